"""Benchmarks by name, as the command reaches them."""

import importlib
import io
import json
from collections.abc import Callable
from typing import Any

import pytest

from opdkit.actors.cli import import_function, main
from opdkit.benchmarks.catalogue import BENCHMARKS, measure, print_list
from opdkit.benchmarks.report import BenchmarkReport, check, figure
from opdkit.protocols.errors import ConfigError
from tests.benchmarks.reports import report_of


def _load(report: BenchmarkReport) -> Callable[[str], Callable[..., Any]]:
    def measured(name: str, *, num_runs: int | None, is_quick: bool) -> BenchmarkReport:
        assert (name, num_runs, is_quick) == ("losses", 3, True)
        return report

    known = {"opdkit.benchmarks.catalogue:measure": measured}
    return lambda name: known.get(name) or import_function(name)


def test_every_benchmark_has_a_module() -> None:
    for name in BENCHMARKS:
        assert callable(importlib.import_module(f"opdkit.benchmarks.{name}").measure)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'speed' is not one of losses, overlap"):
        measure("speed", num_runs=None, is_quick=False)


def test_no_runs_are_refused() -> None:
    with pytest.raises(ConfigError, match="--runs is 0, but must be at least 1"):
        measure("losses", num_runs=0, is_quick=True)


def test_the_list_has_a_line_a_benchmark() -> None:
    stream = io.StringIO()
    print_list(stream)
    assert [line.split()[0] for line in stream.getvalue().splitlines()] == list(BENCHMARKS)


def test_without_a_name_the_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    assert capsys.readouterr().out.startswith("losses ")


@pytest.mark.parametrize(("bound", "code"), [(1.0, 0), (0.5, 1)])
def test_the_exit_code_says_whether_the_bounds_hold(
    capsys: pytest.CaptureFixture[str], bound: float, code: int
) -> None:
    figures = {"a_s": figure([1.0])}
    report = report_of(figures, bounds=[check(figures, "a_s", "<=", bound)])
    arguments = ["bench", "losses", "--runs", "3", "--quick"]
    assert main(arguments, load=_load(report)) == code
    assert "a_s" in capsys.readouterr().out
    assert main([*arguments, "--json"], load=_load(report)) == code
    assert json.loads(capsys.readouterr().out)["holds"] is (code == 0)


def test_an_unknown_benchmark_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "speed"]) == 2
    assert "'speed' is not one of" in capsys.readouterr().err
