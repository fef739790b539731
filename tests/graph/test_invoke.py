"""Nodes called by hand: what they may do to their cotangents, and whose errors they raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import persample as ps
from persample.graph.read.invoke import call
from tests.graph.samples.leaves import w
from tests.reference import assert_same, definition

slow_paths_allowed = pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")


class Writes(torch.autograd.Function):
    """Twice its operand; its backward writes to the cotangent, which PyTorch does not forbid."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].mul_(2)


def centred(h: Tensor) -> Tensor:
    return h - h.mean(0)


PROGRAMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the losses": lambda x, p: Writes.apply((x * p).sum(1)),
    "one feature": lambda x, p: Writes.apply((x * p).sum(1, keepdim=True)).sum(1),
    "features": lambda x, p: Writes.apply(x * p).square().sum(1),
    "weights": lambda x, p: x @ Writes.apply(p),
    "weights, added": lambda x, p: (x + Writes.apply(p)).sum(1),
    "a number for all": lambda x, p: x.sum(1) + Writes.apply(p.sum()),
    "one for all": lambda x, p: x[:, 0] + Writes.apply(p.sum()[None].clone()),
    "above an interaction": lambda x, p: Writes.apply(centred((x * p).sum(1))),
    "below an interaction": lambda x, p: centred(Writes.apply((x * p).sum(1))),
    "a mean of all": lambda x, p: x.sum(1) * Writes.apply((x * p).sum(1)).mean(),
}


@slow_paths_allowed
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
@pytest.mark.parametrize("B", [1, 2, 5])
def test_a_function_may_write_to_its_cotangent(program: Callable[[Tensor, Tensor], Tensor], B: int) -> None:
    """Where the definition gives it memory of its own, so does this."""
    torch.manual_seed(0)
    x, p = torch.randn(B, 3, dtype=torch.float64), {"p": w(3)}
    want = definition(program(x, p["p"]), p)
    assert_same(ps.grad(program(x, p["p"]), p), want)
    assert_same({"p": ps.norms(program(x, p["p"]), p)}, {"p": want["p"].norm(dim=1)})


def test_a_backward_that_fails_is_named() -> None:
    """That of a group norm with a bias and no weight cannot compute the bias' gradient, which nobody asks for."""
    p = w(1, 1, 1)

    def made() -> tuple[Tensor, Tensor]:
        h = F.group_norm(p.expand(2, 2, 1, 1), 1, None, w(2))
        return h, torch.diagonal(h.flatten(1).t())

    h, losses = made()
    try:
        h.grad_fn(torch.ones_like(h), None, None)  # type: ignore[misc]
    except RuntimeError:
        said = r"backward of NativeGroupNorm \(results of shape \[\(2, 2, 1, 1\).*PyTorch says: tensor does not have"
        with pytest.raises(ps.UnsupportedError, match=said):
            ps.grad(losses, [p])
    else:  # in releases that can
        assert_same(ps.grad(made()[1], [p]), definition(made()[1], [p]))


def called(y: Tensor) -> None:
    assert y.grad_fn is not None
    call(y.grad_fn, [torch.ones_like(y)], [(y.grad_fn, 0)])


def test_a_freed_graph_is_pytorchs_error() -> None:
    y = w(3).exp()
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time") as found:
        called(y)
    assert not isinstance(found.value, ps.UnsupportedError)


def test_a_saved_tensor_that_was_changed_is_pytorchs_error() -> None:
    y = w(3).exp()
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as found:
        called(y)
    assert not isinstance(found.value, ps.UnsupportedError)
