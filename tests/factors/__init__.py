"""Factors of every kind, made by hand, each with its gradients written out by another formula."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from persample.factors import (
    Apart,
    ByRows,
    Convolution,
    Deferred,
    Dense,
    Factor,
    Hadamard,
    Masked,
    Outer,
    Rows,
    Sum,
    View,
    combine,
    placed,
)
from persample.factors.rearrange import AsComplex, Cast, Flip, Permute, Rearrangement, Reshape, Roll, Section
from tests.kernels.conv_cases import CASES as CONVOLUTIONS
from tests.kernels.conv_cases import Case, case

Shape: TypeAlias = tuple[int, ...]
Made: TypeAlias = tuple[Factor, Tensor]  # and (B, *shape) in float64 or complex128
Make: TypeAlias = Callable[[int, torch.dtype], Made]

SHAPE = (6, 4)  # of most factors, so that they can be compared with each other


def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    """Random, the same for the same shape."""
    rng = torch.Generator().manual_seed(prod(shape) + 7 * len(shape))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, generator=rng, dtype=wide).to(dtype)


def exact(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def outer_of(left: Tensor, right: Tensor, scale: float = 1.0) -> Made:
    want = torch.einsum("b...tp,b...td->b...pd", exact(left), exact(right)) * scale
    return Outer(left, right, scale), want


def outer(T: int, shape: Shape = SHAPE, groups: Shape = (), scale: float = 1.0) -> Make:
    def make(B: int, dtype: torch.dtype) -> Made:
        p, d = shape
        return outer_of(numbers(dtype, B, *groups, T, p), numbers(dtype, B, *groups, T, d), scale)

    return make


def deferred(T: int, most: int) -> Make:
    """Outer products that are fetched for a few samples at a time."""

    def make(B: int, dtype: torch.dtype) -> Made:
        kept, want = outer(T)(B, dtype)
        return Deferred(kept.__getitem__, B, T, kept.shape, kept.tensors, most), want  # type: ignore[arg-type]

    return make


def time_first(B: int, dtype: torch.dtype) -> Made:
    return outer_of(numbers(dtype, 5, B, 6).transpose(0, 1), numbers(dtype, 5, B, 4).transpose(0, 1))


def shared_input(B: int, dtype: torch.dtype) -> Made:
    return outer_of(numbers(dtype, B, 3, 6), numbers(dtype, 1, 3, 4).expand(B, -1, -1))


def rows_of(ids: Tensor, dy: Tensor, size: int) -> Made:
    want = exact(dy.new_zeros(len(ids), size, *dy.shape[2:]))
    for b, sample in enumerate(ids.tolist()):
        for t, i in enumerate(sample):
            if i >= 0:
                want[b, i] += exact(dy[b, t])
    return Rows(ids, dy, size), want


def rows(T: int, shape: Shape = SHAPE, skipped: bool = False) -> Make:
    """More positions than rows repeat some of them."""

    def make(B: int, dtype: torch.dtype) -> Made:
        rng = torch.Generator().manual_seed(T)
        ids = torch.randint(-1 if skipped else 0, shape[0], (B, T), generator=rng)
        return rows_of(ids, numbers(dtype, B, T, *shape[1:]), shape[0])

    return make


def shared_ids(B: int, dtype: torch.dtype) -> Made:
    return rows_of(torch.tensor([3, 0, 3, -1, 5]).expand(B, -1), numbers(dtype, B, 5, 4), 6)


def rows_time_first(B: int, dtype: torch.dtype) -> Made:
    """Ids and cotangents whose positions come first in memory."""
    ids = torch.randint(-1, 6, (9, B), generator=torch.Generator().manual_seed(0)).t()
    return rows_of(ids, numbers(dtype, 9, B, 4).transpose(0, 1), 6)


def dense(shape: Shape = SHAPE) -> Make:
    def make(B: int, dtype: torch.dtype) -> Made:
        value = numbers(dtype, B, *shape)
        return Dense(value), exact(value)

    return make


def by_rows(shape: Shape = SHAPE) -> Make:
    """A shared matrix, of which every sample scales the rows."""

    def make(B: int, dtype: torch.dtype) -> Made:
        scales, shared = numbers(dtype, B, shape[0]), numbers(dtype, *shape)
        return ByRows(scales, shared), torch.einsum("bn,n...->bn...", exact(scales), exact(shared))

    return make


def hadamard(base: Make) -> Make:
    """Another factor's gradients times a tensor of their shape, in which there are zeros."""

    def make(B: int, dtype: torch.dtype) -> Made:
        factor, want = base(B, dtype)
        by = numbers(dtype, *factor.shape) * (numbers(torch.float64, *factor.shape) > 0)
        return Hadamard(factor, by), want * exact(by)

    return make


def masked(index_shape: Shape, shape: Shape = SHAPE) -> Make:
    """Some elements are nobody's, some samples have none."""

    def make(B: int, dtype: torch.dtype) -> Made:
        rng = torch.Generator().manual_seed(B)
        index, value = torch.randint(-1, B, index_shape, generator=rng), numbers(dtype, *shape)
        each = [exact(value) * (index == b) for b in range(B)]
        want = torch.stack(each) if B else exact(value.new_zeros(0, *shape))
        return Masked(value, index, B), want

    return make


def convolution(c: Case, images: int) -> Make:
    def make(B: int, dtype: torch.dtype) -> Made:
        x, dy = c.tensors(B, images, dtype)
        return Convolution(x, dy, c.weight_size, c.geometry), c.reference(x, dy)

    return make


def view(base: Make, shape: Shape, move: Rearrangement, forward: Callable[[Tensor], Tensor]) -> Make:
    """The move is the backward of ``forward``, from one gradient's shape to the base's."""

    def make(B: int, dtype: torch.dtype) -> Made:
        factor, inner = base(B, dtype)
        moved = View(factor, shape, move)
        leaf = torch.zeros(shape, dtype=exact(torch.empty(0, dtype=moved.dtype)).dtype, requires_grad=True)
        seen = forward(leaf)
        each = [torch.autograd.grad(seen, leaf, g.to(seen.dtype), retain_graph=True)[0] for g in inner]
        return moved, torch.stack(each) if B else leaf.new_zeros(0, *shape).detach()

    return make


def apart(*groups: Make, missing: bool = False) -> Make:
    """Samples take turns between groups; some are in none of them if they are ``missing``."""

    def make(B: int, dtype: torch.dtype) -> Made:
        turns = len(groups) + missing
        order = torch.randperm(B, generator=torch.Generator().manual_seed(B))
        made = [(order[k::turns], *group(len(order[k::turns]), dtype)) for k, group in enumerate(groups)]
        want = made[0][2].new_zeros(B, *made[0][2].shape[1:])
        for index, _, rows_of_group in made:
            want[index] = rows_of_group
        return Apart([(index, factor) for index, factor, _ in made], B), want

    return make


def gathered(*lengths: int, build: Callable[[int], Make] = outer) -> Make:
    """Several contributions, each of which lacks other samples; some samples come up again and again."""

    def make(B: int, dtype: torch.dtype) -> Made:
        terms, want = list[Factor](), torch.zeros(())
        for seed, T in enumerate(lengths):
            rng = torch.Generator().manual_seed(seed)
            index = torch.randint(B, (max(B - seed, 0),), generator=rng) if B else torch.empty(0, dtype=torch.long)
            factor, rows_of_term = build(T)(len(index), dtype)
            want = want + rows_of_term.new_zeros(B, *rows_of_term.shape[1:]).index_add(0, index, rows_of_term)
            terms.append(placed(index, factor, B))
        return combine(terms), want

    return make


def total(*terms: Make, build: Callable[[list[Factor]], Factor] = Sum) -> Make:
    def make(B: int, dtype: torch.dtype) -> Made:
        made = [term(B, dtype) for term in terms]
        return build([factor for factor, _ in made]), sum(want for _, want in made)

    return make


# Each move with a base shape, the result's shape, and the function whose backward it is.
MOVES: dict[str, tuple[Rearrangement, Shape, Shape, Callable[[Tensor], Tensor]]] = {
    "reshape": (Reshape((6, 4), (2, 12)), (6, 4), (2, 12), lambda t: t.reshape(6, 4)),
    "reshape to a scalar": (Reshape((1, 1), ()), (1, 1), (), lambda t: t.reshape(1, 1)),
    "permute": (Permute((1, 2, 0)), (2, 3, 4), (3, 4, 2), lambda t: t.permute(2, 0, 1)),
    "transpose": (Permute((1, 0)), (4, 6), (6, 4), lambda t: t.t()),
    "section": (Section((6, 9), 1, 2, 6), (6, 4), (6, 9), lambda t: t[:, 2:6]),
    "section with steps": (Section((6, 9), 1, 1, 9, 2), (6, 4), (6, 9), lambda t: t[:, 1:9:2]),
    "section of nothing": (Section((6, 9), 1, 3, 3), (6, 0), (6, 9), lambda t: t[:, 3:3]),
    "select": (Section((3, 6, 4), 0, 2, 3, squeezed=True), (6, 4), (3, 6, 4), lambda t: t[2]),
    "select last": (Section((6, 4, 3), 2, 1, 2, squeezed=True), (6, 4), (6, 4, 3), lambda t: t[..., 1]),
    "flip": (Flip((0,)), (6, 4), (6, 4), lambda t: t.flip(0)),
    "flip both": (Flip((0, 1)), (6, 4), (6, 4), lambda t: t.flip(0, 1)),
    "roll": (Roll((2, -1), (0, 1)), (6, 4), (6, 4), lambda t: t.roll((-2, 1), (0, 1))),
    "roll flat": (Roll((5,), ()), (6, 4), (6, 4), lambda t: t.roll(-5)),
    "cast": (Cast(torch.float64, torch.float32), (6, 4), (6, 4), lambda t: t),
    "cast up": (Cast(torch.float32, torch.float64), (6, 4), (6, 4), lambda t: t.float()),
    "cast to half": (Cast(torch.float64, torch.float16), (6, 4), (6, 4), lambda t: t),
    "cast to real": (Cast(torch.complex128, torch.float64), (6, 4), (6, 4), lambda t: t.to(torch.complex128)),
    "as complex": (AsComplex(torch.complex128), (6, 4, 2), (6, 4), torch.view_as_real),
}

# Small images and many channels: norms are cheaper from Gram matrices than from the gradients.
GRAM_CONVOLUTIONS = {  # large weights and few positions: norms come from Gram matrices
    "plain": case((3, 2), (3, 3), padding=1, d=96, p=96),
    "groups": case((2, 2), (2, 2), padding=1, stride=2, groups=2, d=104, p=104),
    "dilation": case((4, 4), (2, 2), dilation=2, d=144, p=144),
    "transposed": case((2, 1), (3, 3), stride=2, padding=1, output_padding=1, d=96, p=96),
    "transposed-groups": case((2, 2), (2, 2), output_padding=0, groups=3, d=84, p=84),
}

TABLE = (200, 12)  # with a few positions, a tied table's norms come from products
FACTORS: dict[str, Make] = {
    **{f"outer-T{T}": outer(T) for T in (0, 1, 2, 40)},
    "outer-gram": outer(5, (30, 20)),
    "outer-gram-blocks": outer(300, (600, 560)),
    "outer-one-element": outer(3, (1, 1)),
    "outer-no-elements": outer(3, (0, 4)),
    "outer-scaled-T1": outer(1, scale=-0.5),
    "outer-scaled-gram": outer(3, (30, 20), scale=-0.5),
    "outer-scaled-T40": outer(40, scale=-0.5),
    **{f"outer-groups-T{T}": outer(T, groups=(3,)) for T in (0, 1, 2, 40)},
    "outer-groups-gram": outer(3, (30, 20), groups=(2,), scale=2.0),
    "outer-groups-of-groups": outer(3, (8, 9), groups=(2, 3)),
    "outer-one-group": outer(3, (8, 9), groups=(1,)),
    "outer-no-groups": outer(3, groups=(0,)),
    "outer-time-first": time_first,
    "outer-shared-input": shared_input,
    **{f"rows-T{T}": rows(T) for T in (0, 1, 3, 20)},
    "rows-skipped": rows(12, skipped=True),
    "rows-of-numbers": rows(9, (6,), skipped=True),
    "rows-of-matrices": rows(9, (6, 2, 3), skipped=True),
    "rows-of-nothing": rows(3, (6, 0)),
    "rows-large-table": rows(4, TABLE, skipped=True),
    "rows-shared-ids": shared_ids,
    "rows-time-first": rows_time_first,
    "by-rows": by_rows(),
    "by-rows-of-numbers": by_rows((6,)),
    "by-rows-of-matrices": by_rows((6, 2, 3)),
    "hadamard-T1": hadamard(outer(1)),
    "hadamard-T40": hadamard(outer(40)),
    "hadamard-rows": hadamard(rows(3)),
    "hadamard-by-rows": hadamard(by_rows()),
    "apart-by-rows": apart(by_rows(), by_rows(), missing=True),
    "apart-dense": apart(dense(), dense(), missing=True),
    "apart-outer": apart(outer(2), outer(40), outer(1)),
    "apart-outer-gram": apart(outer(5, (30, 20)), outer(3, (30, 20), scale=-0.5), missing=True),
    "apart-rows": apart(rows(3), rows(20), missing=True),
    "apart-of-several-forms": apart(outer(3), dense(), rows(4)),
    "gathered-outer": gathered(1, 2, 5, 1),
    "gathered-outer-T1": gathered(1, 1, 1),
    "gathered-outer-gram": gathered(3, 2, 1, build=lambda T: outer(T, (30, 20), scale=-0.5)),
    "gathered-groups": gathered(1, 2, build=lambda T: outer(T, groups=(3,))),
    "gathered-rows": gathered(3, 1, 5, build=rows),
    "gathered-dense": gathered(1, 2, 3, build=lambda T: dense()),
    "dense": dense(),
    "dense-scalar": dense(()),
    "dense-vector": dense((5,)),
    "dense-empty": dense((3, 0)),
    "masked": masked(SHAPE),
    "masked-by-row": masked((6, 1)),
    "masked-whole": masked((1, 1)),
    "masked-vector": masked((9,), (9,)),
    **{
        f"convolution-{name}-R{R}": convolution(c, R)
        for name, c in CONVOLUTIONS.items()
        for R in ((0, 1, 2) if name in ("2d-pad", "2d-groups-stride", "2d-transposed-stride") else (1,))
    },
    **{f"convolution-gram-{name}-R{R}": convolution(c, R) for name, c in GRAM_CONVOLUTIONS.items() for R in (1, 2)},
    "deferred-T1": deferred(1, 2),
    "deferred-gram": deferred(3, 1),
    "deferred-T40": deferred(40, 2),
    "deferred-T0": deferred(0, 1),
    "deferred-at-once": deferred(3, 100),
    "sum-deferred": total(deferred(3, 2), rows(4), build=combine),
    "view-deferred": view(deferred(3, 2), (4, 6), Permute((1, 0)), lambda t: t.t()),
    "sum-tied": total(outer(3, TABLE), rows(4, TABLE, skipped=True)),
    "sum-tied-rows-first": total(rows(4, TABLE), outer(1, TABLE, scale=-0.5)),
    "sum-tied-T0": total(outer(0, TABLE), rows(4, TABLE)),
    "sum-tied-many": total(outer(40), rows(20)),
    "sum-dense-first": total(dense(), outer(2), rows(3)),
    "sum-view-first": total(view(dense((4, 6)), (6, 4), Permute((1, 0)), lambda t: t.t()), dense()),
    "sum-masked": total(masked(SHAPE), masked((6, 1)), outer(2)),
    "sum-of-sums": total(total(dense(), outer(2)), total(rows(3), dense())),
    "sum-convolution": total(convolution(CONVOLUTIONS["2d-groups"], 1), dense(CONVOLUTIONS["2d-groups"].weight_size)),
    "combined": total(outer(2), rows(3), outer(1, scale=-2.0), rows(2, skipped=True), dense(), build=combine),
    "combined-outers": total(outer(3, (30, 20)), outer(2, (30, 20), scale=0.5), build=combine),
    "combined-groups": total(outer(3, groups=(2,)), outer(2, groups=(2,)), build=combine),
    **{
        f"view-{name}": view(dense(base), shape, move, forward)
        for name, (move, base, shape, forward) in MOVES.items()
        if name not in ("cast to real", "cast up")
    },
    "view-of-outer": view(outer(3, (4, 6)), (6, 4), Permute((1, 0)), lambda t: t.t()),
    "view-of-rows": view(rows(9), (6, 9), MOVES["section with steps"][0], lambda t: t[:, 1:9:2]),
    "view-of-sum": view(total(outer(3), rows(2)), (2, 12), MOVES["reshape"][0], lambda t: t.reshape(6, 4)),
    "view-of-masked": view(masked(SHAPE), (3, 6, 4), MOVES["select"][0], lambda t: t[2]),
    "view-of-view": view(
        view(outer(2), (2, 12), MOVES["reshape"][0], lambda t: t.reshape(6, 4)),
        (12, 2),
        Permute((1, 0)),
        lambda t: t.t(),
    ),
}
# The same with complex numbers, where that can be.
COMPLEX = [
    *"outer-T0 outer-T1 outer-T2 outer-T40 outer-gram outer-groups-T1 outer-groups-T2 outer-scaled-T1".split(),
    *"rows-T20 rows-skipped rows-of-numbers rows-large-table dense dense-scalar masked masked-by-row".split(),
    *"sum-tied sum-dense-first sum-masked combined combined-outers view-of-outer view-of-rows view-flip".split(),
]
