"""A report for tests, complete but for what the test says."""

from collections.abc import Mapping, Sequence

from opdkit.benchmarks.report import BenchmarkReport, Bound, Figure, Limit, Machine, make_report

MACHINE = Machine(
    cpu="Abacus", num_cores=2, memory_bytes=1 << 34, load_1m=0.5, system="Linux x86_64", python="3"
)


def report_of(
    figures: dict[str, Figure],
    *,
    limits: Mapping[str, Limit] | None = None,
    bounds: Sequence[Bound] = (),
) -> BenchmarkReport:
    """Return a report with these figures."""
    return make_report(
        "trial",
        machine=MACHINE,
        config={},
        figures=figures,
        limits=dict(limits or {}),
        bounds=bounds,
    )
