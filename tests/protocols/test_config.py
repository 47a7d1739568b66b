"""Checks across fields, one row a refused combination; derived numbers."""

from typing import Any

import pytest

from opdkit.protocols.config import JobSpec
from opdkit.protocols.config_decoding import apply_overrides, decode_job
from opdkit.protocols.errors import ConfigError
from tests.protocols.jobs import job_values

REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no room for a prompt": (
        {"rollout.max_new_tokens": 256},
        ("rollout.max_new_tokens is 256", "student.max_model_len, 256"),
    ),
    "no room to score": (
        {"teachers.0.max_model_len": 256},
        ("teachers[0].max_model_len is 256", "student.max_model_len, 256"),
    ),
    "a sequence longer than a micro-batch": (
        {"trainer.microbatch_tokens": 255},
        ("trainer.microbatch_tokens is 255", "student.max_model_len, 256"),
    ),
    "two teachers": (
        {
            "teachers": [
                {"model": "t", "max_model_len": 257, "name": "a"},
                {"model": "u", "max_model_len": 257, "name": "b"},
            ]
        },
        ("teachers has 2 entries",),
    ),
    "jsd without beta": (
        {"loss.divergence": "jsd"},
        ("loss.beta is None", "loss.divergence 'jsd'"),
    ),
    "beta without jsd": (
        {"loss.beta": 0.5},
        ("loss.beta is 0.5", "loss.divergence 'reverse_kl'"),
    ),
    "a loss that is identically 0": (
        {"loss.top_k": 1, "loss.tail": "renormalize"},
        ("loss.top_k is 1", "loss.tail 'renormalize'"),
    ),
    "a tail at another temperature": (
        {"loss.temperature": 0.5},
        ("loss.temperature is 0.5", "loss.tail 'bucket'"),
    ),
    "top-k 0": ({"rollout.top_k": 0}, ("rollout.top_k is 0", "-1 or at least 1")),
    "top-k -2": ({"rollout.top_k": -2}, ("rollout.top_k is -2", "-1 or at least 1")),
    "a queue below a batch": (
        {"pipeline.queue_samples": 15},
        ("pipeline.queue_samples is 15", "pipeline.samples_per_step, 16"),
    ),
    "a schedule that ascends": (
        {"trainer.optimizer.min_lr": 1.0},
        ("trainer.optimizer.min_lr is 1.0", "trainer.optimizer.lr, 0.0001"),
    ),
    "sequence parallel without a group": (
        {"trainer.parallel.sequence": True},
        ("trainer.parallel.sequence is true", "trainer.parallel.tensor is 1"),
    ),
}

ACCEPTED: dict[str, dict[str, Any]] = {
    "defaults": {},
    "strictly on-policy": {"pipeline.max_policy_lag": 0},
    "jsd with beta": {"loss.divergence": "jsd", "loss.beta": 0.5},
    "jsd at its end": {"loss.divergence": "jsd", "loss.beta": 0},
    "full support at a temperature": {"loss.support": "full", "loss.temperature": 0.5},
    "renormalised at a temperature": {"loss.tail": "renormalize", "loss.temperature": 2.0},
    "top 1 with a tail": {"loss.top_k": 1},
    "a queue of one batch": {"pipeline.queue_samples": 16},
    "a constant schedule": {"trainer.optimizer.min_lr": 1e-4},
    "sequence parallel": {"trainer.parallel.sequence": True, "trainer.parallel.tensor": 2},
    "one token": {"rollout.max_new_tokens": 255},
}


def _decode(changes: dict[str, Any]) -> JobSpec:
    return decode_job(apply_overrides(job_values(), list(changes.items())))


@pytest.mark.parametrize(("changes", "parts"), REFUSED.values(), ids=REFUSED.keys())
def test_a_combination_is_refused_naming_both_fields(
    changes: dict[str, Any], parts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        _decode(changes)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_a_combination_is_accepted(changes: dict[str, Any]) -> None:
    assert isinstance(_decode(changes), JobSpec)


def test_slots_are_one_batch_more_than_the_lag_allows_to_wait() -> None:
    spec = _decode({"pipeline.max_policy_lag": 3, "pipeline.samples_per_step": 8})
    assert spec.pipeline.slots == 32


def test_sampling_is_untruncated_by_default() -> None:
    rollout = _decode({}).rollout
    assert (rollout.top_p, rollout.top_k, rollout.temperature) == (1.0, -1, 1.0)


def test_a_run_writes_below_runs_unless_told() -> None:
    assert _decode({}).job.directory == "runs/tiny"
    assert _decode({"job.run_dir": "elsewhere"}).job.directory == "elsewhere"
