"""What capture does with every use of every parameter, in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import Node

from .._errors import UnsupportedError
from ..numberless import lacks_numbers, with_numbers
from .entry import check_reached, whole_graph
from .execute.capture import Capture, Sink
from .execute.plan import plan
from .layout import Block, Layout, Shape, sample_dims, split
from .locate.interaction import interactions, undecided
from .read.library import op_of
from .read.nodes import op_name
from .read.notes import Notes, noting
from .read.roots import Roots
from .read.saved import is_custom
from .read.tape import Tape


@dataclass(frozen=True, slots=True)
class Handling:
    """One use of one parameter."""

    parameter: str
    op: str  # the node in which samples meet the parameter
    via: str  # nodes between that one and the parameter
    layout: str  # where the samples lie in the node's cotangent
    handling: str  # "rule", "fallback", "separable", "zeros" or "refused", with details


UNKNOWN = "decided by data: unknown without it"


@with_numbers
def in_words(layout: Layout | None, shape: Shape) -> str:
    """Where the samples lie in a tensor of this shape."""
    if layout is None:
        return "nowhere"
    dims = sample_dims(layout, shape)
    sizes = "(" + ", ".join(map(str, shape)) + ")"
    if isinstance(layout, Block):
        parts = split(layout, shape, dims[0]) if len(dims) == 1 else None
        if parts is not None:
            a, b = parts
            return f"dim {dims[0]} of {sizes}" + (f", as {a}·B·{b}" if (a, b) != (1, 1) else "")
        return f"dims {dims} of {sizes}"
    if not dims:
        return f"all of {sizes} is sample {int(layout.index.reshape(-1)[0])}" if layout.index.numel() else "nowhere"
    return f"index along dim{'s' if len(dims) > 1 else ''} {', '.join(map(str, dims))} of {sizes}"


def _shown(node: Node) -> str:
    """A node's type; an op of torch.library by its own name."""
    return (op_of(node) if is_custom(node) else None) or type(node).__name__


def _ways_to_leaves(tape: Tape, start: int) -> dict[int, tuple[str, ...]]:
    """The leaves that a node leads to, each with the node types on one way there."""
    ways: dict[int, tuple[str, ...]] = {start: ()}
    for node in tape.below(start):
        for slot in tape.edges[node]:
            if slot is not None:
                ways[slot[0]] = (*ways[node], type(tape.node(node)).__name__)
    return {node: way for node, way in ways.items() if tape.is_leaf(node)}


@dataclass(frozen=True, slots=True)
class Description:
    """What there is to say of one call."""

    rows: Sequence[Handling]
    interactions: Sequence[str] = ()  # ops in which samples meet
    undecided: Sequence[str] = ()  # ops of which data decide whether they do, where there are none
    activations: int | None = None  # about how many bytes the forward pass has kept


def describe(losses: Tensor, params: Mapping[str, Tensor], sink: Sink) -> Description:
    """Every use of every parameter, and the ops in which samples interact. Runs a backward and keeps the graph.

    Factors are handed to the ``sink``, as in any backward.
    """
    if losses.grad_fn is None:
        return Description(_for_all(params, "the losses are a parameter themselves, or reach none"))
    with noting() as notes:
        try:
            roots = Roots.of_losses(losses)
            check_reached(roots.tape(params.values()), params)
            made = plan(roots, list(params.values())) if len(losses) > 1 else None
        except UnsupportedError as error:
            return Description(_for_all(params, f"refused: {error}"))
        if made is None:
            return Description(_for_all(params, "one sample or none: an ordinary backward"))
        capture = Capture(made, roots, params, sink)
        try:
            capture.run(retain_graph=True)
        except RuntimeError as error:
            if roots.has_numbers or not lacks_numbers(error):
                raise
            why = f"refused: without data, {str(error).splitlines()[0]}"
            return Description(_for_all(params, why), undecided=_names(notes))
        meeting = interactions(*whole_graph(roots, made), thoroughly=True)
        rows: dict[str, list[Handling]] = {name: [] for name in params}
        for row in [*_uses(capture), *_leaves_that_hold_samples(capture)]:
            rows[row.parameter].append(row)
    unreached = [name for name, listed in rows.items() if not listed]
    rows |= {name: _for_all([name], "zeros: the losses do not reach it") for name in unreached}
    return Description(
        [row for listed in rows.values() for row in listed],
        meeting,
        _names(notes),
        made.activations * roots.itemsize,
    )


def _names(notes: Notes) -> list[str]:
    """The ops of which data decide, where there are none."""
    return list(dict.fromkeys(map(op_name, notes.unknown)))


def _for_all(params: Iterable[str], handling: str) -> list[Handling]:
    return [Handling(name, "", "", "", handling) for name in params]


def _uses(capture: Capture) -> Iterator[Handling]:
    """Where samples meet a parameter, or what was computed from it."""
    tape, samples = capture.tape, capture.samples
    unsure = undecided(tape)
    for site, k, how in capture.record:
        how += f"; {UNKNOWN}" if site.index in unsure else ""
        layout = "shared by all samples"
        if site.index not in samples.batched:
            layouts = samples.layouts(site.index)
            shown = next(nr for nr, one in enumerate(layouts) if one is not None)
            layout = in_words(layouts[shown], site.shapes[shown])
        slot = site.edges[k]
        assert slot is not None
        for leaf, via in _ways_to_leaves(tape, slot[0]).items():
            for name in capture.names[id(tape.graph.leaves[leaf])]:
                yield Handling(name, _shown(site.node), ", ".join(via), layout, how)


def _leaves_that_hold_samples(capture: Capture) -> Iterator[Handling]:
    tape = capture.tape
    for node, _ in capture.plan.requested:
        if tape.is_leaf(node):
            layout = in_words(capture.samples.layouts(node)[0], tape.shapes(node)[0])
            for name in capture.names[id(tape.graph.leaves[node])]:
                yield Handling(name, tape.name(node), "", layout, "separable: every element is one sample's")
