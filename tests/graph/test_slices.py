"""Copies into a part of a tensor are seen for what they are, and nothing else is taken for one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import persample as ps
from persample.graph.read.slices import Copied, copied
from tests.reference import assert_same, definition


def leaf(*shape: int) -> Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))
    ).requires_grad_()


def written(write: Callable[[Tensor], None], *shape: int) -> Tensor:
    whole = leaf(*shape) * 1
    write(whole)
    return whole


class TinyMixing(torch.autograd.Function):
    """Changes its first operand in place; its backward mixes rows, by less than rounding shows."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, part: Tensor, other: Tensor) -> Tensor:
        ctx.mark_dirty(part)  # type: ignore[attr-defined]
        return part.copy_(other)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (g,) = grads
        return torch.zeros_like(g), g + 1e-30 * g.flip(0)


def test_where_a_copy_lies() -> None:
    source = leaf(2, 3)

    def write(whole: Tensor) -> None:
        whole[1:3] = source

    assert copied(written(write, 4, 3).grad_fn) == Copied((3, 1), (2, 3), (3, 1), 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "write",
    [
        lambda whole: whole[1:3].mul_(leaf(2, 3)),
        lambda whole: whole[1:3].add_(leaf(2, 3)),
        lambda whole: whole[1:3].cumsum_(0),
        lambda whole: TinyMixing.apply(whole[1:3], leaf(2, 3)),
    ],
    ids=["mul", "add", "cumsum", "a custom Function"],
)
def test_what_is_no_copy(write: Callable[[Tensor], None]) -> None:
    assert copied(written(write, 4, 3).grad_fn) is None  # type: ignore[arg-type]


def rows(whole: Tensor, w: Tensor, x: Tensor) -> None:
    for i in range(4):
        whole[i] = x[i] @ w


def several(whole: Tensor, w: Tensor, x: Tensor) -> None:
    whole[:2], whole[2:] = x[:2] @ w, x[2:] @ w
    whole[1:3, ::2] = (x[1:3] @ w)[:, ::2] * 2


def broadcast(whole: Tensor, w: Tensor, x: Tensor) -> None:
    whole[1] = (x[1] @ w)[0]


def of_another_dtype(whole: Tensor, w: Tensor, x: Tensor) -> None:
    whole[1:] = (x[1:] @ w).float().exp()


def samples_that_meet(whole: Tensor, w: Tensor, x: Tensor) -> None:
    whole.copy_(x @ w)
    whole[2:] = whole[1:3].clone()


WRITES = [rows, several, broadcast, of_another_dtype]


@pytest.mark.parametrize("make", [torch.zeros, lambda *n: torch.zeros(*reversed(n)).t()], ids=["rows", "columns"])
@pytest.mark.parametrize("write", WRITES)
def test_samples_that_are_copied(write: Callable[[Tensor, Tensor, Tensor], None], make: Callable[..., Tensor]) -> None:
    w, x = leaf(5, 3), torch.randn(4, 5, dtype=torch.float64)
    whole = make(4, 3).double()
    write(whole, w, x)
    losses = whole.tanh().sum(1)
    assert_same(ps.grad(losses, {"w": w}, retain_graph=True, independent=True), definition(losses, {"w": w}), 1e-6)


def test_samples_that_meet_are_noticed() -> None:
    w, x, whole = leaf(5, 3), torch.randn(4, 5, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.float64)
    samples_that_meet(whole, w, x)
    losses = whole.tanh().sum(1)
    with pytest.raises(ps.InteractionError, match="samples interact in CopySlices"):
        ps.grad(losses, {"w": w}, retain_graph=True, independent=True)
    with pytest.warns(ps.PerformanceWarning, match="samples interact"):
        assert_same(ps.grad(losses, {"w": w}, retain_graph=True), definition(losses, {"w": w}), 1e-8)


def test_nobody_imports_a_compiler_for_it() -> None:
    program = """
import sys, torch
from persample.graph.read.slices import copied
whole = torch.ones(4, requires_grad=True) * 1
whole[1:3] = torch.ones(2, requires_grad=True)
assert copied(whole.grad_fn) is not None
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
