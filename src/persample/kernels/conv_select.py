"""Which convolution kernel for which shape."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

CACHE_BYTES = 2**21


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a convolution walks over its input; every tuple has one entry per spatial dim."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def read_size(self, out_size: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
        """The length s·(O - 1) + δ·(k - 1) + 1 of padded input that O outputs read, in each spatial dim."""
        return tuple(
            s * (n - 1) + d * (k - 1) + 1
            for s, n, d, k in zip(self.stride, out_size, self.dilation, kernel, strict=True)
        )

    def output_size(self, in_size: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
        """The output's spatial size if this is not transposed."""
        return tuple(
            (n + 2 * pad - d * (k - 1) - 1) // s + 1
            for n, pad, d, k, s in zip(in_size, self.padding, self.dilation, kernel, self.stride, strict=True)
        )


def applicable(weight_size: Sequence[int], geometry: Geometry) -> tuple[str, ...]:
    """The kernels that can do this convolution."""
    names = ["library", "unfold"]
    if all(s == 1 for s in geometry.stride):
        names.append("shifted")
    if math.prod(weight_size[2:]) == 1:
        names.append("pointwise")
    return tuple(names)

def choose(samples, images, weight_size, x_size, dy_size, geometry) -> str:
    return "pointwise" if math.prod(weight_size[2:]) == 1 else "unfold"
