"""The benchmarks by name. A benchmark's module is imported when it is run: some load much."""

import importlib
from typing import Protocol, TextIO

from opdkit.benchmarks.report import BenchmarkReport
from opdkit.protocols.errors import ConfigError

MIN_RUNS = 1

BENCHMARKS = {
    "losses": "What does the loss cost, against one read of the logits?",
    "overlap": "What does it gain to let generation, scoring and training run at once?",
    "schedules": "How near does the engine come to what its lag allows?",
    "teacher_path": "What does the teacher's signal cost on its way to the trainer?",
    "weight_update": "How long until every replica serves the trainer's new weights?",
}
"""Module of this package: the question that it answers."""


class Benchmark(Protocol):
    """``measure`` of a benchmark's module."""

    def __call__(self, *, num_runs: int | None, is_quick: bool) -> BenchmarkReport:
        """Measure.

        Args:
            num_runs: repetitions that the medians are taken over; None: what suits it.
            is_quick: small sizes, to see that it works; the figures say little.
        """
        ...


def measure(name: str, *, num_runs: int | None, is_quick: bool) -> BenchmarkReport:
    """Run a benchmark.

    Raises:
        ConfigError: there is none of this name, or ``num_runs`` is below 1.
    """
    if name not in BENCHMARKS:
        raise ConfigError(f"benchmark {name!r} is not one of {', '.join(BENCHMARKS)}")
    if num_runs is not None and num_runs < MIN_RUNS:
        raise ConfigError(f"--runs is {num_runs}, but must be at least {MIN_RUNS}")
    benchmark: Benchmark = importlib.import_module(f"opdkit.benchmarks.{name}").measure
    return benchmark(num_runs=num_runs, is_quick=is_quick)


def print_list(stream: TextIO) -> None:
    """Write each benchmark's name and question."""
    for name, question in BENCHMARKS.items():
        stream.write(f"{name:16}{question}\n")
