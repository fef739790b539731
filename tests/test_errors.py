"""The errors that only somebody who extends persample can meet."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from persample.graph.flows import FLOWS
from persample.graph.flows.registry import flow, only
from persample.graph.layout import Block
from persample.graph.registry import Undecided
from persample.graph.rules import RULES
from persample.graph.rules.registry import rule
from persample.graph.site import Flow, Site
from persample.graph.tape import read


def test_a_second_rule_for_an_op_is_refused() -> None:
    before = dict(RULES)
    with pytest.raises(ValueError, match="Addmm already has a rule"):
        rule("Addmm")(lambda use: None)
    assert before == RULES


def test_a_second_flow_rule_for_an_op_is_refused() -> None:
    before = dict(FLOWS)
    with pytest.raises(ValueError, match="Tanh already has a flow rule"):
        flow("Tanh")(lambda site, k, layouts: None)
    assert before == FLOWS


@pytest.mark.parametrize("layouts", [[], [None], [None, Block(2, 1)], [Block(2, 1), Block(2, 1)]])
def test_a_flow_for_one_cotangent_leaves_the_rest_to_data(layouts: list[Block | None]) -> None:
    """The first one, and no other: users never see that the flow did not know."""
    with pytest.raises(Undecided):
        only(layouts)
    flow("Unheard")(lambda site, k, layouts: only(layouts))
    try:
        assert FLOWS["Unheard"](None, 0, layouts) is Flow.PROBE  # type: ignore[arg-type]
        assert FLOWS["Unheard"](None, 0, [Block(2, 1), None]) == Block(2, 1)  # type: ignore[arg-type]
    finally:
        del FLOWS["Unheard"]


def test_a_rule_is_told_what_was_not_saved() -> None:
    net = nn.Linear(3, 2)
    net.weight.requires_grad_(False)  # then the input is not needed
    losses = net(torch.randn(4, 3)).sum(1)
    tape = read([losses.grad_fn]).tape([net.bias])
    (node,) = [number for number in tape.order if tape.name(number) == "Addmm"]
    with pytest.raises(LookupError, match="Addmm did not save 'mat1'"):
        Site(tape, node).tensor("mat1")
