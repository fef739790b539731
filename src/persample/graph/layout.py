"""Where sample i lies in a tensor: the algebra of layouts.

A tensor is *separable* when each of its elements belongs to one sample. Two forms say to which:

- ``Block(B, inner)``: element ``f`` (counted in row-major order) belongs to sample ``(f // inner) % B``. One
  number covers batch-first, time-first, folded ``(B*T, C)`` and windowed ``(B*nW, ...)`` tensors alike, and a
  reshape does not change it.
- ``Labels(index)``: an explicit sample number for every position, as an integer tensor that broadcasts to the
  tensor's shape; ``-1`` marks elements that no sample reaches (their cotangent is zero). Packed sequences,
  chunks of the batch, routed experts and Python loops over samples need it.

Everything here depends on sizes alone, except ``Labels`` itself, which is data of one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from ..kernels.ragged import is_always_ragged
from ..numberless import with_numbers

Shape = tuple[int, ...]
NOBODY = -1


@dataclass(frozen=True, slots=True)
class Block:
    """Element f belongs to sample (f // inner) % batch."""

    batch: int
    inner: int


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """Element at position q belongs to sample index[q] (broadcast over dims of size 1); -1 is nobody's."""

    batch: int
    index: Tensor


Layout = Block | Labels


class Flow(Enum):
    """What a backward output can be, other than separable."""

    SHARED = "shared"  # a sum over samples: the gradient of something all samples use
    MIXED = "mixed"  # elements that depend on several samples' cotangents in some other way
    PROBE = "probe"  # sizes and dims do not decide: look at the data of this call


Outcome = Layout | Flow | None  # None: nothing flows here


@lru_cache(maxsize=65536)
def strides(shape: Shape) -> Shape:
    """Row-major strides, counting an empty dim as one element."""
    result, step = [], 1
    for size in reversed(shape):
        result.append(step)
        step *= max(size, 1)
    return tuple(reversed(result))


@lru_cache(maxsize=65536)
def _block_dims(shape: Shape, batch: int, inner: int) -> Shape:
    # A step along dim d moves by steps[d] elements: nothing changes if that is a whole number of rounds through the
    # batch, or if all n steps stay within one sample's run.
    steps, turn = strides(shape), inner * batch
    return tuple(d for d, n in enumerate(shape) if n > 1 and steps[d] % turn and inner % (steps[d] * n))


def sample_dims(layout: Layout, shape: Shape) -> Shape:
    """The dims along which the sample changes."""
    if isinstance(layout, Block):
        return _block_dims(shape, layout.batch, layout.inner)
    return tuple(d for d, n in enumerate(layout.index.shape) if n != 1)


def labels(layout: Layout, shape: Shape, device: torch.device | str = "cpu") -> Tensor:
    """The sample of every element, as a tensor that broadcasts to ``shape``."""
    if isinstance(layout, Labels):
        return layout.index.to(device, non_blocking=True)
    varying = _block_dims(shape, layout.batch, layout.inner)
    sizes = tuple(shape[d] if d in varying else 1 for d in range(len(shape)))
    steps = strides(shape)
    flat = torch.zeros((), dtype=torch.int64, device=device)
    for d in varying:
        step = torch.arange(shape[d], device=device) * steps[d]
        flat = flat + step.reshape([-1 if e == d else 1 for e in range(len(shape))])
    return ((flat // layout.inner) % layout.batch).expand(sizes)


def split(layout: Layout, shape: Shape, dim: int) -> tuple[int, int] | None:
    """(a, b) when dim has size a·B·b and the sample is its middle factor alone, else None."""
    if not isinstance(layout, Block) or sample_dims(layout, shape) != (dim,):
        return None
    step = strides(shape)[dim]
    if layout.inner % step:
        return None
    b = layout.inner // step
    return (shape[dim] // (layout.batch * b), b) if shape[dim] % (layout.batch * b) == 0 else None


@lru_cache(maxsize=65536)
def _carry_block(layout: Block, shape: Shape, to_shape: Shape, to_dims: tuple[int | None, ...]) -> Block | None:
    """`carry` for a sample that lies in one dim; None when it does not."""
    dims = _block_dims(shape, layout.batch, layout.inner)
    if len(dims) != 1:
        return None
    here, there = dims[0], to_dims[dims[0]]
    if there is None or shape[here] != to_shape[there] or layout.inner % strides(shape)[here]:
        return None
    return Block(layout.batch, layout.inner // strides(shape)[here] * strides(to_shape)[there])


def carry(layout: Layout, shape: Shape, to_shape: Shape, to_dims: Sequence[int | None]) -> Layout | None:
    """Follow the sample from a tensor of ``shape`` to one of ``to_shape`` whose dims ``to_dims[d]`` are dims ``d``.

    Dims that are summed, mixed or resized on the way are None; None comes back when the sample lay in one of them.
    """
    if isinstance(layout, Block):
        quick = _carry_block(layout, shape, to_shape, tuple(to_dims))
        if quick is not None:
            return quick
    elif shape == to_shape and all(d == to for d, to in enumerate(to_dims)):
        return layout
    for d in sample_dims(layout, shape):
        there = to_dims[d]
        if there is None or to_shape[there] != shape[d]:
            return None
    index = labels(layout, shape)
    moved = [(to, d) for d, to in enumerate(to_dims) if to is not None and index.shape[d] != 1]
    index = index.permute([d for _, d in sorted(moved)] + [d for d in range(len(shape)) if index.shape[d] == 1])
    sizes = {to: shape[d] for to, d in moved}
    index = index.reshape([sizes.get(e, 1) for e in range(len(to_shape))])
    return Labels(layout.batch, index) if isinstance(layout, Labels) else simplify(index, to_shape, layout.batch)


@lru_cache(maxsize=65536)
def broadcast_dims(shape: Shape, target: Shape) -> tuple[int | None, ...]:
    """For every dim of ``shape``, the dim of the broadcast operand ``target`` it came from (None: repeated)."""
    offset = len(shape) - len(target)
    return tuple(d - offset if d >= offset and target[d - offset] == n else None for d, n in enumerate(shape))


def reshape(layout: Layout, shape: Shape, to_shape: Shape) -> Layout:
    """Follow the samples through a reshape, which keeps the elements and their row-major order."""
    if isinstance(layout, Block) or shape == to_shape:
        return layout
    full = _expand_groups(layout.index, shape, to_shape)
    return simplify(full, to_shape, layout.batch)


def _expand_groups(index: Tensor, shape: Shape, to_shape: Shape) -> Tensor:
    """Reshape labels, expanding only the groups of merged or split dims in which they vary."""
    if prod(shape) == 0:
        return index.new_full([0 if n == 0 else 1 for n in to_shape], NOBODY)
    sizes: list[int] = []
    out: list[int] = []
    i = j = 0
    while i < len(shape) or j < len(to_shape):
        i0, j0, left, right = i, j, 1, 1
        while i < len(shape) and (i == i0 or left < right or shape[i] == 1):
            left, i = left * shape[i], i + 1
            while right < left and j < len(to_shape):
                right, j = right * to_shape[j], j + 1
        while j < len(to_shape) and (left != right or to_shape[j] == 1):
            right, j = right * to_shape[j], j + 1
        varies = any(index.shape[d] != 1 for d in range(i0, i))
        sizes += [shape[d] if varies else 1 for d in range(i0, i)]
        out += [to_shape[e] if varies else 1 for e in range(j0, j)]
    return index.expand(sizes).reshape(out)


def narrowed(index: Tensor) -> Tensor:
    """Labels with dims along which they do not vary dropped to size 1."""
    for d, n in enumerate(index.shape):
        if n > 1 and bool((index == index.narrow(d, 0, 1)).all()):
            index = index.narrow(d, 0, 1)
    return index


def simplify(index: Tensor, shape: Shape, batch: int) -> Layout:
    """Labels as a Block where they are one and may be, with dims along which they do not vary dropped to size 1."""
    if index.numel() == 0 or 0 in shape:
        return Labels(batch, index)
    index = narrowed(index)
    varying = [d for d, n in enumerate(index.shape) if n != 1]
    if varying and not is_always_ragged():
        first, last = varying[0], varying[-1]
        line = index.expand([n if first <= d <= last else 1 for d, n in enumerate(shape)]).flatten()
        run = int((line != line[0]).nonzero()[0])
        pattern = torch.arange(len(line), device=line.device) // run % batch
        if len(line) % (run * batch) == 0 and torch.equal(line, pattern):
            return Block(batch, run * strides(shape)[last])
    return Labels(batch, index)


def same(a: Layout, b: Layout) -> bool:
    """Are these two the same layout, written in the same form?"""
    if a is b:
        return True
    if isinstance(a, Labels) and isinstance(b, Labels):
        return a.batch == b.batch and torch.equal(a.index, b.index)
    return isinstance(a, Block) and a == b


def join(a: Layout, b: Layout, shape: Shape) -> Layout | None:
    """The layout of a sum of two separable tensors, or None where their samples differ."""
    if same(a, b):
        return a
    if isinstance(a, Block) and isinstance(b, Block):
        agree = sample_dims(a, shape) == sample_dims(b, shape) and torch.equal(labels(a, shape), labels(b, shape))
        return a if agree else None
    x, y = labels(a, shape), labels(b, shape)
    both = torch.maximum(x, y)
    if bool(((x != both) & (x != NOBODY)).any()) or bool(((y != both) & (y != NOBODY)).any()):
        return None
    return simplify(both, shape, a.batch) if bool((both != NOBODY).all()) else Labels(a.batch, narrowed(both))


@dataclass(frozen=True, slots=True, eq=False)
class Present:
    """Some of the samples, and where each lies in several tensors, counted among these alone."""

    samples: Tensor  # (b,): their numbers
    layouts: tuple[Layout | None, ...]


def present(layouts: Sequence[Layout | None], shapes: Sequence[Shape]) -> Present | None:
    """The samples that these tensors have to do with; None if that is all of them.

    Where each has one place, they keep the order of these: then they often are a block.
    """
    if not all(layout is None or isinstance(layout, Labels) for layout in layouts):
        return None
    labelled = [layout for layout in layouts if isinstance(layout, Labels)]
    if not labelled:
        return None
    batch, (first, *others) = labelled[0].batch, labelled
    if first.index.numel() == 1 and not others:
        some = first.index.reshape(1)
        return Present(some, _wholes(layouts, shapes)) if int(some) != NOBODY else _nobody(layouts)
    numbers = torch.cat([layout.index.reshape(-1) for layout in labelled])
    numbers = numbers[numbers != NOBODY]
    samples = numbers.unique()
    if not len(samples):
        return _nobody(layouts)
    if len(samples) == batch:
        return None
    samples = numbers if len(numbers) == len(samples) else samples
    place = samples.new_full((batch + 1,), NOBODY)  # the last is that of nobody's
    place[samples] = torch.arange(len(samples), device=place.device)
    among = [
        None if layout is None else _among(place, len(samples), layout, shape)
        for layout, shape in zip(layouts, shapes, strict=True)
    ]
    return Present(samples, tuple(among))


def _nobody(layouts: Sequence[Layout | None]) -> Present:
    """No loss depends on these tensors."""
    return Present(torch.empty(0, dtype=torch.int64), (None,) * len(layouts))


def _wholes(layouts: Sequence[Layout | None], shapes: Sequence[Shape]) -> tuple[Layout | None, ...]:
    """All of each tensor is one sample's."""
    pairs = zip(layouts, shapes, strict=True)
    return tuple([None if layout is None else Block(1, max(prod(shape), 1)) for layout, shape in pairs])


def _among(place: Tensor, count: int, layout: Layout, shape: Shape) -> Layout:
    """A layout with other numbers for its samples, of which there are fewer."""
    assert isinstance(layout, Labels)
    index = place[layout.index]
    if count == 1 and bool((index != NOBODY).all()):
        return Block(1, max(prod(shape), 1))
    return simplify(index, shape, count)


@with_numbers
def together(every: Sequence[Present], shape: Shape) -> tuple[Layout, Tensor]:
    """Where samples lie in tensors of whole rows, put one after another, and which these are; one may come twice.

    In the result, of this ``shape``, each counts as often as it comes.
    """
    blocks = [block for one in every if isinstance(block := one.layouts[0], Block)]
    assert len(blocks) == len(every)
    numbers = torch.cat([one.samples for one in every])
    inner = {block.inner for block in blocks}
    if len(inner) == 1:
        return Block(len(numbers), inner.pop()), numbers
    row = prod(shape[1:])
    counts = torch.tensor([block.inner // row for block in blocks for _ in range(block.batch)], device="cpu")
    index = torch.arange(len(numbers), device="cpu").repeat_interleave(counts)
    return Labels(len(numbers), index.reshape(-1, *[1] * (len(shape) - 1))), numbers
