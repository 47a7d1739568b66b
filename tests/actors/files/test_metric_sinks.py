# pyright: basic
"""Metrics on disk: what is written, and what a resume takes back."""

import contextlib
import json
import math
import pathlib
import struct
from typing import Any

import pytest

from opdkit.actors.files.metric_sinks import (
    EverySink,
    JsonlSink,
    TensorBoardSink,
    open_sinks,
    read_metrics,
)
from opdkit.actors.files.run_files import RunDirectory
from opdkit.protocols.roles import MetricSink
from tests.conftest import Run


def _numbers(path: pathlib.Path) -> list[tuple[str, int]]:
    return [(record["kind"], record["step"]) for record in read_metrics(path)]


def _scalars(directory: pathlib.Path) -> list[tuple[str, int, float]]:
    """Read every event file as TensorBoard does: length, crc, record, crc."""
    event_pb2 = pytest.importorskip("tensorboard.compat.proto.event_pb2")

    found: list[tuple[str, int, float]] = []
    for path in sorted(directory.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if event.HasField("session_log"):
                found = [item for item in found if item[1] < event.step]
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return found


def test_every_record_is_one_line(run: Run, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink: MetricSink = JsonlSink(path)
    run(sink.write("step", 1, {"loss": 0.5, "num_tokens": 7, "note": "é\n"}))
    (line,) = path.read_text().splitlines()
    record = json.loads(line)
    assert record.pop("time") > 1.7e9
    assert record == {"kind": "step", "step": 1, "loss": 0.5, "num_tokens": 7, "note": "é\n"}


def test_what_is_no_number_becomes_null(run: Run, tmp_path: pathlib.Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    run(sink.write("step", 1, {"a": math.nan, "b": math.inf}))
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (record["a"], record["b"]) == (None, None)


def test_a_resumed_file_reads_as_one_run(run: Run, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    run(sink.write("evaluation", 0, {}))
    for step in (1, 2, 3):
        run(sink.write("step", step, {}))
    with path.open("ab") as file:
        file.write(b'{"kind":"step","st')
    sink = JsonlSink(path, resumed_step=2)
    run(sink.write("step", 3, {"loss": 1.0}))
    assert _numbers(path) == [("evaluation", 0), ("step", 1), ("step", 2), ("step", 3)]
    assert read_metrics(path)[-1]["loss"] == 1.0


def test_a_run_that_begins_anew_begins_its_file_anew(run: Run, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run(JsonlSink(path).write("step", 1, {}))
    JsonlSink(path)
    assert _numbers(path) == []


def test_a_resume_without_a_file_begins_one(tmp_path: pathlib.Path) -> None:
    JsonlSink(tmp_path / "metrics.jsonl", resumed_step=5)
    assert _numbers(tmp_path / "metrics.jsonl") == []


def test_numbers_become_scalars(run: Run, tmp_path: pathlib.Path) -> None:
    with contextlib.closing(TensorBoardSink(tmp_path / "tb")) as sink:
        run(sink.write("step", 3, {"loss": 0.5, "num_tokens": 7, "note": "text"}))
    assert _scalars(tmp_path / "tb") == [("step/loss", 3, 0.5), ("step/num_tokens", 3, 7.0)]


def test_tensorboard_forgets_what_came_after_the_resume(run: Run, tmp_path: pathlib.Path) -> None:
    with contextlib.closing(TensorBoardSink(tmp_path)) as sink:
        for step in (1, 2, 3):
            run(sink.write("step", step, {"loss": float(step)}))
    with contextlib.closing(TensorBoardSink(tmp_path, resumed_step=2)) as sink:
        run(sink.write("step", 3, {"loss": 30.0}))
    losses = [(step, value) for _, step, value in _scalars(tmp_path)]
    assert losses == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_tensorboard_itself_reads_a_resumed_run_as_one(run: Run, tmp_path: pathlib.Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for resumed_step, steps in ((None, (1, 2, 3)), (2, (3, 4))):
        with contextlib.closing(TensorBoardSink(tmp_path, resumed_step=resumed_step)) as sink:
            for step in steps:
                run(sink.write("step", step, {"loss": step + 0.25 * bool(resumed_step)}))
    accumulator = accumulators.EventAccumulator(str(tmp_path))
    accumulator.Reload()
    losses = [(event.step, event.value) for event in accumulator.Scalars("step/loss")]
    assert losses == [(1, 1.0), (2, 2.0), (3, 3.25), (4, 4.25)]


def test_every_sink_gets_every_record(run: Run, tmp_path: pathlib.Path) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    values: dict[str, Any] = {"loss": 1.0}
    run(EverySink([JsonlSink(path) for path in paths]).write("step", 1, values))
    assert [_numbers(path) for path in paths] == [[("step", 1)]] * 2


@pytest.mark.parametrize("tensorboard", [True, False])
def test_a_run_gets_the_sinks_it_asked_for(
    run: Run, tmp_path: pathlib.Path, tensorboard: bool
) -> None:
    directory = RunDirectory(tmp_path, keep=1)
    with open_sinks(directory, tensorboard=tensorboard, resumed_step=None) as sink:
        run(sink.write("step", 1, {"loss": 1.0}))
    assert _numbers(directory.metrics) == [("step", 1)]
    assert directory.tensorboard.exists() is tensorboard
