"""Four trainer ranks take the steps that one takes, and end together when one dies."""

import time
from dataclasses import dataclass
from typing import Any

import pytest

from opdkit.actors.files.metric_sinks import read_metrics
from tests.integration.command import Place, running
from tests.integration.conftest import Finished

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

TOLERANCE = 1e-5
SOON_S = 20.0


@dataclass(frozen=True)
class Parallel:
    """The finished job's twin, with two times two ranks, one of which was killed after a while."""

    steps: list[dict[str, Any]]
    code: int
    cause: str
    seconds: float
    """From the death to the end of the run."""
    left_behind: list[str]


@pytest.fixture(scope="module")
def parallel(finished: Finished, shared_place: Place) -> Parallel:
    for name in (finished.job, "train.jsonl"):
        (shared_place.folder / name).write_bytes((finished.place.folder / name).read_bytes())
    overrides = (
        "trainer.parallel={data: 2, tensor: 2}",
        "data.held_out=null",
        "data.num_epochs=null",
        "pipeline.num_steps=1000",
    )
    with running(shared_place, finished.job, *overrides) as run:
        run.until_step(3)
        started_s = time.monotonic()
        run.find_all("ray::TrainerRank")[-1].kill()
        code, _ = run.end()
        seconds = time.monotonic() - started_s
    metrics = read_metrics(shared_place.folder / "runs" / "finished" / "metrics.jsonl")
    return Parallel(
        steps=[record for record in metrics if record["kind"] == "step"],
        code=code,
        cause=run.records[-1]["cause"],
        seconds=seconds,
        left_behind=shared_place.until_gone(within_s=SOON_S),
    )


def test_the_first_step_has_the_loss_of_a_single_rank(
    finished: Finished, parallel: Parallel
) -> None:
    [alone, *_] = finished.records("step")
    first = parallel.steps[0]
    # Sampling is seeded: the same tokens, or nothing here could be equal.
    assert first["num_supervised"] == alone["num_supervised"]
    assert first["loss"] == pytest.approx(alone["loss"], abs=TOLERANCE)
    assert first["grad_norm"] == pytest.approx(alone["grad_norm"], abs=10 * TOLERANCE)


def test_all_steps_are_of_seven_samples(parallel: Parallel) -> None:
    assert len(parallel.steps) >= 3
    assert {step["num_samples"] for step in parallel.steps} == {7}
    assert {step["num_uncovered"] for step in parallel.steps} == {0}


def test_the_death_of_one_rank_ends_the_run_by_name(parallel: Parallel) -> None:
    assert parallel.code == 1
    assert parallel.cause.startswith("TrainerError: trainer ")
    assert "died: The actor died" in parallel.cause
    assert parallel.seconds < SOON_S
    assert parallel.left_behind == []
