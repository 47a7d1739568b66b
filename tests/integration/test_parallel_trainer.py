"""Four trainer ranks take the step that one takes."""

import json

import pytest

from tests.integration.command import Place
from tests.integration.conftest import Finished

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def parallel(finished: Finished, shared_place: Place) -> list[dict[str, object]]:
    """The step records of the finished job's twin, with a trainer of two times two ranks."""
    for name in (finished.job, "train.jsonl", "held_out.jsonl"):
        (shared_place.folder / name).write_bytes((finished.place.folder / name).read_bytes())
    grid = "trainer.parallel={data: 2, tensor: 2}"
    result = shared_place.call("run", finished.job, "--json", "data.held_out=null", grid)
    assert result.returncode == 0, result.stderr
    assert shared_place.until_gone(within_s=5) == []
    metrics = shared_place.folder / "runs" / "finished" / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record for record in records if record["kind"] == "step"]


def test_the_first_step_has_the_loss_of_a_single_rank(
    finished: Finished, parallel: list[dict[str, object]]
) -> None:
    [alone, *_] = finished.records("step")
    [first, *_] = parallel
    # Sampling is seeded: the same tokens, or nothing here could be equal.
    assert first["num_supervised"] == alone["num_supervised"]
    assert first["loss"] == pytest.approx(alone["loss"], abs=TOLERANCE)
    assert first["grad_norm"] == pytest.approx(alone["grad_norm"], abs=10 * TOLERANCE)


def test_all_steps_of_seven_samples_are_taken(parallel: list[dict[str, object]]) -> None:
    assert [record["num_samples"] for record in parallel] == [7, 7, 7]
    assert [record["num_uncovered"] for record in parallel] == [0, 0, 0]
