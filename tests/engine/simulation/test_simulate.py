"""A simulated job is the engine's own schedule, and never beats its bound."""

import math
from typing import Any

import msgspec
import pytest

from opdkit.engine.simulation import SimulationReport, simulate, with_one_more
from opdkit.engine.stage_report import Stage
from opdkit.protocols.config import JobSpec
from opdkit.protocols.config_decoding import decode_job
from opdkit.protocols.errors import ConfigError

EVEN: dict[str, float] = {"reply_tokens_sigma": 0.0, "reply_tokens_median": 100.0}
"""All replies alike."""


def make_spec(speeds: dict[str, float], *, lag: int, num_steps: int = 24) -> JobSpec:
    return decode_job(
        {
            "job": {"name": "simulated"},
            "student": {"model": "student", "max_model_len": 4096, "max_num_seqs": 64},
            "teachers": [{"model": "teacher", "max_model_len": 4097}],
            "data": {"train": "prompts.jsonl"},
            "rollout": {"max_new_tokens": 2048},
            "trainer": {"microbatch_tokens": 4096},
            "pipeline": {"num_steps": num_steps, "samples_per_step": 8, "max_policy_lag": lag},
            "simulation": speeds,
        }
    )


def test_in_turn_the_times_add_up() -> None:
    speeds = {
        "decode_step_s": 0.1,
        "decode_sequence_s": 0.0,
        "score_request_s": 1e-9,
        "score_token_s": 0.0,
        "train_step_s": 5.0,
        "train_token_s": 0.0,
        "export_s": 1.0,
        "update_s": 2.0,
    }
    report = simulate(make_spec(EVEN | speeds, lag=0))
    # 100 tokens at 0.1 s, the step, its export and the update: 18 s for 8 samples.
    assert report.samples_per_s == pytest.approx(8 / 18, rel=1e-6)
    assert report.bounds.together == pytest.approx(8 / 18)
    assert report.shares[Stage.TRAINER] == pytest.approx(5 / 18)


def test_a_pipeline_is_as_fast_as_its_slowest_stage() -> None:
    report = simulate(make_spec(EVEN | {"train_step_s": 10.0}, lag=2, num_steps=30))
    assert report.bounding_stage is Stage.TRAINER
    assert report.bounds.together == report.bounds.trainer
    assert report.reached == pytest.approx(1.0)


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("train_step_s", [0.5, 20.0])
def test_no_schedule_beats_its_bound_or_its_lag(lag: int, train_step_s: float) -> None:
    speeds = {"train_step_s": train_step_s, "train_token_s": 0.0}
    report = simulate(make_spec(speeds, lag=lag))
    assert 0.9 < report.reached <= 1.0 + 1e-9
    assert max(report.lags) <= lag
    assert report.num_trained == 24 * 8
    assert report.length_ratio == pytest.approx(1.0)


def test_replies_end_with_the_context() -> None:
    report = simulate(make_spec({"prompt_tokens": 4000}, lag=1))
    assert report.length_ratio == pytest.approx(1.0)


@pytest.mark.parametrize("lag", [0, 2])
def test_training_in_no_time_is_no_bound(lag: int) -> None:
    speeds = {"train_step_s": 0.0, "train_token_s": 0.0, "export_s": 0.0, "update_s": 0.0}
    report = simulate(make_spec(EVEN | speeds, lag=lag))
    assert report.bounds.trainer == math.inf
    assert 0.8 < report.reached <= 1.0


def test_too_few_steps_tell_no_rate() -> None:
    with pytest.raises(ConfigError, match=r"num_steps is 15, but must be at least .*, 16: "):
        simulate(make_spec({}, lag=3, num_steps=15))


def test_schedulers_of_several_turns_are_refused() -> None:
    spec = make_spec({}, lag=1)
    rollout = msgspec.structs.replace(spec.rollout, scheduler="math_tips")
    with pytest.raises(ConfigError, match="scheduler is 'math_tips', but a simulation knows only"):
        simulate(msgspec.structs.replace(spec, rollout=rollout))


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"prompt_tokens is 4096, .*max_model_len, 4096"):
        simulate(make_spec({"prompt_tokens": 4096}, lag=1))


def test_a_simulation_repeats_exactly() -> None:
    spec = make_spec({}, lag=1)
    assert simulate(spec) == simulate(spec)


@pytest.mark.parametrize(
    ("stage", "speeds"),
    [
        (Stage.STUDENT, {"decode_step_s": 0.1, "decode_sequence_s": 0.1}),
        (Stage.TEACHER, {"score_request_s": 3.0}),
        (Stage.TRAINER, {"train_token_s": 0.01}),
    ],
)
def test_one_more_of_what_bounds_it_helps(stage: Stage, speeds: dict[str, float]) -> None:
    spec = make_spec(EVEN | speeds, lag=4)
    before = simulate(spec)
    assert _rate_of(before, stage) == before.bounds.together
    assert simulate(with_one_more(spec, stage)).samples_per_s > 1.3 * before.samples_per_s


def _rate_of(report: SimulationReport, stage: Stage) -> float:
    rates: dict[Stage, Any] = {
        Stage.STUDENT: report.bounds.student,
        Stage.TEACHER: report.bounds.teacher,
        Stage.TRAINER: report.bounds.trainer,
    }
    return float(rates[stage])
