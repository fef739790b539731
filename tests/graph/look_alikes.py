"""Programs whose graphs look alike and are not, and what the tests of recalled plans have in common."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import persample as ps
from persample.graph import remember
from persample.graph.read.roots import Roots
from tests.reference import Params, assert_same, definition, named

N = 4
Program = Callable[[], tuple[Params, Tensor]]  # parameters and losses


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    remember._PLANS.clear()
    yield
    remember._PLANS.clear()


def data(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same numbers for the same shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def leaf(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """A parameter."""
    return data(*shape, seed=seed, dtype=dtype).requires_grad_()


def look(losses: Tensor, params: Params) -> Hashable:
    """What a graph has in common with those that look like it."""
    roots = Roots.of_losses(losses)
    return remember.key_of(roots.read(), roots, list(named(params).values()))


def is_recalled(losses: Tensor, params: Params) -> bool:
    """Is there a plan for this graph?"""
    key = look(losses, params)
    return key is not None and remember.recall(key, Roots.of_losses(losses).read()) is not None


def check(program: Program, rtol: float = 1e-8) -> None:
    """Compare with the definition."""
    params, losses = program()
    want = definition(losses, params)
    assert_same(ps.grad(losses, params), want, rtol=rtol)


LOOK_ALIKES: dict[str, Mapping[Any, Program]] = {}
Step = Callable[..., Tensor]


def on_cubes(step: Step, dims: tuple[int, int] = (1, 2)) -> tuple[Params, Tensor]:
    """A step on (N, N, N) between two layers, with a parameter along every dim; losses are sums over two dims."""
    before, after, row, column = leaf(N, N), leaf(N, N, seed=2), leaf(N, 1), leaf(N, 1, 1)
    h = step((data(N, N, N) @ before).tanh() * column + row)
    return [before, after, row, column], ((h @ after).sin() * data(N, N, N, seed=3)).sum(dims)


def steps(name: str, choices: Sequence[Any], step: Step) -> None:
    """Register a step with several choices of what it is given."""
    LOOK_ALIKES[name] = {choice: lambda c=choice: on_cubes(lambda h: step(h, c)) for choice in choices}


PAIRS = [(0, 1), (0, 2), (1, 2), (2, 0)]
TURNS = {"same": [0, 1, 2, 3], "turned": [1, 2, 3, 0], "one": [2, 2, 2, 2]}
EYES = {"eye": torch.eye(N).double(), "any": data(N, N, seed=4), "none": torch.zeros(N, N).double()}

LOOK_ALIKES["losses"] = {d: lambda d=d: on_cubes(lambda h: h, d) for d in [(1, 2), (0, 2), (0, 1)]}
steps("transpose", PAIRS, lambda h, d: h.transpose(*d))
steps("permute", [(0, 2, 1), (1, 2, 0), (2, 0, 1)], lambda h, d: h.permute(d))
steps("transpose twice", PAIRS, lambda h, d: h.transpose(*d).sin().transpose(*d))
steps("softmax", range(3), lambda h, d: h.softmax(d))
steps("cumsum", range(3), lambda h, d: h.cumsum(d))
steps("flip", [0, 1, (0, 2)], lambda h, d: h.flip(d))
steps("roll", [(1, 0), (1, 1), (2, 1)], lambda h, d: h.roll(*d))
steps("pad", range(3), lambda h, d: F.pad(h, [0, 0] * d + [1, -1]))
steps("unfold", range(3), lambda h, d: h.unfold(d, 1, 1).squeeze(-1))
steps("fourier", [(0,), (1,), (2,), (0, 2)], lambda h, d: torch.fft.fftn(h, dim=d).real)
steps("sum", range(3), lambda h, d: h + h.sum(d).unsqueeze(0))
steps("sum of two", PAIRS, lambda h, d: h * h.sum(d).unsqueeze(1))
steps("amax", range(3), lambda h, d: h + h.amax(d).unsqueeze(1))
steps("var", range(3), lambda h, d: h + h.var(d).unsqueeze(2))
steps("mean", range(3), lambda h, d: h - h.mean(d).unsqueeze(1))
steps("norm", range(3), lambda h, d: h + torch.linalg.vector_norm(h, dim=d).unsqueeze(1))
steps("select", [(0, 1), (0, 2), (1, 1), (2, 3)], lambda h, d: h.select(*d).unsqueeze(1) * h)
steps("slice", [0, 1, 2], lambda h, at: torch.cat([h[at : at + 2], h[2:]]))
steps("slice of columns", [0, 1, 2], lambda h, at: torch.cat([h[:, at : at + 2], h[:, 2:]], 1))
steps("unbind and stack", [(0, 0), (0, 1), (1, 0), (2, 1)], lambda h, d: torch.stack(h.unbind(d[0]), d[1]))
steps("split and cat", range(3), lambda h, d: torch.cat(h.split(N, d), d))
steps("diagonal", PAIRS, lambda h, d: h.diagonal(0, *d).unsqueeze(1) * h)
steps("expand", range(3), lambda h, d: h.select(d, 0).unsqueeze(1).expand(N, N, N) * h)
steps("rows", TURNS, lambda h, c: h[torch.tensor(TURNS[c])])
steps("columns", TURNS, lambda h, c: h.index_select(1, torch.tensor(TURNS[c])))
steps("matrix", EYES, lambda h, c: torch.tensordot(EYES[c], h, 1))
steps("masks of both", EYES, lambda h, c: (h * EYES[c]).sum(2).unsqueeze(1) * h)
steps("two ways", EYES, lambda h, c: h * EYES[c].unsqueeze(2) + h.transpose(0, 1) * EYES[c].unsqueeze(2))
steps("slope", [0.1, 0.5, 1.0], lambda h, a: F.leaky_relu(h, a))
steps("power", [2, 3, 2.0], lambda h, a: h**a)
steps("approximation", ["none", "tanh"], lambda h, a: F.gelu(h, approximate=a))
steps("clamp", [0.1, 0.5], lambda h, a: h.clamp(-a, a))
steps("in place", range(3), lambda h, d: h.clone().mul_(h.softmax(d)))
steps("written", range(3), lambda h, d: _written(h, d))
steps("dropout", [0.2, 0.7], lambda h, p: _dropped(h, p))
steps("scalar", [1, 2.5, -1], lambda h, a: torch.add(h, leaf(N), alpha=a) * a)


def _written(h: Tensor, d: int) -> Tensor:
    copy = h.clone()
    copy.select(d, 1).copy_(h.select(0, 1))
    return copy


def _dropped(h: Tensor, p: float) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return F.dropout(h, p)


def uses(name: str, choices: Sequence[Any], shapes: Sequence[tuple[int, ...]], use: Step) -> None:
    """Register a use of parameters of these shapes; the result's first dim holds the samples."""

    def program(choice: Any) -> tuple[Params, Tensor]:
        params = [leaf(*shape, seed=5 + i) for i, shape in enumerate(shapes)]
        return params, use(choice, *params).sin().flatten(1).sum(1)

    LOOK_ALIKES[name] = {choice: lambda c=choice: program(c) for choice in choices}


X, IDS = data(N, N), {seed: torch.randint(N, (N, N), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)}
GEOMETRIES = [(2, 1, 1), (1, 0, 1), (3, 2, 1), (1, 1, 2)]  # stride, padding, dilation: 4 places become 2
uses("addmm", [(1, 1), (0.5, 2), (0, 3)], [(N,), (N, N)], lambda c, b, w: torch.addmm(b, X, w, beta=c[0], alpha=c[1]))
uses("added in columns", [0, 1], [(N, 1), (1, N)], lambda c, a, b: X * a + (X * b).transpose(c, 1))
uses("part of a weight", [0, 1, 2], [(N, N)], lambda c, w: X[:, :2] @ w[:, c : c + 2].t())
uses("row of a weight", [(0, 0), (0, 3), (1, 2)], [(N, N)], lambda c, w: X * w.select(*c))
uses("turned weight", [(0, 1), (1, 0), (1, 1)], [(N, N)], lambda c, w: X @ w.transpose(*c))
uses("rolled weight", [(1, 0), (1, 1), (3, 1)], [(N, N)], lambda c, w: X @ w.roll(*c))
uses("padding", [-1, 0, 2], [(N, 3)], lambda c, w: F.embedding(IDS[0], w, padding_idx=c if c >= 0 else None))
uses("frequencies", [False, True], [(N, 3)], lambda c, w: F.embedding(IDS[0], w, scale_grad_by_freq=c))
uses("ids", [0, 1], [(N, 3)], lambda c, w: F.embedding(IDS[c], w))
uses("bags", ["sum", "mean"], [(N, 3)], lambda c, w: F.embedding_bag(IDS[0], w, mode=c))
uses("geometry", GEOMETRIES, [(N, N, 3), (N,)], lambda c, w, b: F.conv1d(data(N, N, N), w, b, *c))
uses("direction", [F.conv1d, F.conv_transpose1d], [(N, N, 3)], lambda c, w: c(data(N, N, N), w, padding=1))
uses("squares", [False, True], [(N, N)], lambda c, w: (data(N, N, N) @ w).transpose(0, 1 if c else 2))
