"""Mistakes that a type checker should find before they are run: every marked line, and no other, is an error."""

from __future__ import annotations

from torch import Tensor, nn

import persample as ps


def mistakes(losses: Tensor, model: nn.Module) -> None:
    ps.grad(losses, model).append(losses)  # wrong: a dict
    ps.grad(losses, 3)  # wrong: no parameters
    ps.grad(losses, model, retain=True)  # wrong: no such argument
    ps.ClippedSum(1.0, nonfinite="ignore")  # wrong: raise or drop
    ps.reduce(losses, model, "norms")  # wrong: no reduction
    ps.Monitor(model, every="ten")  # wrong: a number
    print(ps.Monitor(model).backward(losses).values)  # wrong: may be None
