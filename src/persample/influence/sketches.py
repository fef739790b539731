"""Sketches: a few numbers for every sample and parameter, which keep inner products on average."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from math import prod, sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..factors import Factor, Workspace
from ..factors.stacks import real_rows
from ..kernels.norms import wide
from ..numberless import with_numbers
from ..reductions import Call, Projection, Reduction
from ..reductions.projection import KEPT

_MOST_KEPT_ROWS = 256  # of an identity that a factor is multiplied by; larger ones cost more than writing gradients out


def matrix_shape(p: Tensor) -> tuple[int, int]:
    """How a parameter is seen as a matrix (n, m): rows are outputs, of all experts if it holds several matrices.

    A complex number counts as two columns. Of three dims, the first two are rows if the last is larger than the first
    (experts, heads), else the first alone (1-D convolutions); of more, the first alone (convolutions).
    """
    shape, pairs = tuple(p.shape), 2 if p.is_complex() else 1
    rows = 2 if len(shape) == 3 and shape[2] > shape[0] else 1
    return prod(shape[:rows]), prod(shape[rows:]) * pairs


class Sketch(ABC):
    """A linear map from a parameter's gradient to a small matrix (l, r), fixed by a seed and the parameter's name."""

    kind: ClassVar[str]
    seed: int

    @abstractmethod
    def block(self, p: Tensor) -> tuple[int, int]:
        """The shape (l, r) of a parameter's sketch."""

    @abstractmethod
    def of(self, name: str, p: Tensor, factor: Factor, space: Workspace) -> Tensor:
        """(B, l, r): the sketches of the gradients that a factor holds."""

    @abstractmethod
    def of_stack(self, name: str, p: Tensor, stack: Tensor) -> Tensor:
        """(B, l, r): the same of gradients (B, *shape) that are written out: the definition."""

    def settings(self) -> dict[str, Any]:
        """What the sketch is made from, as plain values."""
        return {"kind": self.kind, **asdict(self)}  # type: ignore[call-overload]

    def _generator(self, what: str) -> torch.Generator:
        digest = blake2b(f"{self.seed}/{self.kind}/{what}".encode(), digest_size=8).digest()
        return torch.Generator("cpu").manual_seed(int.from_bytes(digest) >> 1)


@dataclass(frozen=True)
class Blocks(Sketch):
    """Lᵀ G R of every parameter's gradient G, with random matrices L of ``left`` and R of ``right`` columns.

    No gradient is written out: L and R are multiplied with what gradients are made of. A side that is not longer than
    its bound stays as it is, so that ``Blocks(None, None)`` is the gradient itself. Inner products of a parameter have
    a standard deviation of at most ``error`` times the norms.

    >>> import torch
    >>> Blocks(16, 16).block(torch.empty(512, 10)), Blocks(None, None).block(torch.empty(512, 10))
    ((16, 10), (512, 10))
    """

    left: int | None = 16
    right: int | None = 16
    seed: int = 0
    kind = "blocks"

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), "a positive integer or None")
        _check_seed(self.seed)

    @property
    def error(self) -> float:
        """The largest standard deviation of a parameter's inner products, relative to the norms."""
        sides = [1 + 2 / side for side in (self.left, self.right) if side is not None]
        return sqrt(prod(sides) - 1)

    def block(self, p: Tensor) -> tuple[int, int]:
        n, m = matrix_shape(p)
        return n if self.left is None else min(n, self.left), m if self.right is None else min(m, self.right)

    def of(self, name: str, p: Tensor, factor: Factor, space: Workspace) -> Tensor:
        (n, m), (k, r) = matrix_shape(p), self.block(p)
        if (k, r) == (n, m):
            return real_rows(factor.stack()).view(factor.batch, n, m)
        if m == 1:  # a bias: one product for all samples, rather than one for each
            left = self._side(name, "left", n, k, factor.device)
            rows = [real_rows(stack) @ left.to(wide(stack.dtype).to_real()) for _, stack in factor.stacks(space)]
            return torch.cat(rows).unsqueeze(2) if rows else self.of_stack(name, p, factor.stack())
        if (k == n and n > _MOST_KEPT_ROWS) or (r == m and m > _MOST_KEPT_ROWS):
            parts = [self.of_stack(name, p, stack) for _, stack in factor.stacks(space)]
            return torch.cat(parts) if parts else self.of_stack(name, p, factor.stack())
        return factor.compress(*self._sides(name, p, factor.device), space)

    def of_stack(self, name: str, p: Tensor, stack: Tensor) -> Tensor:
        (n, m), (k, r) = matrix_shape(p), self.block(p)
        matrices = real_rows(stack).reshape(len(stack), n, m)
        if k < n:
            matrices = self._side(name, "left", n, k, stack.device).to(matrices.dtype).t() @ matrices
        return matrices if r == m else matrices @ self._side(name, "right", m, r, stack.device).to(matrices.dtype)

    def _sides(self, name: str, p: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        (n, m), (k, r) = matrix_shape(p), self.block(p)
        return self._side(name, "left", n, k, device), self._side(name, "right", m, r, device)

    def _side(self, name: str, side: str, n: int, columns: int, device: torch.device) -> Tensor:
        """(n, columns): a random matrix with entries ±1/√columns, or the identity."""
        if columns == n:
            return KEPT.get(("identity",), (device, n), partial(torch.eye, n, device=device))
        make = Projection(columns, self.seed).rows
        return KEPT.get(self, (device, name, side, n), lambda: make(f"{name}/{side}", 0, n).to(device))


class _OfElements(Sketch):
    """A sketch of the flattened gradient, which is written out for a few samples at a time."""

    dim: int

    def block(self, p: Tensor) -> tuple[int, int]:
        return 1, min(prod(matrix_shape(p)), self.dim)

    def of(self, name: str, p: Tensor, factor: Factor, space: Workspace) -> Tensor:
        parts = [self.of_stack(name, p, stack) for _, stack in factor.stacks(space)]
        return torch.cat(parts) if parts else self.of_stack(name, p, factor.stack())

    def of_stack(self, name: str, p: Tensor, stack: Tensor) -> Tensor:
        rows = real_rows(stack)
        return (rows if rows.shape[1] <= self.dim else self._sketched(name, rows)).reshape(len(rows), *self.block(p))

    @abstractmethod
    def _sketched(self, name: str, rows: Tensor) -> Tensor:
        """(B, dim) of rows (B, numel) with more elements than that."""


@dataclass(frozen=True)
class Sparse(_OfElements):
    """SJLT: each element is added to ``nonzeros`` of ``dim`` places, with random signs.

    Inner products of a parameter have a standard deviation of about √(2/dim) times the norms, less than `Blocks` of as
    many numbers; but gradients are written out, a few samples at a time, which makes it slower.
    """

    dim: int = 256
    nonzeros: int = 1
    seed: int = 0
    kind = "sparse"

    def __post_init__(self) -> None:
        _check_count("dim", self.dim)
        _check_count("nonzeros", self.nonzeros)
        _check_seed(self.seed)

    def _sketched(self, name: str, rows: Tensor) -> Tensor:
        numel, out = rows.shape[1], rows.new_zeros(len(rows), self.dim)
        for time in range(self.nonzeros):
            signed = KEPT.get(
                self,
                (rows.device, name, numel, time),
                partial(self._places_and_signs, f"{name}/{time}", numel, rows.device),
            )
            places, signs = signed.abs() - 1, signed.sign()
            out.index_add_(1, places, rows * signs.to(rows.dtype))
        return out.mul_(1 / sqrt(self.nonzeros))

    @with_numbers
    def _places_and_signs(self, what: str, numel: int, device: torch.device) -> Tensor:
        """(numel,): one more than the place of each element, with its sign."""
        generator = self._generator(what)
        places = torch.randint(self.dim, (numel,), generator=generator, dtype=torch.int32, device="cpu")
        signs = torch.randint(2, (numel,), generator=generator, dtype=torch.int32, device="cpu") * 2 - 1
        return ((places + 1) * signs).to(device)


@dataclass(frozen=True)
class Masked(_OfElements):
    """``dim`` elements of every parameter's gradient, chosen at random and scaled by √(numel / dim)."""

    dim: int = 256
    seed: int = 0
    kind = "masked"

    def __post_init__(self) -> None:
        _check_count("dim", self.dim)
        _check_seed(self.seed)

    def _sketched(self, name: str, rows: Tensor) -> Tensor:
        numel = rows.shape[1]
        make = partial(self._places, name, numel)
        places = KEPT.get(self, (rows.device, name, numel), lambda: make().to(rows.device))
        return rows.index_select(1, places).mul_(sqrt(numel / self.dim))

    @with_numbers
    def _places(self, name: str, numel: int) -> Tensor:
        chosen = torch.randperm(numel, generator=self._generator(name), device="cpu")[: self.dim]
        return chosen.sort().values.clone()


SKETCHES: dict[str, type[Sketch]] = {kind.kind: kind for kind in (Blocks, Sparse, Masked)}


def sketch_of(settings: Mapping[str, Any]) -> Sketch:
    """The sketch with these `Sketch.settings`."""
    rest = dict(settings)
    kind = rest.pop("kind", None)
    if kind not in SKETCHES:
        raise ValueError(f"unknown kind of sketch {kind!r}: this version knows {', '.join(SKETCHES)}")
    return SKETCHES[kind](**rest)


class Sketched(Reduction):
    """{parameter name: (B, l, r)}: the sketch of every sample's gradient, parameter by parameter.

    >>> import torch, persample as ps
    >>> from persample import influence as pi
    >>> model = torch.nn.Linear(64, 32)
    >>> losses = model(torch.ones(5, 64)).square().sum(1)
    >>> (blocks,) = ps.reduce(losses, model, pi.Sketched(pi.Blocks(16, 16)))
    >>> {name: tuple(block.shape) for name, block in blocks.items()}
    {'weight': (5, 16, 16), 'bias': (5, 16, 1)}
    """

    in_portions = True

    def __init__(self, sketch: Sketch, scales: Mapping[str, Tensor] | None = None) -> None:
        if not isinstance(sketch, Sketch):
            raise TypeError(f"expected a sketch such as pi.Blocks(16, 16), not {type(sketch).__name__}")
        self.sketch, self.scales = sketch, scales or {}  # gradients are multiplied by scales (*shape) first

    def start(self, call: Call) -> None:
        self._call = call
        self._found: dict[str, Tensor] = {}

    def add(self, name: str, factor: Factor) -> None:
        p, space, scale = self._call.params[name], self._call.space, self.scales.get(name)
        if scale is None or not factor.batch:
            self._found[name] = self.sketch.of(name, p, factor, space)
        else:
            stacks = (stack * scale.to(stack.device) for _, stack in factor.stacks(space))
            self._found[name] = torch.cat([self.sketch.of_stack(name, p, stack) for stack in stacks])

    def result(self) -> dict[str, Tensor]:
        every = self._call.params.items()
        return {name: self._found.pop(name) if name in self._found else self._zeros(p) for name, p in every}

    def _zeros(self, p: Tensor) -> Tensor:
        dtype = wide(p.dtype).to_real()
        return torch.zeros(self._call.batch, *self.sketch.block(p), dtype=dtype, device=self._call.device)

    def join(self, portions: Sequence[Any], call: Call) -> Any:
        return call.rows(portions)


def _check_count(name: str, value: object, what: str = "a positive integer") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be {what}, not {value!r}")


def _check_seed(seed: object) -> None:
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(f"seed must be an integer, not {seed!r}")
