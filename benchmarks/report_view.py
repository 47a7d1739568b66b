"""A benchmark's report for people: its figures over their limits, and the bounds."""

import math
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from opdkit.benchmarks.report import BenchmarkReport, Bound

BYTES_PER_MIB = 1 << 20
NUM_DIGITS = 3
LIMIT_MARK = "  └"


def print_report(report: BenchmarkReport, console: Console) -> None:
    """Print the figures, what limits them, and the verdict."""
    machine = report.machine
    where = f"{report.name} at {report.commit}, {machine.num_cores} cores of {machine.cpu}"
    console.print(Text(f"{where}, load {machine.load_1m:g}"), soft_wrap=True)
    _print_table(table_cells(report), console)
    for basis in dict.fromkeys(limit.basis for limit in report.limits.values()):
        console.print(Text(f"limit: {basis}", style="dim"), soft_wrap=True)
    for bound in report.bounds:
        console.print(_bound_line(bound, report.figures[bound.figure].median), soft_wrap=True)
    if report.bounds:
        console.print("Every bound holds." if report.holds else "Not every bound holds.")


def table_cells(report: BenchmarkReport) -> list[list[str]]:
    """Return a heading and a row for each quantity, with a column for each condition.

    Spreads are given as shares of the median. A row of limits follows the quantities that have
    any, with how many times the limit the median is.
    """
    conditions = list(dict.fromkeys(_split(name)[0] for name in report.figures))
    quantities = dict.fromkeys(_split(name)[1] for name in report.figures)
    rows = [["median (spread)", *conditions]]
    for short in quantities:
        names = [f"{condition}.{short}" if condition else short for condition in conditions]
        rows.append([short, *(_figure_cell(report, name) for name in names)])
        if not report.limits.keys().isdisjoint(names):
            rows.append([f"{LIMIT_MARK} limit", *(_limit_cell(report, name) for name in names)])
    return rows


def quantity(name: str, value: float) -> str:
    """Write a value to three digits, in the unit that its name ends with."""
    if name.endswith("_bytes"):
        return f"{value:,.0f} B" if value < BYTES_PER_MIB else f"{value / BYTES_PER_MIB:,.1f} MiB"
    if name.endswith("_fraction"):
        return f"{value:.1%}"
    if name.endswith("_s") and not name.endswith("_per_s"):
        return seconds(value)
    return digits(value)


def seconds(value: float) -> str:
    """Write a time span with the prefix that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= size:
            return f"{digits(value / size)} {unit}"
    return f"{digits(value / 1e-9)} ns" if value else "0 s"


def digits(value: float) -> str:
    """Write a number to three digits, whole from a hundred on; tiny ones with an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -NUM_DIGITS:
        return f"{value:.1e}"
    return f"{value:,.{max(NUM_DIGITS - 1 - magnitude, 0)}f}"


def _print_table(rows: Sequence[Sequence[str]], console: Console) -> None:
    """Print aligned rows; on a narrow screen they wrap, but no digit is cut off."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, (first, *others) in enumerate(rows):
        cells = [f"{text:>{width}}" for text, width in zip(others, widths[1:], strict=True)]
        line = "  ".join([f"{first:{widths[0]}}", *cells])
        style = "dim" if first.startswith(LIMIT_MARK) else "" if number else "bold"
        console.print(Text(line, style=style), soft_wrap=True)


def _split(name: str) -> tuple[str, str]:
    """Split a figure's name into its condition, which may be empty, and its quantity."""
    condition, _, short = name.rpartition(".")
    return condition, short


def _figure_cell(report: BenchmarkReport, name: str) -> str:
    if name not in report.figures:
        return ""
    figure = report.figures[name]
    spread = f" ({figure.spread / abs(figure.median):.0%})" if figure.median else ""
    return quantity(name, figure.median) + (spread if figure.spread else "")


def _limit_cell(report: BenchmarkReport, name: str) -> str:
    if name not in report.limits:
        return ""
    limit = report.limits[name].value
    times = f" (x{digits(report.figures[name].median / limit)})" if limit else ""
    return quantity(name, limit) + times


def _bound_line(bound: Bound, median: float) -> Text:
    mark, style = ("holds", "green") if bound.holds else ("fails", "bold red")
    limit = quantity(bound.figure, bound.bound)
    told = f"  {bound.figure} {bound.operator} {limit}: {quantity(bound.figure, median)}"
    return Text.assemble((mark, style), told)
