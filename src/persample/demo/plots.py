"""Plots as SVG that takes its colours and its font from the page, for light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter
from torch import Tensor

from .findings import Findings
from .scores import precision

# Colours that stand for the page's: each is replaced by a CSS variable when the drawing is done.
INK, GRID, *SERIES = (f"#01020{i}" for i in range(6))
VARIABLES = {INK: "currentColor", GRID: "var(--line)"} | {c: f"var(--series-{i})" for i, c in enumerate(SERIES, 1)}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "persample",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "savefig.transparent": True,
}
SIZE = (4.4, 3.0)  # inches; small, so that text stays readable on a narrow screen
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D")


class Drawing:
    """What `drawing` makes: ``axes`` to draw on, and afterwards its ``svg``."""

    def __init__(self, axes: Axes) -> None:
        self.axes, self.svg = axes, ""


@contextmanager
def drawing(name: str, xlabel: str, ylabel: str) -> Iterator[Drawing]:
    """Axes in the page's style; ``name`` keeps the ids of one drawing apart from those of others."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        drawn = Drawing(figure.subplots())
        drawn.axes.set(xlabel=xlabel, ylabel=ylabel)
        yield drawn
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    drawn.svg = for_page(out.getvalue(), name)


def for_page(svg: str, name: str) -> str:
    """Without header, fixed size and metadata; with the page's colours and font, and ids that nobody else has."""
    svg = svg[svg.index("<svg ") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg [^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg [^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", svg)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg


def predicted_and_actual(findings: Findings) -> str:
    """Changes of losses without some training images: as gradients predict them, and as training shows them."""
    with drawing("causes", "predicted change of a loss", "actual change") as drawn:
        changes(drawn.axes, findings, SERIES, INK)
        _legend(drawn.axes)
    return drawn.svg


def changes(axes: Axes, findings: Findings, colours: Sequence[str], ink: str) -> None:
    """Points for all queries: without the images most harmful for each, and without random subsets."""
    causes = findings.causes
    axes.axline((0, 0), slope=1, color=ink, linewidth=0.8, linestyle=":")
    random = (causes.score.predicted.flatten(), (causes.score.actual - causes.losses).flatten())
    axes.plot(*random, "o", markersize=3, alpha=0.6, markeredgewidth=0, color=colours[1], label="random subsets")
    chosen = (causes.without.predicted, causes.without.actual)
    axes.plot(*chosen, "D", markersize=5, color=colours[0], label="without the most harmful")


def norms_over_training(findings: Findings) -> str:
    """Median and middle half of the gradients' norms after every epoch, flipped labels and others."""
    norms = torch.stack([evidence.norms for evidence in findings.trained.history])
    flipped = findings.digits.flipped
    with drawing("norms", "epoch", "gradient norm") as drawn:
        for k, (label, rows) in enumerate((("flipped labels", flipped), ("all others", ~flipped))):
            _band(drawn.axes, norms[:, rows], label, k)
        _logarithmic(drawn.axes)
        drawn.axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _legend(drawn.axes)
    return drawn.svg


def _logarithmic(axes: Axes) -> None:
    """With plain numbers: exponents would be too small to read."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def _legend(axes: Axes) -> None:
    """Above the drawing, where it covers nothing."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)


def _band(axes: Axes, values: Tensor, label: str, k: int) -> None:
    low, middle, high = values.quantile(torch.tensor([0.25, 0.5, 0.75]), dim=1).clamp(min=1e-12).tolist()
    epochs = range(1, len(middle) + 1)
    axes.fill_between(epochs, low, high, color=SERIES[k], alpha=0.25, linewidth=0)
    axes.plot(epochs, middle, LINES[k], marker=MARKERS[k], markersize=4, color=SERIES[k], label=label)


def precision_curves(findings: Findings) -> str:
    """Precision against the length of the list, for every score."""
    depths = list(range(1, 3 * findings.flips + 1))
    with drawing("precision", "k, examples looked at", "share of them with a flipped label") as drawn:
        axes = drawn.axes
        for k, score in enumerate(findings.scores.values()):
            shares = [precision(score.order, findings.digits.flipped, depth) for depth in depths]
            axes.plot(depths, shares, LINES[k], color=SERIES[k], label=score.title)
        best = [min(1.0, findings.flips / depth) for depth in depths]
        axes.plot(depths, best, color=INK, linewidth=0.8, label="the best possible")
        axes.axhline(findings.chance, color=INK, linewidth=0.8, linestyle=":", label="chance")
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.legend(loc="lower left", bbox_to_anchor=(0, 0.05))
    return drawn.svg


def accuracy_against_epsilon(findings: Findings) -> str:
    """A point for every private run, and a line through their means."""
    epsilons, means = list(findings.settings.epsilons), [mean for mean, _, _ in findings.private_accuracy.values()]
    with drawing("private", "epsilon", "test accuracy") as drawn:
        axes = drawn.axes
        axes.plot(epsilons, means, color=SERIES[0], label="private, mean")
        points = [(run.epsilon, run.accuracy) for run in findings.private]
        axes.plot(*zip(*points, strict=True), "o", markersize=4, color=SERIES[0], label="private, each run")
        axes.axhline(findings.trained.accuracy, color=SERIES[1], linestyle="--", label="without privacy")
        axes.set_xscale("log")
        axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
        axes.minorticks_off()
        axes.set_ylim(top=1)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        _legend(axes)
    return drawn.svg


def noise_over_training(findings: Findings) -> str:
    """The noise scale from all training gradients, and as it is estimated from batches alone."""
    epochs: Sequence[int] = range(1, len(findings.trained.exact) + 1)
    with drawing("noise", "epoch", "gradient noise scale, samples") as drawn:
        axes = drawn.axes
        lines = [
            (findings.trained.exact, "o-", "all gradients, end of epoch"),
            (findings.trained.estimated, "s--", "batches of the epoch"),
        ]
        for (values, style, label), color in zip(lines, SERIES, strict=False):
            axes.plot(epochs, values, style, markersize=4, color=color, label=label)
        axes.axhline(findings.settings.batch, color=INK, linewidth=0.8, linestyle=":", label="batch size")
        _logarithmic(axes)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _legend(axes)
    return drawn.svg
