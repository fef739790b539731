"""Every case with several losses per sample: each reduction is what the definition's gradients, written out, give.

Most cases end in `score`, which is replaced by three functions of what it is given; the losses of the others stand
beside functions of themselves.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import persample as ps
from persample.graph.several import positions_meet
from persample.reductions.clipping import ClippedDict, ClippedTuple
from tests import case_library
from tests.cases import CASES, Case, untouched
from tests.reductions.expected import Stacks, questions
from tests.reductions.test_cases import check_results
from tests.reference import Params, definition, named

pytestmark = pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")

EACH = [
    pytest.param(case, case.batches[0], id=str(case), marks=[pytest.mark.slow] if place % 6 else [])
    for place, case in enumerate(CASES)
]
SIZES = [pytest.param(case, B, id=f"{case}-B{B}") for case in CASES[::20] for B in case.batches[1:]]


def three_scores(h: Tensor) -> Tensor:
    """(B, ...) -> (B, 3): two functions of all elements, and one of the first alone."""
    flat = h.unsqueeze(-1).flatten(1)
    slope = torch.linspace(-1, 1, flat.shape[1]).to(flat)
    last = flat[:, :1].sum(1) * 2 if flat.shape[1] else flat.sum(1)
    return torch.stack([(flat * slope + 0.3 * flat.square()).sum(1), (flat.sin() + slope * flat).sum(1), last], 1)


@contextmanager
def scores_are(score: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let cases end in another function."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)  # quickly: cases often do
        for module in pkgutil.iter_modules(case_library.__path__):
            patch.setattr(f"tests.case_library.{module.name}.score", score, raising=False)
        yield


@contextmanager
def several(case: Case, B: int) -> Iterator[tuple[Params, Tensor]]:
    """The case's parameters, and losses (B, 3); checkpoints may run parts of the case again inside."""
    with scores_are(three_scores):
        losses = torch.empty(0)
        with suppress(RuntimeError):  # where scores are added to one number per sample
            params, forward = case.build(B)
            losses = forward()
        if losses.shape == (B, 3) and B != 3:
            yield params, losses
            return
    params, forward = case.build(B)
    losses = forward()
    yield params, torch.stack([losses, losses.sin(), losses * 2], 1)


def flattened(result: Any, shape: tuple[int, ...]) -> Any:
    """A result with one row for every loss, where it has one for every sample and position."""
    if isinstance(result, Tensor):
        assert result.shape[: len(shape)] == shape
        return result.flatten(0, len(shape) - 1)
    if isinstance(result, (ClippedDict, ClippedTuple)):
        flat = type(result)(result)  # sums, which have no rows
        norms, weights = (flattened(each, shape) for each in result.clipping)
        flat.clipping = ps.Clipping(norms, weights, result.clipping.dropped, result.clipping.sensitivity)
        return flat
    if isinstance(result, dict):
        return {key: flattened(value, shape) for key, value in result.items()}
    return tuple(flattened(value, shape) for value in result)


HAVE_ROWS = ("norms", "gram", "dot", "stack", "projected")


def check(case: Case, params: Params, losses: Tensor, want: Stacks, variants: bool, **options: Any) -> None:
    asked = questions(want, params, variants)
    for name, ask in asked.items():
        if isinstance(ask.reduction, ps.WeightedSum):
            asked[name] = replace(ask, reduction=ps.WeightedSum(ask.reduction.weights.view(losses.shape)))
    if not options.pop("gram", True):  # which keeps all factors at once
        asked = {name: ask for name, ask in asked.items() if ask.reduction.in_portions}
    with untouched(params):
        results = ps.reduce(losses, params, *(ask.reduction for ask in asked.values()), **options)
    check_results(
        case, params, asked, tuple(as_rows(name, r, losses.shape) for name, r in zip(asked, results, strict=True))
    )


def as_rows(name: str, result: Any, shape: tuple[int, ...]) -> Any:
    """The result of a reduction as it would be for as many samples as there are losses."""
    if name == "gram":
        result = result.flatten(len(shape))
    has_rows = isinstance(result, (ClippedDict, ClippedTuple)) or any(word in name for word in HAVE_ROWS)
    return flattened(result, shape) if has_rows else result


@pytest.mark.parametrize(("case", "B"), EACH)
def test_every_reduction_of_several_losses(case: Case, B: int) -> None:
    """All at once, and then one position at a time."""
    with several(case, B) as (params, losses):
        want = definition(losses.flatten(), params)
        check(case, params, losses, want, variants=True, retain_graph=True)
        check(case, params, losses, want, variants=False, gram=False, max_memory=1)


@pytest.mark.parametrize(("case", "B"), SIZES)
def test_one_sample_and_none(case: Case, B: int) -> None:
    with several(case, B) as (params, losses):
        check(case, params, losses, definition(losses.flatten(), params), variants=False)


@pytest.mark.parametrize(("case", "B"), EACH[::4])
def test_samples_in_two_dims(case: Case, B: int) -> None:
    """Where samples do not meet, each is a loss of its own, and one backward serves all."""
    params, forward = case.build(B)
    losses = forward().unflatten(0, (2, -1)) if B % 2 == 0 else forward().unsqueeze(0)
    may_meet = case.interacts or case.slow_path or "custom" in str(case) or len(losses) == 1
    assert may_meet or not positions_meet(losses, named(params))
    check(case, params, losses, definition(losses.flatten(), params), variants=False)
