"""What the tests of expanded weights share: numbers, losses, small modules, and the comparison with the definition."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample as ps
from persample import call_for_per_sample_grads
from tests.reference import assert_same, definition, named

both_reductions = pytest.mark.parametrize("reduction", ["sum", "mean"])
sizes = pytest.mark.parametrize("B", [5, 1, 0])


def r(*shape: int, grad: bool = False) -> Tensor:
    """Random numbers."""
    return torch.randn(shape, dtype=torch.float64, requires_grad=grad)


def ids(*shape: int) -> Tensor:
    """Random rows of a table of six."""
    return torch.randint(6, shape)


def squares(out: Tensor, dim: int = 0) -> Tensor:
    """Losses (B,) of an output with the samples in `dim`."""
    return out.square().movedim(dim, 0).unsqueeze(-1).flatten(1).sum(1)


def total(losses: Tensor, reduction: str = "sum") -> Tensor:
    """The user's loss."""
    return losses.sum() if reduction == "sum" else losses.mean()


def says(*parts: object) -> str:
    """A pattern that finds all of these, in any order."""
    return "(?s)" + "".join(f"(?=.*{re.escape(str(part))})" for part in parts)


class Run(nn.Module):
    """A forward written in place, over the modules and parameters it is given."""

    def __init__(self, body: Callable[..., Any], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.body = body
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


class Object:
    """Holds tensors where nobody looks for them."""

    def __init__(self, logits: Tensor, hidden: Tensor) -> None:
        self.logits, self.hidden = logits, hidden


def taken(module: nn.Module) -> dict[str, Tensor]:
    """The stacks that parameters hold, which are removed; a trainable parameter without one is an error."""
    stacks = {}
    for name, p in named(module).items():
        assert getattr(p, "grad_sample", None) is not None, f"{name} has no grad_sample"
        assert p.grad is None, f"{name} has a grad"
        stacks[name] = p.grad_sample
        del p.grad_sample
    return stacks


def check(module: nn.Module, *args: Any, losses: Callable[[Any], Tensor] = squares, **options: Any) -> Any:
    """Call, backward, and compare with the definition on the plain module; the output of the call."""
    torch.manual_seed(0)
    want = definition(losses(module(*args)), module)
    torch.manual_seed(0)
    out = call_for_per_sample_grads(module, **options)(*args)
    total(losses(out), options.get("loss_reduction", "sum")).backward()
    assert_same(taken(module), want)
    return out


def check_reductions(module: nn.Module, x: Tensor, reduction: str) -> None:
    """Norms and clipped sums of a call are those of the definition's stacks, and parameters are left alone."""
    stacks = definition(squares(module(x)), module)
    call = call_for_per_sample_grads(module, loss_reduction=reduction, reductions=[ps.Norms(), ps.ClippedSum(1.0)])
    total(squares(call(x)), reduction).backward()
    norms, clipped = call.results()
    want = torch.cat([stack.flatten(1) for stack in stacks.values()], 1).norm(dim=1)
    assert_same([norms], {"0": want})
    factors = (1 / want).clamp(max=1)
    sums = {name: torch.einsum("n,n...->...", factors, stack)[None] for name, stack in stacks.items()}
    assert_same({name: clipped[name][None] for name in sums}, sums)
    assert all(getattr(p, "grad_sample", None) is None and p.grad is None for p in module.parameters())
