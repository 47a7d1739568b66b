"""Two channels keep their samples apart, and payloads are found in either."""

import msgspec

from opdkit.actors.queue_actor import EVALUATION, TRAINING, QueueActor
from opdkit.engine.testing_messages import make_meta
from opdkit.protocols.messages import Demand, SampleMeta
from tests.conftest import Run

encode = msgspec.msgpack.encode


def named(name: str, ordinal: int) -> SampleMeta:
    return msgspec.structs.replace(make_meta(ordinal), sample_id=name)


def test_a_channel_leases_its_own_samples_and_any_payload_is_found(run: Run) -> None:
    async def scenario() -> None:
        queue = QueueActor(max_samples=4, max_bytes=1000)
        await queue.put(TRAINING, encode(named("sample-7", 7)), b"trained on")
        await queue.put(EVALUATION, encode(named("held-out-0-7", 7)), b"held out")
        for channel, name in ((TRAINING, "sample-7"), (EVALUATION, "held-out-0-7")):
            await queue.set_demand(channel, encode(Demand(count=1)))
            leased = msgspec.msgpack.decode(await queue.lease(channel), type=list[SampleMeta])
            assert [meta.sample_id for meta in leased] == [name]
        payloads = await queue.fetch(["held-out-0-7", "sample-7"])
        assert payloads == [b"held out", b"trained on"]
        await queue.acknowledge(TRAINING, ["sample-7"])
        assert await queue.fetch(["held-out-0-7"]) == [b"held out"]

    run(scenario())
