"""The page docs/supported-ops.md, made from the table of ops: `python -m tests.graph.ops_page` writes it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import persample as ps
from persample.graph import ops
from persample.graph.ops.table import Op, named
from tests.expanded.table import render as expanded_rules
from tests.graph.names import NO_OPS, NODES
from tests.graph.table import families, having

PAGE = Path(__file__).parents[2] / "docs" / "supported-ops.md"

INTRODUCTION = """\
# Supported ops
Every differentiable op of PyTorch is supported, and exact. This page lists those that are fast: nodes of the autograd
graph, by the name that `ps.explain` shows without its ending `Backward0`. It is made from the table of ops by
`python -m tests.graph.ops_page`.

| an op | without a rule, or not listed |
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

ENTRIES_BEGIN = """\
## Ops
One table per file of `src/persample/graph/ops/`. Samples are followed by sizes and dims alone, operand by operand where
these differ; what fits no statement (another rank, an operand that was broadcast) is left to the data of the call. A
rule that meets a form it does not know (a layout, a complex number) leaves it to the slow path. Views have no rule, as
no parameter is shared by samples there: what they do to a parameter's factor is in brackets. B samples, T positions,
C channels, h hidden units.
"""

WITHOUT_BEGIN = """\
## What has no rule
Exact all the same, at the price that the table at the top names.
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
    ops = [ENTRIES_BEGIN, tables(), WITHOUT_BEGIN, without(), EXPANDED_BEGIN, expanded_rules() + "\n"]
    return "\n".join([INTRODUCTION, *layers, *ops])


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


def tables() -> str:
    """One table per family, headed by what its file says of itself; nodes of which the same is known share a row."""
    by_length = sorted(families(), key=lambda family: (len(families()[family]) > LONG, family))
    return "\n".join(_table(family) for family in by_length)


def _table(family: str) -> str:
    title = first_line(import_module(f"{ops.__name__}.{family}")).rstrip(".")
    head, _, rest = title.partition(": ")
    lines = [f"### {head}", *([f"{rest[0].upper()}{rest[1:]}.", ""] if rest else [])]
    lines += ["| nodes | samples | parameters |", "|---|---|---|"]
    rows: dict[tuple[str, str], list[str]] = {}
    for name in sorted(families()[family]):
        op = named(name)
        if op.flow or op.rule:
            rows.setdefault((_flows(op), _parameters(op)), []).append(f"`{name}`")
    return "\n".join([*lines, *[f"| {', '.join(nodes)} | {' | '.join(known)} |" for known, nodes in rows.items()], ""])


def _flows(op: Op) -> str:
    """Where samples go, operand by operand where these differ."""
    said: dict[str, list[str]] = {}
    for k, flow in op.flow.items():
        said.setdefault(first_line(flow), []).append(str(k))
    if len(said) > 1:
        return " ".join(f"{', '.join(operands)}: {text}" for text, operands in said.items())
    return next(iter(said), "–")


def _parameters(op: Op) -> str:
    """What gradients are made of; of a view without a rule, what it does to a factor."""
    if op.rule is not None:
        return first_line(op.rule)
    return "–" if op.lift is None else f"({first_line(op.lift)})"


def without() -> str:
    """The nodes of this release that have no rule, and those of which nothing is known."""
    unknown = {name for name in NODES if not (named(name).rule or named(name).flow)} - NO_OPS
    second = {name for name in unknown if name.endswith(("Backward", "BackwardData"))}
    lists = {
        "Samples are followed": NODES & having("flow") - having("rule") - having("lift"),
        "Data decide where samples go": unknown - second,
        "Data decide, and only a second derivative meets them": second,
    }
    return "\n".join(f"{head}: {', '.join(f'`{name}`' for name in sorted(names))}.\n" for head, names in lists.items())


def first_line(thing: Any) -> str:
    """The first line of a docstring, in Markdown that tables can hold."""
    text = (inspect.getdoc(thing) or "").splitlines()[0]
    return text.replace("``", "`").replace("|", "\\|").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(render())
