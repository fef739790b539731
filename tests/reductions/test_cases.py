"""Every case at every batch size: each reduction is what the definition's gradients, written out, give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import persample as ps
from tests.cases import CASES, Case, untouched, warnings_of
from tests.reductions.expected import Ask, Expected, Stacks, Want, assert_result, questions
from tests.reference import Params, definition, named

# Squares of gradients of 1e35 are beyond float32: nothing is promised for moments and inner products of gradients.
BEYOND_RANGE = {"float32_reordered_near_overflow"}


@pytest.fixture(scope="module", autouse=True)
def _quick_seeds() -> Iterator[None]:
    """Cases are seeded thousands of times; for devices that are absent, each time would format a stack trace."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)
        yield


PLACE = {str(case): place for place, case in enumerate(CASES)}
EACH = [pytest.param(case, case.batches[0], id=str(case)) for case in CASES]
SLOW = [pytest.param(*each.values, id=each.id, marks=pytest.mark.slow) for each in EACH]
TIGHT = [EACH[place] if place % 20 == 0 else SLOW[place] for place in range(len(CASES))]
# `test_grad` has all sizes of all cases; here, those after the first are for every fourth case, and else slow.
REPEATED = {str(case) for place, case in enumerate(CASES) if place % 4 != 2}
SIZES = [
    pytest.param(case, B, id=f"{case}-B{B}", marks=[pytest.mark.slow] if place and str(case) in REPEATED else [])
    for case in CASES
    for place, B in enumerate(case.batches)
]
INTO_GRAD = [pytest.param(case, B, id=f"{case}-B{B}") for case in CASES[::20] for B in case.batches]


@pytest.mark.parametrize(("case", "B"), SIZES)
def test_all_reductions_in_one_backward(case: Case, B: int) -> None:
    """And, for every fourth case in turn, their variants or the gram of two batches."""
    turn = PLACE[str(case)] % 4 if case.batches[0] == B else None
    params, forward = case.build(B)
    losses = forward()
    want = definition(losses, params)
    check_all(case, params, losses, want, variants=turn == 0, retain_graph=turn == 1)
    if turn == 1:
        check_two_batches(case, params, losses, losses[1:], want)


@pytest.mark.parametrize(("case", "B"), SLOW)
def test_all_variants_and_two_batches(case: Case, B: int) -> None:
    params, forward = case.build(B)
    losses = forward()
    want = definition(losses, params)
    check_two_batches(case, params, losses, forward()[1:], want)
    check_all(case, params, forward(), want, variants=True)


@pytest.mark.parametrize(("case", "B"), TIGHT)
def test_one_sample_at_a_time(case: Case, B: int) -> None:
    params, forward = case.build(B)
    losses = forward()
    check_all(case, params, losses, definition(losses, params), variants=True, max_memory=1)


@pytest.mark.parametrize(("case", "B"), INTO_GRAD)
def test_backward_adds_to_what_is_there(case: Case, B: int) -> None:
    """Once into no gradient and once more on top; where the losses do not reach, there stays none."""
    params, forward = case.build(B)
    losses = forward()
    asked = questions(definition(losses, params), params, variants=False)["clipped"]
    reached = torch.autograd.grad(losses.sum(), list(named(params).values()), allow_unused=True, retain_graph=True)
    with warnings_of(case):
        clipping = ps.backward(losses, params, asked.reduction, retain_graph=True)
    rtol = tolerance(case, params)
    assert_result(clipping.norms, asked.want.norms, rtol)
    assert_result(clipping.weights, asked.want.weights, rtol)
    for g, (name, p) in zip(reached, named(params).items(), strict=True):
        assert (g is None) == (p.grad is None), name
    found = {name: p.grad.clone() for name, p in named(params).items() if p.grad is not None}
    zeros = {name: torch.zeros_like(p) for name, p in named(params).items() if p.grad is None}
    assert_result({name: (found | zeros)[name] for name in named(params)}, asked.want.sums, rtol)
    with warnings_of(case):
        ps.backward(losses, params, asked.reduction)
    for name, once in found.items():
        assert torch.equal(named(params)[name].grad, 2 * once), name


def check_all(case: Case, params: Params, losses: Tensor, want: Stacks, variants: bool, **options: Any) -> None:
    asked = questions(want, params, variants)
    with untouched(params), warnings_of(case):
        results = ps.reduce(losses, params, *(ask.reduction for ask in asked.values()), **options)
    check_results(case, params, asked, results)


def check_two_batches(case: Case, params: Params, losses: Tensor, others: Tensor, want: Stacks) -> None:
    """The second lacks a sample."""
    first, second = Expected(want, params), Expected({name: g[1:] for name, g in want.items()}, params)
    with untouched(params), warnings_of(case):
        found = ps.gram(losses, params, others, retain_graph=True)
    check_results(case, params, {"gram of two": Ask(ps.Gram(), first.gram(second))}, (found,))


def check_results(case: Case, params: Params, asked: dict[str, Ask], results: tuple[Any, ...]) -> None:
    """Name every reduction that is wrong, not only the first."""
    wrong = []
    for (name, ask), got in zip(asked.items(), results, strict=True):
        if isinstance(ask.want, Want) and ask.want.beyond_range():
            assert str(case) in BEYOND_RANGE
            continue
        try:
            assert_result(got, ask.want, tolerance(case, params))
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)


def tolerance(case: Case, params: Params) -> float:
    """What is given back in a parameter's dtype is rounded to it."""
    return max(case.rtol, *(8 * torch.finfo(p.dtype).eps for p in named(params).values()))
