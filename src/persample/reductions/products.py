"""Inner products of gradients: with each other, and with given directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor, nn

from ..distributed import whole
from ..factors import Factor
from ..kernels.differentiable import detached_by_default
from .base import Call, Reduction

Directions = nn.Module | Mapping[str, Tensor] | Sequence[Tensor]


class Gram(Reduction):
    """(B, B): the inner product of every two samples' gradients, the empirical neural tangent kernel.

    With several losses per sample, (B, K…, B, K…): what the gradients are made from is kept for all losses at once.
    """

    def start(self, call: Call) -> None:
        self._call, self._products = call, call.zeros(call.batch, call.batch)

    def add(self, name: str, factor: Factor) -> None:
        self._products += factor.gram(factor, self._call.space).to(self._products)

    def result(self) -> Tensor:
        return ((self._products + self._products.t()) / 2).to(self._call.dtype)

    def join(self, portions: Sequence[Any], call: Call) -> Tensor:
        (products,) = portions
        return products.reshape(*call.shape, *call.shape)  # type: ignore[no-any-return]


class KeptFactors(Reduction):
    """The factors themselves, by parameter name: one batch's side of a `CrossGram`."""

    keeps_factors = True

    def start(self, call: Call) -> None:
        self._factors: dict[str, Factor] = {}

    def add(self, name: str, factor: Factor) -> None:
        self._factors[name] = factor

    def result(self) -> dict[str, Factor]:
        return self._factors


class CrossGram(Reduction):
    """(A, B): the inner products of another batch's gradients, given by their factors, with this one's.

    ``shape`` is that of the other losses, (A,) or (A, K…).
    """

    in_portions = True

    def __init__(self, others: Mapping[str, Factor], shape: tuple[int, ...]) -> None:
        self.others, self.shape = others, shape

    def start(self, call: Call) -> None:
        self._call, self._products = call, call.zeros(prod(self.shape), call.batch)

    def add(self, name: str, factor: Factor) -> None:
        if name in self.others:
            self._products += self.others[name].gram(factor, self._call.space).to(self._products)

    def result(self) -> Tensor:
        return self._products.to(self._call.dtype).reshape(*self.shape, self._call.batch)

    def portion(self) -> Tensor:
        return self._products.t().to(self._call.dtype)

    def join(self, portions: Sequence[Any], call: Call) -> Tensor:
        rows: Tensor = call.rows(portions)
        return rows.flatten(0, len(call.shape) - 1).t().reshape(*self.shape, *call.shape)


class Dot(Reduction):
    """The inner product of every gradient with a direction: (B,), or (B, k) for k of them.

    Args:
        direction: one tensor like each parameter, in the parameters' container, or a sequence in their order. k
            directions are given as tensors with one more dim at the front, of size k.
    """

    in_portions = True

    def __init__(self, direction: Directions) -> None:
        self.direction = direction

    def start(self, call: Call) -> None:
        self._call = call
        self._vectors, self._single = _stacked(self.direction, call)
        count = next((len(v) for v in self._vectors.values()), 1)
        self._products = call.zeros(call.batch, count)

    def add(self, name: str, factor: Factor) -> None:
        self._products += factor.dot(self._vectors[name].to(factor.device), self._call.space).to(self._products)

    def result(self) -> Tensor:
        products = self._products.to(self._call.dtype)
        return products.squeeze(1) if self._single else products

    def join(self, portions: Sequence[Any], call: Call) -> Any:
        return call.rows(portions)


def _stacked(direction: Directions, call: Call) -> tuple[dict[str, Tensor], bool]:
    """Directions by name, (k, *shape) each, and whether there is only one, given without the dim for k."""
    given = _by_name(direction, call)
    wrong = [n for n, p in call.params.items() if given[n].shape[max(0, given[n].ndim - p.ndim) :] != p.shape]
    extra = {given[n].ndim - p.ndim for n, p in call.params.items()}
    counts = {len(given[n]) for n in given if extra == {1}}
    if wrong or not extra <= {0, 1} or len(extra) > 1 or len(counts) > 1:
        shapes = {n: (tuple(given[n].shape), tuple(p.shape)) for n, p in call.params.items()}
        raise ValueError(
            f"a direction needs one tensor like each parameter, or all of them with the same number of directions in "
            f"front; got (given, parameter) {shapes}"
        )
    single = extra != {1}
    given = {name: whole(v) for name, v in given.items()}
    return {name: detached_by_default(v.unsqueeze(0) if single else v) for name, v in given.items()}, single


def _by_name(direction: Directions, call: Call) -> dict[str, Tensor]:
    names = list(call.params)
    if isinstance(direction, nn.Module):
        direction = {name: p for name, p in direction.named_parameters() if p.requires_grad}
    if not isinstance(direction, (Mapping, Sequence)):
        raise TypeError(f"direction must be a mapping or a sequence of tensors, not {type(direction).__name__}")
    if isinstance(direction, Mapping):
        if set(direction) != set(names):
            raise ValueError(f"direction must hold one tensor per parameter: expected {names}, got {list(direction)}")
        given = {name: direction[name] for name in names}
    else:
        if len(direction) != len(names):
            raise ValueError(
                f"direction must hold one tensor per parameter: expected {len(names)}, {len(direction)} given"
            )
        given = dict(zip(names, direction, strict=True))
    for name, v in given.items():
        if not isinstance(v, Tensor):
            raise TypeError(f"direction {name!r} must be a tensor, not {type(v).__name__}")
    return given
