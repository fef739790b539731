"""The definition of a per-sample gradient, computed slowly, and the one comparator the tests use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

Params: TypeAlias = nn.Module | Mapping[str, Tensor] | Sequence[Tensor]

# Gradients below this size are compared absolutely: they are rounding noise of cancelling terms.
FLOOR = 1e-4


def named(params: Params) -> dict[str, Tensor]:
    """The trainable tensors of a module, a mapping or a sequence (keys "0", "1", ...), by name."""
    if isinstance(params, nn.Module):
        pairs = list(params.named_parameters())
    elif isinstance(params, Mapping):
        pairs = list(params.items())
    else:
        pairs = [(str(i), p) for i, p in enumerate(params)]
    return {name: p for name, p in pairs if p.requires_grad}


def definition(losses: Tensor, params: Params) -> dict[str, Tensor]:
    """d losses[i] / d p for every sample i, one backward each; the graph is retained."""
    wanted = named(params)
    rows = [_row(loss, wanted) for loss in losses.unbind()]
    return {
        name: torch.stack([row[name] for row in rows]) if rows else p.new_zeros((0, *p.shape))
        for name, p in wanted.items()
    }


def _row(loss: Tensor, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """One loss's gradients, dense, with zeros where the graph does not reach."""
    grads = torch.autograd.grad(loss, list(wanted.values()), retain_graph=True, allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g.to_dense() if g.layout != torch.strided else g
        for (name, p), g in zip(wanted.items(), grads, strict=True)
    }


def nodes_behind(losses: Tensor) -> set[Node]:
    """Every node of the graph behind `losses`."""
    stack, seen = [losses.grad_fn], set[Node]()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [child for child, _ in node.next_functions]
    return seen


def real(t: Tensor) -> Tensor:
    """Numbers in float64; complex ones as pairs along a last dim of their own."""
    return (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).detach().double()


def flat(stack: Tensor) -> Tensor:
    """(B, ...) -> (B, n): one parameter's gradients as rows of real numbers in float64."""
    return real(stack).reshape(len(stack), prod(real(stack).shape[1:]))


def vectors(stacks: Mapping[str, Tensor]) -> Tensor:
    """(B, n): every sample's gradient as one vector of real numbers in float64, all parameters side by side."""
    return torch.cat([flat(stack) for stack in stacks.values()], 1)


def assert_same(
    got: Mapping[str, Tensor] | Sequence[Tensor],
    want: Mapping[str, Tensor],
    rtol: float = 1e-8,
    nan: bool = False,
) -> None:
    """Raise unless both hold the same stacks: each row within `rtol` of its own largest element.

    Non-finite values fail, also equal ones, unless `nan` asks for them to be compared as values.
    """
    if not isinstance(got, Mapping):
        got = {str(i): g for i, g in enumerate(got)}
    if list(got) != list(want):
        raise AssertionError(f"parameters differ: got {list(got)}, want {list(want)}")
    problems = [f"{name}: {why}" for name in want if (why := _difference(got[name], want[name], rtol, nan))]
    if problems:
        raise AssertionError(f"{len(problems)} of {len(want)} parameters differ\n  " + "\n  ".join(problems))


def _difference(got: Tensor, want: Tensor, rtol: float, nan: bool) -> str | None:
    """What is wrong with one parameter's stack, or None."""
    for what in ("shape", "dtype", "device", "layout"):
        if getattr(got, what) != getattr(want, what):
            return f"{what} {getattr(got, what)}, want {getattr(want, what)}"
    if got.requires_grad:
        return "the result requires grad"
    if not got.numel():
        return None
    wide = torch.complex128 if got.is_complex() else torch.float64
    left, right = (t.detach().to(wide).unsqueeze(-1).flatten(1) for t in (got, want))
    if nan:
        # The same infinity or NaN in the same place counts as equal; the rest is compared as usual.
        same = ((left == right) & ~right.isfinite()) | (left.isnan() & right.isnan())
        left, right = left.masked_fill(same, 0), right.masked_fill(same, 0)
    if bad := _first_non_finite(left, right):
        return bad
    error = (left - right).abs().amax(1)
    scale = right.abs().amax(1).clamp_min(FLOOR)
    worst = int((error / scale).argmax())
    if bool((error <= rtol * scale).all()):
        return None
    return (
        f"largest error {float(error[worst]):.3e} in sample {worst}, "
        f"relative {float(error[worst] / scale[worst]):.3e} > rtol {rtol:.0e}"
    )


def _first_non_finite(got: Tensor, want: Tensor) -> str | None:
    """Names the first sample with a non-finite gradient on either side, or None."""
    for side, stack in (("result", got), ("reference", want)):
        finite = stack.isfinite().all(1)
        if not bool(finite.all()):
            return f"{side} not finite in sample {int((~finite).nonzero()[0])}"
    return None
