"""The page docs/supported-ops.md, made from the tables of rules: `python -m tests.graph.ops_page` writes it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import persample as ps
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

LAYERS_BEGIN = """\
## Layers
The nodes that the parameters of PyTorch's layers enter on a CPU, and the factors that are made of them. Functions
(`F.linear`, `x @ w`) enter the same nodes.
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


LONG = 100  # tables of more nodes than this come last


def render() -> str:
    """The whole page."""
    with torch.random.fork_rng():
        layers = [LAYERS_BEGIN, layers_table()]
    rules = [RULES_BEGIN, tables(RULES), FLOWS_BEGIN, tables(FLOWS), EXPANDED_BEGIN, expanded_rules() + "\n"]
    return "\n".join([INTRODUCTION, *layers, *rules])


def layers() -> Iterator[tuple[nn.Module, Sequence[Tensor]]]:
    """PyTorch's layers with parameters, and data for each."""
    images, words = torch.randn(3, 4, 6, 6), torch.randint(9, (3, 5))
    rows, steps = torch.randn(3, 4), torch.randn(3, 5, 4)
    yield nn.Linear(4, 4), [rows]
    yield nn.Bilinear(4, 4, 2), [rows, rows]
    yield nn.Conv1d(4, 2, 3), [images[..., 0]]
    yield nn.Conv2d(4, 2, 3), [images]
    yield nn.Conv3d(4, 2, 3), [images.unsqueeze(-1).expand(-1, -1, -1, -1, 6)]
    yield nn.ConvTranspose2d(4, 2, 3), [images]
    yield nn.Embedding(9, 4), [words]
    yield nn.EmbeddingBag(9, 4), [words]
    yield nn.LayerNorm(4), [steps]
    yield nn.RMSNorm(4), [steps]
    yield nn.GroupNorm(2, 4), [images]
    yield nn.InstanceNorm2d(4, affine=True), [images]
    yield nn.BatchNorm2d(4).eval(), [images]
    yield nn.PReLU(4), [images]
    yield nn.RNN(4, 3, batch_first=True), [steps]
    yield nn.GRU(4, 3, batch_first=True), [steps]
    yield nn.LSTM(4, 3, batch_first=True), [steps]
    yield nn.MultiheadAttention(4, 2, batch_first=True), [steps, steps, steps]
    yield nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), [steps]


def layers_table() -> str:
    """What `ps.explain` says of them."""
    lines = ["| layer | nodes and factors |", "|---|---|"]
    for layer, data in layers():
        nodes: dict[str, dict[str, None]] = {}
        for row in ps.explain(_losses(layer, data), layer).rows:
            factors = nodes.setdefault(row.op.removesuffix("Backward0"), {})
            factors[row.handling.removeprefix("rule: ")] = None
        found = [f"`{node}` ({', '.join(factors)})" for node, factors in nodes.items()]
        lines.append(f"| `nn.{type(layer).__name__}` | {', '.join(found)} |")
    return "\n".join([*lines, ""])


def _losses(layer: nn.Module, data: Sequence[Tensor]) -> Tensor:
    """Something of every sample's result; its batch is dim 0."""
    result = layer(*data)
    return (result[0] if isinstance(result, tuple) else result).square().flatten(1).sum(1)


def tables(rules: Mapping[str, Any]) -> str:
    """One table per file of rules, headed by what the file says of itself; nodes with one rule share a row."""
    files: dict[str, dict[Any, list[str]]] = {}
    for node, rule in sorted(rules.items()):
        files.setdefault(rule.__module__, {}).setdefault(rule, []).append(f"`{node}`")
    by_length = sorted(files.items(), key=lambda entry: (sum(map(len, entry[1].values())) > LONG, entry[0]))
    return "\n".join(_table(by_rule) for _, by_rule in by_length)


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
