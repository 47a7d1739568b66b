# pyright: basic
"""Training goes on from a checkpoint as if it had not stopped."""

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from opdkit.protocols.config import OptimizerSection
from opdkit.protocols.messages import Sample, StepPlan
from tests.actors.megatron.micro import by_id, make_plan, make_sample, settings_for, write_model
from tests.actors.megatron.ranks import run_ranks

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

WARMING = OptimizerSection(lr=1e-3, schedule="cosine", warmup_steps=2, weight_decay=0.1)


def train_and_save(
    session: Any, plans: list[StepPlan], samples: dict[str, Sample], folder: str
) -> Any:
    """Take half of the steps, save, and take the others."""
    half = len(plans) // 2
    for plan in plans[:half]:
        session.train(plan, samples)
    session.save(folder)
    return finish(session, plans[half:], samples)


def load_and_finish(
    session: Any, plans: list[StepPlan], samples: dict[str, Sample], folder: str
) -> Any:
    """Take a step to be forgotten, restore, and take the second half of the steps."""
    session.train(plans[0], samples)
    session.load(folder)
    return finish(session, plans[len(plans) // 2 :], samples)


def finish(session: Any, plans: list[StepPlan], samples: dict[str, Sample]) -> Any:
    """Return (loss, norm, learning rate) of each step, and the weights."""
    from opdkit.actors.megatron.export import stream_hf

    reports = [session.train(plan, samples) for plan in plans]
    figures = [(report.loss, report.grad_norm, report.learning_rate) for report in reports]
    weights = {
        name: part.float().numpy() for name, part in stream_hf(session.student, torch.float32)
    }
    return figures, weights, int(torch.randint(1 << 30, ()))


def save_and_count_forks(session: Any, folder: str) -> int:
    """Return how many processes this one started for a checkpoint."""
    forks: list[None] = []
    os.register_at_fork(before=lambda: forks.append(None))
    session.save(folder)
    return len(forks)


def save_with_little_room(session: Any, folder: str) -> None:
    """Save where no file can be larger than a page."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    session.save(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_goes_on_bit_for_bit(tmp_path: Path, dtype: Any) -> None:
    model = write_model(tmp_path / "model", kind="qwen3", tied=False)
    samples = [make_sample(f"s{n}", lengths=(5 + n,), seed=n) for n in range(4)]
    plans = [make_plan(samples)] * 6
    settings = settings_for(model, dtype=dtype, optimizer=WARMING)
    folder = str(tmp_path / "checkpoint")
    [straight] = run_ranks(train_and_save, settings, plans, by_id(samples), folder)
    [resumed] = run_ranks(load_and_finish, settings, plans, by_id(samples), folder)
    assert resumed[0] == straight[0]
    assert all((resumed[1][name] == value).all() for name, value in straight[1].items())
    assert resumed[2] == straight[2]


@pytest.mark.parametrize("layout", [{"data": 2}, {"tensor": 2}], ids=["data-2", "tensor-2"])
def test_checkpoint_of_one_rank_loads_on_two(tmp_path: Path, layout: dict[str, Any]) -> None:
    model = write_model(tmp_path / "model", kind="llama", tied=True)
    samples = [make_sample(f"s{n}", lengths=(5 + n,), seed=n) for n in range(4)]
    folder = str(tmp_path / "checkpoint")
    one = settings_for(model, optimizer=WARMING)
    two = settings_for(model, optimizer=WARMING, **layout)
    [straight] = run_ranks(train_and_save, one, [make_plan(samples)] * 6, by_id(samples), folder)
    plans = [make_plan(samples, data=layout.get("data", 1))] * 6
    resumed, _ = run_ranks(load_and_finish, two, plans, by_id(samples), folder)
    for actual, expected in zip(resumed[0], straight[0], strict=True):
        assert actual == pytest.approx(expected, rel=1e-5)
    for name, value in straight[1].items():
        torch.testing.assert_close(torch.tensor(resumed[1][name]), torch.tensor(value))


def test_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", kind="llama", tied=True)
    samples = [make_sample("only", lengths=(9,), seed=1)]
    with pytest.raises(AssertionError, match=r"ConfigError: .* holds no complete"):
        run_ranks(
            load_and_finish, settings_for(model), [make_plan(samples)], by_id(samples), "nowhere"
        )


def test_saving_forks_no_process(tmp_path: Path) -> None:
    # A fork of a process with many threads can die before its first line, and be waited for.
    model = write_model(tmp_path / "model", kind="llama", tied=True)
    settings = settings_for(model, data=2)
    assert run_ranks(save_and_count_forks, settings, str(tmp_path / "checkpoint")) == [0, 0]


def test_full_disk_fails_the_save(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", kind="llama", tied=True)
    with pytest.raises(AssertionError, match="File too large"):
        run_ranks(save_with_little_room, settings_for(model), str(tmp_path / "checkpoint"))
