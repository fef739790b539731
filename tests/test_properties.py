"""Random programs: `persample.grad` is the definition, whatever the ops and wherever the samples lie."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

import persample as ps
from persample.graph.plan import plan
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
        assert refuted_cotangents(plan(losses, params), losses, floor=1e-12) == []
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


@pytest.mark.slow
@settings(CHECKED, max_examples=5000)
@given(programs(longest=9))
def test_many_separable_programs(program: tuple[Tensor, list[Tensor], str]) -> None:
    check(*program)


@pytest.mark.slow
@settings(CHECKED, max_examples=1000)
@given(programs(longest=8, interacting=True))
def test_many_interacting_programs(program: tuple[Tensor, list[Tensor], str]) -> None:
    check(*program)
