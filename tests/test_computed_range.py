"""Weights computed with numbers of any range and dtype: gradients are lost no sooner than autograd loses them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps
from tests.reference import assert_same, definition

B, D, P = 3, 4, 5


def linear(w: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, w).sum(-1).flatten(1).sum(1)


def made(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        *((torch.float64, s) for s in (1e-310, 1e-200, 1e-15, 1e15, 1e200)),
        *((torch.float32, s) for s in (1e-39, 1e-24, 1e-13, 1e13, 1e30)),
        *((torch.float16, s) for s in (1e-5, 1e-3, 1e3)),
    ],
)
@pytest.mark.parametrize("way", ["quotient", "product", "rows"])
def test_no_number_is_too_large_or_too_small(way: str, dtype: torch.dtype, number: float, T: int) -> None:
    """Cotangents and data bring gradients back to where they can be seen."""
    w = nn.Parameter(made(dtype, P, D))
    s = nn.Parameter(torch.full((P, 1) if way == "rows" else (), number, dtype=dtype))
    x, room = made(dtype, B, T, D, seed=1), torch.finfo(dtype).max ** 0.5
    back = min(max(number if way == "quotient" else 1 / number, 1 / room), room)

    def losses() -> Tensor:
        weight = w / s if way == "quotient" else w * s
        return linear(weight, x) * torch.tensor(back, dtype=dtype)

    with torch.no_grad():
        expected = {"w": w, "s": s}
    want, got = definition(losses(), expected), ps.grad(losses(), expected)
    for name, rows in want.items():
        for mine, theirs in zip(got[name].double(), rows.double(), strict=True):
            seen = theirs.isfinite()
            assert torch.equal(mine.isfinite(), seen)
            size = theirs[seen].abs().max() if bool(seen.any()) else torch.ones(())
            assert bool(((mine - theirs)[seen].abs() <= 64 * torch.finfo(dtype).eps * size).all()), name


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64, torch.bool])
def test_integers_divided_by_a_parameter(dtype: torch.dtype) -> None:
    mask = (made(torch.float64, P, D) > 0).to(dtype)
    s = nn.Parameter(made(torch.float64, P, D).abs() + 1)
    x = made(torch.float64, B, D)
    assert_same(ps.grad(linear(mask / s, x[:, None]), [s]), definition(linear(mask / s, x[:, None]), [s]))


@pytest.mark.parametrize("mode", ["trunc", "floor"])
def test_what_is_rounded_has_no_slope(mode: str) -> None:
    w, s, x = (
        nn.Parameter(made(torch.float64, P, D)),
        nn.Parameter(made(torch.float64, P, 1)),
        made(torch.float64, B, D),
    )
    for g in ps.grad(linear(torch.div(w, s, rounding_mode=mode), x[:, None]), [w, s]):
        assert not g.any()


def test_what_padding_skips_may_be_infinite() -> None:
    a, b = nn.Parameter(made(torch.float64, 6, 2)), nn.Parameter(made(torch.float64, 2, D))
    ids = torch.tensor([[1, 0], [2, 3], [0, 0]])
    scale = torch.ones(3, 2, 1).double()
    scale[0, 1] = float("inf")
    losses = (F.embedding(ids, a @ b, padding_idx=0) * scale).masked_fill(scale == float("inf"), 0).sum((1, 2))
    stacks = ps.grad(losses, [a, b], retain_graph=True)
    assert_same(stacks, definition(losses, [a, b]))
    direct = (F.embedding(ids, a @ b, padding_idx=0) * scale).sum((1, 2))
    for stack in ps.grad(direct, [a, b]):
        assert stack.isfinite().all()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_masks_that_are_not_finite(bad: float) -> None:
    """Zero times infinity is NaN, in rows that no sample reads as well."""
    table, ids = nn.Parameter(made(torch.float64, 6, D)), torch.tensor([[1, 2], [3, 3]])
    mask = torch.ones(6, 1).double()
    mask[0] = bad
    losses = F.embedding(ids, table * mask).sum((1, 2))
    want = definition(losses, [table])
    assert_same(ps.grad(losses, [table], retain_graph=True), want, nan=True)
    assert ps.norms(losses, [table]).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_terms_that_cancel_in_half_precision(dtype: torch.dtype) -> None:
    w, m = nn.Parameter(made(dtype, P, D)), nn.Parameter(made(dtype, P, 1))
    x = made(dtype, B, 2, D)

    def losses() -> Tensor:
        u = (w - w) + 0.05
        return linear(m * u / u.norm(dim=1, keepdim=True), x)

    (dw, dm) = ps.grad(losses(), [w, m])
    assert float(dw.abs().max()) <= 1e-3 * float(dm.abs().max())
