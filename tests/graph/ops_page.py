"""The page docs/supported-ops.md, made from the tables of rules: `python -m tests.graph.ops_page` writes it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from persample.graph.flows import FLOWS
from persample.graph.rules import RULES
from tests.expanded.table import render as expanded_rules

PAGE = Path(__file__).parents[2] / "docs" / "supported-ops.md"

INTRODUCTION = """\
# Supported ops
Every differentiable op of PyTorch is supported, and exact. This page lists those that are fast: nodes of the autograd
graph, by the name that `ps.explain` shows without its ending `Backward0`. It is made from the tables of rules by
`python -m tests.graph.ops_page`.

| an op | not listed here |
|---|---|
| that parameters enter | is called once per sample, with a `PerformanceWarning` |
| that samples pass through | is sent one or two more backwards per call, which find out where its samples go |
| of your own | the same; [Teach it a new op](teach.md) says how to do better |
"""

RULES_BEGIN = """\
## Parameters enter
Rules by which a parameter's use becomes a factor. A rule that meets a form it does not know (a layout, a complex
number) leaves it to the slow path.
"""

FLOWS_BEGIN = """\
## Samples pass through
Rules by which samples are followed, by sizes and dims alone. B samples, T positions, C channels, h hidden units.
"""

EXPANDED_BEGIN = """\
## Functions of expanded weights
What `ps.expanded.ExpandedWeight` meets by name, and where the batch lies in the data. Any other function is followed
through its graph, by the rules above: [Two ways in](two-ways-in.md).
"""


def render() -> str:
    """The whole page."""
    parts = [
        INTRODUCTION,
        RULES_BEGIN,
        tables(RULES),
        FLOWS_BEGIN,
        tables(FLOWS),
        EXPANDED_BEGIN,
        expanded_rules() + "\n",
    ]
    return "\n".join(parts)


def tables(rules: Mapping[str, Any]) -> str:
    """One table per file of rules, headed by what the file says of itself; nodes with one rule share a row."""
    files: dict[str, dict[Any, list[str]]] = {}
    for node, rule in sorted(rules.items()):
        files.setdefault(rule.__module__, {}).setdefault(rule, []).append(f"`{node}`")
    return "\n".join(_table(by_rule) for _, by_rule in sorted(files.items()))


def _table(by_rule: Mapping[Any, list[str]]) -> str:
    title = first_line(inspect.getmodule(next(iter(by_rule)))).rstrip(".")
    head, _, rest = title.partition(": ")
    lines = [f"### {head}", *([f"{rest[0].upper()}{rest[1:]}.", ""] if rest else []), "| nodes | rule |", "|---|---|"]
    rows = [f"| {', '.join(nodes)} | {first_line(rule)} |" for rule, nodes in by_rule.items()]
    return "\n".join([*lines, *rows, ""])


def first_line(thing: Any) -> str:
    """The first line of a docstring, in Markdown that tables can hold."""
    text = (inspect.getdoc(thing) or "").splitlines()[0]
    return text.replace("``", "`").replace("|", "\\|").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(render())
