"""From a tensor to the graph node that made it, and what the engine says that node computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from persample.graph.read.nodes import is_leaf, op_name
from persample.graph.read.saved import metadata
from persample.graph.read.site import Site
from persample.graph.read.tape import read

Row = Sequence[Tensor | None]


def nodes(output: Tensor) -> Iterator[Node]:
    """All nodes below a tensor, the nearest first."""
    assert output.grad_fn is not None
    queue, seen = [output.grad_fn], {output.grad_fn}
    for node in queue:
        yield node
        below = [child for child, _ in node.next_functions if child is not None]
        queue += [child for child in dict.fromkeys(below) if child not in seen]
        seen.update(below)


def find(output: Tensor, name: str) -> Node:
    """The nearest node of one type."""
    found = next((node for node in nodes(output) if op_name(node) == name), None)
    assert found is not None, f"no {name} below {output.grad_fn}"
    return found


def site_of(output: Tensor, name: str) -> Site:
    """The nearest node of one type, as the rules see it, with all leaves requested."""
    leaves = [node.variable for node in nodes(output) if is_leaf(node)]
    tape = read([output.grad_fn]).tape(leaves)
    return Site(tape, tape.graph.numbers[find(output, name)])


def wanted(site: Site) -> list[int]:
    """The outputs that lead somewhere."""
    return [k for k, slot in enumerate(site.edges) if slot is not None]


def edge(site: Site, k: int) -> GradientEdge:
    """Where an output goes to."""
    return GradientEdge(*site.node.next_functions[k])


def by_engine(site: Site, row: Row) -> dict[GradientEdge, Tensor]:
    """What the autograd engine sends along every edge of a node for these cotangents."""
    outputs = [GradientEdge(site.node, nr) for nr, g in enumerate(row) if g is not None]
    inputs = list(dict.fromkeys(edge(site, k) for k in wanted(site)))
    live = [g for g in row if g is not None]
    grads = torch.autograd.grad(outputs, inputs, live, retain_graph=True, allow_unused=True)
    return {edge: _dense(edge, g) for edge, g in zip(inputs, grads, strict=True)}


def _dense(edge: GradientEdge, g: Tensor | None) -> Tensor:
    about = metadata(edge.node)[edge.output_nr]
    if g is None:
        return torch.zeros(about.shape, dtype=about.dtype)
    return g.to_dense() if g.is_sparse else g


def rows_by_engine(site: Site, rows: Sequence[Row]) -> dict[GradientEdge, Tensor]:
    """The same, for one row of cotangents after another: (B, *shape)."""
    found = [by_engine(site, row) for row in rows]
    return {edge: torch.stack([one[edge] for one in found]) for edge in found[0]}


def by_edge(site: Site, outputs: dict[int, Tensor]) -> dict[GradientEdge, Tensor]:
    """A node's outputs summed where two of them lead to the same place (x * x)."""
    found: dict[GradientEdge, Tensor] = {}
    for k, value in outputs.items():
        to = edge(site, k)
        found[to] = found[to] + value if to in found else value
    return found
