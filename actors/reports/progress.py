"""What a person, or a program, sees of a run while it runs.

On a terminal one block is redrawn in place; elsewhere one plain line a step; for programs one JSON
object a record. Redrawing happens as records arrive: no timer, no thread.
"""

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TextIO

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from opdkit.actors.broken_pipe import silence
from opdkit.protocols.messages import ProgressRecord

Style = Literal["live", "lines", "json"]
STAGES = ("student", "teacher", "trainer")
Show = Callable[[ProgressRecord], None]


async def show_progress(
    records: AsyncIterator[ProgressRecord], *, style: Style, stream: TextIO | None = None
) -> None:
    """Show each record as it arrives, until there are no more. Nobody has to look."""
    stream = stream or sys.stdout
    with _DISPLAYS[style](stream) as show:
        async for record in records:
            try:
                show(record)
            except BrokenPipeError:  # the reader has gone (``| head``), but the run goes on
                silence(stream)


def plain_line(record: ProgressRecord) -> str:
    """Return a record as one line, without what is not known."""
    parts = [f"{record.phase} {record.step}/{record.num_steps}"]
    if record.loss is not None:
        parts.append(f"loss {record.loss:.4f}")
    if record.lag is not None:
        parts.append(f"lag {record.lag:.2f}")
    parts.append(f"queue {_queue(record)}")
    parts += [
        f"{stage} {record.tokens_per_s[stage]:,.0f} tok/s"
        for stage in STAGES
        if stage in record.tokens_per_s
    ]
    if record.eta_s is not None:
        parts.append(f"eta {duration(record.eta_s)}")
    if record.message:
        parts.append(record.message)
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Return a time span as a person says it: ``42 s``, ``3 min 05 s``, ``2 h 07 min``."""
    whole = round(max(seconds, 0.0))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def block(record: ProgressRecord) -> Group:
    """Return a record as a block for a terminal: a bar, a line of facts, a line a stage."""
    head = Table.grid(padding=(0, 1))
    head.add_row(
        Text(record.phase, style="bold"),
        ProgressBar(total=max(record.num_steps, 1), completed=record.step, width=32),
        f"{record.step}/{record.num_steps}",
        "" if record.eta_s is None else f"about {duration(record.eta_s)} left",
    )
    facts = Text("  ".join(_facts(record)), style="dim")
    stages = Table.grid(padding=(0, 2))
    for stage in STAGES:
        if stage in record.tokens_per_s or stage in record.busy:
            stages.add_row(*_stage_cells(record, stage))
    return Group(head, facts, stages, Text(record.message))


def _facts(record: ProgressRecord) -> Iterator[str]:
    if record.loss is not None:
        yield f"loss {record.loss:.4f}"
    if record.lag is not None:
        yield f"lag {record.lag:.2f} steps"
    yield f"queue {_queue(record)} samples"


def _stage_cells(record: ProgressRecord, stage: str) -> tuple[str, Text, ProgressBar | str, str]:
    rate, busy = record.tokens_per_s.get(stage), record.busy.get(stage)
    return (
        stage,
        Text("" if rate is None else f"{rate:,.0f} tok/s", justify="right"),
        "" if busy is None else ProgressBar(total=1.0, completed=busy, width=16),
        "" if busy is None else f"{busy:.0%} busy",
    )


def _queue(record: ProgressRecord) -> str:
    bound = "" if record.queue_bound is None else f"/{record.queue_bound}"
    return f"{record.queue_samples}{bound}"


@contextmanager
def _live(stream: TextIO) -> Iterator[Show]:
    # Transient: the summary takes its place. NO_COLOR is honoured by Console itself.
    with Live(console=Console(file=stream), auto_refresh=False, transient=True) as live:
        yield lambda record: live.update(block(record), refresh=True)


@contextmanager
def _lines(stream: TextIO) -> Iterator[Show]:
    last: tuple[str, int, str] | None = None

    def show(record: ProgressRecord) -> None:
        nonlocal last
        if (key := (record.phase, record.step, record.message)) != last:
            stream.write(plain_line(record) + "\n")
            stream.flush()
        last = key

    yield show


@contextmanager
def _json(stream: TextIO) -> Iterator[Show]:
    def show(record: ProgressRecord) -> None:
        line = {"kind": "progress", **msgspec.to_builtins(record)}
        stream.write(msgspec.json.encode(line).decode() + "\n")
        stream.flush()

    yield show


_DISPLAYS = {"live": _live, "lines": _lines, "json": _json}
