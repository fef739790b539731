"""Convolutions of every kind, and their per-sample gradients by definition."""

from dataclasses import dataclass

import torch
from torch import Tensor

from persample.kernels.convolution import Geometry


@dataclass(frozen=True)
class Case:
    """One convolution; d and p are the input and output channels of a group."""

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    geometry: Geometry
    d: int
    p: int

    @property
    def weight_size(self) -> tuple[int, ...]:
        groups = self.geometry.groups
        if self.geometry.transposed:
            return (self.d * groups, self.p, *self.kernel)
        return (self.p * groups, self.d, *self.kernel)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        g = self.geometry
        args = (g.stride, g.padding, g.dilation, g.transposed, g.output_padding, g.groups)
        return torch.convolution(x, weight, None, *args)

    def tensors(self, B: int, R: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """x and dy, the same for the same arguments."""
        rng = torch.Generator().manual_seed(B + 10 * R)
        channels = self.d * self.geometry.groups
        y = self.forward(torch.zeros(1, channels, *self.size), torch.zeros(self.weight_size))
        x = torch.randn(B, R, channels, *self.size, generator=rng, dtype=torch.float64)
        dy = torch.randn(B, R, *y.shape[1:], generator=rng, dtype=torch.float64)
        return x.to(dtype), dy.to(dtype)

    def reference(self, x: Tensor, dy: Tensor) -> Tensor:
        """The definition: the gradient of each sample's own outputs."""
        rows = [torch.zeros(0, *self.weight_size, dtype=torch.float64)]
        for x_, dy_ in zip(x.double(), dy.double(), strict=True):
            weight = torch.zeros(self.weight_size, dtype=torch.float64, requires_grad=True)
            (grad,) = torch.autograd.grad(self.forward(x_, weight), weight, dy_)
            rows.append(grad[None])
        return torch.cat(rows)


def case(
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    *,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    output_padding: int | tuple[int, ...] | None = None,
    groups: int = 1,
    d: int = 3,
    p: int = 2,
) -> Case:
    """A case with scalars for equal entries; giving output_padding makes it transposed."""

    def each(value: int | tuple[int, ...]) -> tuple[int, ...]:
        return value if isinstance(value, tuple) else (value,) * len(size)

    transposed = output_padding is not None
    ends = each(output_padding or 0)
    return Case(size, kernel, Geometry(each(stride), each(padding), each(dilation), transposed, ends, groups), d, p)


CASES = {
    "1d": case((9,), (3,)),
    "1d-pad": case((9,), (3,), padding=1),
    "1d-even-kernel": case((9,), (4,), padding=2),
    "1d-causal-length": case((9,), (2,), dilation=4, padding=4),
    "1d-remainder": case((10,), (3,), stride=3),
    "1d-depthwise": case((9,), (5,), padding=2, groups=4, d=1, p=1),
    "1d-transposed": case((5,), (3,), stride=2, padding=1, output_padding=1),
    "1d-crop-beyond-stride": case((5,), (3,), dilation=3, padding=1, output_padding=2),
    "2d": case((6, 5), (3, 3)),
    "2d-pad": case((6, 5), (3, 3), padding=1),
    "2d-pad-beyond-kernel": case((4, 3), (2, 3), padding=(3, 4)),
    "2d-even-kernel": case((6, 5), (2, 4), padding=(1, 2)),
    "2d-dilation": case((8, 9), (3, 2), dilation=(2, 3), padding=(2, 1)),
    "2d-stride-divides": case((7, 7), (3, 3), stride=2),
    "2d-stride-remainder": case((8, 9), (3, 3), stride=(2, 3), padding=1),
    "2d-stride-beyond-kernel": case((9, 8), (2, 1), stride=(4, 3)),
    "2d-stride-dilation": case((11, 10), (3, 2), stride=2, dilation=(2, 3), padding=2),
    "2d-patches": case((8, 8), (4, 4), stride=4),
    "2d-whole-image": case((4, 5), (4, 5)),
    "2d-one-pixel": case((1, 1), (3, 3), padding=1),
    "2d-row-kernel": case((6, 5), (1, 3), padding=(0, 1)),
    "2d-groups": case((6, 5), (3, 3), padding=1, groups=2),
    "2d-groups-stride": case((7, 6), (3, 3), padding=1, stride=2, groups=3),
    "2d-depthwise": case((6, 5), (3, 3), padding=1, groups=6, d=1, p=1),
    "2d-depthwise-multiplier": case((6, 5), (3, 3), padding=1, groups=4, d=1, p=3),
    "2d-depthwise-large": case((8, 8), (5, 5), padding=2, stride=2, groups=4, d=1, p=1),
    "2d-vectorised": case((6, 5), (3, 3), padding=1, groups=2, d=8, p=16),
    "2d-first-layer": case((6, 5), (3, 3), padding=1, d=3, p=16),
    "2d-pointwise": case((4, 5), (1, 1)),
    "2d-pointwise-stride": case((4, 5), (1, 1), stride=(2, 3)),
    "2d-pointwise-pad": case((4, 5), (1, 1), padding=(1, 2), stride=(1, 2)),
    "2d-pointwise-groups": case((4, 5), (1, 1), groups=3),
    "2d-transposed": case((4, 3), (3, 3), output_padding=0),
    "2d-transposed-stride": case((4, 3), (3, 4), stride=2, padding=1, output_padding=1),
    "2d-transposed-remainder": case((3, 4), (2, 3), stride=(3, 2), output_padding=(2, 0)),
    "2d-transposed-dilation": case((3, 4), (2, 3), dilation=(3, 2), padding=1, output_padding=(2, 1)),
    "2d-transposed-groups": case((4, 3), (3, 3), stride=2, padding=1, output_padding=1, groups=2),
    "2d-transposed-depthwise": case((4, 3), (3, 3), padding=1, output_padding=0, groups=4, d=1, p=2),
    "2d-transposed-pointwise": case((4, 3), (1, 1), stride=2, output_padding=1),
    "3d": case((4, 5, 3), (3, 2, 3), padding=1),
    "3d-stride": case((5, 6, 4), (3, 3, 2), stride=(1, 2, 3), padding=(1, 0, 1)),
    "3d-dilation": case((5, 6, 4), (2, 3, 2), dilation=(1, 2, 3)),
    "3d-groups": case((4, 4, 4), (2, 2, 2), groups=2),
    "3d-depthwise": case((4, 4, 4), (3, 3, 3), padding=1, groups=4, d=1, p=1),
    "3d-transposed": case((2, 3, 2), (3, 2, 3), stride=2, padding=1, output_padding=1),
}
