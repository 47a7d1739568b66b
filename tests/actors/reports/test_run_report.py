"""The end of a run: figures, page and plot."""

import io
import json
import math
import pathlib
from typing import Any

import msgspec
import pytest
from PIL import Image
from rich.console import Console

from opdkit.actors.files.run_files import RunDirectory
from opdkit.actors.reports.divergence_plot import curves_of, plot_divergence
from opdkit.actors.reports.run_report import (
    RunSummary,
    print_summary,
    read_summary,
    write_report,
    write_summary,
)
from opdkit.protocols.messages import EvaluationReport


def _evaluation(step: int, reverse_kl: float) -> EvaluationReport:
    return EvaluationReport(
        step=step,
        num_samples=8,
        num_supervised=100,
        reverse_kl=reverse_kl,
        reverse_kl_on_support=reverse_kl,
        mean_generated_tokens=12.5,
        truncated_fraction=0.0,
    )


SUMMARY = RunSummary(
    name="tiny",
    status="completed",
    num_steps=30,
    wall_s=185.0,
    before=_evaluation(0, 0.8),
    after=_evaluation(30, 0.2),
    tokens_per_s={"student": 1234.0, "teacher": 2000.0, "trainer": 1100.0},
    waited_s={"student": 120.0, "teacher": 0.0, "trainer": 30.0, "publisher": 10.0},
    num_drawn=490,
    num_trained=480,
    num_dead=2,
    num_alive=8,
    num_missing=0,
    num_generated_tokens=12000,
    num_trained_tokens=11000,
    num_dead_tokens=300,
    num_missing_tokens=0,
    run_dir="runs/tiny",
    checkpoint="runs/tiny/checkpoints/step-000030",
    export="runs/tiny/export",
    plot="runs/tiny/divergence.png",
)


def _page(summary: RunSummary) -> str:
    stream = io.StringIO()
    print_summary(summary, Console(file=stream, width=40))
    return stream.getvalue()


def _changed(**changes: Any) -> RunSummary:
    return msgspec.structs.replace(SUMMARY, **changes)


def test_the_page_tells_what_came_of_the_run() -> None:
    page = _page(SUMMARY)
    for part in (
        "tiny completed after 30 steps, 3 min 05 s",
        "0.8000 → 0.2000 nats per token (-75%)",
        "student 1,234 sampled, teacher 2,000 scored, trainer 1,100 trained, both with prompts",
        "student: 75% of the time",
        "490 drawn = 480 trained + 2 dead + 8 alive",
        "12,000 sampled, 11,000 trained on, 300 dead",
        "runs/tiny/checkpoints/step-000030",
        "runs/tiny/divergence.png",
        "next                 opdkit run runs/tiny/job.yaml pipeline.num_steps=60",
    ):
        assert part in page
    assert "missing" not in page
    assert "\x1b" not in page


def test_a_failed_run_tells_why_and_how_to_go_on() -> None:
    page = _page(_changed(status="failed", cause="rank 0 was killed (signal 9)", after=None))
    assert "tiny failed after 30 steps, 3 min 05 s: rank 0 was killed (signal 9)" in page
    assert "next                 opdkit run runs/tiny/job.yaml\n" in page
    assert "reverse KL" not in page


def test_the_next_command_names_the_program_as_it_was_called() -> None:
    stream = io.StringIO()
    print_summary(SUMMARY, Console(file=stream, width=40), program=".venv/bin/opdkit")
    assert "next                 .venv/bin/opdkit run runs/tiny/job.yaml" in stream.getvalue()


def test_a_run_that_never_waited_has_no_bound() -> None:
    assert _changed(waited_s={}).bound is None
    assert "bound by" not in _page(_changed(waited_s={}, tokens_per_s={}))


def test_a_divergence_of_0_before_gives_no_percentage() -> None:
    page = _page(_changed(before=_evaluation(0, 0.0), after=_evaluation(30, 0.0)))
    assert "0.0000 → 0.0000 nats per token" in page
    assert "%" not in page.split("tokens/s")[0]


def test_what_is_missing_is_called_a_defect() -> None:
    page = _page(_changed(num_missing=3, num_missing_tokens=-1))
    assert "3 are missing, which is a defect" in page
    assert "-1 are missing" in page


def test_the_summary_reads_back_and_is_plain_json(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, SUMMARY)
    assert read_summary(path) == SUMMARY
    values = json.loads(path.read_text())
    assert values["bound"] == {"stage": "student", "share": 0.75}
    assert values["next_command"] == "opdkit run runs/tiny/job.yaml pipeline.num_steps=60"
    assert values["after"]["reverse_kl"] == 0.2


def _records(num_steps: int, *, every: int) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = [{"kind": "evaluation", "step": 0, "reverse_kl": 0.85}]
    for step in range(1, num_steps + 1):
        noise = 0.06 * math.sin(step * 12.9898)
        decay = math.exp(-2.5 * step / num_steps)
        records.append(
            {
                "kind": "step",
                "step": step,
                "num_supervised": 900 + step % 50,
                "loss": 0.2 + 0.6 * decay + noise,
                "reverse_kl_estimate": 0.15 + 0.7 * decay + 2 * noise,
            }
        )
        if step % every == 0:
            records.append({"kind": "evaluation", "step": step, "reverse_kl": 0.17 + 0.68 * decay})
    return records


def test_the_curves_run_over_the_tokens_trained_on() -> None:
    curves = curves_of(_records(4, every=2))
    assert curves.step_tokens.tolist() == [901, 1803, 2706, 3610]
    assert curves.held_out_tokens.tolist() == [0, 1803, 3610]
    assert len(curves.held_out_reverse_kl) == 3


@pytest.mark.parametrize(
    "records",
    [
        _records(300, every=50),
        _records(3, every=3),
        _records(3, every=9)[1:],
        [],
        [{"kind": "step", "step": 1, "num_supervised": 5, "loss": None}],
    ],
    ids=["long", "short", "no evaluation", "nothing", "no loss"],
)
def test_the_plot_is_a_picture(tmp_path: pathlib.Path, records: list[dict[str, Any]]) -> None:
    path = tmp_path / "divergence.png"
    plot_divergence(path, records, title="tiny: held-out reverse KL 0.850 → 0.226")
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.size == (1280, 960)
        darkness = image.convert("L").histogram()
    # Ink on white.
    assert sum(darkness[:100]) > 1000
    assert darkness[255] > 640_000
    assert 5_000 < path.stat().st_size < 500_000


def test_the_report_is_written_where_the_run_is(tmp_path: pathlib.Path) -> None:
    directory = RunDirectory(tmp_path, keep=1)
    lines = [json.dumps(record) + "\n" for record in _records(3, every=3)]
    directory.metrics.write_text("".join(lines))
    summary = write_report(directory, _changed(plot=None))
    assert summary.plot == str(tmp_path / "divergence.png")
    assert directory.plot.exists()
    assert read_summary(directory.summary) == summary


def test_a_run_that_ended_before_its_first_record_has_a_report_without_plot(
    tmp_path: pathlib.Path,
) -> None:
    directory = RunDirectory(tmp_path, keep=1)
    summary = write_report(directory, _changed(status="cancelled", plot=None))
    assert summary.plot is None
    assert not directory.plot.exists()
    assert read_summary(directory.summary) == summary
