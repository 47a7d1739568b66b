"""What every benchmark returns: figures, the limit of each, and whether the bounds hold.

A name ends with its unit (``_s``, ``_bytes``, ``_per_s``, ``_per_sample``, ``_ratio``); names that
are measured under several conditions begin with the condition (``lag1.samples_per_s``).
"""

import os
import pathlib
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from opdkit.protocols.messages import Message

Operator = Literal["<=", ">=", "=="]

_PACKAGES = pathlib.Path(__file__).resolve().parents[1]


class Figure(Message, frozen=True, kw_only=True):
    """What one quantity came out as, over the runs."""

    median: float
    spread: float
    """Largest value minus smallest."""
    values: tuple[float, ...]
    """In the order of the runs."""


class Limit(Message, frozen=True, kw_only=True):
    """The best that a figure could be."""

    value: float
    basis: str
    """Why it cannot be better, and how the value was found."""


class Bound(Message, frozen=True, kw_only=True):
    """What a figure's median must satisfy."""

    figure: str
    operator: Operator
    bound: float
    holds: bool


class Machine(Message, frozen=True, kw_only=True):
    """Where it was measured."""

    cpu: str
    num_cores: int
    memory_bytes: int
    load_1m: float
    """Processes that wanted a core over the last minute before the benchmark. Far above 0: the
    machine was shared, and times are not worth quoting."""
    system: str
    python: str


class BenchmarkReport(Message, frozen=True, kw_only=True):
    """One benchmark's answer: what ``opdkit bench NAME --json`` prints."""

    name: str
    commit: str
    """``unknown`` outside of a checkout."""
    machine: Machine
    config: dict[str, Any]
    """What was run, in plain values."""
    figures: dict[str, Figure]
    limits: dict[str, Limit]
    """By the figure that they limit."""
    bounds: tuple[Bound, ...]
    holds: bool
    """All bounds do."""

    def __post_init__(self) -> None:
        """Refuse limits and bounds of figures that were not measured, and a false verdict."""
        named = {*self.limits, *(bound.figure for bound in self.bounds)}
        if missing := named - set(self.figures):
            raise ValueError(f"BenchmarkReport.figures lacks {', '.join(sorted(missing))}")
        if self.holds != all(bound.holds for bound in self.bounds):
            raise ValueError(f"BenchmarkReport.holds is {self.holds}, which the bounds contradict")


def figure(values: Sequence[float]) -> Figure:
    """Summarise the values of one quantity."""
    return Figure(
        median=statistics.median(values), spread=max(values) - min(values), values=tuple(values)
    )


def figures_of(runs: Sequence[Mapping[str, float]]) -> dict[str, Figure]:
    """Summarise runs that each measured the same quantities."""
    return {name: figure([run[name] for run in runs]) for name in runs[0]}


def check(figures: Mapping[str, Figure], name: str, operator: Operator, bound: float) -> Bound:
    """Compare a figure's median with its bound."""
    median = figures[name].median
    holds = {"<=": median <= bound, ">=": median >= bound, "==": median == bound}[operator]
    return Bound(figure=name, operator=operator, bound=bound, holds=holds)


def make_report(
    name: str,
    *,
    machine: Machine,
    config: dict[str, Any],
    figures: dict[str, Figure],
    limits: dict[str, Limit],
    bounds: Sequence[Bound],
) -> BenchmarkReport:
    """Put a report together; the verdict follows from the bounds."""
    return BenchmarkReport(
        name=name,
        commit=commit_of(_PACKAGES),
        machine=machine,
        config=config,
        figures=figures,
        limits=limits,
        bounds=tuple(bounds),
        holds=all(bound.holds for bound in bounds),
    )


def this_machine() -> Machine:
    """Describe this machine; call it before the load of the benchmark itself is on it."""
    return Machine(
        cpu=_cpu_name(pathlib.Path("/proc/cpuinfo")),
        num_cores=num_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        load_1m=round(os.getloadavg()[0], 2),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
    )


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def commit_of(folder: pathlib.Path) -> str:
    """Return the commit that a folder is checked out at, with ``-dirty`` if files differ."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()


def _cpu_name(path: pathlib.Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
