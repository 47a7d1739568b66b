"""A check's report for people: a table on a terminal, else one line a finding."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from opdkit.actors.checks.preflight_report import PreflightReport

_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "error": ("error", "bold red")}


def print_report(report: PreflightReport, console: Console, *, only_problems: bool = False) -> None:
    """Print the findings, or only those that are not good, and the verdict."""
    table = Table.grid(padding=(0, 2))
    for finding in report.findings:
        if finding.level == "ok" and only_problems:
            continue
        mark, style = _MARKS[finding.level]
        if console.is_terminal:
            table.add_row(Text(mark, style=style), finding.check, Text(finding.message))
        else:
            _print_line(console, f"{mark:8}{finding.check}: {finding.message}")
    if table.row_count:
        console.print(table)
    if report.errors or not only_problems:
        _print_line(console, _verdict(report))


def _verdict(report: PreflightReport) -> str:
    num_warnings = sum(finding.level == "warning" for finding in report.findings)
    if report.errors:
        return f"The job cannot run: {_counted(len(report.errors), 'error')}."
    return f"The job can run, with {_counted(num_warnings, 'warning')}."


def _counted(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


def _print_line(console: Console, line: str) -> None:
    console.print(Text(line), soft_wrap=True)
