"""Toeplitz matrices by their first column, against dense ones and all ways to take part."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from persample.dp.correlated import toeplitz
from tests.dp.correlated import dense

SIZES = [1, 2, 3, 7, 16, 33]


def column(n: int, seed: int = 0) -> Tensor:
    """Positive, not rising, beginning with 1."""
    falling = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).sort(descending=True)[0]
    falling[0] = 1
    return falling


@pytest.mark.parametrize("n", SIZES)
def test_products_and_inverses(n: int) -> None:
    a, b = column(n, 1), column(n, 2)
    np.testing.assert_allclose(dense.matrix(toeplitz.product(a, b)), dense.matrix(a) @ dense.matrix(b), atol=1e-12)
    np.testing.assert_allclose(
        dense.matrix(toeplitz.inverse(a)), np.linalg.inv(dense.matrix(a)), atol=1e-10, rtol=1e-10
    )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("n", SIZES)
def test_the_workload_is_what_sgd_does(n: int, momentum: float) -> None:
    p = torch.zeros(n, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([p], lr=1.0, momentum=momentum)
    after = []
    for step in range(n):
        p.grad = torch.eye(n, dtype=torch.float64)[step]
        optimizer.step()
        after.append(-p.detach().clone())
    workload = dense.matrix(toeplitz.prefix_sums(n, momentum))
    np.testing.assert_allclose(torch.stack(after).numpy(), workload, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("n", SIZES)
def test_the_mean_squared_error(n: int, momentum: float) -> None:
    c, a = column(n), toeplitz.prefix_sums(n, momentum)
    decoder = dense.matrix(a) @ np.linalg.inv(dense.matrix(c))
    assert float(toeplitz.mean_squared_error(c, a)) == pytest.approx(np.square(decoder).sum() / n, rel=1e-9)


@pytest.mark.parametrize("separation", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("n", [1, 2, 7, 12])
def test_the_sensitivity_is_that_of_the_worst_way_to_take_part(n: int, separation: int) -> None:
    for seed in range(5):
        c = column(n, seed)
        among = list(dense.patterns(n, separation))
        worst = dense.squared_sensitivity(dense.matrix(c), among)
        assert float(toeplitz.squared_sensitivity(c, separation)) == pytest.approx(worst, rel=1e-12)
        cyclic = [list(range(first, n, separation)) for first in range(min(n, separation))]
        assert dense.squared_sensitivity(dense.matrix(c), cyclic) == pytest.approx(worst, rel=1e-12)


def test_no_vectors_of_norm_one_move_the_encoder_further() -> None:
    """Contributions are vectors, and different in every step."""
    n, separation = 12, 3
    c = column(n)
    most = float(toeplitz.squared_sensitivity(c, separation))
    generator = np.random.default_rng(0)
    for steps in dense.patterns(n, separation):
        moves = np.zeros((n, 4))
        moves[steps] = generator.standard_normal((len(steps), 4))
        moves[steps] /= np.linalg.norm(moves[steps], axis=1, keepdims=True)
        assert np.square(dense.matrix(c) @ moves).sum() <= most * (1 + 1e-12)
