"""Tables of positions whose sizes coincide with the batch are no data of it: no false alarm at the gate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.expanded.helpers import Run, check, r

pytestmark = pytest.mark.usefixtures("float64")
C = 3


class Relative(nn.Module):
    """Attention with a T x T table of relative positions, trained or fixed."""

    def __init__(self, T: int, trained: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(C, C) for _ in range(3))
        self.table = nn.Parameter(r(T, T), requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).mT + self.table
        return scores.softmax(-1) @ self.v(x)


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "fixed"])
@pytest.mark.parametrize(("B", "T"), [(2, 4), (4, 4), (4, 8), (3, 4)])
def test_added_to_scores(B: int, T: int, trained: bool) -> None:
    check(Relative(T, trained), r(B, T, C))


@pytest.mark.parametrize(("B", "T"), [(2, 4), (4, 4), (4, 8), (3, 4)])
def test_a_fixed_transform_of_data(B: int, T: int) -> None:
    """Along the positions, before the first layer."""
    matrix = r(T, T)
    check(Run(lambda m, x: m.a(matrix @ x), a=nn.Linear(C, 2)), r(B, T, C))


@pytest.mark.parametrize(("B", "H"), [(2, 4), (4, 4), (3, 4)])
def test_decomposed_relative_positions(B: int, H: int) -> None:
    """As in SAM and MViTv2."""
    index = (torch.arange(H)[:, None] - torch.arange(H) + H - 1).reshape(H, H)

    def body(m: Run, x: Tensor) -> Tensor:
        q = m.a(x)
        return torch.einsum("bhwc,hkc->bhwk", q, m.positions[index])

    check(Run(body, a=nn.Linear(C, C), positions=r(2 * H - 1, C)), r(B, H, 5, C))


@pytest.mark.parametrize(("B", "T"), [(2, 4), (4, 4), (4, 8), (3, 4)])
def test_a_fixed_transform_of_activations(B: int, T: int) -> None:
    matrix = r(T, T)
    check(Run(lambda m, x: matrix @ m.a(x), a=nn.Linear(C, 2)), r(B, T, C))


@pytest.mark.parametrize(("B", "T"), [(2, 4), (4, 4), (3, 4)])
def test_a_group_norm_whose_cotangent_is_expanded(B: int, T: int) -> None:
    """Scale and shift of a sum: every element of the cotangent is one number."""
    check(nn.GroupNorm(2, 4), r(B, 4, T), losses=lambda y: y.sum((1, 2)))
