"""Sketches: the answer from factors equals the definition, Lᵀ G R of gradients by autograd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import Tensor, nn

import persample as ps
from persample import influence as pi
from persample.factors.stacks import real_rows
from tests.case_library.registry import Case
from tests.cases import CASES, warnings_of
from tests.reference import definition, named
from tests.zoo import ENTRIES, FAST, Entry

SKETCHES = [pi.Blocks(2, 3, seed=1), pi.Blocks(None, 2), pi.Blocks(None, None), pi.Sparse(3, 2), pi.Masked(3)]
EXACT = pi.Blocks(None, None)
SOME = [case for case in CASES if not case.interacts and case.dtype == torch.float64][::12]


@pytest.fixture(autouse=True)
def _graphs_that_can_be_kept() -> Iterator[None]:
    """The definition goes through a graph once for every sample, which compiled ones refuse by default."""
    with torch._functorch.config.patch(donated_buffer=False):
        yield


def check(losses: Any, params: Any, sketch: pi.Sketch, rtol: float) -> None:
    """Sketches, and their inner products over all parameters, against those of gradients by autograd."""
    (got,) = ps.reduce(losses(), params, pi.Sketched(sketch))
    want = definition(losses(), params)
    expected = {name: sketch.of_stack(name, p, want[name]) for name, p in named(params).items()}
    rows, stacks = (_line(blocks) for blocks in (got, expected))
    gradients = _line(want)
    largest = max(1e-30, float(gradients.norm(dim=1).max()) if len(gradients) else 0.0)
    close = (
        50 * rtol * largest
    )  # a sketch may be zero but for rounding, so that all is relative to the largest gradient
    for name, p in named(params).items():
        assert got[name].shape == (len(want[name]), *sketch.block(p))
        assert _largest(got[name].double() - expected[name].double()) <= close
    assert _largest(rows @ rows.t() - stacks @ stacks.t()) <= 50 * close * max(largest, _largest(stacks))
    if sketch == EXACT:
        assert _largest(rows @ rows.t() - gradients @ gradients.t()) <= close * largest


def _line(blocks: dict[str, Tensor]) -> Tensor:
    """(B, D) in float64."""
    return torch.cat([real_rows(block).double() for block in blocks.values()], 1)


def _largest(t: Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0


@pytest.mark.parametrize("case", SOME, ids=str)
def test_sketches_of_cases_are_those_of_autograd(case: Case) -> None:
    for B in case.batches:
        params, losses = case.build(B)
        with warnings_of(case):
            for sketch in SKETCHES[:1] if case.batches[0] != B else SKETCHES:
                check(losses, params, sketch, case.rtol)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case(case: Case) -> None:
    for B in case.batches:
        params, losses = case.build(B)
        with warnings_of(case):
            for sketch in SKETCHES:
                check(losses, params, sketch, case.rtol)


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
@pytest.mark.parametrize(
    "entry",
    [pytest.param(e, id=e.name, marks=[] if e.name in FAST[:2] else [pytest.mark.slow]) for e in ENTRIES],
)
def test_every_model_of_the_zoo(entry: Entry) -> None:
    model, losses = entry.build()
    for sketch in (pi.Blocks(4, 4, seed=1), EXACT):
        check(losses, model, sketch, entry.rtol)


@pytest.mark.parametrize(
    ("shape", "block"),
    [((), (1, 1)), ((9,), (4, 1)), ((9, 8), (4, 4)), ((2, 3, 8), (4, 4)), ((9, 2, 3), (4, 4)), ((2, 3, 3, 3), (2, 4))],
)
@pytest.mark.parametrize("B", [0, 1, 3])
def test_parameters_of_any_rank(shape: tuple[int, ...], block: tuple[int, int], B: int) -> None:
    p = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    x = torch.randn(B, *shape, dtype=torch.float64)
    assert pi.Blocks(4, 4).block(p) == block
    for sketch in SKETCHES:
        check(lambda: (x * p).flatten(1).sum(1).sin() if shape else (x * p).sin(), [p], sketch, 1e-10)


def test_inner_products_are_kept_on_average() -> None:
    g = torch.randn(2, 12, 15, dtype=torch.float64)
    want, p = float((g[0] * g[1]).sum()), torch.empty(12, 15)
    for kind in (
        lambda s: pi.Blocks(4, 4, seed=s),
        lambda s: pi.Sparse(16, 2, seed=s),
        lambda s: pi.Masked(16, seed=s),
    ):
        products = []
        for seed in range(400):
            z = kind(seed).of_stack("w", p, g).flatten(1)
            products.append(float(z[0] @ z[1]))
        found = torch.tensor(products)
        assert abs(float(found.mean()) - want) < 4 * float(found.std()) / 20


def test_scales_multiply_gradients_first() -> None:
    w = nn.Parameter(torch.randn(6, 5))
    x, scale = torch.randn(3, 5), torch.rand(6, 5)
    losses = lambda: (x @ w.t()).square().sum(1)  # noqa: E731
    (got,) = ps.reduce(losses(), {"w": w}, pi.Sketched(pi.Blocks(2, 2), {"w": scale}))
    want = pi.Blocks(2, 2).of_stack("w", w, definition(losses(), {"w": w})["w"] * scale)
    assert torch.allclose(got["w"], want, atol=1e-5)


def test_several_losses_per_sample() -> None:
    w = nn.Parameter(torch.randn(6, 5, dtype=torch.float64))
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    losses: Tensor = (x @ w.t()).square().sum(2)
    (got,) = ps.reduce(losses, [w], pi.Sketched(pi.Blocks(2, 2)))
    want = definition((x @ w.t()).square().sum(2).flatten(), [w])["0"]
    assert torch.allclose(next(iter(got.values())).flatten(0, 1), pi.Blocks(2, 2).of_stack("0", w, want))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pi.Blocks(0, 4), "left must be a positive integer or None, not 0"),
        (lambda: pi.Sparse(True), "dim must be a positive integer, not True"),
        (lambda: pi.Masked(4, seed=0.5), r"seed must be an integer, not 0\.5"),
    ],
)
def test_bad_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
    with pytest.raises(TypeError, match=r"expected a sketch such as pi\.Blocks"):
        pi.Sketched(3)  # type: ignore[arg-type]
