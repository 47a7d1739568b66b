"""Progress for a terminal, for a log and for a program."""

import asyncio
import io
import json
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest

from opdkit.actors.reports.progress import Style, duration, plain_line, show_progress
from opdkit.protocols.messages import ProgressRecord
from tests.conftest import Run

FULL = ProgressRecord(
    phase="training",
    step=3,
    num_steps=10,
    loss=0.51239,
    lag=0.5,
    queue_samples=4,
    queue_bound=32,
    tokens_per_s={"student": 12345.6, "teacher": 900.0, "trainer": 2.0},
    busy={"student": 0.97, "teacher": 0.4, "trainer": 0.2},
    eta_s=125.4,
    message="checkpoint 2 written",
)


FOURTH = msgspec.structs.replace(FULL, step=4)


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        """Say yes."""
        return True


async def _stream(records: Sequence[ProgressRecord]) -> AsyncIterator[ProgressRecord]:
    for record in records:
        yield record


def _shown(
    run: Run, style: Style, *records: ProgressRecord, stream: io.StringIO | None = None
) -> str:
    stream = stream or io.StringIO()
    run(show_progress(_stream(records), style=style, stream=stream))
    return stream.getvalue()


def test_a_line_holds_everything_that_is_known() -> None:
    assert plain_line(FULL) == (
        "training 3/10  loss 0.5124  lag 0.50  queue 4/32  student 12,346 tok/s  "
        "teacher 900 tok/s  trainer 2 tok/s  eta 2 min 05 s  checkpoint 2 written"
    )


def test_a_line_leaves_out_what_is_not_known() -> None:
    record = ProgressRecord(phase="starting", step=0, num_steps=10)
    assert plain_line(record) == "starting 0/10  queue 0"


def test_a_log_gets_one_plain_line_a_step(run: Run) -> None:
    text = _shown(run, "lines", FULL, FULL, FOURTH)
    assert text.splitlines() == [plain_line(FULL), plain_line(FOURTH)]
    assert "\x1b" not in text


def test_a_program_gets_one_object_a_record(run: Run) -> None:
    lines = _shown(run, "json", FULL, FULL).splitlines()
    assert len(lines) == 2
    assert json.loads(lines[0])["kind"] == "progress"
    assert json.loads(lines[0])["tokens_per_s"]["teacher"] == 900.0


def test_a_terminal_gets_a_block_that_is_redrawn(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = _shown(run, "live", FULL, FOURTH, stream=Terminal())
    for part in ("training", "3/10", "4/10", "97% busy", "12,346 tok/s", "queue 4/32", "left"):
        assert part in text
    assert "\x1b[1A" in text


def test_colours_can_be_switched_off(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    text = _shown(run, "live", FULL, stream=Terminal())
    assert "\x1b[3" not in text
    assert "\x1b[9" not in text


def test_an_error_of_the_source_ends_the_display(run: Run) -> None:
    async def failing() -> AsyncIterator[ProgressRecord]:
        yield FULL
        raise ConnectionError("gone")

    async def show(style: Any) -> None:
        await show_progress(failing(), style=style, stream=io.StringIO())

    for style in ("live", "lines", "json"):
        with pytest.raises(ConnectionError):
            run(show(style))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 s"),
        (0.4, "0 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7625, "2 h 07 min"),
        (90000, "25 h 00 min"),
    ],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_run_goes_on_when_nobody_reads_its_progress() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    num_left = 3

    async def records() -> AsyncIterator[ProgressRecord]:
        nonlocal num_left
        while num_left:
            num_left -= 1
            yield msgspec.structs.replace(FULL, step=num_left)

    with os.fdopen(writer, "w") as stream:
        # Not in the fixture, which forbids pipes on the loop: this one is standard output.
        asyncio.run(show_progress(records(), style="json", stream=stream))
    assert num_left == 0
