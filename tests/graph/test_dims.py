"""A flow says what it is right for: a careless one asks the data, and is never wrong in silence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import persample as ps
from persample.graph.layout import Block, Labels, Layout, Outcome, Shape
from persample.graph.ops.dims import by_letters, follow, keep, leading, only, whole
from persample.graph.ops.table import EVERY, FlowRule, Layouts, Undecided
from persample.graph.read.site import Site
from tests.graph.look_alikes import nothing_remembered  # noqa: F401
from tests.graph.table import plant
from tests.reference import assert_same, definition

B = 4


def first(shape: Shape) -> Block:
    """B samples in dim 0."""
    return Block(shape[0], torch.Size(shape[1:]).numel())


# The cotangent's shape, the operand's, and which of its dims are said to be which.
UNFIT: dict[str, tuple[Shape, Shape, Sequence[int | None]]] = {
    "an operand of lower rank, with as many rows as samples": ((B, 3, B), (B, 5), [0, None, None]),
    "an operand of higher rank": ((B, 3), (B, 3, 2), [0, 1]),
    "an operand that was broadcast": ((B, 3), (1, 3), [0, 1]),
    "another dim was": ((B, 3), (B, 1), [0, 1]),
    "too few dims": ((B, 3), (B, 3), [0]),
    "too many dims": ((B, 3), (B, 3), [0, 1, None]),
    "a dim that is not there": ((B, 3), (B, 3), [0, 2]),
    "a dim counted from the end": ((B, 3), (B, 3), [0, -1]),
    "one dim twice": ((B, B), (B, B), [0, 0]),
}


@pytest.mark.parametrize("what", UNFIT)
@pytest.mark.parametrize("how", [follow, keep])
def test_a_statement_that_does_not_fit_is_no_answer(what: str, how: Callable[..., Outcome]) -> None:
    shape, target, to_dims = UNFIT[what]
    for layout in (first(shape), Labels(2, torch.zeros([1] * len(shape), dtype=torch.long))):
        with pytest.raises(Undecided):
            how(layout, shape, target, to_dims)


@pytest.mark.parametrize(
    ("shape", "target", "to_dims", "rank", "layout"),
    [
        ((B, 3), (B, 3), [0, 1], None, Block(B, 3)),
        ((B, 3), (B, 2), [0, None], None, Block(B, 2)),
        ((B, 3), (5, B, 2), [1, None], 3, Block(B, 2)),
        ((B, 3), (3, B), [1, 0], None, Block(B, 1)),
        ((B, 3, 2), (B, 3), [0, 1, None], 2, Block(B, 3)),
    ],
)
def test_one_that_fits_is(
    shape: Shape, target: Shape, to_dims: Sequence[int | None], rank: int | None, layout: Layout
) -> None:
    assert follow(first(shape), shape, target, to_dims, rank) == layout


def test_a_dim_that_does_not_stay_is_left_to_the_data() -> None:
    assert follow(first((B, 3)), (B, 3), (B, 3), [None, 1]) is None


def test_one_samples_cotangents_are_one_samples() -> None:
    of = [Labels(B, torch.full((1, 1), i)) for i in (1, 1, 2)]
    assert whole(of[:2], 3) is not None
    assert whole(of[1:], 3) is None
    assert whole([None, first((B, 3))], 2) is None


# --- flows that somebody might write ---


def batches_stay(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Right for batches of matrices of which none was broadcast."""
    shape = site.shapes[0]
    return keep(only(layouts), shape, site.target(k), leading(shape, 1))


def rows_stay(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Right for the first of two matrices."""
    return keep(only(layouts), site.shapes[0], site.target(k), [0, None])


def columns_are_rows(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Right for the second of two matrices."""
    return keep(only(layouts), site.shapes[0], site.target(k), [None, 0])


CARELESS: dict[str, dict[int, FlowRule]] = {
    "batches stay": {EVERY: batches_stay},
    "rows stay, columns are rows": {0: rows_stay, 1: columns_are_rows},
    "letters of one rank": by_letters("bnm", {0: "bnd", 1: "bmd"}),
    "letters of another": by_letters("nm", {0: "nd", 1: "md"}),
    "letters in front": by_letters("...nm", {0: "...nd", 1: "...md"}),
}


def operands(*shapes: Shape) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
@pytest.mark.parametrize("shape", [(B, 3), (1, B, 3), (B, B, 3), (5, 3), (1, 5, 3), (1, 3), (1, 1, 3)], ids=str)
@pytest.mark.parametrize("data", [(B, 3), (B, B, 3), (B, 1, 3), (B, 5, 3)], ids=str)
@pytest.mark.parametrize("hidden", [False, True], ids=["weight", "computed"])
@pytest.mark.parametrize("flow", CARELESS)
def test_a_careless_flow_is_not_wrong(
    flow: str, hidden: bool, data: Shape, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of distances: operands that were broadcast, of lower rank, and with as many rows as there are samples."""
    plant(monkeypatch, "Cdist", flow=CARELESS[flow])
    if flow == "batches stay" and len(data) == len(shape) == 2:
        pytest.skip("what it says of two matrices is wrong by itself: the matrix of tests finds it")
    x, w, v = operands(data, shape, (3, 3))
    params = [w.requires_grad_(), v.requires_grad_()]
    seen = x @ v
    other = (w if not hidden else w + seen.detach().mean()) @ v
    distances = torch.cdist(seen, other)
    if distances.shape[0] != B:
        pytest.skip("dim 0 is not the samples'")
    losses = distances.square().flatten(1).sum(1)
    assert_same(ps.grad(losses, params, retain_graph=True), definition(losses, params))
