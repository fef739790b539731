"""The errors that only somebody who extends persample can meet."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from persample.graph.layout import Block, Flow
from persample.graph.ops.dims import only
from persample.graph.ops.table import Op, Undecided, entries, op
from persample.graph.read.site import Site
from persample.graph.read.tape import read


def test_a_second_entry_for_an_op_is_refused() -> None:
    before = list(entries())
    with pytest.raises(ValueError, match="Addmm already has an entry: say all that is known of it there"):
        op("Unheard Addmm", rule=lambda use: None)
    assert before == list(entries())


def test_an_entry_says_nothing_that_nobody_asks() -> None:
    before = list(entries())
    with pytest.raises(TypeError, match="speed"):
        op("Unheard", speed=3)
    assert before == list(entries())


@pytest.mark.parametrize("layouts", [[], [None], [None, Block(2, 1)], [Block(2, 1), Block(2, 1)]])
def test_a_flow_for_one_cotangent_leaves_the_rest_to_data(layouts: list[Block | None]) -> None:
    """The first one, and no other: users never see that the flow did not know."""
    with pytest.raises(Undecided):
        only(layouts)
    unheard = Op(flow={0: lambda site, k, layouts: only(layouts)})
    assert unheard.where(None, 0, layouts) is Flow.PROBE  # type: ignore[arg-type]
    assert unheard.where(None, 0, [Block(2, 1), None]) == Block(2, 1)  # type: ignore[arg-type]


def test_a_rule_is_told_what_was_not_saved() -> None:
    net = nn.Linear(3, 2)
    net.weight.requires_grad_(False)  # then the input is not needed
    losses = net(torch.randn(4, 3)).sum(1)
    tape = read([losses.grad_fn]).tape([net.bias])
    (node,) = [number for number in tape.order if tape.name(number) == "Addmm"]
    with pytest.raises(LookupError, match="Addmm did not save 'mat1'"):
        Site(tape, node).tensor("mat1")
