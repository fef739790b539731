"""What all samples share may have been computed with constants: are these the samples' own data?

Tables of positions, fixed transforms and masks are not; the other samples' inputs are, and then samples meet. Nothing
but sizes could make a constant the batch's: if a dim that it brings along is a multiple of B. Sizes coincide, so two
more things are looked at:

- A dim that runs along another dim of the samples' own tensors (a position, a feature) is not that of the samples: a
  sample has all of it. Where it comes out on its own, as classes to be scored, or is summed up, it may be.
- Integers that count positions or distances are no data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from enum import Enum
from math import prod

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ...numberless import NoNumbers, read_numbers
from ..layout import Block, Flow, Layout, Outcome, Shape, reshape, same, sample_dims, simplify, strides
from ..ops.dims import LetterFlows
from ..ops.table import Product, lookup
from ..read import saved
from ..read.nodes import is_opaque
from ..read.notes import ask, lacking
from ..read.site import Site, Sites, computes_with_data, weights_only
from ..read.tape import Slot, Tape


class Below(Enum):
    """What something was computed from."""

    WEIGHTS = "weights, and constants that cannot be the samples'"
    ALIGNED = "constants that might be, but run along another dim of the samples' tensors"
    SAMPLES = "what may be data of the batch"


class Alignment:
    """For tensors that all samples share: which of their dims run along one of the samples' own tensors.

    All such dims of a tensor together are one layout, whose "samples" are the places along them. There are two of them:
    the second also takes a constant with a sample's letter for one of the samples' tensors, which it may not be.
    """

    def __init__(self, tape: Tape, sites: Sites, sizes: Collection[int] = ()) -> None:
        self._tape, self._sites = tape, sites
        self._sizes = sizes  # of the dims that samples lie in, where these are ragged
        self._places: tuple[dict[Slot, Layout | None], dict[Slot, Layout | None]] = ({}, {})

    def enter(self, site: Site, k: int) -> None:
        """Samples use a shared tensor here."""
        slot = site.edges[k]
        assert slot is not None
        matched = list(_matched(self._tape, site, k))
        for weakly in (False, True):
            dims = [*matched, *(_matched_by_constant(site, k) if weakly else ())]
            self._meet(slot, _places(site.target(k), dims), weakly)

    def descend(self, node: int) -> None:
        """From what is computed to what it is computed from; nodes come in the order of the tape."""
        site = self._sites[node]
        for weakly in (False, True):
            known = self._places[weakly].get((node, 0)) if len(site.shapes) == 1 else None
            for k, slot in site.outputs:
                places = None if known is None else _followed(site, k, known)
                dims = _weights_dims(self._tape, site, k)
                self._meet(slot, _with_dims(places, site.target(k), dims), weakly)

    def _meet(self, slot: Slot, places: Layout | None, weakly: bool) -> None:
        table = self._places[weakly]
        before = table.get(slot, places)
        alike = before is not None and places is not None and same(before, places)
        table[slot] = places if alike else None

    def _aligned(self, node: int, shape: Shape, weakly: bool) -> tuple[int, ...]:
        places = self._places[weakly].get((node, 0))
        return () if places is None else sample_dims(places, shape)

    def origin(self, node: int, batch: int) -> Below:
        """What may the constants be that enter here?"""
        op, shape = self._tape.node(node), self._tape.shapes(node)[0]
        unclear = {d for d in constant_dims(self._sites[node]) if self._may_be(shape[d], batch)}
        unclear |= {d for d in ask(op, _rows_of_saved) if shape[d] == batch}
        counts = ask(op, only_counts) if unclear else True
        if counts:
            return Below.WEIGHTS
        unclear -= set(self._aligned(node, shape, False))
        unclear -= set(self._aligned(node, shape, True)) - set(_row_dims(op, shape))
        if unclear and counts is None:
            lacking(op)
        return Below.SAMPLES if unclear else Below.ALIGNED

    def _may_be(self, size: int, batch: int) -> bool:
        """Can so many be the samples, or their parts?"""
        return size % batch == 0 or size in self._sizes


def below_product(tape: Tape, sites: Sites, site: Site, k: int, batch: int, sizes: Collection[int]) -> Below:
    """What was a product's operand, of which all samples use all, computed from?"""
    alignment = Alignment(tape, sites, sizes)
    alignment.enter(site, k)
    slot = site.edges[k]
    assert slot is not None
    below, overall = tape.below(slot[0]), Below.WEIGHTS
    for node in below:
        if not tape.is_leaf(node):
            if computes_with_data(tape, node):
                origin = Below.SAMPLES if is_opaque(tape.node(node)) else alignment.origin(node, batch)
                if origin is Below.SAMPLES:
                    return origin
                overall = origin if origin is Below.ALIGNED else overall
            alignment.descend(node)
    return overall if set(below).isdisjoint(tape.data) else Below.SAMPLES


def _places(shape: Shape, dims: Sequence[int]) -> Layout | None:
    """A layout in which every place along these dims is a sample of its own."""
    sizes = [n if d in dims else 1 for d, n in enumerate(shape)]
    count = prod(sizes)
    return simplify(torch.arange(count, device="cpu").reshape(sizes), shape, count) if count > 1 else None


def _with_dims(places: Layout | None, shape: Shape, dims: Collection[int]) -> Layout | None:
    """A layout in which every place along these dims, too, is a sample of its own."""
    known = () if places is None else sample_dims(places, shape)
    return places if set(dims) <= set(known) else _places(shape, [*known, *dims])


def _weights_dims(tape: Tape, site: Site, k: int) -> set[int]:
    """The dims of an operand that a weight beside it has, too: these are not the samples' either."""
    if not site.op.pointwise or is_opaque(site.node):
        return set()
    target = site.target(k)
    others = [slot for at, slot in enumerate(site.edges) if slot is not None and at != k]
    if not any(tape.shape(slot) == target and weights_only(tape, slot[0]) for slot in others):
        return set()
    return {d for d, n in enumerate(target) if n > 1}


def _followed(site: Site, k: int, places: Layout) -> Layout | None:
    """Where places go in output k of a node: all together, or at least those along single dims."""
    shape, target, op = site.shapes[0], site.target(k), site.op
    if op.in_place and prod(shape) == prod(target):  # on a view of the whole tensor
        return reshape(places, shape, target)
    if not op.flow or is_opaque(site.node) or 0 in (*shape, *target):
        return None
    if op.new_rows is not None and saved.in_checkpoint(site.node):  # whose integers can be read once only
        return None
    outcome = _where(site, k, places)
    if isinstance(outcome, Layout):
        return outcome
    read = None if op.read_dims is None else op.read_dims(site)
    if read is not None and k == 0 and set(read) <= set(sample_dims(places, shape)):
        return _places(target, [0])  # a table that is read place by place has rows of places
    kept = [_dim_in_operand(site, k, d) for d in sample_dims(places, shape)]
    return _places(target, [d for d in kept if d is not None])


def _where(site: Site, k: int, places: Layout) -> Outcome:
    """Where places go by the op's flow; nowhere that is known, if indices decide that cannot be read."""
    try:
        return site.op.where(site, k, [places])
    except NoNumbers:
        lacking(site.node)
        return Flow.PROBE


def _dim_in_operand(site: Site, k: int, dim: int) -> int | None:
    """The dim of operand k that a dim of the result is, by the op's flow; equal sizes alone prove nothing."""
    shape, target = site.shapes[0], site.target(k)
    outcome = _where(site, k, Block(shape[dim], strides(shape)[dim]))
    moved = sample_dims(outcome, target) if isinstance(outcome, Layout) else ()
    return moved[0] if len(moved) == 1 and target[moved[0]] == shape[dim] else None


def _matched(tape: Tape, site: Site, k: int) -> Iterator[int]:
    """The dims of a shared operand that another one, computed from samples, has too."""
    if is_opaque(site.node):
        return
    others = {at: slot for at, slot in enumerate(site.edges) if slot is not None and at != k}
    shapes = {at: tape.shape(slot) for at, slot in others.items() if not weights_only(tape, slot[0])}
    if not others and site.op.pointwise:  # a mask, whose shape is not known: it has what the result has
        shapes = {k: site.shapes[0]}
    product = site.op.product
    if product is not None and k in product.operands:
        letters = "".join(product.operands.get(at, "") for at in shapes)
        yield from (d for d, c in enumerate(product.operands[k]) if c in letters)
    elif site.op.pointwise:
        yield from _broadcast_alike(site.target(k), list(shapes.values()))
    elif site.op.convolution and k == 1 and shapes:
        yield 1


def _broadcast_alike(shape: Shape, others: Sequence[Shape]) -> Iterator[int]:
    """The dims that one of the others has in the same size, counted from the last."""
    for d, n in enumerate(shape):
        from_end = d - len(shape)
        if n > 1 and any(len(other) >= -from_end and other[from_end] == n for other in others):
            yield d


def _matched_by_constant(site: Site, k: int) -> Iterator[int]:
    """The dims of a product's shared operand that its other one, a constant, has: a feature, or another sample."""
    product = site.op.product
    if product is not None and k in product.operands:
        other = next(own for at, own in product.operands.items() if at != k)
        yield from (d for d, c in enumerate(product.operands[k]) if c in other)


def _row_dims(node: Node, shape: Shape) -> list[int]:
    """The dims of a result that come from the rows of a constant, where samples would lie."""
    product = lookup(node).product
    if product is None:
        return list(range(len(shape)))
    constants = [own for k, own in product.operands.items() if node.next_functions[k][0] is None]
    rows = {own[-2] if len(own) > 1 else own for own in constants}
    return [d for d, c in enumerate(product.result) if c in rows]


def constant_dims(site: Site) -> list[int]:
    """The dims of a result that constants may have brought along."""
    op, shape = site.op, site.shapes[0]
    if op.product is not None:
        return _constant_letters(site, op.product)
    if op.convolution:
        return [d for d in range(len(shape)) if d != 1]
    if op.mixes is not None:  # sequences, next to which weights and states have dims of another order
        return list(range(len(shape)))
    if op.new_rows is not None:
        return list(op.new_rows(site.node, shape))
    if isinstance(op.flow, LetterFlows):
        dims = [d for d, n in enumerate(shape) if n > 1]
        return [d for d in dims if all(_dim_in_operand(site, k, d) is None for k, _ in site.outputs)]
    return _dims_of_other_sizes(site)


def _constant_letters(site: Site, product: Product) -> list[int]:
    """The dims of a product that an operand without gradient has."""
    edges = site.node.next_functions
    constant = "".join(letters for k, letters in product.operands.items() if edges[k][0] is None)
    return [d for d, c in enumerate(product.result) if c in constant]


def _dims_of_other_sizes(site: Site) -> list[int]:
    """The dims of a result that no operand with a gradient has in that size, where dims lie as in broadcasting."""
    shape, edges = site.shapes[0], site.node.next_functions
    known = [tuple(saved.metadata(child)[nr].shape) for child, nr in edges if child is not None]
    lengths = [(1,) * (len(shape) - len(own)) + own for own in known]
    return [d for d, n in enumerate(shape) if not any(len(own) == len(shape) and own[d] == n for own in lengths)]


def _rows_of_saved(node: Node) -> tuple[int, ...]:
    """The dims of an elementwise result in which the rows of constants lie, where these were saved."""
    if not lookup(node).pointwise or is_opaque(node) or saved.in_checkpoint(node):
        return ()
    rank = len(saved.metadata(node)[0].shape)
    rows = [t for t in saved.constants(node) if 1 < t.ndim <= rank and len(t) > 1 and is_data(t)]
    return tuple([rank - t.ndim for t in rows])


def only_counts(node: Node) -> bool | None:
    """Are all constants integers that are no data? None if they may be, and there is nothing to look at."""
    if saved.in_checkpoint(node):
        return False
    constants = saved.constants(node)
    try:
        return bool(constants) and all(counts_positions(t) for t in constants)
    except NoNumbers:
        return None


def counts_positions(t: Tensor) -> bool:
    """Are these integers 0, 1, 2, … in steps of any size, or distances between such numbers (the same on diagonals)?"""
    if is_data(t) or not t.numel() or max(t.shape, default=0) < 3:  # two numbers always count
        return False
    if bool((read_numbers(t) == t.reshape(-1)[0]).all()):  # equal numbers do not show that they count
        return False
    if t.ndim == 1 or all(n == 1 for n in t.shape[:-1]):
        steps = t.reshape(-1).diff()
        return bool((steps == steps[0]).all())
    table = t.reshape(-1, *t.shape[-2:])
    return bool((table == table[:1]).all()) and torch.equal(table[0, 1:, 1:], table[0, :-1, :-1])


def is_data(t: Tensor) -> bool:
    """Numbers or masks."""
    return t.is_floating_point() or t.is_complex() or t.dtype == torch.bool


def memory_of_rows(node: Node) -> set[int]:
    """The memory in which the constants of a node lie, of those that have rows."""
    rows = [t for t in saved.constants(node) if t.ndim > 1 and is_data(t) and t.layout == torch.strided]
    return {saved.memory(t) for t in rows}


def goes_by_sample(site: Site, layout: Layout) -> bool:
    """Does a node's constant have one row per sample, or several?"""
    dims = constant_dims(site)
    return any(d in dims for d in sample_dims(layout, site.shapes[0]))
