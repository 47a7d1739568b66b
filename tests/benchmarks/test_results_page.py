"""The README shows what the committed results say."""

import pathlib

import msgspec

from opdkit.benchmarks.report import Limit, check, figure
from opdkit.benchmarks.results_page import HERE, markdown, page_with, read_results
from tests.benchmarks.reports import report_of

FIGURES = {"total_s": figure([2.0, 3.0, 2.5]), "replies": figure([9.0])}
REPORT = report_of(
    FIGURES,
    limits={"total_s": Limit(value=0.5, basis="one copy")},
    bounds=[check(FIGURES, "total_s", "<=", 1.0)],
)


def test_the_readme_is_up_to_date() -> None:
    page = (HERE / "README.md").read_text(encoding="utf-8")
    assert page_with(page, read_results(HERE / "results")) == page


def test_a_figure_with_a_limit_or_a_bound_has_a_row() -> None:
    lines = markdown([REPORT]).splitlines()
    assert lines[2] == (
        "| trial | `total_s` | 2.50 s | 1.00 s | 500 ms | 5.00 | <= 1.00 s: **fails** |"
    )
    assert lines[3] == ""
    assert lines[4].endswith("2 cores of Abacus, load 0.5 before it")


def test_the_rest_of_the_page_stays() -> None:
    page = "a\n<!-- results -->\nold\n<!-- end of results -->\nz\n"
    once = page_with(page, [REPORT])
    assert once.startswith("a\n<!-- results -->\n")
    assert once.endswith("<!-- end of results -->\nz\n")
    assert "old" not in once
    assert page_with(once, [REPORT]) == once


def test_results_are_read_in_the_order_of_the_catalogue(tmp_path: pathlib.Path) -> None:
    for name in ("weight_update", "losses"):
        report = msgspec.structs.replace(REPORT, name=name)
        (tmp_path / f"{name}.json").write_bytes(msgspec.json.encode(report))
    assert [report.name for report in read_results(tmp_path)] == ["losses", "weight_update"]
