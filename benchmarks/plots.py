"""``python -m benchmarks.plots RESULTS.json... --out docs/images``: bars of ratios, and lines of how cost grows."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from .workloads import CURVES

# The same file from the same figures, and text that a page's reader can search and enlarge.
STYLE = {
    "svg.hashsalt": "persample",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "figure.facecolor": "white",  # readable on light and dark pages
}
COLOURS = {
    "plain": "#888888",
    "grad_out": "#56B4E9",
    "grad": "#0072B2",
    "clipped_sum": "#0072B2",
    "norms": "#0072B2",
    "vmap": "#E69F00",
    "expanded": "#009E73",
    "opacus-hooks": "#D55E00",
    "opacus-ghost": "#D55E00",
    "backpack-grad": "#CC79A7",
    "backpack-norms": "#CC79A7",
}
LINES = {"plain": ":", "gradients": "-", "clipped sums": "--", "norms": "-."}
KINDS = {"gradients": "full gradients", "clipped sums": "clipped sums", "norms": "norms"}
SIZES = {"batch": "batch size", "length": "sequence length", "width": "width", "layers": "layers"}

Report = dict[str, Any]


def bars(report: Report) -> Figure:
    """A panel for each kind of result: groups of workloads, a bar for each method."""
    kinds = {kind: title for kind, title in KINDS.items() if _methods(report, kind)}
    figure, panels = plt.subplots(len(kinds), 1, figsize=(9, 2.6 * len(kinds)), squeeze=False, layout="constrained")
    for axes, (kind, title) in zip(panels[:, 0], kinds.items(), strict=True):
        _panel(axes, report, _methods(report, kind))
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    return figure


def _panel(axes: Axes, report: Report, methods: Sequence[str]) -> None:
    workloads, width = list(report["workloads"]), 0.8 / len(methods)
    rows = {(row["workload"], row["method"]): row for row in report["rows"]}
    for k, method in enumerate(methods):
        places = [i + (k - (len(methods) - 1) / 2) * width for i in range(len(workloads))]
        found = [rows.get((w, method), {"status": "-"}) for w in workloads]
        heights = [row["ratio"]["median"] if row["status"] == "ok" else 0.0 for row in found]
        drawn = axes.bar(places, heights, width, color=COLOURS[method], label=report["methods"][method]["title"])
        axes.bar_label(drawn, [f"{h:.2g}" if h < 10 else f"{h:.0f}" if h else "" for h in heights], fontsize=7)
        for place, row in zip(places, found, strict=True):
            if row["status"] != "ok":
                axes.text(
                    place, 1.05, row["status"], rotation=90, ha="center", va="bottom", fontsize=7, color="#888888"
                )
    axes.axhline(1, color="#888888", linewidth=0.8)
    axes.set_ylabel("times a plain step")
    _logarithmic(axes)
    axes.set_ylim(bottom=0.5)
    axes.set_xticks(range(len(workloads)), [f"{w}\nB={report['workloads'][w]['batch']}" for w in workloads])
    axes.legend(ncols=len(methods), frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1))


def _logarithmic(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def lines(report: Report) -> Figure:
    """A column for each size that grows: time above, memory below, both axes logarithmic."""
    sizes = [size for size in CURVES if any(w["group"] == size for w in report["workloads"].values())]
    figure, panels = plt.subplots(2, len(sizes), figsize=(3 * len(sizes), 5.4), squeeze=False, layout="constrained")
    for column, size in enumerate(sizes):
        for axes, field in zip(panels[:, column], ("ms", "bytes"), strict=True):
            for method in report["methods"]:
                _line(axes, report, size, method, field)
            axes.set(xscale="log", xlabel=SIZES[size])
            _logarithmic(axes)
            ticks = [w["value"] for w in report["workloads"].values() if w["group"] == size]
            axes.set_xticks(ticks, map(str, ticks), fontsize=8)
            axes.set_xticks([], minor=True)
            axes.grid(color="#dddddd", linewidth=0.5)
    panels[0, 0].set_ylabel("ms per step")
    panels[1, 0].set_ylabel("MB per step at most (1 or more)")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(labels), frameon=False, loc="outside upper center")
    return figure


def _line(axes: Axes, report: Report, size: str, method: str, field: str) -> None:
    rows = {row["workload"]: row for row in report["rows"] if row["method"] == method and field in row}
    points = [
        (w["value"], rows[name]) for name, w in report["workloads"].items() if w["group"] == size and name in rows
    ]
    values = [row["ms"]["min"] if field == "ms" else max(sum(row["bytes"].values()) / 1e6, 1.0) for _, row in points]
    about = report["methods"][method]
    axes.plot(
        [value for value, _ in points],
        values,
        LINES[about["kind"]],
        marker=".",
        linewidth=1.3,
        color=COLOURS[method],
        label=about["title"],
    )


def _methods(report: Report, kind: str) -> list[str]:
    return [name for name, about in report["methods"].items() if about["kind"] == kind]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args(argv)
    mpl.use("svg")
    args.out.mkdir(parents=True, exist_ok=True)
    for path in args.results:
        report = json.loads(path.read_text())
        curves = any(w["group"] in CURVES for w in report["workloads"].values())
        with mpl.rc_context(STYLE):
            figure = (lines if curves else bars)(report)
            figure.savefig(args.out / f"{path.stem}.svg", metadata={"Date": None})
            plt.close(figure)


if __name__ == "__main__":
    main()
