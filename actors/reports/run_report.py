"""What is left to say when a run has ended: summary.json, the plot, and a page for people."""

import pathlib
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.text import Text

from opdkit.actors.files.durable_files import write_durably
from opdkit.actors.files.metric_sinks import read_metrics
from opdkit.actors.files.run_files import RunDirectory
from opdkit.actors.reports.progress import duration
from opdkit.protocols.messages import EvaluationReport

NAME_WIDTH = 21

COUNTED = {"student": "sampled", "teacher": "scored", "trainer": "trained, both with prompts"}
"""Which tokens a stage's rate counts."""

Status = Literal["completed", "failed", "cancelled"]


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in figures: the content of ``summary.json``."""

    name: str
    status: Status
    cause: str = ""
    """Why it did not complete."""
    num_steps: int
    """Optimizer steps done."""
    wall_s: float
    """Of this process, start-up included."""
    before: EvaluationReport | None = None
    """On the held-out prompts, before the first step."""
    after: EvaluationReport | None = None
    tokens_per_s: dict[str, float]
    """By stage: ``student`` sampled, ``teacher`` scored, ``trainer`` trained."""
    waited_s: dict[str, float]
    """By stage: time for which the run loop stood still for it, or computed in it."""
    num_drawn: int
    num_trained: int
    num_dead: int
    num_alive: int
    num_missing: int
    """Drawn, but nowhere: 0, or a defect."""
    num_generated_tokens: int
    num_trained_tokens: int
    num_dead_tokens: int
    num_missing_tokens: int
    """Sampled, but nowhere: 0, or a defect."""
    run_dir: str
    checkpoint: str | None = None
    """Newest complete checkpoint."""
    export: str | None = None
    """Trained student in Hugging Face format."""
    plot: str | None = None

    @property
    def bound(self) -> tuple[str, float] | None:
        """The stage that the run waited for most, and its share of all waiting."""
        total_s = sum(self.waited_s.values())
        if total_s <= 0:
            return None
        stage = max(self.waited_s, key=lambda name: self.waited_s[name])
        return stage, self.waited_s[stage] / total_s

    @property
    def next_command(self) -> str:
        """What to type next: go on, or go on for longer."""
        if self.status != "completed":
            return f"opdkit run {self.run_dir}/job.yaml"
        return f"opdkit run {self.run_dir}/job.yaml pipeline.num_steps={2 * self.num_steps}"


def summary_values(summary: RunSummary) -> dict[str, Any]:
    """Return plain values, with what follows from the figures."""
    stage, share = summary.bound or (None, None)
    values: dict[str, Any] = msgspec.to_builtins(summary)
    return values | {
        "bound": {"stage": stage, "share": share},
        "next_command": summary.next_command,
    }


def write_summary(path: pathlib.Path, summary: RunSummary) -> None:
    """Write ``summary.json``, indented."""
    text = msgspec.json.format(msgspec.json.encode(summary_values(summary)), indent=2)
    write_durably(path, text + b"\n")


def write_report(directory: RunDirectory, summary: RunSummary) -> RunSummary:
    """Draw the plot and write the summary, with the plot's place in it; return that summary.

    A run that ended before its first record has nothing to plot.
    """
    if records := read_metrics(directory.metrics):
        # Here, since matplotlib takes a second to load, which no other command should.
        from opdkit.actors.reports.divergence_plot import plot_divergence

        plot_divergence(directory.plot, records, title=_title(summary))
        summary = msgspec.structs.replace(summary, plot=str(directory.plot))
    write_summary(directory.summary, summary)
    return summary


def read_summary(path: pathlib.Path) -> RunSummary:
    """Read what ``write_summary`` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=RunSummary)


def print_summary(summary: RunSummary, console: Console, *, program: str = "opdkit") -> None:
    """Print the page for people; lines are not wrapped, so that paths can be copied.

    Args:
        summary: The run.
        console: Where to.
        program: How this program was called, so that the next command can be typed as it stands.
    """
    console.print(_headline(summary), soft_wrap=True)
    next_command = summary.next_command.replace("opdkit", program, 1)
    for name, value in [*_facts(summary), ("next", next_command)]:
        console.print(Text.assemble((f"{name:{NAME_WIDTH}}", "dim"), value), soft_wrap=True)


def _title(summary: RunSummary) -> str:
    if summary.before is None or summary.after is None:
        return summary.name
    before, after = summary.before.reverse_kl, summary.after.reverse_kl
    return f"{summary.name}: held-out reverse KL {before:.3f} → {after:.3f} nats per token"


def _headline(summary: RunSummary) -> Text:
    colour = {"completed": "green", "failed": "red", "cancelled": "yellow"}[summary.status]
    line = Text.assemble(
        (f"{summary.name} {summary.status}", f"bold {colour}"),
        f" after {summary.num_steps} steps, {duration(summary.wall_s)}",
    )
    return line.append(f": {summary.cause}") if summary.cause else line


def _facts(summary: RunSummary) -> Iterator[tuple[str, str]]:
    if summary.before is not None and summary.after is not None:
        yield "held-out reverse KL", _change(summary.before.reverse_kl, summary.after.reverse_kl)
        yield (
            "on teacher's top k",
            _change(summary.before.reverse_kl_on_support, summary.after.reverse_kl_on_support),
        )
    if summary.tokens_per_s:
        rates = (
            f"{stage} {rate:,.0f} {COUNTED[stage]}" for stage, rate in summary.tokens_per_s.items()
        )
        yield "tokens/s", ", ".join(rates)
    if summary.bound is not None:
        stage, share = summary.bound
        yield (
            "bound by",
            f"{stage}: {share:.0%} of the time was spent in it or waiting for it",
        )
    yield (
        "samples",
        f"{summary.num_drawn:,} drawn = {summary.num_trained:,} trained + "
        f"{summary.num_dead:,} dead + {summary.num_alive:,} alive{_missing(summary.num_missing)}",
    )
    yield (
        "tokens",
        f"{summary.num_generated_tokens:,} sampled, {summary.num_trained_tokens:,} trained on, "
        f"{summary.num_dead_tokens:,} dead{_missing(summary.num_missing_tokens)}",
    )
    for name, path in (
        ("checkpoint", summary.checkpoint),
        ("export", summary.export),
        ("plot", summary.plot),
    ):
        if path is not None:
            yield name, path


def _change(before: float, after: float) -> str:
    text = f"{before:.4f} → {after:.4f} nats per token"
    return f"{text} ({after / before - 1:+.0%})" if before > 0 else text


def _missing(count: int) -> str:
    return "" if count == 0 else f"; {count:,} are missing, which is a defect: please report it"
