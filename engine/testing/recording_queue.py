"""A queue that only remembers."""

import asyncio

import msgspec

from opdkit.protocols.messages import Sample, SampleMeta

_DECODER = msgspec.msgpack.Decoder(Sample)


class RecordingQueue:
    """A ``SampleSink`` without bound, or one that is full until it is opened."""

    def __init__(self, *, is_full: bool = False) -> None:
        self._room = asyncio.Event()
        if not is_full:
            self._room.set()
        self.metas: list[SampleMeta] = []
        self.samples: list[Sample] = []
        self.num_waiting = 0
        """Producers held."""

    async def put(self, meta: SampleMeta, payload: bytes) -> None:
        """Wait for room, and remember."""
        self.num_waiting += 1
        try:
            await self._room.wait()
        finally:
            self.num_waiting -= 1
        self.metas.append(meta)
        self.samples.append(_DECODER.decode(payload))

    def open(self) -> None:
        """Make room for everything."""
        self._room.set()
