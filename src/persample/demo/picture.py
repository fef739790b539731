"""One drawing for the site's home page: some wrong answers, the training images behind them, and whether it is true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from torch import Tensor

from .findings import Findings
from .plots import changes

ANSWERS, EACH = 3, 4
COLOURS = ("#b3440c", "#0b63a5")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "persample",
    "font.size": 9,
    "font.family": "sans-serif",
}


def picture(findings: Findings, path: Path) -> None:
    """Thumbnails on the left, predicted and actual changes on the right; on white, for light and dark pages."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 2.9), layout="constrained")
        left, right = figure.subfigures(1, 2, width_ratios=(2.2, 1), squeeze=False)[0]
        _thumbnails(left, findings)
        axes = right.subplots()
        changes(axes, findings, COLOURS, "black")
        axes.set(xlabel="predicted change of a loss", ylabel="actual change")
        axes.set_title(f"LDS {findings.causes.score.score:.2f}", fontsize=9)
        axes.legend(frameon=False, fontsize=8, loc="upper left")
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _thumbnails(part: SubFigure, findings: Findings) -> None:
    causes, digits = findings.causes, findings.digits
    count = min(ANSWERS, len(causes.asked))
    rows = part.subplots(count, 3 + 2 * EACH, squeeze=False, width_ratios=(1, 0.3, *[1] * EACH, 0.3, *[1] * EACH))
    for q, row in enumerate(rows):
        for axes in row:
            axes.axis("off")
        i, order = int(causes.asked[q]), causes.scores[q].argsort()
        _show(row[0], digits.test_x[i, 0], f"says {causes.said[q]}\nis {digits.test_y[i]}", "black")
        for axes, k in zip(row[2 : 2 + EACH], order[:EACH].tolist(), strict=True):
            _cause(axes, findings, k)
        for axes, k in zip(row[3 + EACH :], order.flip(0)[:EACH].tolist(), strict=True):
            _cause(axes, findings, k)
    for column, title in ((0, "test"), (2, "most harmful"), (3 + EACH, "most helpful")):
        rows[0, column].set_title(title, fontsize=9, loc="left")


def _cause(axes: Axes, findings: Findings, k: int) -> None:
    given, true = int(findings.digits.y[k]), int(findings.digits.true[k])
    told = f"labelled {given}" if given == true else f"labelled {given},\nis {true}"
    _show(axes, findings.digits.x[k, 0], told, "black" if given == true else COLOURS[0])


def _show(axes: Axes, image: Tensor, told: str, colour: str) -> None:
    axes.imshow(image.numpy(), cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
    axes.text(0.5, -0.06, told, transform=axes.transAxes, ha="center", va="top", fontsize=7, color=colour)
