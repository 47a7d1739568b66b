# pyright: basic
"""The loss and the plain way agree, and the benchmark measures both."""

import pytest
import torch

from opdkit.benchmarks import losses
from opdkit.benchmarks.storage_meter import StorageMeter


@pytest.mark.parametrize("support", ["top_k", "full"])
def test_the_plain_way_computes_the_same(support: str) -> None:
    case = losses.random_case(support, num_positions=6, num_vocab=128)
    torch.testing.assert_close(
        losses.our_losses(case), losses.plain_losses(case), atol=1e-5, rtol=1e-5
    )


def test_the_quick_form_measures_every_case() -> None:
    report = losses.measure(num_runs=1, is_quick=True)
    assert report.holds
    conditions = {name.partition(".")[0] for name in report.figures}
    assert conditions == {
        f"V{size}_{support}" for size in losses.QUICK_VOCABULARIES for support in ("top_k", "full")
    }
    for condition in conditions:
        assert report.figures[f"{condition}.tokens_per_s"].median > 0
        assert f"{condition}.tokens_per_s" in report.limits


def test_the_number_of_threads_is_restored() -> None:
    before = torch.get_num_threads()
    with losses.one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_the_meter_counts_what_is_alive_at_once() -> None:
    given = torch.ones(1000)
    with StorageMeter(given) as meter:
        first = given + 1
        del first
        second = given + 2
        third = second.view(10, 100) + 3  # a view takes nothing
    assert meter.peak_bytes == 8000
    assert third.shape == (10, 100)
