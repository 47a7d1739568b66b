"""The smallest job there is, as plain values."""

from typing import Any


def job_values() -> dict[str, Any]:
    """Return new plain values of a valid job: only what is required."""
    return {
        "job": {"name": "tiny"},
        "student": {"model": "student", "max_model_len": 256},
        "teachers": [{"model": "teacher", "max_model_len": 257}],
        "data": {"train": "train.jsonl"},
        "pipeline": {"num_steps": 3},
    }
