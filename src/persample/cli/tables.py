"""Tables of the smaller commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from ..audit.costs import LOOP, PLAIN, STEPS
from ..audit.words import milliseconds
from .bench import Timed


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """Columns under a line; long words are broken, never left out."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", caption_justify="left")
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return made


def bench_table(timings: Sequence[Timed]) -> Table:
    """One row per model: a plain step in milliseconds, everything else relative to it."""
    names = [name for name in STEPS if name != PLAIN]
    figures = ("batch", "parameters", PLAIN, *names, "loop")
    made = table("model", *figures, right=figures)
    made.caption = "relative to a plain step (forward pass and backward); loop: one backward per sample"
    for one in timings:
        costs = {cost.name: cost for cost in one.costs}
        ratios = [f"{costs[name].ratio:.2f}" for name in [*names, LOOP]]
        made.add_row(escape(one.name), str(one.batch), f"{one.parameters:,}", milliseconds(costs[PLAIN].ms), *ratios)
    return made


def facts_table(facts: Mapping[str, Any]) -> Table:
    """One row per fact."""
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(style="bold")
    made.add_column(overflow="fold")
    for key, value in facts.items():
        if isinstance(value, Mapping):
            shown = ", ".join(f"{name} {version or 'not installed'}" for name, version in value.items())
        else:
            shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        made.add_row(key.replace("_", " "), escape(shown))
    return made
