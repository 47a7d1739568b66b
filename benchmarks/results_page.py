"""Writes the committed results into the README: ``python -m opdkit.benchmarks.results_page``.

One row for each figure that has a limit or a bound; the rest is in the JSON files.
"""

import pathlib
from collections.abc import Iterator, Sequence

import msgspec

from opdkit.benchmarks.catalogue import BENCHMARKS
from opdkit.benchmarks.report import BenchmarkReport
from opdkit.benchmarks.report_view import digits, quantity

HERE = pathlib.Path(__file__).parent
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->\n"
HEADING = ("benchmark", "figure", "median", "spread", "limit", "median / limit", "bound")


def read_results(folder: pathlib.Path) -> list[BenchmarkReport]:
    """Read the results of the catalogue's benchmarks that there are, in its order."""
    paths = [folder / f"{name}.json" for name in BENCHMARKS]
    decoder = msgspec.json.Decoder(BenchmarkReport)
    return [decoder.decode(path.read_bytes()) for path in paths if path.exists()]


def page_with(page: str, reports: Sequence[BenchmarkReport]) -> str:
    """Return a page with the reports' tables between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{markdown(reports)}\n{END}{after}"


def markdown(reports: Sequence[BenchmarkReport]) -> str:
    """Return a Markdown table, and below it where each benchmark was run."""
    if not reports:
        return "None yet.\n"
    rows = [HEADING, ("---", "---", *["---:"] * (len(HEADING) - 3), "---")]
    rows += [row for report in reports for row in _rows(report)]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return f"{table}\n{''.join(_where(report) for report in reports)}"


def _rows(report: BenchmarkReport) -> Iterator[tuple[str, ...]]:
    bounds = {bound.figure: bound for bound in report.bounds}
    for name, figure in report.figures.items():
        limit, bound = report.limits.get(name), bounds.get(name)
        if limit is None and bound is None:
            continue
        verdict = ""
        if bound is not None:
            holds = "holds" if bound.holds else "**fails**"
            verdict = f"{bound.operator} {quantity(name, bound.bound)}: {holds}"
        yield (
            report.name,
            f"`{name}`",
            quantity(name, figure.median),
            quantity(name, figure.spread),
            quantity(name, limit.value) if limit else "",
            digits(figure.median / limit.value) if limit and limit.value else "",
            verdict,
        )


def _where(report: BenchmarkReport) -> str:
    machine = report.machine
    return (
        f"- {report.name}: commit {report.commit}, {machine.num_cores} cores of {machine.cpu}, "
        f"load {machine.load_1m:g} before it\n"
    )


def main() -> None:
    """Bring the README up to date."""
    readme = HERE / "README.md"
    page = page_with(readme.read_text(encoding="utf-8"), read_results(HERE / "results"))
    readme.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
