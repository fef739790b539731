"""Both ways in give the same, on every case that both accept."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

import persample as ps
from tests.cases import CASES, Case
from tests.reference import assert_same, definition, named

# A case whose parameters are no module's cannot be called as a module.
MODULES = [case for case in CASES if isinstance(case.build(2 if 2 in case.batches else case.batches[0])[0], nn.Module)]


class Program(nn.Module):
    """A case's program as a module: its forward returns the losses."""

    def __init__(self, net: nn.Module, losses: Callable[[], Tensor]) -> None:
        super().__init__()
        self.net, self.losses = net, losses

    def forward(self) -> Tensor:
        return self.losses()


def both(case: Case, batch: int) -> tuple[dict[str, Any], dict[str, Any]]:
    net, losses = case.build(batch)
    assert isinstance(net, nn.Module)
    want = definition(losses(), net)
    values = ps.call_for_per_sample_grads(Program(net, losses), batch_size=batch)()
    if values.requires_grad:
        values.sum().backward()
    got = {name: getattr(p, "grad_sample", None) for name, p in named(net).items()}
    return got, want


# A backward that divides by the norm of all that comes to it cannot be told from one in which samples meet.
WHOLE = "function_not_linear_backward-normalised"
REFUSED = [case for case in MODULES if case.interacts or case.name == WHOLE]


@pytest.mark.parametrize("case", [case for case in MODULES if case not in REFUSED], ids=str)
def test_both_ways_in_agree(case: Case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in [b for b in case.batches if b][:2]:
            got, want = both(case, batch)
            assert_same(got, want, rtol=case.rtol)


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_ps_grad_answers_by_jacobian_rows_is_refused_here(case: Case) -> None:
    with pytest.raises(RuntimeError, match="samples interact"):
        both(case, max(case.batches))


def test_most_cases_are_modules() -> None:
    assert len(MODULES) > 800
