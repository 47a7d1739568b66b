"""A call that waits for others has at least the time that they have."""

from opdkit.actors.call_deadlines import (
    lease_deadline_s,
    put_deadline_s,
    trajectory_deadline_s,
)
from opdkit.protocols.config import JobSpec
from opdkit.protocols.config_decoding import decode_job


def make_spec(*, max_policy_lag: int = 2, max_turns: int = 4) -> JobSpec:
    sections: dict[str, object] = {
        "job": {"name": "test"},
        "student": {"model": "student"},
        "teachers": [{"model": "teacher", "max_model_len": 1025}],
        "data": {"train": "prompts.jsonl"},
        "rollout": {"max_turns": max_turns, "hook_timeout_s": 7.0},
        "pipeline": {"num_steps": 6, "samples_per_step": 4, "max_policy_lag": max_policy_lag},
        "deadlines": {"generate_s": 100.0, "score_s": 30.0, "step_s": 1000.0},
    }
    return decode_job(sections)


def test_a_put_may_wait_for_every_step_until_its_sample_is_due() -> None:
    assert put_deadline_s(make_spec(max_policy_lag=0)) == 1000.0
    assert put_deadline_s(make_spec(max_policy_lag=2)) == 3000.0


def test_a_trajectory_may_use_every_deadline_of_its_parts() -> None:
    assert trajectory_deadline_s(make_spec(max_turns=1)) == 121.0 + 30.0 + 3000.0
    assert trajectory_deadline_s(make_spec(max_turns=4)) == 4 * 121.0 + 30.0 + 3000.0


def test_a_lease_may_wait_for_the_longest_trajectory() -> None:
    assert lease_deadline_s(make_spec()) == trajectory_deadline_s(make_spec())
