"""One tensor in every form that PyTorch has for it: what a kernel, a rule or a node may be given."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Shape = tuple[int, ...]
Make = Callable[[Shape, torch.dtype], Tensor]

_GENERATOR = torch.Generator()


def numbers(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Random numbers in memory without gaps, the same ones after `seed`."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, generator=_GENERATOR, dtype=wide).to(dtype)


def seed(value: int) -> None:
    """Begin again."""
    _GENERATOR.manual_seed(value)


def _permuted(shape: Shape, dtype: torch.dtype, order: list[int]) -> Tensor:
    """Memory in another order of dims."""
    return numbers(tuple(shape[d] for d in order), dtype).permute([order.index(d) for d in range(len(shape))])


def _transposed(shape: Shape, dtype: torch.dtype) -> Tensor:
    return _permuted(shape, dtype, list(reversed(range(len(shape)))))


def _channels_last(shape: Shape, dtype: torch.dtype) -> Tensor:
    return _permuted(shape, dtype, [0, *range(2, len(shape)), 1])


def _expanded(shape: Shape, dtype: torch.dtype, dim: int | None = None) -> Tensor:
    """The same number all along one dim, or along all."""
    return numbers(tuple(1 if dim in (d, None) else n for d, n in enumerate(shape)), dtype).expand(shape)


def _spaced(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Every second number of every dim, not from the first on."""
    return numbers(tuple(2 * n + 1 for n in shape), dtype)[tuple(slice(1, 2 * n + 1, 2) for n in shape)]


def _columns(shape: Shape, dtype: torch.dtype) -> Tensor:
    """The middle of longer rows."""
    return numbers((*shape[:-1], shape[-1] + 2), dtype)[..., 1:-1]


def _conjugate(shape: Shape, dtype: torch.dtype) -> Tensor:
    return numbers(shape, dtype).conj()


def _negative(shape: Shape, dtype: torch.dtype) -> Tensor:
    """A sign left to be done: what the imaginary part of a conjugate is."""
    return torch._neg_view(numbers(shape, dtype))


def forms(shape: Shape, dtype: torch.dtype) -> Iterator[tuple[str, Make]]:
    """All that differ from one another for tensors of this shape; the first is the plain one."""
    yield "contiguous", numbers
    if len(shape) > 1:
        yield "transposed", _transposed
    if len(shape) > 2:
        yield "channels last", _channels_last
    for dim, n in enumerate(shape):
        if n > 1:
            yield f"expanded along {dim}", lambda s, d, dim=dim: _expanded(s, d, dim)
    if len([n for n in shape if n > 1]) > 1:
        yield "expanded", _expanded
    if shape:
        yield "spaced", _spaced
        yield "columns", _columns
    if dtype.is_complex:
        yield "conjugate", _conjugate
    yield "negative", _negative


def plain(t: Tensor) -> Tensor:
    """The same numbers in memory of their own, as they are."""
    return torch.empty(t.shape, dtype=t.dtype).copy_(t)
