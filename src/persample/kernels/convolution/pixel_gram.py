"""Norms of per-sample weight gradients of convolutions from Gram matrices of pixels, without patches.

With D[t, u] = dy[:, t] · dy[:, u] and P[a, b] = x[:, a] · x[:, b], formula (1) of `convolution` gives

    ‖dw‖² = Σ_tu  D[t, u] · Σ_k P[s·t + δ·k, s·u + δ·k]

The inner sum is the Gram matrix of the patches. It is a sum of diagonal shifts of P, taken one axis after the other,
and P is made of d channels where the patches have d·K. Rounding is bounded as in `gram`: by Cauchy and Schwarz, the
terms of an element of the inner sum are together at most the product of two patches' norms.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from ..geometry import Geometry
from ..gram import ROWS, summed, trusted_norms
from ..norms import widest
from .patches import padded, windows_along

__all__ = ["pixel_gram_norms"]


def pixel_gram_norms(
    x: Tensor, dy: Tensor, weight_size: Sequence[int], geometry: Geometry, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """For x (B, R, Cin, *S) and dy (B, R, Cout, *O): norms (B·G,), and which can be trusted as in `trusted_norms`."""
    if geometry.transposed:
        x, dy, geometry = dy, x, replace(geometry, transposed=False)
    kernel, out_size, rows = weight_size[2:], dy.shape[3:], len(x) * geometry.groups
    pixels, dy = _lines(padded(x, kernel, out_size, geometry), rows), _lines(dy, rows)
    squares = torch.zeros(rows, dtype=widest(x.device), device=x.device)
    size = torch.zeros_like(squares)
    least = torch.finfo(x.dtype).tiny / torch.finfo(x.dtype).eps  # below, digits are lost
    step = max(1, ROWS // math.prod(dy.shape[3:]))
    for start in range(0, out_size[0], step):  # Gram matrices are symmetric: what lies left of a block is done
        count = min(step, out_size[0] - start)
        left = _gram(dy[:, :, start:], count).flatten(1, dy.ndim - 2).flatten(2)
        right = _patch_gram(pixels[:, :, geometry.stride[0] * start :], count, kernel, geometry).reshape(left.shape)
        rows_here = left.shape[1]
        left_norms, right_norms = (gram.detach().diagonal(0, 1, 2).clamp(min=least).sqrt() for gram in (left, right))
        size += (left_norms * right_norms).sum(1)
        products = right.mul_(left)
        squares += summed(products[..., :rows_here]) + 2 * summed(products[..., rows_here:])
    return trusted_norms(squares, size.square_(), x.dtype, dtype)


def _lines(x: Tensor, rows: int) -> Tensor:
    """(B, R, C, *S) as (B·G, C/G, S[0], R, *S[1:]): lines along the first axis."""
    x = x.movedim(1, 3)
    return x.reshape(rows, -1, *x.shape[2:])


def _gram(x: Tensor, count: int) -> Tensor:
    """Inner products over channels of the first lines of x (N, C, *S) with all of it: (N, *S, *S)."""
    some = x[:, :, :count]
    return torch.bmm(some.flatten(2).mT, x.flatten(2)).view(len(x), *some.shape[2:], *x.shape[2:])


def _patch_gram(pixels: Tensor, count: int, kernel: Sequence[int], geometry: Geometry) -> Tensor:
    """Inner products of the patches at the first ``count`` lines with all patches: (N, *O, *O)."""
    n = len(kernel)
    gram = _gram(pixels, geometry.read_size((count,) * n, kernel)[0])
    for axis in reversed(range(n)):
        row_dim = 1 + axis + (axis > 0)  # the images' dim is the second
        for dim in (row_dim, row_dim + n + 1):
            gram = windows_along(gram, dim, kernel[axis], geometry.stride[axis], geometry.dilation[axis])
        gram = reduce(torch.add, gram.diagonal(0, -2, -1).unbind(-1))
    return gram
