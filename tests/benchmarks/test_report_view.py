"""A report as a person reads it."""

import io

import pytest
from rich.console import Console

from opdkit.benchmarks.report import BenchmarkReport, Limit, check, figure
from opdkit.benchmarks.report_view import print_report, quantity, table_cells
from tests.benchmarks.reports import report_of


def _printed(report: BenchmarkReport) -> list[str]:
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=40))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("a_s", 0.0, "0 s"),
        ("a_s", 12.345, "12.3 s"),
        ("a_s", 0.0123456, "12.3 ms"),
        ("a_s", 1.5e-6, "1.50 µs"),
        ("a_s", 2e-9, "2.00 ns"),
        ("samples_per_s", 1234.5, "1,234"),
        ("cpu_s_per_sample", 0.0451, "0.0451"),
        ("a_bytes", 8_282, "8,282 B"),
        ("a_bytes", 3 << 20, "3.0 MiB"),
        ("busy_fraction", 0.356, "35.6%"),
        ("speedup_ratio", 1.2345, "1.23"),
        ("difference", 2.6e-5, "2.6e-05"),
        ("difference", float("inf"), "inf"),
        ("count", 0, "0"),
    ],
)
def test_a_value_is_written_in_the_unit_of_its_name(name: str, value: float, text: str) -> None:
    assert quantity(name, value) == text


def test_conditions_stand_side_by_side_over_their_limits() -> None:
    report = report_of(
        {
            "lag0.samples_per_s": figure([10.0, 12.0, 11.0]),
            "lag1.samples_per_s": figure([20.0]),
            "lag1.gain_ratio": figure([2.0]),
        },
        limits={"lag1.samples_per_s": Limit(value=40.0, basis="cores")},
    )
    assert table_cells(report) == [
        ["median (spread)", "lag0", "lag1"],
        ["samples_per_s", "11.0 (18%)", "20.0"],
        ["  └ limit", "", "40.0 (x0.500)"],
        ["gain_ratio", "", "2.00"],
    ]


def test_the_page_ends_with_the_bounds_and_the_verdict() -> None:
    figures = {"total_s": figure([2.0])}
    bounds = [check(figures, "total_s", "<=", 5.0), check(figures, "total_s", "<=", 1.0)]
    lines = _printed(report_of(figures, bounds=bounds))
    assert lines[0].startswith("trial at ")
    assert lines[0].endswith("2 cores of Abacus, load 0.5")
    assert lines[-3:] == [
        "holds  total_s <= 5.00 s: 2.00 s",
        "fails  total_s <= 1.00 s: 2.00 s",
        "Not every bound holds.",
    ]


def test_a_wide_table_is_not_cut_off() -> None:
    figures = {f"condition{n}.quantity_s": figure([1.25]) for n in range(9)}
    [row] = [line for line in _printed(report_of(figures)) if "quantity_s" in line]
    assert row.count("1.25 s") == 9


def test_the_basis_of_several_limits_is_told_once() -> None:
    limit = Limit(value=1.0, basis="one copy")
    report = report_of(
        {"a_s": figure([1.0]), "b_s": figure([2.0])}, limits={"a_s": limit, "b_s": limit}
    )
    assert _printed(report).count("limit: one copy") == 1
