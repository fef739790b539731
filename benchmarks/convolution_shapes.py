"""Convolutions to measure: the grid of shapes that choices are judged by, and others that are drawn at random."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from persample.kernels.convolution import Geometry, Sizes

_MOST_PRODUCTS, _MOST_PATCHES = 1.5e9, 3e7  # in a shape: what takes much longer is no different


@dataclass(frozen=True)
class Shape:
    """A convolution: B samples of R images (R, Cin, *size), with Cin and Cout over all groups."""

    B: int
    cin: int
    cout: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1
    transposed: bool = False
    R: int = 1
    dtype: torch.dtype = torch.float32

    @property
    def title(self) -> str:
        size, kernel = ("x".join(map(str, t)) for t in (self.size, self.kernel))
        extras = {"s": self.stride, "dil": self.dilation, "G": self.groups, "R": self.R}
        words = [f"{name}{value}" for name, value in extras.items() if value != 1]
        words += ["transposed"] * self.transposed + ["float64"] * (self.dtype == torch.float64)
        return " ".join([f"B{self.B} {self.cin}>{self.cout} {size} k{kernel}", *words])

    @property
    def weight_size(self) -> tuple[int, ...]:
        first, second = (self.cin, self.cout) if self.transposed else (self.cout, self.cin)
        return (first, second // self.groups, *self.kernel)

    @property
    def geometry(self) -> Geometry:
        n = len(self.size)
        each = ((value,) * n for value in (self.stride, self.padding, self.dilation))
        return Geometry(*each, transposed=self.transposed, output_padding=(0,) * n, groups=self.groups)

    @property
    def sizes(self) -> Sizes:
        """What the choice goes by."""
        return Sizes(self.B, self.R, self.weight_size, self.size, self.out_size, self.geometry, self.dtype)

    @property
    def out_size(self) -> tuple[int, ...]:
        """Of the output, in space."""
        x = torch.empty(1, self.cin, *self.size, device="meta")
        weight = torch.empty(self.weight_size, device="meta")
        return tuple(torch.convolution(x, weight, None, *self.geometry.arguments).shape[2:])

    def tensors(self) -> tuple[Tensor, Tensor]:
        """x and dy."""
        x = torch.randn(self.B, self.R, self.cin, *self.size, dtype=self.dtype)
        return x, torch.randn(self.B, self.R, self.cout, *self.out_size, dtype=self.dtype)


def square(B: int, cin: int, cout: int, side: int, k: int, **options: Any) -> Shape:
    """In two dims, padded so that a stride of 1 keeps the size."""
    options.setdefault("padding", options.get("dilation", 1) * (k - 1) // 2)
    return Shape(B, cin, cout, (side, side), (k, k), **options)


def depthwise(B: int, channels: int, side: int, k: int, **options: Any) -> Shape:
    return square(B, channels, channels, side, k, groups=channels, **options)


def line(B: int, cin: int, cout: int, length: int, k: int, **options: Any) -> Shape:
    return Shape(B, cin, cout, (length,), (k,), **options)


def cube(B: int, cin: int, cout: int, side: int, k: int, **options: Any) -> Shape:
    return Shape(B, cin, cout, (side,) * 3, (k,) * 3, padding=k // 2, **options)


GRID = [
    # residual networks on small images
    *[square(32, c, c, side, 3) for c, side in ((32, 32), (64, 16), (128, 8), (256, 4))],
    *[square(32, c, 2 * c, side, 3, stride=2) for c, side in ((32, 32), (64, 16), (128, 8))],
    *[square(B, 64, 64, 16, 3) for B in (1, 4, 128)],
    square(256, 16, 16, 32, 3),
    square(8, 64, 64, 56, 3),
    square(8, 128, 128, 28, 3),
    square(8, 256, 256, 14, 3),
    square(4, 512, 512, 7, 3),
    square(16, 48, 96, 20, 3),
    square(16, 33, 65, 15, 3),
    # first layers
    square(32, 3, 32, 32, 3),
    square(64, 3, 64, 32, 3),
    square(16, 3, 64, 64, 7, stride=2),
    square(256, 1, 16, 28, 8, stride=2),
    square(256, 1, 32, 28, 3, padding=0),
    square(128, 1, 6, 28, 5),
    square(16, 3, 128, 64, 8, stride=8, padding=0),
    square(8, 3, 192, 96, 16, stride=16, padding=0),
    square(16, 3, 32, 96, 3, stride=2),
    # second layers of small networks
    square(256, 16, 32, 12, 4, stride=2, padding=0),
    square(256, 32, 64, 26, 3, padding=0),
    square(128, 6, 16, 14, 5, padding=0),
    square(64, 8, 16, 14, 5),
    # other kernels, strides and dilations
    square(16, 64, 64, 16, 5),
    square(16, 32, 32, 24, 7),
    square(16, 32, 64, 33, 3, stride=3),
    square(16, 64, 64, 24, 5, stride=2),
    square(16, 32, 32, 32, 3, dilation=2),
    square(8, 64, 64, 32, 3, dilation=4),
    Shape(16, 64, 64, (16, 16), (1, 7), padding=0),
    Shape(16, 64, 64, (16, 16), (7, 1), padding=0),
    # few groups
    *[square(32, 64, 64, 16, 3, groups=groups) for groups in (2, 4, 8, 16, 32)],
    square(8, 128, 128, 28, 3, groups=32),
    square(8, 256, 256, 14, 3, groups=32, stride=2),
    square(32, 48, 48, 16, 3, groups=12),
    # one channel per group
    depthwise(64, 64, 16, 3),
    depthwise(64, 64, 16, 3, stride=2),
    depthwise(64, 64, 16, 5),
    depthwise(16, 96, 28, 5, stride=2),
    depthwise(8, 96, 56, 7),
    depthwise(8, 384, 14, 7),
    depthwise(16, 64, 28, 3, dilation=2),
    depthwise(32, 64, 16, 3, dtype=torch.float64),
    square(32, 32, 64, 16, 3, groups=32),
    # one dim
    line(32, 64, 64, 256, 5, padding=2),
    line(32, 32, 64, 128, 3, padding=1, stride=2),
    line(64, 16, 32, 100, 7),
    line(16, 1, 64, 4000, 80, stride=4),
    line(16, 64, 64, 500, 3, padding=4, dilation=4),
    line(8, 512, 512, 256, 4, padding=3, groups=512),
    line(8, 144, 144, 400, 31, padding=15, groups=144),
    line(16, 256, 256, 50, 3, padding=1),
    # three dims
    cube(8, 16, 32, 12, 3),
    cube(8, 1, 16, 20, 3),
    cube(8, 32, 32, 8, 3),
    cube(8, 16, 32, 16, 3, stride=2),
    cube(4, 32, 32, 12, 3, groups=32),
    # transposed
    square(32, 64, 32, 8, 4, stride=2, padding=1, transposed=True),
    square(32, 128, 64, 4, 4, stride=2, padding=1, transposed=True),
    square(32, 32, 3, 16, 4, stride=2, padding=1, transposed=True),
    square(16, 64, 64, 16, 3, transposed=True),
    line(16, 64, 32, 64, 4, stride=2, padding=1, transposed=True),
    # several images per sample
    square(8, 32, 32, 16, 3, R=4),
    square(4, 64, 64, 8, 3, R=16),
    square(8, 3, 32, 32, 3, R=4),
    line(8, 32, 32, 64, 3, padding=1, R=8),
    depthwise(8, 64, 16, 3, R=4),
    # double precision
    square(16, 32, 32, 16, 3, dtype=torch.float64),
    square(16, 64, 128, 16, 3, stride=2, dtype=torch.float64),
]


def draw(chance: random.Random) -> Shape:
    """A convolution of any kind, but of those that are common more often."""
    n = chance.choice([1, 2, 2, 2, 2, 3])
    groups = chance.choice([1, 1, 1, 1, 2, 4, 8, 16, 32, 64])
    d = 1 if groups > 16 else chance.choice([1, 3, 4, 6, 8, 16, 24, 32, 64, 128, 256] if groups == 1 else [2, 4, 8, 16])
    p = chance.choice([d, d, 2 * d, 4 * d]) if d > 3 or groups > 1 else chance.choice([6, 16, 32, 64])
    kernel = chance.choice([2, 3, 3, 3, 3, 4, 5, 7] if n < 3 else [2, 3, 3])
    side = chance.choice({1: [50, 100, 256, 500], 2: [4, 7, 8, 12, 16, 24, 28, 32, 56], 3: [6, 8, 12, 16]}[n])
    return Shape(
        B=chance.choice([1, 4, 8, 16, 32, 64, 128, 256]),
        cin=groups * d,
        cout=groups * p,
        size=(side,) * n,
        kernel=(kernel,) * n,
        stride=chance.choice([1, 1, 1, 2, 2, 3]),
        padding=chance.choice([0, kernel // 2]),
        dilation=chance.choice([1, 1, 1, 1, 1, 2]),
        groups=groups,
        transposed=chance.random() < 0.1,
        R=chance.choice([1, 1, 1, 1, 1, 4]),
        dtype=chance.choice([torch.float32] * 7 + [torch.float64]),
    )


def is_useful(shape: Shape) -> bool:
    """Neither impossible nor too large, and not one of those that choices are judged by."""
    reach = shape.dilation * (shape.kernel[0] - 1) + 1
    if shape in GRID or reach > shape.size[0] + 2 * shape.padding:
        return False
    places = shape.B * shape.R * prod(shape.size if shape.transposed else shape.out_size)
    patches = places * (shape.cout if shape.transposed else shape.cin) * prod(shape.kernel)
    return 0 < patches < _MOST_PATCHES and places * prod(shape.weight_size) < _MOST_PRODUCTS
