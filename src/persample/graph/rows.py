"""Constants with as many rows as the batch: are they the samples' data?

What all samples share may have been computed from constants: tables of positions, fixed transforms, masks. If one of
them has B rows, or a multiple, it may be that, or data of the batch, in which case samples meet. Sizes do not tell them
apart, but two things do:

- Rows that run along another dim of the samples' own tensors (a position, a feature) are no samples: a sample has all
  of them. Where they come out on their own, as classes to be scored, or are summed up, they may be.
- Integers that count positions or distances are no data.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import Node

from . import saved
from .flows import FLOWS
from .flows.pointwise import broadcast_dims
from .flows.products import LETTERS
from .invoke import is_opaque
from .layout import Block, Layout, Shape, sample_dims, strides
from .names import POINTWISE
from .notes import ask
from .site import Site, Sites, computes_with_data
from .tape import Slot, Tape, is_leaf, op_name

Dims = frozenset[int]
_CONVOLUTIONS = frozenset({"Convolution"})


class Alignment:
    """For tensors that all samples share: the dims of each that run along a dim of the samples' own tensors."""

    def __init__(self, tape: Tape, sites: Sites) -> None:
        self._tape, self._sites = tape, sites
        self._dims: dict[Slot, Dims] = {}

    def enter(self, site: Site, k: int) -> None:
        """Samples use a shared tensor here."""
        slot = site.edges[k]
        assert slot is not None
        self._meet(slot, frozenset(_matched(self._tape, site, k)))

    def descend(self, node: Node) -> None:
        """From what is computed to what it is computed from; nodes come in the order of the tape."""
        site = self._sites[node]
        known = self._dims.get((node, 0), frozenset()) if len(site.shapes) == 1 else frozenset()
        for k, slot in site.outputs:
            moved = {_followed(site, k, d) for d in known}
            self._meet(slot, frozenset(d for d in moved if d is not None))

    def _meet(self, slot: Slot, dims: Dims) -> None:
        self._dims[slot] = self._dims.get(slot, dims) & dims

    def may_hold_samples(self, node: Node, batch: int) -> bool:
        """Does a node compute with a constant whose rows may be the batch's?"""
        return self._ask(node, batch, self._dims.get((node, 0), frozenset()))

    def may_read_samples(self, node: Node, batch: int) -> bool:
        """Is a table read by integers that may be the samples' own?"""
        along = 0 in self._dims.get((node, 0), frozenset()) and bool(ask(node, _reads_by_row))
        return not along and bool(ask(node, partial(_reads_rows, batch=batch)))

    def is_excused(self, node: Node, batch: int) -> bool:
        """Are there such rows, that run along another dim?"""
        return self._ask(node, batch, frozenset()) and not self.may_hold_samples(node, batch)

    def _ask(self, node: Node, batch: int, aligned: Dims) -> bool:
        shape = self._tape.shapes(node)[0]
        return bool(ask(node, partial(_has_rows, batch=batch, aligned=aligned, shape=shape)))


def may_meet_below(tape: Tape, sites: Sites, site: Site, k: int, batch: int) -> bool:
    """Was a product's operand, of which all samples use all, computed from what may be data of the batch?"""
    alignment = Alignment(tape, sites)
    alignment.enter(site, k)
    slot = site.edges[k]
    assert slot is not None
    below = tape.below(slot[0])
    for node in tape.order:
        if node in below and not is_leaf(node):
            if node in tape.data or (computes_with_data(tape, node) and _may_hold(alignment, node, batch)):
                return True
            alignment.descend(node)
    return not below.isdisjoint(tape.data)


def _may_hold(alignment: Alignment, node: Node, batch: int) -> bool:
    hidden = is_opaque(node) or saved.in_checkpoint(node)
    return hidden or alignment.may_hold_samples(node, batch) or alignment.may_read_samples(node, batch)


def memory_of_rows(node: Node) -> set[int]:
    """Where the constants of a node are kept."""
    return {t.untyped_storage().data_ptr() for t in saved.constants(node) if t.ndim > 1 and _is_data(t)}


def goes_by_sample(site: Site, layout: Layout) -> bool:
    """Does a product's or elementwise op's constant have one row per sample, or several?"""
    return all(
        _runs_along(site.node, t, frozenset(sample_dims(layout, site.shapes[0])), site.shapes[0])
        for t in saved.constants(site.node)
        if t.ndim > 1 and _is_data(t)
    )


def _followed(site: Site, k: int, dim: int) -> int | None:
    """Where one dim of a node's cotangent goes in its output k."""
    shape, target, rule = site.shapes[0], site.target(k), FLOWS.get(site.name)
    if shape[dim] < 2 or rule is None or is_opaque(site.node):
        return None
    fate = rule(site, k, [Block(shape[dim], strides(shape)[dim])])
    found = sample_dims(fate, target) if isinstance(fate, Layout) else ()
    return found[0] if len(found) == 1 and target[found[0]] == shape[dim] else None


def _matched(tape: Tape, site: Site, k: int) -> Iterator[int]:
    """The dims of a shared operand that the samples' operand has, too."""
    target = site.target(k)
    if is_opaque(site.node):
        return
    if site.name in LETTERS and k in LETTERS[site.name][1]:
        operands = LETTERS[site.name][1]
        other = next(letters for at, letters in operands.items() if at != k)
        yield from (d for d, c in enumerate(operands[k]) if c in other)
    elif site.name in POINTWISE:
        others = [tape.shape(slot) for at, slot in enumerate(site.edges) if slot is not None and at != k]
        for d, n in enumerate(target):
            from_end = d - len(target)
            if n > 1 and any(len(other) >= -from_end and other[from_end] == n for other in others):
                yield d
    elif site.name in _CONVOLUTIONS and k == 1:
        yield 1


def _has_rows(node: Node, batch: int, aligned: Dims, shape: Shape) -> bool:
    constants = () if saved.in_checkpoint(node) else saved.constants(node)
    return any(
        t.ndim > 1 and len(t) and len(t) % batch == 0 and _is_data(t) and not _runs_along(node, t, aligned, shape)
        for t in constants
    )


def _is_data(t: Tensor) -> bool:
    """Numbers or masks; integers are as often places in a table that all samples read (relative positions)."""
    return t.is_floating_point() or t.is_complex() or t.dtype == torch.bool


def _runs_along(node: Node, t: Tensor, aligned: Dims, shape: Shape) -> bool:
    """Do the rows of a constant go to a dim of the result that is aligned?"""
    name = op_name(node)
    if name in LETTERS:
        letters, operands = LETTERS[name]
        constant = [operands[k] for k, (child, _) in enumerate(node.next_functions) if child is None and k in operands]
        return bool(constant) and all(own[0] in letters and letters.index(own[0]) in aligned for own in constant)
    if name in POINTWISE and t.ndim <= len(shape):
        to_dims = broadcast_dims(shape, tuple(t.shape))
        return 0 in to_dims and to_dims.index(0) in aligned
    return False


def _reads_by_row(node: Node) -> bool:
    """Do the integers have the first dims of the result?"""
    name = op_name(node)
    if name in ("Index", "UnsafeIndex"):
        given = [t is not None for t in saved.value(node, "indices")]
        return given[0] and not any(given[1:])
    return name == "Embedding" or (name == "IndexSelect" and saved.number(node, "dim") == 0)


def _reads_rows(node: Node, batch: int) -> bool:
    """Integers by which a table is read, that do not just count."""
    return any(
        t.ndim > 0 and not t.is_floating_point() and len(t) % batch == 0 and not counts_positions(t)
        for t in saved.constants(node)
    )


def counts_positions(t: Tensor) -> bool:
    """Are these integers 0, 1, 2, … in steps of any size, or distances between such numbers (the same on diagonals)?"""
    if _is_data(t) or t.numel() < 2:
        return False
    if bool((t == t.reshape(-1)[0]).all()):  # which says nothing
        return False
    if t.ndim == 1 or all(n == 1 for n in t.shape[:-1]):
        steps = t.reshape(-1).diff()
        return bool((steps == steps[0]).all())
    table = t.reshape(-1, *t.shape[-2:])
    return bool((table == table[:1]).all()) and torch.equal(table[0, 1:, 1:], table[0, :-1, :-1])
