"""A summary is read from the files of the run."""

import pathlib

import msgspec
import pytest

from opdkit.actors.files.run_files import RunDirectory
from opdkit.actors.reports.run_totals import summarise
from opdkit.protocols.config import JobSpec
from opdkit.protocols.config_decoding import decode_job

STEP = {
    "kind": "step",
    "drawn": 12,
    "trained": 8,
    "dead": 1,
    "alive": 3,
    "ledger_missing": 0,
    "tokens_generated": 500,
    "tokens_trained": 300,
    "tokens_dead": 20,
    "ledger_missing_tokens": 0,
    "score_s_mean": 0.1,
    "generate_s_mean": 0.5,
    "batch_wait_s": 1.0,
    "fetch_s": 0.0,
    "publish_wait_s": 0.5,
}


def make_spec() -> JobSpec:
    return decode_job(
        {
            "job": {"name": "test"},
            "student": {"model": "student"},
            "teachers": [{"model": "teacher", "max_model_len": 1025}],
            "data": {"train": "prompts.jsonl"},
            "pipeline": {"num_steps": 2},
        }
    )


def step(number: int, *, step_s: float, tokens_per_s: float) -> dict[str, object]:
    rates = {f"{name}_tokens_per_s": tokens_per_s for name in ("student", "teacher", "trainer")}
    return {**STEP, **rates, "step": number, "step_s": step_s, "train_s": step_s - 1.5}


def evaluation(number: int, *, reverse_kl: float) -> dict[str, object]:
    return {
        "kind": "evaluation",
        "step": number,
        "num_samples": 4,
        "num_supervised": 40,
        "reverse_kl": reverse_kl,
        "reverse_kl_on_support": reverse_kl / 2,
        "mean_generated_tokens": 10.0,
        "truncated_fraction": 0.5,
    }


def test_rates_are_weighed_by_time_and_waits_put_down_to_stages(tmp_path: pathlib.Path) -> None:
    directory = RunDirectory(tmp_path, keep=1)
    records = [
        evaluation(0, reverse_kl=1.0),
        step(1, step_s=10.0, tokens_per_s=100.0),
        step(2, step_s=30.0, tokens_per_s=20.0),
        {**STEP, "kind": "ledger", "step": 2, "drawn": 16, "trained": 15, "alive": 0},
        evaluation(2, reverse_kl=0.4),
    ]
    directory.metrics.write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in records))
    summary = summarise(make_spec(), directory, status="completed", cause="", wall_s=50.0)
    assert summary.num_steps == 2
    assert (summary.num_drawn, summary.num_trained, summary.num_alive) == (16, 15, 0)
    assert summary.tokens_per_s == pytest.approx(dict.fromkeys(summary.tokens_per_s, 40.0))
    assert summary.waited_s["student"] == pytest.approx(2.0)
    assert summary.waited_s["trainer"] == pytest.approx(37.0)
    assert summary.bound is not None
    assert summary.bound[0] == "trainer"
    assert summary.before is not None
    assert summary.after is not None
    assert (summary.before.reverse_kl, summary.after.reverse_kl) == (1.0, 0.4)


def test_a_run_that_failed_before_its_first_step_has_a_summary(tmp_path: pathlib.Path) -> None:
    directory = RunDirectory(tmp_path, keep=1)
    summary = summarise(make_spec(), directory, status="failed", cause="no memory", wall_s=1.0)
    assert (summary.num_steps, summary.cause, summary.bound) == (0, "no memory", None)
