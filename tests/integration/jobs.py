"""Jobs on micro models, as plain values: small enough that starting them is all the time."""

from pathlib import Path
from typing import Any

PROMPTS = ("What is the capital of Australia?", "Add 19 and 24.", "Name three rivers.", "Hello!")


def micro_job(name: str, models: Path, *, num_steps: int, **pipeline: int) -> dict[str, Any]:
    """Return a job of the micro student and teacher in ``models``."""
    size = {"dtype": "float32", "kv_cache_mib": 32, "max_num_seqs": 16}
    return {
        "job": {"name": name, "run_dir": f"runs/{name}"},
        "student": {"model": str(models / "student"), "max_model_len": 128, **size},
        "teachers": [{"model": str(models / "teacher"), "max_model_len": 129, **size}],
        "data": {"train": "train.jsonl"},
        "rollout": {"max_new_tokens": 12},
        "loss": {"top_k": 64},
        "trainer": {
            "dtype": "float32",
            "microbatch_tokens": 256,
            "optimizer": {"lr": 2e-3, "schedule": "constant"},
        },
        "pipeline": {"num_steps": num_steps, **pipeline},
        "checkpoint": {"every_steps": 1},
    }
