"""The definition of a differentiable per-sample gradient: a loop of ``torch.autograd.grad``, and comparing with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import persample as ps
from tests.reference import Params, named

Stacks = dict[str, Tensor]
# From per-sample gradients, or what is computed of them, to a number that depends on every element.
Answer = Callable[[Tensor, Params], Any]


def loop(losses: Tensor, params: Params) -> Stacks:
    """Every sample's gradient, with its graph: one backward each."""
    wanted = named(params)
    rows = [torch.autograd.grad(loss, list(wanted.values()), create_graph=True, allow_unused=True) for loss in losses]
    return {
        name: torch.stack([_dense(row[k], p) for row in rows]) if rows else p.new_zeros(0, *p.shape)
        for k, (name, p) in enumerate(wanted.items())
    }


def _dense(g: Tensor | None, p: Tensor) -> Tensor:
    if g is None:
        return torch.zeros_like(p, requires_grad=False)
    return g.to_dense() if g.layout != torch.strided else g


def real_parts(t: Tensor) -> Tensor:
    """(n,): all numbers of a tensor, complex ones as pairs, with their graph."""
    return (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).reshape(-1).double()


def mixed(results: Iterable[Tensor], seed: int = 0) -> Tensor:
    """A number that depends on all elements of all results, on each in another way and not linearly."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64)
    for result in results:
        flat = real_parts(result)
        first, second = (torch.rand(len(flat), generator=generator, dtype=torch.float64) + 0.5 for _ in range(2))
        total = total + (first * flat + second * flat.square()).sum()
    return total


def derivatives(total: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Of a number with respect to the leaves: zeros where it does not depend on one."""
    if not total.requires_grad:
        return [torch.zeros_like(t) for t in leaves]
    found = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
    return [_dense(g, t).detach() for g, t in zip(found, leaves, strict=True)]


def assert_close(got: Sequence[Tensor], want: Sequence[Tensor], rtol: float) -> None:
    """Raise unless derivatives are within ``rtol`` of the largest one of their tensor, or nearly of all."""
    largest = max([float(t.abs().max()) for t in want if t.numel()], default=0.0)
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape
        if b.numel():
            same = a.isnan() & b.isnan()
            gap = float((a - b).masked_fill(same, 0).abs().max())
            scale = max(float(b.masked_fill(b.isnan(), 0).abs().max()), 1e-3 * largest, 1e-6)
            assert gap <= rtol * scale, f"derivative {k} of shape {tuple(b.shape)} is off by {gap:.2e} of {scale:.2e}"


def flat_rows(stacks: Mapping[str, Tensor]) -> Tensor:
    """(B, n): every sample's gradient as one vector of real numbers."""
    rows = [torch.view_as_real(s.resolve_conj()) if s.is_complex() else s for s in stacks.values()]
    return torch.cat([r.reshape(len(r), r[0].numel() if len(r) else 0).double() for r in rows], 1)


def data_of(program: Callable[[], Tensor]) -> list[Tensor]:
    """Tensors of floating-point numbers that a function refers to and that are no parameters."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()

    def visit(value: object) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            plain = type(value) is Tensor and value.is_leaf and not value.requires_grad
            if plain and value.is_floating_point() and value.layout == torch.strided:
                found[id(value)] = value
        elif isinstance(value, (list, tuple)):
            for one in value:
                visit(one)
        elif isinstance(value, dict):
            for one in value.values():
                visit(one)
        elif callable(value) and not isinstance(value, (type, nn.Module)):
            for cell in _cells(value):
                visit(cell)

    visit(program)
    return list(found.values())


def _cells(function: Any) -> Iterator[object]:
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not yet filled
            continue
    yield from getattr(function, "__defaults__", None) or ()


def verbs(
    losses: Tensor, params: Params, direction: Sequence[Tensor], **options: Any
) -> Iterator[tuple[str, list[Tensor]]]:
    """What every verb answers, as a list of tensors."""
    make: dict[str, Callable[[], Any]] = {
        "grad": lambda: ps.grad(losses, params, create_graph=True),
        "norms": lambda: ps.norms(losses, params, create_graph=True, **options),
        "clipped_sum": lambda: ps.clipped_sum(losses, params, 0.5, create_graph=True, **options),
        "dot": lambda: ps.dot(losses, params, direction, create_graph=True, **options),
        "gram": lambda: ps.gram(losses, params, create_graph=True, **options),
        "moments": lambda: ps.reduce(
            losses,
            params,
            ps.SecondMoment(),
            ps.Variance(),
            ps.WeightedSum(weights(losses)),
            create_graph=True,
            **options,
        ),
    }
    for name, answer in make.items():
        yield name, listed(answer())


def weights(losses: Tensor) -> Tensor:
    return torch.linspace(0.5, 2, len(losses), dtype=losses.dtype)


def listed(answer: Any) -> list[Tensor]:
    """All tensors of an answer."""
    if isinstance(answer, Tensor):
        return [answer]
    inside = answer.values() if isinstance(answer, Mapping) else answer
    return [t for one in inside for t in listed(one)]


def defined(stacks: Stacks, losses: Tensor, direction: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """What the verbs answer, by definition."""
    rows = flat_rows(stacks)
    norms = torch.linalg.vector_norm(rows, dim=1)
    along = flat_rows({str(i): v.unsqueeze(0) for i, v in enumerate(direction)})[0]
    clipped = (0.5 / norms.clamp(min=0.5)).unsqueeze(1)
    by_parameter = {name: flat_rows({name: stack}) for name, stack in stacks.items()}
    second = [_squares(s).mean(0) for s in stacks.values()]
    return {
        "grad": list(stacks.values()),
        "norms": [norms],
        "clipped_sum": [(clipped * r).sum(0) for r in by_parameter.values()],
        "dot": [rows @ along],
        "gram": [rows @ rows.t()],
        "moments": [
            *second,
            *[(_squares(s - s.mean(0)).sum(0) / (len(s) - 1)) for s in stacks.values()],
            *[(weights(losses).double().unsqueeze(1) * r).sum(0) for r in by_parameter.values()],
        ],
    }


def _squares(s: Tensor) -> Tensor:
    return (s.abs() if s.is_complex() else s).double().square()
