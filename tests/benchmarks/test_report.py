"""What a report says, and what it cannot say."""

import pathlib

import msgspec
import pytest

from opdkit.benchmarks.report import (
    BenchmarkReport,
    Limit,
    Operator,
    check,
    commit_of,
    figure,
    figures_of,
    this_machine,
)
from tests.benchmarks.reports import report_of


def test_a_figure_is_a_median_a_spread_and_the_values_behind_them() -> None:
    assert msgspec.to_builtins(figure([3.0, 1.0, 2.5])) == {
        "median": 2.5,
        "spread": 2.0,
        "values": (3.0, 1.0, 2.5),
    }


def test_runs_are_summarised_by_quantity() -> None:
    figures = figures_of([{"a_s": 1.0, "b": 4.0}, {"a_s": 3.0, "b": 4.0}])
    assert {name: (f.median, f.spread) for name, f in figures.items()} == {
        "a_s": (2.0, 2.0),
        "b": (4.0, 0.0),
    }


@pytest.mark.parametrize(
    ("operator", "bound", "holds"),
    [
        ("<=", 2.0, True),
        ("<=", 1.9, False),
        (">=", 2.0, True),
        (">=", 2.1, False),
        ("==", 2.0, True),
        ("==", 2.1, False),
    ],
)
def test_a_bound_is_held_against_the_median(operator: Operator, bound: float, holds: bool) -> None:
    figures = {"a_s": figure([1.0, 2.0, 90.0])}
    assert check(figures, "a_s", operator, bound).holds is holds


def test_a_report_holds_when_all_its_bounds_do() -> None:
    figures = {"a": figure([1.0])}
    good, bad = check(figures, "a", "<=", 1.0), check(figures, "a", "<=", 0.0)
    assert report_of(figures).holds
    assert report_of(figures, bounds=[good]).holds
    assert not report_of(figures, bounds=[good, bad]).holds


def test_the_json_object_has_the_documented_names_and_reads_back() -> None:
    figures = {"a": figure([1.0])}
    report = report_of(
        figures,
        limits={"a": Limit(value=0.5, basis="half")},
        bounds=[check(figures, "a", "<=", 1.0)],
    )
    values = msgspec.json.decode(msgspec.json.encode(report))
    assert list(values) == [
        "name",
        "commit",
        "machine",
        "config",
        "figures",
        "limits",
        "bounds",
        "holds",
    ]
    assert values["bounds"] == [{"figure": "a", "operator": "<=", "bound": 1.0, "holds": True}]
    assert msgspec.convert(values, BenchmarkReport) == report


def test_what_was_not_measured_has_neither_limit_nor_bound() -> None:
    limits = {"b_s": Limit(value=1.0, basis="light")}
    with pytest.raises(ValueError, match="figures lacks b_s"):
        report_of({"a_s": figure([1.0])}, limits=limits)


def test_a_verdict_that_the_bounds_contradict_is_refused() -> None:
    figures = {"a": figure([1.0])}
    report = report_of(figures, bounds=[check(figures, "a", "==", 2.0)])
    with pytest.raises(ValueError, match="holds is True"):
        msgspec.structs.replace(report, holds=True)


def test_outside_of_a_checkout_the_commit_is_unknown(tmp_path: pathlib.Path) -> None:
    assert commit_of(tmp_path) == "unknown"


def test_the_machine_is_described() -> None:
    machine = this_machine()
    assert machine.num_cores >= 1
    assert machine.memory_bytes > 1 << 28
    assert machine.cpu
