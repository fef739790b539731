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


def bench_table(found: Sequence[Timed]) -> Table:
    """One row per model: a plain step in milliseconds, everything else relative to it."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.caption = "relative to a plain step (forward pass and backward); loop: one backward per sample"
    names = [name for name in STEPS if name != PLAIN]
    table.add_column("model", overflow="fold")
    for title in ("batch", "parameters", PLAIN, *names, "loop"):
        table.add_column(title, justify="right")
    for one in found:
        costs = {cost.name: cost for cost in one.costs}
        ratios = [f"{costs[name].ratio:.2f}" for name in [*names, LOOP]]
        table.add_row(escape(one.name), str(one.batch), f"{one.parameters:,}", milliseconds(costs[PLAIN].ms), *ratios)
    return table


def facts_table(found: Mapping[str, Any]) -> Table:
    """One row per fact."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for key, value in found.items():
        if isinstance(value, Mapping):
            shown = ", ".join(f"{name} {version or 'not installed'}" for name, version in value.items())
        else:
            shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        table.add_row(key.replace("_", " "), escape(shown))
    return table
