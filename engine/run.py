"""One job, from prompts to published weights.

::

    admission ──▶ rollouts ──▶ queue ──▶ batches ──▶ steps ──▶ publication
        ▲   (slots)  one task      (bounded,   one ahead   one at   in the background
        │            a sample       leased)    of the step  a time      │
        └──────────────────────── slots come free ◀─────────────────────┘

Five tasks wait on one condition and wake each other through it: *admission* waits for a slot,
*demands* for a change of what the next batch must hold, *batches* for a demand that is stated.
*steps* waits for a prefetched batch. Everything that decides is synchronous, in the ledger and in
``batch_composition``; this module only awaits.
"""

import asyncio

import msgspec

from opdkit.engine.batch_composition import demand
from opdkit.engine.evaluation import evaluate
from opdkit.engine.goal import Goal
from opdkit.engine.ledger import Ledger
from opdkit.engine.packing import plan_step
from opdkit.engine.retry import Budget, are_too_many_dead
from opdkit.engine.run_parts import Batch, Parts, RunState
from opdkit.engine.stage_report import StepTiming
from opdkit.engine.step_record import StepRecorder, account_values
from opdkit.engine.tasks import dead_prompt, make_task
from opdkit.protocols.config import JobSpec
from opdkit.protocols.errors import InfrastructureError, JobFailed, PromptError
from opdkit.protocols.ids import Ordinal, PolicyVersion
from opdkit.protocols.messages import (
    DeadSample,
    Demand,
    ProgressRecord,
    RolloutOutcome,
    StepReport,
    WeightManifest,
)

MAX_LOST_ROLLOUTS = 64
LOST_ROLLOUTS_WINDOW_S = 600.0
"""So many trajectories may be lost with their workers within this time; more ends the run."""

MAX_SKIPPED_STEPS = 3
"""So many steps in a row with a loss or gradient that is not finite, and the run ends."""

MAX_DEAD_FRACTION = 0.5
"""More samples dead than this, and the data or the scheduler is at fault: the run ends."""


class Run:
    """The engine of one job. ``run`` ends with the job, or with its first unrepaired failure."""

    def __init__(self, spec: JobSpec, parts: Parts, *, state: RunState | None = None) -> None:
        self._spec = spec
        self._parts = parts
        self._step = state.step if state else 0
        self._published = self._step
        self._ledger = Ledger(
            slots=spec.pipeline.slots,
            max_policy_lag=spec.pipeline.max_policy_lag,
            resumed=state.ledger if state else None,
        )
        self._goal = Goal(spec, self._ledger, num_ordinals=parts.prompts.num_ordinals)
        self._queue_bound = spec.pipeline.queue_samples or spec.pipeline.slots
        self._recorder = StepRecorder(
            num_steps=spec.pipeline.num_steps,
            queue_bound=self._queue_bound,
            now_s=parts.clock.now(),
        )
        self._evaluated: int | None = None  # the step last evaluated after
        self._num_held_out_tokens = 0  # sampled, but not of the ledger
        self._num_skipped = 0  # steps in a row
        self._lost_workers = Budget(limit=MAX_LOST_ROLLOUTS, window_s=LOST_ROLLOUTS_WINDOW_S)
        self._changed = asyncio.Condition()
        self._leasing: int | None = None  # the step whose batch is wanted
        self._stated: Demand | None = Demand(count=0)  # None: a new one is on its way
        self._ahead = asyncio.Semaphore(1)  # batches leased before the step that uses them
        self._batches: asyncio.Queue[Batch | None] = asyncio.Queue(maxsize=1)

    @property
    def ledger(self) -> Ledger:
        """Where every prompt is."""
        return self._ledger

    async def run(self) -> None:
        """Train until the steps are taken or the data ends.

        Raises:
            JobFailed: too many samples died, or all before the first step.
            InfrastructureError: a part failed and could not be repaired.
        """
        await self._publish(await self._export())
        if self._step == 0:
            await self._evaluate()
        self._recorder.start(await self._parts.runner.report(), now_s=self._parts.clock.now())
        await self._show("training")
        async with asyncio.TaskGroup() as stages:
            stages.create_task(self._admit(), name="admission")
            demands = stages.create_task(self._state_demands(), name="demands")
            stages.create_task(self._collect_batches(), name="batches")
            await self._train()
            demands.cancel()
        if self._step == 0:
            raise JobFailed(
                "the data ended before the first step: "
                f"all {self._ledger.num_dead} samples are dead letters"
            )
        self._ledger.check()
        await self._close_accounts()
        await self._save()
        await self._evaluate()

    # Admission and rollouts

    async def _admit(self) -> None:
        """Draw prompts while slots are free; end when every sample drawn has ended."""
        async with asyncio.TaskGroup() as rollouts:
            while True:
                async with self._changed:
                    await self._changed.wait_for(
                        lambda: self._goal.can_draw() or self._goal.is_settled()
                    )
                    if self._goal.is_settled():
                        return
                    ordinal = self._ledger.draw(policy_version=PolicyVersion(self._published))
                rollouts.create_task(self._roll(ordinal), name=f"rollout-{ordinal}")

    async def _roll(self, ordinal: Ordinal) -> None:
        outcome = await self._run_rollout(ordinal)
        if isinstance(outcome, DeadSample):
            await self._parts.store.bury(outcome)
        async with self._changed:
            if isinstance(outcome, DeadSample):
                self._ledger.bury(outcome)
                self._give_up_if_the_data_is_at_fault(outcome)
            else:
                self._ledger.queue(outcome)
            self._changed.notify_all()

    def _give_up_if_the_data_is_at_fault(self, last: DeadSample) -> None:
        num_drawn = self._ledger.num_trained + self._ledger.num_dead
        if are_too_many_dead(
            num_dead=self._ledger.num_dead,
            num_drawn=num_drawn,
            max_dead_fraction=MAX_DEAD_FRACTION,
            min_drawn=2 * self._spec.pipeline.samples_per_step,
        ):
            raise JobFailed(
                f"{self._ledger.num_dead} of {num_drawn} samples that ended are dead letters; "
                f"the last: {last.reason}: {last.message}"
            )

    async def _run_rollout(self, ordinal: Ordinal) -> RolloutOutcome:
        try:
            task = make_task(
                self._parts.prompts,
                ordinal,
                due_step=self._ledger.due_step(ordinal),
                seed=self._spec.job.seed,
            )
        except PromptError as error:
            return dead_prompt(ordinal, error)
        while True:
            try:
                return await self._parts.runner.run(task)
            except InfrastructureError as error:
                if not self._lost_workers.spend(now_s=self._parts.clock.now()):
                    raise JobFailed(
                        f"more than {MAX_LOST_ROLLOUTS} trajectories lost their worker within "
                        f"{LOST_ROLLOUTS_WINDOW_S:.0f} s; the last: {error}"
                    ) from error

    # Batches

    def _wanted(self) -> Demand:
        if self._leasing is None:
            return Demand(count=0)
        return demand(
            step=self._leasing,
            alive_by_due=self._ledger.alive_by_due(),
            samples_per_step=self._spec.pipeline.samples_per_step,
            max_policy_lag=self._spec.pipeline.max_policy_lag,
            exhausted=self._goal.is_exhausted(),
        )

    async def _state_demands(self) -> None:
        """Keep the queue's demand equal to what is wanted. Only this task states it."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._wanted() != self._stated)
                self._stated = None
                wanted = self._wanted()
            await self._parts.queue.set_demand(wanted)
            async with self._changed:
                self._stated = wanted
                self._changed.notify_all()

    async def _collect_batches(self) -> None:
        """Lease, plan and prefetch the batch of the next step while the current one runs."""
        for step in range(self._step, self._spec.pipeline.num_steps):
            await self._ahead.acquire()
            batch = await self._lease(step)
            if batch is None:
                break
            await self._parts.trainer.prefetch(batch.plan)
            await self._batches.put(batch)
        await self._batches.put(None)

    async def _lease(self, step: int) -> Batch | None:
        """Return the batch of a step, or None when the data has ended.

        While a step is wanted, the demand is 0 only if nothing is alive and nothing is left to
        draw, and that does not change. The 0 between two steps is over before the lease begins:
        it waits until the queue has answered to what is wanted now.
        """
        async with self._changed:
            self._leasing = step
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._stated == self._wanted())
        samples = await self._parts.queue.lease()
        if not samples:
            return None
        async with self._changed:
            for sample in samples:
                self._ledger.queue(sample)  # its rollout's own task may not have heard of it yet
            self._ledger.lease([sample.ordinal for sample in samples])
            self._leasing = None
            self._changed.notify_all()
        plan = plan_step(
            samples,
            step=step,
            data_parallel_size=self._spec.trainer.parallel.data,
            microbatch_tokens=self._spec.trainer.microbatch_tokens,
        )
        return Batch(plan=plan, samples=samples)

    # Steps

    async def _train(self) -> None:
        """Train, and publish each version while the next step runs."""
        now = self._parts.clock.now
        async with asyncio.TaskGroup() as publications:
            publication: asyncio.Task[None] | None = None
            asked_s = now()
            while (batch := await self._batches.get()) is not None:
                self._ahead.release()
                got_s = now()
                report = await self._parts.trainer.train(batch.plan)
                await self._account(batch, report)
                await self._judge(batch, report)
                trained_s = now()
                if publication is not None:
                    await publication  # of the version before: they are published in order
                manifest = await self._export()
                publication = publications.create_task(
                    self._publish(manifest), name=f"publication-{self._step}"
                )
                timing = StepTiming(
                    batch_wait_s=got_s - asked_s,
                    fetch_s=report.fetch_s,
                    train_s=trained_s - got_s - report.fetch_s,
                    publish_wait_s=now() - trained_s,
                )
                await self._record(batch, report, timing)
                await self._act_on_schedule(publication)
                asked_s = now()

    async def _account(self, batch: Batch, report: StepReport) -> None:
        if report.num_supervised != batch.plan.num_supervised:
            raise AssertionError(
                f"step {report.step}: the ranks counted {report.num_supervised} positions, "
                f"the batch has {batch.plan.num_supervised}"
            )
        await self._parts.queue.acknowledge([sample.sample_id for sample in batch.samples])
        async with self._changed:
            ordinals = [sample.ordinal for sample in batch.samples]
            self._ledger.train(ordinals, step=batch.plan.step)
            self._step = batch.plan.step + 1
            self._changed.notify_all()

    async def _judge(self, batch: Batch, report: StepReport) -> None:
        """Name the samples of a step that changed nothing; give up after several."""
        if not report.skipped:
            self._num_skipped = 0
            return
        self._num_skipped += 1
        names = ", ".join(sample.sample_id for sample in batch.samples)
        await self._parts.sink.write("event", self._step, {"skipped_samples": names})
        if self._num_skipped >= MAX_SKIPPED_STEPS:
            raise JobFailed(
                f"loss or gradient was not finite in {self._num_skipped} steps in a row; "
                f"the samples of the last: {names}"
            )

    async def _export(self) -> WeightManifest:
        return await self._parts.trainer.export(PolicyVersion(self._step))

    async def _publish(self, manifest: WeightManifest) -> None:
        await self._parts.publisher.publish(manifest)
        async with self._changed:
            self._published = manifest.policy_version
            self._ledger.publish(manifest.policy_version)
            self._changed.notify_all()

    async def _record(self, batch: Batch, report: StepReport, timing: StepTiming) -> None:
        rollouts = await self._parts.runner.report()
        values, progress = self._recorder.record(
            batch.samples,
            report,
            timing=timing,
            rollouts=rollouts,
            balance=self._ledger.balance(num_rolling_tokens=rollouts.num_in_flight_tokens),
            num_queued=self._ledger.num_queued,
            now_s=self._parts.clock.now(),
        )
        await self._parts.sink.write("step", self._step, values)
        await self._parts.feed.show(progress)

    async def _act_on_schedule(self, publication: asyncio.Task[None]) -> None:
        if self._step == self._spec.pipeline.num_steps:
            return  # the end of the run saves and evaluates
        if self._step % self._spec.checkpoint.every_steps == 0:
            await self._save()
        every = self._spec.evaluation.every_steps
        if every is not None and self._step % every == 0:
            await publication  # held-out samples must come from these weights
            await self._evaluate()
            await self._show("training")

    async def _evaluate(self) -> None:
        if self._parts.held_out is None or self._evaluated == self._step:
            return  # the queue forgets no ordinal: the samples of one step pass it only once
        await self._show("evaluating", message="the student answers the held-out prompts")
        report = await evaluate(
            self._spec,
            prompts=self._parts.held_out,
            runner=self._parts.runner,
            queue=self._parts.evaluation_queue,
            trainer=self._parts.trainer,
            step=self._step,
        )
        self._evaluated = self._step
        self._num_held_out_tokens += round(report.mean_generated_tokens * report.num_samples)
        await self._parts.sink.write("evaluation", self._step, msgspec.to_builtins(report))

    async def _close_accounts(self) -> None:
        """Record the final balances, with the tokens as the rollout workers counted them."""
        rollouts = await self._parts.runner.report()
        num_counted = rollouts.student.num_generated_tokens - self._num_held_out_tokens
        num_counted -= rollouts.counters.get("unfinished_tokens", 0)  # their samples began anew
        balance = self._ledger.balance(num_generated_tokens=num_counted)
        if balance.num_missing_tokens < 0:
            balance = self._ledger.balance()  # a worker began anew, and counted from 0
        await self._parts.sink.write("ledger", self._step, account_values(balance))

    async def _save(self) -> None:
        state = RunState(
            step=self._step,
            ledger=self._ledger.snapshot(policy_version=PolicyVersion(self._step)),
        )
        encoded = msgspec.msgpack.encode(state)
        await self._parts.store.save(self._step, encoded, self._parts.trainer)

    async def _show(self, phase: str, *, message: str = "") -> None:
        num_steps = self._spec.pipeline.num_steps
        record = ProgressRecord(
            phase=phase,
            step=self._step,
            num_steps=num_steps,
            queue_bound=self._queue_bound,
            message=message,
        )
        await self._parts.feed.show(record)
