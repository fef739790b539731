"""Random programs: `persample.grad` is the definition, whatever the ops and wherever the samples lie."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

import persample as ps
from persample.graph.plan import plan
from persample.graph.roots import Roots
from tests.graph.claims import refuted_cotangents
from tests.programs import OPS, Program, random_losses
from tests.reference import assert_same, definition

CHECKED = settings(
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
BATCHES = [2, 3, 4, 5, 6, 7, 8, 9, 1, 0]
APART = [name for name in OPS if name != "interact"]


@st.composite
def programs(draw: st.DrawFn, longest: int, interacting: bool = False) -> tuple[Tensor, list[Tensor], str]:
    """Losses, the parameters asked for (most of them) and the log of a random program.

    The seed makes all choices, so that they are not biased towards simple ones; failures shrink in length and B.
    """
    program = Program(draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from(BATCHES)))
    for _ in range(draw(st.sampled_from(range(1, longest + 1)))):
        program.step(list(OPS) if interacting and program.chance(4) else APART)
    losses = random_losses(program)
    assume(losses.requires_grad)
    wanted = [p for p in program.params if not program.chance(6)] or program.params
    return losses, wanted, "\n".join(program.log)


def check(losses: Tensor, params: list[Tensor], log: str) -> None:
    """Compare with the definition, and hold every claim about the layout against it, too."""
    note(log)
    want = definition(losses, params)
    assume(all(bool(g.isfinite().all()) for g in want.values()))
    if len(losses) > 1:
        assert refuted_cotangents(plan(Roots.of_losses(losses), params), losses, floor=1e-12) == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ps.PerformanceWarning)
        assert_same(ps.grad(losses, params), want)


@settings(CHECKED, max_examples=300)
@given(programs(longest=7))
def test_separable_programs(program: tuple[Tensor, list[Tensor], str]) -> None:
    check(*program)


@settings(CHECKED, max_examples=50)
@given(programs(longest=5, interacting=True))
def test_interacting_programs(program: tuple[Tensor, list[Tensor], str]) -> None:
    check(*program)


# Products with zeros spread NaN in the forward pass already; rows that nobody reads belong to nobody in particular.
SPREADING = "constant_matrix one_hot_mask masked select_rows select_places gather_anywhere section".split()
TIDY = [name for name in APART if name not in SPREADING]


def twin(seed: int, batch: int, length: int, bad: int, value: float) -> tuple[Tensor, list[Tensor], str]:
    """A program with something added to all that one sample starts from."""
    program = Program(seed, batch)
    program.h = program.h + torch.zeros_like(program.h).masked_fill(program.label == bad, value)
    for _ in range(length):
        program.step(TIDY)
    return random_losses(program), program.params, "\n".join(program.log)


@settings(CHECKED, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.sampled_from(range(1, 6)), st.integers(0, 5))
def test_a_sample_of_nan_leaves_the_others_alone(seed: int, batch: int, length: int, bad: int) -> None:
    bad %= batch
    losses, params, log = twin(seed, batch, length, bad, 0.0)
    poisoned, poisoned_params, _ = twin(seed, batch, length, bad, float("nan"))
    note(log)
    assume(losses.requires_grad)
    want = definition(losses, params)
    others = poisoned.isfinite() & (torch.arange(batch) != bad)
    assume(bool(others.any()) and all(bool(g.isfinite().all()) for g in want.values()))
    with warnings.catch_warnings(record=True) as slow:
        warnings.simplefilter("always")
        got = ps.grad(poisoned, poisoned_params)
    assume(not slow)  # one op at a time, 0 · NaN is NaN
    assert_same([g[others] for g in got], {name: g[others] for name, g in want.items()})


@pytest.mark.slow
@settings(CHECKED, max_examples=6000)
@given(programs(longest=9))
def test_many_separable_programs(program: tuple[Tensor, list[Tensor], str]) -> None:
    check(*program)


@pytest.mark.slow
@settings(CHECKED, max_examples=1000)
@given(programs(longest=8, interacting=True))
def test_many_interacting_programs(program: tuple[Tensor, list[Tensor], str]) -> None:
    check(*program)
