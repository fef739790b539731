"""Lower-triangular Toeplitz matrices by their first column: products, inverses, errors and sensitivities.

A column ``c`` of length n stands for the matrix with ``C[i, j] = c[i - j]``. Products of such matrices are products of
power series, cut off after n terms. All tensors are float64 on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor


def prefix_sums(n: int, momentum: float = 0.0) -> Tensor:
    """The workload: what SGD makes of n gradients, each of which counts in all later weights.

    Without momentum every gradient is added once; with it, it is added again and again, weaker every time.
    """
    if not momentum:
        return torch.ones(n, dtype=torch.float64, device="cpu")
    steps = torch.arange(1, n + 1, dtype=torch.float64, device="cpu")
    return (1 - torch.pow(momentum, steps)) / (1 - momentum)


def product(a: Tensor, b: Tensor) -> Tensor:
    """The first column of the product of two matrices of one size."""
    n = len(a)
    found: Tensor = torch.fft.irfft(torch.fft.rfft(a, n=2 * n) * torch.fft.rfft(b, n=2 * n), n=2 * n)
    return found[:n]


def inverse(c: Tensor) -> Tensor:
    """The first column of the inverse, by Newton's iteration, which doubles the number of right terms every time."""
    n, known = len(c), 1
    found = 1 / c[:1]
    while known < n:
        known = min(2 * known, n)
        found = torch.nn.functional.pad(found, (0, known - len(found)))
        found = 2 * found - product(found, product(found, c[:known]))
    return found


def mean_squared_error(c: Tensor, workload: Tensor) -> Tensor:
    """The mean over all steps of the variance of the noise in the workload's answers: ``||A C⁻¹||²_F / n``.

    Noise of standard deviation 1 goes through ``C⁻¹`` first.
    """
    n = len(c)
    decoder = product(workload, inverse(c))
    often = torch.arange(n, 0, -1, dtype=torch.float64, device="cpu")  # how many rows have each of them
    return (often * decoder.square()).sum() / n


def squared_sensitivity(c: Tensor, separation: int) -> Tensor:
    """How far the encoder ``C x`` moves, squared, with an example that adds at most 1 in every ``separation``-th step.

    For coefficients that are not negative and do not rise, the worst steps to take part in are 0, separation,
    2 · separation and so on (Kalinin and Lampert, 2024), and the worst contributions are the same in all of them.
    The same number holds for steps that are at least ``separation`` apart.
    """
    n = len(c)
    often = -(-n // separation)
    columns = torch.nn.functional.pad(c, (0, often * separation - n)).view(often, separation)
    return columns.cumsum(0).view(-1)[:n].square().sum()
