"""The encoder with the least expected error of a kind: banded Toeplitz, or buffered linear Toeplitz (BLT).

What is minimised is the mean squared error of the workload's answers times the squared sensitivity, neither of which
alone means anything: a larger encoder has more sensitivity and less error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from .toeplitz import mean_squared_error, squared_sensitivity

_ROUNDS = 500  # of L-BFGS at most; tens are enough in general
_NO_WAY = 1e3  # the logarithm of an error where a step went too far: the inverse of the encoder grows beyond float64
_DIGITS = 6  # of coefficients: machines that differ in the last bits should come to the same encoder

Coefficients = tuple[float, ...]


def banded(bands: int, workload: Tensor, start: Sequence[float] = ()) -> Coefficients:
    """The first ``bands`` coefficients of an encoder that has no others, where an example takes part once in them.

    ``start`` is a solution for fewer bands, if there is one.
    """
    n = len(workload)

    def column(free: Tensor) -> Tensor:
        return pad(torch.cat([torch.ones_like(free[:1]), free]), (0, n - bands))

    def loss(free: Tensor) -> Tensor:
        c = column(free)
        return (c.square().sum() * mean_squared_error(c, workload)).log()

    if bands == 1:
        return (1.0,)
    first = torch.tensor([*start[1:], *_square_root(bands)[max(len(start), 1) :]], dtype=torch.float64, device="cpu")
    return 1.0, *_rounded(_least(loss, first))


def _square_root(bands: int) -> list[float]:
    """The first coefficients of the square root of prefix sums, which has the least error if all are kept."""
    found = [1.0]
    for k in range(1, bands):
        found.append(found[-1] * (2 * k - 1) / (2 * k))
    return found


def buffered(buffers: int, workload: Tensor, separation: int) -> tuple[Coefficients, Coefficients]:
    """Scales and decays of a BLT encoder, for examples that take part in every ``separation``-th step.

    Its coefficients are 1 and then the sums of ``scale · decay^(t - 1)``: positive, and they never rise.
    """
    n = len(workload)

    def loss(free: Tensor) -> Tensor:
        c = buffered_column(*_scales_and_decays(free), n)
        return (squared_sensitivity(c, separation) * mean_squared_error(c, workload)).log()

    horizon = max(min(n, 10 * separation), 4)
    slow = torch.logspace(-0.5, -math.log10(horizon), buffers, dtype=torch.float64, device="cpu")  # 1 - decay
    start = torch.cat([slow.new_zeros(1), slow.log() / 2, torch.logit(1 - slow)])
    scales, decays = _scales_and_decays(_least(loss, start))
    order = torch.argsort(decays)
    return _rounded(scales[order], down=True), _rounded(decays[order], down=True)


def _scales_and_decays(free: Tensor) -> tuple[Tensor, Tensor]:
    """Positive scales that add up to less than 1, so that coefficients never rise, and decays below 1."""
    shares, decays = free[1:].chunk(2)
    return free[0].sigmoid() * shares.softmax(0), decays.sigmoid()


def buffered_column(scales: Tensor, decays: Tensor, n: int) -> Tensor:
    """The first n coefficients of a BLT."""
    powers = torch.arange(n - 1, dtype=torch.float64, device="cpu")
    return torch.cat([scales.new_ones(1), (scales[:, None] * decays[:, None] ** powers).sum(0)])


def _least(loss: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Where the loss is least, by L-BFGS."""
    with torch.inference_mode(False), torch.enable_grad():
        free = start.clone().requires_grad_()
        optimizer = torch.optim.LBFGS(
            [free],
            max_iter=_ROUNDS,
            tolerance_grad=1e-8,
            tolerance_change=1e-10,
            history_size=20,
            line_search_fn="strong_wolfe",
        )

        def evaluate() -> Tensor:
            optimizer.zero_grad()
            found = loss(free)
            found.backward()
            assert free.grad is not None
            if bool(found.isfinite()) and bool(free.grad.isfinite().all()):
                return found
            free.grad.zero_()
            return torch.full_like(found, _NO_WAY)

        optimizer.step(evaluate)
    return free.detach()


def _rounded(values: Tensor, down: bool = False) -> Coefficients:
    """To a few digits; downward where a sum must stay below 1."""
    digits = values * 10.0**_DIGITS
    return tuple(((digits.floor() if down else digits.round()) / 10.0**_DIGITS).tolist())
