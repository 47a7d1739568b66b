# pyright: basic
"""``divergence.png``: how far the student is from the teacher, over the tokens trained on."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import NDArray

STEP_COLOUR, HELD_OUT_COLOUR, LOSS_COLOUR = "#7aa6c2", "#c0392b", "#2f5d50"
NUM_SMOOTHED = 20
"""The smoothed line has about this many independent points."""


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """What is plotted; x is the number of supervised tokens trained on so far."""

    step_tokens: NDArray[np.float64]
    loss: NDArray[np.float64]
    """NaN where a step has none."""
    reverse_kl: NDArray[np.float64]
    """Per step, estimated on the training samples."""
    held_out_tokens: NDArray[np.float64]
    held_out_reverse_kl: NDArray[np.float64]


def curves_of(records: Sequence[Mapping[str, Any]]) -> Curves:
    """Take the curves from the records of ``metrics.jsonl``."""
    steps = [record for record in records if record["kind"] == "step"]
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    tokens = np.cumsum(_column(steps, "num_supervised"))
    num_done = [sum(step["step"] <= record["step"] for step in steps) for record in evaluations]
    return Curves(
        step_tokens=tokens,
        loss=_column(steps, "loss"),
        reverse_kl=_column(steps, "reverse_kl_estimate"),
        held_out_tokens=np.concatenate(([0.0], tokens))[num_done],
        held_out_reverse_kl=_column(evaluations, "reverse_kl"),
    )


def plot_divergence(
    path: pathlib.Path, records: Sequence[Mapping[str, Any]], *, title: str
) -> None:
    """Draw the divergence above the loss and write a PNG of 1280 by 960 pixels."""
    curves = curves_of(records)
    figure = Figure(figsize=(8, 6), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.02, ha="left")
    _draw_steps(above, curves.step_tokens, curves.reverse_kl, STEP_COLOUR, "training samples")
    _draw_held_out(above, curves)
    above.set_ylabel("reverse KL per token (nats)")
    if above.lines:
        above.legend(frameon=False, loc="best")
    _draw_steps(below, curves.step_tokens, curves.loss, LOSS_COLOUR, "loss")
    below.set_ylabel("loss (nats)")
    below.set_xlabel("tokens trained on")
    below.xaxis.set_major_formatter(EngFormatter(sep=""))
    for axes in (above, below):
        _tidy(axes)
    figure.savefig(path, format="png")


def _column(records: Sequence[Mapping[str, Any]], name: str) -> NDArray[np.float64]:
    values = [record.get(name) for record in records]
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _draw_steps(
    axes: Axes, x: NDArray[np.float64], y: NDArray[np.float64], colour: str, label: str
) -> None:
    """Draw every step faintly and a centred moving mean over it."""
    is_known = np.isfinite(y)
    x, y = x[is_known], y[is_known]
    width = max(1, len(y) // NUM_SMOOTHED)
    if width == 1:
        axes.plot(x, y, color=colour, linewidth=1.8, marker=".", label=label)
        return
    axes.plot(x, y, color=colour, linewidth=0.8, alpha=0.35)
    window = np.ones(width)
    mean = np.convolve(y, window, "same") / np.convolve(np.ones_like(y), window, "same")
    axes.plot(x, mean, color=colour, linewidth=1.8, label=label)


def _draw_held_out(axes: Axes, curves: Curves) -> None:
    is_known = np.isfinite(curves.held_out_reverse_kl)
    x, y = curves.held_out_tokens[is_known], curves.held_out_reverse_kl[is_known]
    if not len(x):
        return
    axes.plot(
        x,
        y,
        color=HELD_OUT_COLOUR,
        marker="o",
        linewidth=2.0,
        label="held-out prompts",
        clip_on=False,
    )
    # The first and the last point say by how much the run helped; their labels keep off the line.
    rises = y[-1] > y[0]
    _label(axes, x[0], y[0], is_left=True, is_above=not rises)
    if len(x) > 1:
        _label(axes, x[-1], y[-1], is_left=False, is_above=rises)


def _label(axes: Axes, x: float, y: float, *, is_left: bool, is_above: bool) -> None:
    axes.annotate(
        f"{y:.3f}",
        (x, y),
        xytext=(6 if is_left else -6, 8 if is_above else -8),
        textcoords="offset points",
        ha="left" if is_left else "right",
        va="bottom" if is_above else "top",
        color=HELD_OUT_COLOUR,
        fontweight="bold",
    )


def _tidy(axes: Axes) -> None:
    axes.margins(x=0.02, y=0.12)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.set_xlim(left=0)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.grid(visible=True, axis="y", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
