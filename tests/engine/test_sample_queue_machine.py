"""Any order of puts, leases, cancellations, acknowledgements and returns keeps the promises.

The model knows which puts and leases are under way and what they brought; after every deed the
loop runs until all is quiet, and then nobody may wait who could go.
"""

import asyncio
import functools

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from opdkit.engine.batch_composition import shortage
from opdkit.engine.sample_queue import LeaseQueue
from opdkit.engine.testing.clocks import FakeClock
from opdkit.engine.testing_messages import make_meta
from opdkit.engine.testing_run import loop_turns
from opdkit.protocols.messages import Demand, SampleMeta

MAX_SAMPLES = 2
MAX_BYTES = 10

DEMANDS = st.sampled_from(
    [
        Demand(count=0),
        Demand(count=1),
        Demand(count=2, quotas=((1, 1),)),
        Demand(count=4, quotas=((0, 1), (1, 3))),
        Demand(count=5),
    ]
)


class QueueMachine(RuleBasedStateMachine):
    """Ordinals 0 … 5, due by step ordinal % 3, with payloads of 1 … 11 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.queue = LeaseQueue(max_samples=MAX_SAMPLES, max_bytes=MAX_BYTES, clock=FakeClock())
        self.demand = Demand(count=0)
        self.puts: list[tuple[int, asyncio.Task[None]]] = []
        self.leases: list[asyncio.Task[list[SampleMeta]]] = []
        self.ready: set[int] = set()
        self.leased: set[int] = set()
        self.trained: set[int] = set()

    def teardown(self) -> None:
        """Cancel what waits; nothing is left over."""
        for task in (*(task for _, task in self.puts), *self.leases):
            task.cancel()
        self.settle()
        assert self.queue.depth.num_held_puts == 0
        self.runner.close()

    def settle(self) -> None:
        """Run the loop until all is quiet, and note what has ended."""
        had_lease, before = bool(self.leases), self.ready.copy()
        self.runner.run(quiet())
        put = {n for n, task in self.puts if task.done() and not task.cancelled()}
        entered = put - self.ready - self.leased - self.trained
        self.ready |= entered
        if had_lease:
            self.note_overdraft(before, entered)
        elif entered:
            inside = self.ready | self.leased
            num_bytes = sum(len(payload_of(n)) for n in inside)
            is_bounded = len(inside) <= MAX_SAMPLES and num_bytes <= MAX_BYTES
            assert is_bounded or len(inside) == 1, "an overdraft for nobody"
        self.puts = [(n, task) for n, task in self.puts if not task.done()]
        for task in [task for task in self.leases if task.done()]:
            self.leases.remove(task)
            if not task.cancelled():
                self.note_batch(task.result())

    def note_overdraft(self, before: set[int], entered: set[int]) -> None:
        """See that each sample that came into a full queue was lacking."""
        if len(before | self.leased) >= MAX_SAMPLES:
            dues_before, dues = sorted(map(due_of, before)), sorted(map(due_of, self.ready))
            helped = shortage(self.demand, dues_before) - shortage(self.demand, dues)
            assert helped == len(entered), "an overdraft that helps nobody"

    def note_batch(self, batch: list[SampleMeta]) -> None:
        """See that the batch meets the demand with the earliest due, and that all were ready."""
        dues = [meta.due_step for meta in batch]
        assert len(batch) == self.demand.count
        assert not shortage(self.demand, dues)
        ordinals = {meta.ordinal for meta in batch}
        assert ordinals <= self.ready, "leased what was not there"
        left = self.ready - ordinals
        last = max(dues, default=0)
        assert all(due_of(n) >= last for n in left), "an earlier due was passed over"
        self.ready -= ordinals
        self.leased |= ordinals

    @rule(ordinal=st.integers(0, 5))
    def put(self, ordinal: int) -> None:
        """Start a put, perhaps of a sample that was put before."""
        loop = self.runner.get_loop()
        call = self.queue.put(make_meta(ordinal, due_step=due_of(ordinal)), payload_of(ordinal))
        self.puts.append((ordinal, loop.create_task(call)))
        self.settle()

    @precondition(lambda self: len(self.leases) < 2)
    @rule()
    def lease(self) -> None:
        """Start a lease."""
        self.leases.append(self.runner.get_loop().create_task(self.queue.lease()))
        self.settle()

    @rule(demand=DEMANDS)
    def state_demand(self, demand: Demand) -> None:
        """Want something else."""
        self.demand = demand
        self.runner.run(self.queue.set_demand(demand))
        self.settle()

    @precondition(lambda self: self.puts)
    @rule(data=st.data())
    def cancel_put(self, data: st.DataObject) -> None:
        """Cancel one that waits."""
        data.draw(st.sampled_from(self.puts))[1].cancel()
        self.settle()

    @precondition(lambda self: self.leases)
    @rule()
    def cancel_lease(self) -> None:
        """Cancel the first that waits."""
        self.leases[0].cancel()
        self.settle()

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        """Train on some of the leased."""
        some = data.draw(st.sets(st.sampled_from(sorted(self.leased)), min_size=1))
        self.leased -= some
        self.trained |= some
        self.runner.run(self.queue.acknowledge([f"sample-{n}" for n in some]))
        self.settle()

    @precondition(lambda self: self.leased)
    @rule()
    def return_leases(self) -> None:
        """Lose the trainer."""
        self.ready |= self.leased
        self.leased.clear()
        self.runner.run(self.queue.return_leases())
        self.settle()

    @invariant()
    def it_holds_what_was_put_and_not_trained(self) -> None:
        """Count samples and bytes."""
        inside = self.ready | self.leased
        depth = self.queue.depth
        assert depth.num_samples == len(inside)
        assert depth.num_leased == len(self.leased)
        assert depth.num_bytes == sum(len(payload_of(n)) for n in inside)
        assert depth.num_held_puts == len(self.puts)

    @invariant()
    def nobody_waits_who_could_go(self) -> None:
        """Look at every waiter."""
        inside = self.ready | self.leased
        waiting = {n for n, _ in self.puts}
        dues = sorted(map(due_of, self.ready))
        if self.puts:
            first = min(waiting, key=lambda n: (due_of(n), n))
            num_bytes = sum(len(payload_of(n)) for n in (*inside, first))
            assert inside, "a put waits before an empty queue"
            assert len(inside) >= MAX_SAMPLES or num_bytes > MAX_BYTES, "a put waits beside room"
        if self.leases:
            assert shortage(self.demand, dues), "a lease waits though its batch is ready"
            both = sorted(dues + [due_of(n) for n in waiting - inside - self.trained])
            missing = shortage(self.demand, dues)
            assert shortage(self.demand, both) == missing, "a lease and its samples wait apart"


async def quiet() -> None:
    """Let everything happen that can."""
    await loop_turns(25)()


def due_of(ordinal: int) -> int:
    """Return a sample's due step."""
    return ordinal % 3


@functools.cache
def payload_of(ordinal: int) -> bytes:
    """Return a sample's payload; the last one is above the bound."""
    return bytes(2 * ordinal + 1)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
