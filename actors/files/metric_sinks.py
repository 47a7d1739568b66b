# pyright: basic
"""Where metrics go: ``metrics.jsonl``, and TensorBoard event files.

A record's ``step`` is the number of optimizer steps done when it was made; a step's own record
counts that step. Records reach the file before ``write`` returns. After a resume, what came after
the checkpoint is taken back, so that either file reads as one run.
"""

import asyncio
import contextlib
import math
import os
import pathlib
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from opdkit.actors.files.durable_files import append_line, write_durably
from opdkit.actors.files.run_files import RunDirectory
from opdkit.protocols.roles import MetricSink

Value = float | int | str


class JsonlSink:
    """One object a line: ``kind``, ``step``, ``time`` (Unix seconds) and the named values."""

    def __init__(self, path: pathlib.Path, *, resumed_step: int | None = None) -> None:
        """Begin the file, or keep its lines up to the step that the run resumes from."""
        self._path = path
        kept = read_metrics(path) if resumed_step is not None else []
        lines = [_encode(record) for record in kept if record["step"] <= (resumed_step or 0)]
        write_durably(path, b"".join(line + b"\n" for line in lines))

    async def write(self, kind: str, step: int, values: Mapping[str, Value]) -> None:
        """Append one line. NaN and infinities become null, since JSON has none."""
        line = _encode({"kind": kind, "step": step, "time": time.time(), **values})
        await asyncio.to_thread(append_line, self._path, line)


class TensorBoardSink:
    """Numbers as scalars ``kind/name``, text as text; needs tensorboard, not torch."""

    def __init__(self, directory: pathlib.Path, *, resumed_step: int | None = None) -> None:
        """Begin a new event file that tells TensorBoard to forget what came after the resume."""
        # Here, since it takes a quarter of a second that a run without TensorBoard need not spend.
        from tensorboard.compat.proto import event_pb2  # untyped
        from tensorboard.summary.writer.record_writer import (  # untyped
            RecordWriter,
        )

        directory.mkdir(parents=True, exist_ok=True)
        if resumed_step is None:
            for stale in directory.glob("events.out.tfevents.*"):
                stale.unlink()
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._file = (directory / name).open("ab", buffering=0)
        self._records = RecordWriter(self._file)
        self._new_event = event_pb2.Event
        self._append(self._new_event(wall_time=time.time(), file_version="brain.Event:2"))
        if resumed_step is not None:
            session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._append(
                self._new_event(wall_time=time.time(), step=resumed_step + 1, session_log=session)
            )

    async def write(self, kind: str, step: int, values: Mapping[str, Value]) -> None:
        """Append one event that holds all the numbers."""
        event = self._new_event(wall_time=time.time(), step=step)
        for name, value in values.items():
            if not isinstance(value, str):
                event.summary.value.add(tag=f"{kind}/{name}", simple_value=float(value))
        await asyncio.to_thread(self._append, event)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, event: Any) -> None:
        self._records.write(event.SerializeToString())


class EverySink:
    """Passes each record to several sinks, in their order."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = tuple(sinks)

    async def write(self, kind: str, step: int, values: Mapping[str, Value]) -> None:
        """Record in every sink."""
        for sink in self._sinks:
            await sink.write(kind, step, values)


@contextlib.contextmanager
def open_sinks(
    directory: RunDirectory, *, tensorboard: bool, resumed_step: int | None
) -> Iterator[MetricSink]:
    """Open a run's sinks, continued where the run is."""
    jsonl = JsonlSink(directory.metrics, resumed_step=resumed_step)
    if not tensorboard:
        yield jsonl
        return
    board = TensorBoardSink(directory.tensorboard, resumed_step=resumed_step)
    with contextlib.closing(board):
        yield EverySink([jsonl, board])


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file; a last line that a crash tore is left out.

    No file: the run has not begun to record, and there are none.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [msgspec.json.decode(line) for line in lines[:-1]]


def _encode(record: Mapping[str, Any]) -> bytes:
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return msgspec.json.encode(finite)
