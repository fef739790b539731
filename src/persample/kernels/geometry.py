"""The options of a convolution in one record."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["Geometry"]


@dataclass(frozen=True, slots=True)
class Geometry:
    """A convolution's options; every tuple has one entry per spatial dim."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @property
    def arguments(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool, tuple[int, ...], int]:
        """In the order in which PyTorch's convolutions take them."""
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups

    def for_one_group(self) -> "Geometry":
        """The same for the channels of one group alone, not transposed."""
        return replace(self, transposed=False, output_padding=(0,) * len(self.stride), groups=1)

    def read_size(self, out_size: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
        """How much of the padded input is read, if not transposed: s·(O - 1) + δ·(k - 1) + 1 on each axis."""
        return tuple(
            s * (n - 1) + d * (k - 1) + 1
            for s, n, d, k in zip(self.stride, out_size, self.dilation, kernel, strict=True)
        )

    def output_size(self, in_size: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
        """The output's spatial size, if not transposed: ⌊(S + 2·padding - δ·(k - 1) - 1) / s⌋ + 1 on each axis."""
        return tuple(
            (n + 2 * pad - d * (k - 1) - 1) // s + 1
            for n, pad, d, k, s in zip(in_size, self.padding, self.dilation, kernel, self.stride, strict=True)
        )
