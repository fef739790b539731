"""Following samples from dim to dim: what flows are written with.

A flow says for every dim of a cotangent which dim of the operand it is, or None where elements along it are summed,
mixed or resized. `follow` holds it to that: the operand must have the rank that is stated, and every dim that is said
to stay must have the same size in both. An operand that was broadcast fails one or the other, and the data decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from ..layout import Flow, Labels, Layout, Outcome, Shape, broadcast_dims, carry
from ..read.site import Site
from .table import FlowRule, Layouts, Undecided

Dims = Sequence[int | None]


def only(layouts: Layouts) -> Layout:
    """The layout of the first cotangent, which is the only one in use; `Undecided` if it is not.

    Ops with several results have several cotangents as soon as somebody uses the others, as double backwards do with
    the mean and the deviation of a norm.
    """
    first = layouts[0] if layouts else None
    if first is None or any(layout is not None for layout in layouts[1:]):
        raise Undecided
    return first


def whole(layouts: Layouts, ndim: int) -> Labels | None:
    """All cotangents are one and the same sample's: so is everything computed from them."""
    first: Labels | None = None
    for layout in layouts:
        if layout is None:
            continue
        if not isinstance(layout, Labels) or layout.index.numel() != 1:
            return None
        if first is not None and int(first.index) != int(layout.index):
            return None
        first = layout
    return Labels(first.batch, first.index.reshape([1] * ndim)) if first is not None else None


def follow(layout: Layout, shape: Shape, target: Shape, to_dims: Dims, rank: int | None = None) -> Layout | None:
    """Where samples lie in an operand of shape ``target``, whose dim ``to_dims[d]`` is dim d of the cotangent.

    None where they lay in a dim that does not stay. The operand must have the cotangent's rank, or the ``rank`` stated.

    Raises:
        Undecided: the operand is of another rank, or a dim that is said to stay is not there or has another size.
    """
    if not _fits(shape, target, tuple(to_dims), len(shape) if rank is None else rank):
        raise Undecided
    return carry(layout, shape, target, to_dims)


@lru_cache(maxsize=65536)
def _fits(shape: Shape, target: Shape, to_dims: tuple[int | None, ...], rank: int) -> bool:
    if len(target) != rank or len(to_dims) != len(shape):
        return False
    staying = [(n, to) for n, to in zip(shape, to_dims, strict=True) if to is not None]
    once = len({to for _, to in staying}) == len(staying)
    return once and all(0 <= to < rank and target[to] == n for n, to in staying)


def keep(layout: Layout, shape: Shape, target: Shape, to_dims: Dims, rank: int | None = None) -> Outcome:
    """`follow`, with the data to decide where samples lie in a dim that does not stay."""
    moved = follow(layout, shape, target, to_dims, rank)
    return Flow.PROBE if moved is None else moved


def but(shape: Shape, *mixed: int) -> list[int | None]:
    """All dims stay but those that are mixed."""
    return [None if d in mixed else d for d in range(len(shape))]


def leading(shape: Shape, kept: int) -> list[int | None]:
    """The first dims stay."""
    return [d if d < kept else None for d in range(len(shape))]


def of_same_size(shape: Shape, target: Shape, to_dims: Dims) -> list[int | None]:
    """Of the dims that may stay, those that have the same size in both."""
    return [to if to is not None and target[to] == n else None for n, to in zip(shape, to_dims, strict=True)]


def unbroadcast(layout: Layout, shape: Shape, target: Shape) -> Outcome:
    """An operand that was broadcast along the sample dim has a gradient that sums over samples."""
    moved = carry(layout, shape, target, broadcast_dims(shape, target))
    return Flow.SHARED if moved is None else moved


class LetterFlows(dict[int, FlowRule]):
    """Flows that say of every dim of the result which operands have it."""


def by_letters(result: str, operands: Mapping[int, str]) -> LetterFlows:
    """The flows of an op whose dims have letters: those of its result, and for each operand its own.

    A letter that both have stays, and must have the same size in both; one that an operand lacks is summed in its
    gradient. A leading ``...`` stands for any dims in front, all of which an operand that begins with it must have:
    ``by_letters("...nm", {0: "...nd", 1: "...md"})``. An operand of another rank, or one that was broadcast, is left to
    the data.
    """
    return LetterFlows({k: _flow_of_letters(result, own) for k, own in operands.items()})


def _flow_of_letters(result: str, own: str) -> FlowRule:
    letters, mine = result.removeprefix("..."), own.removeprefix("...")

    def flow(site: Site, k: int, layouts: Layouts) -> Outcome:
        layout, shape, target = only(layouts), site.shapes[0], site.target(k)
        more = len(shape) - len(letters)
        if more < 0 or (more and letters == result):
            raise Undecided
        kept = more if mine != own else 0
        places: list[int | None] = [kept + mine.index(c) if c in mine else None for c in letters]
        front = [d if d < kept else None for d in range(more)]
        moved = follow(layout, shape, target, [*front, *places], kept + len(mine))
        if moved is not None:
            return moved
        return Flow.SHARED if site.is_weight(k) else Flow.PROBE

    flow.__doc__ = f"From {f'`{result}`' if result else 'a number'} to `{own}`."
    return flow
