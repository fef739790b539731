"""Random projections of gradients to a few numbers per sample, which keep inner products on average."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from math import isqrt, prod, sqrt
from typing import Any, Literal

import torch
from torch import Tensor

from ..factors import Factor
from ..factors.stacks import real_rows
from ..numberless import with_numbers
from .base import Call, Reduction
from .kept import Kept

_ELEMENTS = 2**18  # of a projection matrix at a time; fixed, as the random numbers depend on it

Kind = Literal["rademacher", "gaussian", "kronecker"]


@dataclass(frozen=True)
class Projection:
    """A random linear map from all parameters to ``dim`` numbers, fixed by its seed.

    Inner products are kept on average, <z_i, z_j> ≈ <g_i, g_j>, with a standard deviation of at most
    ``error`` · ‖g_i‖ ‖g_j‖. The map depends on nothing but the projection itself and the parameters' names and shapes:
    batches that are projected apart, in other processes or on other devices, can be compared.

    Args:
        dim: numbers per sample.
        seed: of the map.
        kind: "rademacher" (entries ±1/√dim), "gaussian", or "kronecker": matrices are multiplied by a random matrix
            from either side, which outer products need not be written out for; much faster, and less exact.
    """

    dim: int
    seed: int = 0
    kind: Kind = "rademacher"

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or isinstance(self.dim, bool) or self.dim < 1:
            raise ValueError(f"dim must be a positive integer, not {self.dim!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ValueError(f"seed must be an integer, not {self.seed!r}")
        if self.kind not in ("rademacher", "gaussian", "kronecker"):
            raise ValueError(f"kind must be 'rademacher', 'gaussian' or 'kronecker', not {self.kind!r}")

    @property
    def error(self) -> float:
        """The largest standard deviation of an inner product, relative to the norms."""
        if self.kind != "kronecker":
            return sqrt(2 / self.dim)
        rows, columns = self.sides
        return sqrt((1 + 2 / rows) * (1 + 2 / columns) - 1)

    @property
    def sides(self) -> tuple[int, int]:
        """dim = rows · columns, as square as possible: the shape to which "kronecker" compresses a matrix."""
        rows = next(k for k in range(isqrt(self.dim), 0, -1) if self.dim % k == 0)
        return rows, self.dim // rows

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` of a parameter's matrix (numel, dim), of one block as `blocks` gives them."""
        return self._random(f"{name}/{start}", stop - start, self.dim)

    def blocks(self, numel: int) -> list[tuple[int, int]]:
        """A parameter's elements in the ranges that are generated together."""
        step = max(1, _ELEMENTS // self.dim)
        return [(start, min(start + step, numel)) for start in range(0, numel, step)]

    def two_sides(self, name: str, n: int, m: int) -> tuple[Tensor, Tensor]:
        """The matrices (n, rows) and (m, columns) that an n x m gradient is multiplied by."""
        return self.left_side(name, n), self.right_side(name, m)

    def left_side(self, name: str, n: int) -> Tensor:
        """The first of `two_sides`."""
        return self._random(f"{name}/left", n, self.sides[0])

    def right_side(self, name: str, m: int) -> Tensor:
        """The second of `two_sides`."""
        return self._random(f"{name}/right", m, self.sides[1])

    @with_numbers
    def _random(self, what: str, rows: int, columns: int) -> Tensor:
        """Independent entries with mean 0 and variance 1 / columns, in float32 on the CPU."""
        digest = blake2b(f"{self.seed}/{what}".encode(), digest_size=8).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest) >> 1)
        if self.kind == "gaussian":
            entries = torch.randn(rows, columns, generator=generator, dtype=torch.float32, device="cpu")
            return entries.mul_(1 / sqrt(columns))
        count = rows * columns
        words = torch.empty(-(-count // 64), dtype=torch.int64, device="cpu").random_(
            -(2**63), None, generator=generator
        )
        signs = (_SIGNS / sqrt(columns)).index_select(0, words.view(torch.uint8).to(torch.int32))
        return signs.view(-1)[:count].view(rows, columns)


# (256, 8): the eight bits of every byte as signs.
_SIGNS = ((torch.arange(256, device="cpu").unsqueeze(1) >> torch.arange(8, device="cpu")) & 1).to(torch.float32) * 2 - 1

KEPT = Kept()  # matrices of projections: making one takes longer than using it


class Project(Reduction):
    """(B, dim): every sample's gradient under a `Projection`."""

    in_portions = True

    def __init__(self, projection: Projection) -> None:
        if not isinstance(projection, Projection):
            raise TypeError(f"expected a ps.Projection(dim, seed), not {type(projection).__name__}")
        self.projection = projection

    def start(self, call: Call) -> None:
        self._call = call
        self._projected = call.zeros(call.batch, self.projection.dim)

    def add(self, name: str, factor: Factor) -> None:
        n = factor.shape[0] if factor.shape else 1
        m = prod(factor.shape[1:]) * (2 if factor.dtype.is_complex else 1)
        if self.projection.kind == "kronecker" and min(n, m) > 1:
            left = self._on(factor.device, ("left", name, n), partial(self.projection.left_side, name, n))
            right = self._on(factor.device, ("right", name, m), partial(self.projection.right_side, name, m))
            compressed = factor.compress(left, right, self._call.space).flatten(1)
            self._projected += compressed.to(self._projected)
        else:
            self._add_blocks(name, factor, n * m)

    def _add_blocks(self, name: str, factor: Factor, numel: int) -> None:
        """Project flattened gradients. Matrices are expensive to generate, so all samples share one if possible."""
        space, blocks = self._call.space.up_to_limit(), self.projection.blocks(numel)
        if factor.stack_bytes > space.limit and factor.elements(0, 1) is not None:
            size = factor.batch * blocks[0][1] * factor.dtype.itemsize
            for some in space.chunks(len(blocks), size):
                first, last = blocks[some.start][0], blocks[some.stop - 1][1]
                part = factor.elements(first, last)
                assert part is not None
                self._multiply(slice(None), real_rows(part), name, blocks[some])
        else:
            for samples, stack in factor.stacks(space):
                self._multiply(samples, real_rows(stack), name, blocks)

    def _multiply(self, samples: slice, rows: Tensor, name: str, blocks: list[tuple[int, int]]) -> None:
        """Add rows, which hold the elements of some blocks, times those blocks of the matrix."""
        offset = blocks[0][0] if blocks else 0
        for start, stop in blocks:
            make = partial(self.projection.rows, name, start, stop)
            matrix = self._on(rows.device, ("rows", name, start, stop), make).to(rows.dtype)
            self._projected[samples] += (rows[:, start - offset : stop - offset] @ matrix).to(self._projected)

    def _on(self, device: torch.device, what: object, make: Callable[[], Tensor]) -> Tensor:
        """A matrix on the device, made anew if it was not kept."""
        return KEPT.get(self.projection, (device, what), lambda: make().to(device))

    def result(self) -> Tensor:
        return self._projected.to(self._call.dtype)

    def join(self, portions: Sequence[Any], call: Call) -> Any:
        return call.rows(portions)
