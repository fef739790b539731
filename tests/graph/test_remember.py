"""A plan that is recalled is the plan that would have been made.

Every program is run several times, and in turn with others that look like it: all are compared with the definition.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

import persample as ps
from persample.graph import remember
from persample.graph.layout import Shape
from persample.graph.read.tape import read
from tests.cases import CASES, Case
from tests.graph.look_alikes import LOOK_ALIKES, N, Program, check, data, is_recalled, leaf, look, nothing_remembered  # noqa: F401
from tests.graph.table import having
from tests.reference import Params, assert_same, definition, named

BATCHED = [case for case in CASES if max(case.batches) > 1]
FEW = BATCHED[::5]
pytestmark = pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")


# --- every case, with other numbers ---


def other_numbers(case: Case, seed: int) -> tuple[Params, Tensor]:
    """The case's program with random numbers of another seed, which is made from its name."""
    made = case.build.args[0]
    params, forward = case.build.func(replace(made, name=f"{made.name} {seed}"), max(case.batches))
    return params, forward()


def recalled_in_turn(case: Case) -> bool:
    """Run a case three times, with other numbers each; was it recalled at the end?"""
    remember._PLANS.clear()
    for seed in range(2):
        check(lambda seed=seed: other_numbers(case, seed), case.rtol)
    params, losses = other_numbers(case, 2)
    found = is_recalled(losses, params)
    want = definition(losses, params)
    assert_same(ps.grad(losses, params), want, rtol=case.rtol)
    return found


def test_every_fifth_case_with_other_numbers() -> None:
    found = [case.name for case in FEW if recalled_in_turn(case)]
    assert len(found) > 0.7 * len(FEW)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in BATCHED if case not in FEW], ids=str)
def test_other_cases_with_other_numbers(case: Case) -> None:
    recalled_in_turn(case)


# --- shapes that are not read ---


def test_shapes_that_are_said_to_follow_from_others_do() -> None:
    """In all cases: an op with operands of the same shapes has results of the same shapes."""
    found: dict[tuple[object, ...], set[tuple[Shape, ...]]] = {}
    for case in CASES:
        params, forward = case.build(max(case.batches))
        losses = forward()
        tape = read([losses.grad_fn] if losses.grad_fn is not None else []).tape(named(params).values())
        for node, edges in tape.edges.items():
            if tape.op(node).shape_follows and edges and None not in edges:
                given = tuple([tape.shape(slot) for slot in edges if slot is not None])
                found.setdefault((tape.name(node), *given), set()).add(tape.shapes(node))
    assert len({op for op, *_ in found}) > 0.7 * len(having("shape_follows"))
    assert [about for about, shapes in found.items() if len(shapes) > 1] == []


# --- graphs that look alike and are not ---


def test_they_look_alike() -> None:
    """Or nothing would be tested: all but a few, where PyTorch takes other ways for other choices."""
    alike = [
        name
        for name, programs in LOOK_ALIKES.items()
        if len({look(losses, params) for params, losses in (program() for program in programs.values())}) == 1
    ]
    assert len(alike) >= len(LOOK_ALIKES) - 4


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_in_turn(name: str) -> None:
    programs = list(LOOK_ALIKES[name].values())
    for program in [*programs, *programs[::-1], *programs[::2], programs[1], programs[0]]:
        check(program)
