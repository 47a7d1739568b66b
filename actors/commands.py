"""What each command does. Lines of text for people; with ``--json`` one object a line.

What needs Ray, vLLM, Megatron or torch is reached through ``load``, after everything that can be
known without them has been checked. Even numpy and rich are imported only behind the reading of the
job, so that a slip of the pen is answered in a tenth of a second.
"""

import argparse
import functools
import os
import pathlib
import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from opdkit.actors.checks.preflight_report import report_values
from opdkit.actors.cli import BAD_CONFIGURATION, DONE, INTERRUPTED, JOB_FAILED, Load
from opdkit.actors.files.config_file import read_job

if TYPE_CHECKING:
    from opdkit.actors.reports.progress import Style
    from opdkit.actors.reports.run_report import RunSummary

_EXIT_CODES = {"completed": DONE, "failed": JOB_FAILED, "cancelled": INTERRUPTED}


def run(args: argparse.Namespace, load: Load) -> int:
    """Check a job, run it to its end and report."""
    spec = read_job(args.config, overrides=args.overrides)

    from rich.console import Console

    from opdkit.actors.checks.preflight import check_job
    from opdkit.actors.checks.preflight_view import print_report
    from opdkit.actors.reports.progress import show_progress
    from opdkit.actors.reports.run_report import print_summary, summary_values

    report = check_job(spec)
    if args.json:
        _write_line({"kind": "check", **report_values(report)})
    else:
        print_report(report, Console(stderr=True), only_problems=True)
    if report.errors:
        return BAD_CONFIGURATION
    show = functools.partial(show_progress, style=_style(as_json=args.json))
    summary: RunSummary = load("opdkit.actors.foreground:run")(spec, show=show)
    if args.json:
        _write_line({"kind": "summary", **summary_values(summary)})
    else:
        print_summary(summary, Console(), program=_program())
    return _EXIT_CODES[summary.status]


def _program() -> str:
    """Return what was typed to call this program: ``opdkit``, or a path to it."""
    called = pathlib.Path(sys.argv[0])
    if called.name != "opdkit" or shutil.which("opdkit") == str(called):
        return "opdkit"
    return os.path.relpath(called)


def check(args: argparse.Namespace, load: Load) -> int:
    """Say everything that is wrong with a job."""
    spec = read_job(args.config, overrides=args.overrides)

    from rich.console import Console

    from opdkit.actors.checks.preflight import check_job
    from opdkit.actors.checks.preflight_view import print_report

    report = check_job(spec)
    if args.json:
        _write_line({"kind": "check", **report_values(report)})
    else:
        print_report(report, Console())
    return BAD_CONFIGURATION if report.errors else DONE


def simulate(args: argparse.Namespace, load: Load) -> int:
    """Run a job in virtual time, on simulated parts."""
    spec = read_job(args.config, overrides=args.overrides)
    sizing = load("opdkit.actors.reports.simulation_report:size_job")(spec)
    if args.json:
        values = load("opdkit.actors.reports.simulation_report:sizing_values")(sizing)
        _write_line({"kind": "simulation", **values})
    else:
        from rich.console import Console

        load("opdkit.actors.reports.simulation_report:print_sizing")(sizing, Console())
    return DONE


def prepare(args: argparse.Namespace, load: Load) -> int:
    """Make the models of the examples."""
    make = load(f"opdkit.actors.models.commands:prepare_{args.models}")
    make(pathlib.Path(args.dir), report=lambda line: sys.stdout.write(f"{line}\n"))
    return DONE


def export(args: argparse.Namespace, load: Load) -> int:
    """Write the student of a run's newest checkpoint as a model folder."""
    load("opdkit.actors.exporting:export_run")(pathlib.Path(args.run), pathlib.Path(args.dir))
    sys.stdout.write(f"{args.dir}: ready, in Hugging Face format\n")
    return DONE


def bench(args: argparse.Namespace, load: Load) -> int:
    """Run a benchmark and say whether its bounds hold, or list the benchmarks."""
    if args.name is None:
        load("opdkit.benchmarks.catalogue:print_list")(sys.stdout)
        return DONE
    measure = load("opdkit.benchmarks.catalogue:measure")
    report = measure(args.name, num_runs=args.runs, is_quick=args.quick)
    if args.json:
        _write_line(msgspec.to_builtins(report))
    else:
        from rich.console import Console

        load("opdkit.benchmarks.report_view:print_report")(report, Console())
    return DONE if report.holds else JOB_FAILED


def _style(*, as_json: bool) -> "Style":
    if as_json:
        return "json"
    return "live" if sys.stdout.isatty() else "lines"


def _write_line(values: Mapping[str, Any]) -> None:
    sys.stdout.write(msgspec.json.encode(values).decode() + "\n")
