"""All sizes of a convolution in one record, and the counts that costs are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..devices import launches_cost
from ..geometry import Geometry

__all__ = ["Sizes"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """A convolution of B samples of R images each: what its gradients cost depends on this and on the device alone.

    Where it is transposed, all properties are those of (1) with x and dy exchanged.

    >>> geometry = Geometry((1, 1), (1, 1), (1, 1), transposed=False, output_padding=(0, 0), groups=2)
    >>> sizes = Sizes(32, 1, (64, 16, 3, 3), (8, 8), (8, 8), geometry)
    >>> sizes.p, sizes.d, sizes.K, sizes.T
    (32, 16, 9, 64)
    """

    B: int
    R: int
    weight: tuple[int, ...]  # (Cout, Cin/G, *k), or (Cin, Cout/G, *k) if transposed
    x: tuple[int, ...]  # the spatial dims alone
    dy: tuple[int, ...]
    geometry: Geometry
    dtype: torch.dtype = torch.float32  # that gradients are computed in
    on_accelerator: bool = False  # where the costs of CPUs do not hold

    @classmethod
    def of(cls, x: Tensor, dy: Tensor, weight_size: Sequence[int], geometry: Geometry) -> Sizes:
        """Of the convolution with inputs x (B, R, Cin, *S) and cotangents dy (B, R, Cout, *O)."""
        B, R = x.shape[:2]
        spatial = tuple(x.shape[3:]), tuple(dy.shape[3:])
        return cls(B, R, tuple(weight_size), *spatial, geometry, working_dtype(x), launches_cost(x.device))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return 0 in (self.B, self.R, *self.weight, *self.x, *self.dy)

    @property
    def kernel(self) -> tuple[int, ...]:
        """The kernel's size."""
        return self.weight[2:]

    @property
    def in_size(self) -> tuple[int, ...]:
        """The size of the input in space."""
        return self.dy if self.geometry.transposed else self.x

    @property
    def out_size(self) -> tuple[int, ...]:
        """The size of the output in space."""
        return self.x if self.geometry.transposed else self.dy

    @property
    def p(self) -> int:
        """Output channels of a group."""
        return self.weight[0] // self.geometry.groups

    @property
    def d(self) -> int:
        """Input channels of a group."""
        return self.weight[1]

    @property
    def K(self) -> int:
        """Offsets in the kernel."""
        return math.prod(self.kernel)

    @property
    def T(self) -> int:
        """Output positions of one sample."""
        return self.R * math.prod(self.out_size)

    @property
    def matrices(self) -> int:
        """Matrices in a batched product: one for each sample and group."""
        return self.B * self.geometry.groups

    @property
    def weights(self) -> int:
        """Elements of all samples' gradients."""
        return self.matrices * self.p * self.d * self.K

    @property
    def patches(self) -> int:
        """Elements of the unfolded input."""
        return self.matrices * self.d * self.K * self.T

    @property
    def inputs(self) -> int:
        """Elements of the input."""
        return self.matrices * self.R * self.d * math.prod(self.in_size)

    @property
    def cotangents(self) -> int:
        """Elements of dy."""
        return self.matrices * self.p * self.T

    @property
    def width(self) -> float:
        """The size of an element, in units of float32's."""
        return self.dtype.itemsize / 4

    @property
    def is_depthwise(self) -> bool:
        """Whether every group has one channel."""
        return self.p == self.d == 1 < self.matrices


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype to compute in: half precision goes through float32 on a CPU.

    That is 3 to 8 times faster where the CPU has no bfloat16 GEMM.
    """
    half = x.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if half and x.device.type == "cpu" else x.dtype
