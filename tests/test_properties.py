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
APART = [name for name in OPS if name != "interact"]


@st.composite
def programs(draw: st.DrawFn, longest: int, interacting: bool = False) -> tuple[Tensor, list[Tensor], str]:
    """Losses, the parameters asked for (most of them) and the log of a random program."""
    program = Program(draw, draw(st.integers(0, 9)))
    for _ in range(draw(st.integers(1, longest))):
        program.step(list(OPS) if interacting and draw(st.integers(0, 3)) == 3 else APART)
    losses = random_losses(program)
    assume(losses.requires_grad)
    wanted = [p for p in program.params if draw(st.integers(0, 5))] or program.params
    return losses, wanted, "\n".join(program.log)


def check(losses: Tensor, params: list[Tensor], log: str) -> None:
    """Compare with the definition, and hold every claim about the layout against it, too."""
    note(log)
    want = definition(losses, params)
    assume(all(bool(g.isfinite().all()) for g in want.values()))
    if len(losses) > 1:
        assert refuted_cotangents(plan(losses, params), losses) == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ps.PerformanceWarning)
        assert_same(ps.grad(losses, params), want)


@settings(CHECKED, max_examples=250)
@given(programs(longest=6))
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
