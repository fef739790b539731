"""What every reduction must give, computed in float64 from gradients that were written out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

import persample as ps
from tests.reference import FLOOR, Params, assert_same, flat, named

Stacks: TypeAlias = Mapping[str, Tensor]
Weigh: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Want:
    """Numbers, and the size of the terms they are made of: terms may cancel, and then so do digits."""

    value: Tensor
    size: Tensor
    dtype: torch.dtype
    powers: int = 1  # how often a gradient is a factor of them

    def beyond_range(self) -> bool:
        """May products of gradients overflow the dtype, so that the result need not be finite?"""
        return self.powers == 2 and bool((self.size > torch.finfo(self.dtype).max / 4).any())


@dataclass(frozen=True)
class WantEach(Want):
    """The same for every parameter: all of them flattened in a row, complex ones as pairs."""

    like: dict[str, tuple[torch.dtype, torch.Size]] = field(default_factory=dict)


@dataclass(frozen=True)
class WantClipped:
    """A clipped sum, and what it reports of its clipping: for all parameters, or for every group."""

    sums: WantEach
    norms: Any
    weights: Any


@dataclass(frozen=True)
class Ask:
    """A reduction, and what it must give."""

    reduction: ps.Reduction
    want: Any


class Expected:
    """Every reduction's result for the gradients in ``stacks``, {name: (B, *shape)}."""

    def __init__(self, stacks: Stacks, params: Params) -> None:
        self.params = named(params)
        rows = [flat(stacks[name]) for name in self.params]
        self.rows = torch.cat(rows, 1)  # (B, elements of all parameters)
        self.widths = torch.tensor([r.shape[1] for r in rows])
        self.places = {name: place for place, name in enumerate(self.params)}
        self.batch = len(self.rows)
        self.dtype = torch.float32
        for p in self.params.values():
            self.dtype = torch.promote_types(self.dtype, p.dtype.to_real())
        self.each = torch.stack([r.norm(dim=1) for r in rows])  # (parameters, B)
        self.whole = self.each.norm(dim=0)
        self.size = self.whole.clamp(min=FLOOR)

    def norm(self, names: Sequence[str]) -> Tensor:
        """(B,): over some parameters together."""
        if len(names) == 1:
            return self.each[self.places[names[0]]]
        return self.each[[self.places[name] for name in names]].norm(dim=0)

    def norms(self, names: Sequence[str]) -> Want:
        found = self.norm(names)
        return Want(found, found.clamp(min=FLOOR), self.dtype)

    def weighted_sum(self, weights: Tensor) -> WantEach:
        """Σ_i w_i g_i."""
        weights = weights.double()
        return self._sum(weights @ self.rows, weights.expand_as(self.each), 1)

    def clipped_sum(self, groups: Mapping[str, Sequence[str]], weigh: Mapping[str, Weigh]) -> WantClipped:
        """Σ_i w_i g_i with weights from the norms of every group."""
        weights = {key: weigh[key](self.norm(names)) for key, names in groups.items()}
        of = torch.stack([weights[key] for name in self.params for key in groups if name in groups[key]])
        sums = (of.repeat_interleave(self.widths, 0).t() * self.rows).sum(0)
        reports = {key: Want(w, w, self.dtype) for key, w in weights.items()}
        return WantClipped(self._sum(sums, of, 2), {key: self.norms(names) for key, names in groups.items()}, reports)

    def clipped_together(self, weigh: Weigh) -> WantClipped:
        """All parameters in one group."""
        weights = weigh(self.whole)
        sums = self._sum(weights @ self.rows, weights.expand_as(self.each), 2)
        return WantClipped(sums, Want(self.whole, self.size, self.dtype), Want(weights, weights, self.dtype))

    def _sum(self, row: Tensor, weights: Tensor, powers: int) -> WantEach:
        """A sum over samples, with weights (parameters, B); errors are relative to Σ_i |w_i| ‖g_i‖."""
        size = (weights.abs() * self.each.clamp(min=FLOOR)).sum(1).repeat_interleave(self.widths)
        return WantEach(row, size, self.dtype, powers, {n: (p.dtype, p.shape) for n, p in self.params.items()})

    def second_moment(self) -> WantEach:
        return self._moments(self.rows.square().mean(0))

    def variance(self, correction: int = 1) -> WantEach:
        divisor = self.batch - correction
        squares = (self.rows - self.rows.mean(0)).square().sum(0)
        return self._moments(squares / divisor if divisor > 0 else torch.full_like(squares, float("nan")))

    def _moments(self, row: Tensor) -> WantEach:
        """The moments of real and imaginary parts add."""
        parts, widths, like = [], [], {}
        for (name, p), part in zip(self.params.items(), row.split(self.widths.tolist()), strict=True):
            parts.append(part.view(-1, 2).sum(1) if p.is_complex() else part)
            widths.append(len(parts[-1]))
            like[name] = (torch.promote_types(p.dtype.to_real(), torch.float32), p.shape)
        size = self.each.clamp(min=FLOOR).square().sum(1) / max(self.batch, 1)
        return WantEach(torch.cat(parts), size.repeat_interleave(torch.tensor(widths)), self.narrowest(), 2, like)

    def narrowest(self) -> torch.dtype:
        """Of the parameters' dtypes, the one with the smallest range."""
        return min((p.dtype.to_real() for p in self.params.values()), key=lambda dtype: torch.finfo(dtype).max)

    def gram(self, other: Expected | None = None) -> Want:
        other = other or self
        return Want(self.rows @ other.rows.t(), torch.outer(self.size, other.size), self.dtype, 2)

    def dot(self, directions: Stacks) -> Want:
        """With directions {name: (k, *shape)}."""
        vectors = torch.cat([flat(directions[name]) for name in self.params], 1)
        return Want(self.rows @ vectors.t(), torch.outer(self.size, vectors.norm(dim=1)), self.dtype)

    def project(self, projection: ps.Projection) -> Want:
        """With every parameter's matrix (n, dim) written out."""
        each = [dense_projection(projection, name, p.shape, p.is_complex()) for name, p in self.params.items()]
        matrix = torch.cat(each)
        return Want(self.rows @ matrix, torch.outer(self.size, matrix.norm(dim=0)), self.dtype)


@lru_cache(maxsize=1000)
def dense_projection(projection: ps.Projection, name: str, shape: tuple[int, ...], is_complex: bool) -> Tensor:
    """(n, dim): the matrix of one parameter. Of the "kronecker" kind, only proper matrices have two sides."""
    n, m = shape[0] if shape else 1, prod(shape[1:]) * (2 if is_complex else 1)
    if projection.kind == "kronecker" and min(n, m) > 1:
        left, right = projection.two_sides(name, n, m)
        return torch.kron(left.double(), right.double())
    blocks = [projection.rows(name, start, stop) for start, stop in projection.blocks(n * m)]
    return torch.cat([torch.zeros(0, projection.dim), *blocks]).double()


def questions(stacks: Stacks, params: Params, variants: bool = True) -> dict[str, Ask]:
    """Every reduction by name, with bounds, weights and directions that suit the gradients, in all variants or few."""
    x, tensors = Expected(stacks, params), named(params)
    names, rng = list(tensors), torch.Generator().manual_seed(0)
    alone = {name: [name] for name in names}
    bound, each = _bound(x, names), _bounds(x, alone)
    weights = torch.randn(x.batch, generator=rng)
    three = _directions(tensors, 3, rng)
    asked = {
        "norms": Ask(ps.Norms(), x.norms(names)),
        "norms per parameter": Ask(ps.Norms("parameter"), {name: x.norms([name]) for name in names}),
        "clipped": Ask(ps.ClippedSum(bound), x.clipped_together(_clip(bound))),
        "clipped per parameter": Ask(
            ps.ClippedSum(each, per="parameter"), x.clipped_sum(alone, {n: _clip(c) for n, c in each.items()})
        ),
        "weighted": Ask(ps.WeightedSum(weights), x.weighted_sum(weights)),
        "second moment": Ask(ps.SecondMoment(), x.second_moment()),
        "variance": Ask(ps.Variance(), x.variance()),
        "gram": Ask(ps.Gram(), x.gram()),
        "three dots": Ask(ps.Dot(three), x.dot(three)),
        "stack": Ask(ps.Stack(), dict(stacks)),
        "projected from two sides": _projected(x, ps.Projection(6, kind="kronecker")),
    }
    return asked | _variants(x, rng) if variants else asked


def _variants(x: Expected, rng: torch.Generator) -> dict[str, Ask]:
    """Other ways to ask the same things."""
    names = list(x.params)
    groups = {"0": names[::2], "1": names[1::2]}  # the second is empty if there is one parameter
    bounds = _bounds(x, groups)
    one = _directions(x.params, 1, rng)
    dot = x.dot(one)
    return {
        "norms of groups": Ask(ps.Norms(list(groups.values())), {key: x.norms(g) for key, g in groups.items()}),
        "clipped by groups": Ask(
            ps.ClippedSum(list(bounds.values()), per=list(groups.values())),
            x.clipped_sum(groups, {n: _clip(c) for n, c in bounds.items()}),
        ),
        "normalised": Ask(ps.ClippedSum(2.0, gamma=0.1), x.clipped_together(lambda n: 2.0 / (n + 0.1))),
        "weighted by norms": Ask(ps.ClippedSum(weights=_decaying), x.clipped_together(_decaying)),
        "dot": Ask(ps.Dot([v[0] for v in one.values()]), Want(dot.value[:, 0], dot.size[:, 0], dot.dtype)),
        "projected": _projected(x, ps.Projection(5)),
        "projected by gaussians": _projected(x, ps.Projection(3, seed=7, kind="gaussian")),
        "variance of all": Ask(ps.Variance(correction=0), x.variance(0)),
    }


def _projected(x: Expected, projection: ps.Projection) -> Ask:
    return Ask(ps.Project(projection), x.project(projection))


def _bound(x: Expected, names: Sequence[str]) -> float:
    """A bound that clips some samples and not others, where they differ."""
    norms = x.norm(names)
    return max(0.8 * float(norms.mean()), FLOOR) if len(norms) else 1.0


def _bounds(x: Expected, groups: Mapping[str, Sequence[str]]) -> dict[str, float]:
    return {key: _bound(x, names) for key, names in groups.items()}


def _clip(bound: float) -> Weigh:
    return lambda norms: (bound / norms).clamp(max=1)


def _decaying(norms: Tensor) -> Tensor:
    return 1 / (1 + norms)


def _directions(tensors: Stacks, k: int, rng: torch.Generator) -> dict[str, Tensor]:
    dtypes = {name: torch.complex64 if p.is_complex() else torch.float32 for name, p in tensors.items()}
    return {
        name: torch.randn((k, *p.shape), generator=rng, dtype=dtypes[name]).to(p.dtype) for name, p in tensors.items()
    }


def assert_result(got: Any, want: Any, rtol: float) -> None:
    """Compare the result of one reduction, in whatever container it comes, with what was expected."""
    if isinstance(want, WantClipped):
        assert got.clipping.dropped == []
        assert_result(got.clipping.norms, want.norms, rtol)
        assert_result(got.clipping.weights, want.weights, rtol)
        want = want.sums
    if isinstance(want, Want) and not isinstance(want, WantEach):
        assert (got.dtype, got.shape, got.requires_grad) == (want.dtype, want.value.shape, False)
        return _assert_near(got, want, rtol)
    names = list(want.like if isinstance(want, WantEach) else want)
    if not isinstance(got, Mapping):
        assert isinstance(got, tuple), f"a {type(got).__name__}"
        got = dict(zip(names, got, strict=True))
    assert list(got) == names
    if isinstance(want, WantEach):
        for name, like in want.like.items():
            assert (got[name].dtype, got[name].shape) == like, f"{name}: {got[name].dtype} {tuple(got[name].shape)}"
            assert not got[name].requires_grad
        return _assert_near(torch.cat([flat(g.unsqueeze(0))[0] for g in got.values()]), want, rtol)
    if isinstance(next(iter(want.values())), Tensor):
        return assert_same(got, want, rtol)
    for name in names:
        assert_result(got[name], want[name], rtol)


def _assert_near(got: Tensor, want: Want, rtol: float) -> None:
    error = (got - want.value).abs()
    if bool(error.isnan().any()):
        error = torch.where(got.isnan() & want.value.isnan(), 0, error)
    allowed = want.powers * rtol * want.size
    if not bool((error <= allowed).all()):
        worst = int((error / allowed).nan_to_num(torch.inf).argmax())
        found, meant = (float(t.flatten()[worst]) for t in (got, want.value))
        raise AssertionError(f"{int((error > allowed).sum())} elements, {found} for {meant}, rtol {rtol:.0e}")
