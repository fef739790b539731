"""Every case on the strict device, once: all verbs are what the definition gives, with no op that would be refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import persample as ps
from persample.reductions.clipping import Clipping
from tests.cases import CASES, Case, warnings_of
from tests.device.chosen import DEVICE, raise_refused
from tests.reductions.expected import questions
from tests.reductions.test_cases import check_results
from tests.reference import definition, named

EACH = [pytest.param(case, case.batches[0], id=str(case)) for case in CASES]


@pytest.fixture(scope="module", autouse=True)
def _quick_seeds() -> Iterator[None]:
    """Cases are seeded thousands of times; for devices that are absent, each time would format a stack trace."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)
        yield


@pytest.mark.parametrize(("case", "B"), EACH)
def test_all_reductions(case: Case, B: int) -> None:
    with torch.device(DEVICE):
        params, forward = case.build(B)
        losses = forward()
    tensors = named(params)
    assert {t.device for t in [losses, *tensors.values()]} == {DEVICE}
    want = on_cpu(definition(losses, tensors))
    leaves = {name: on_cpu(p).requires_grad_() for name, p in tensors.items()}
    asked = questions(want, leaves, variants=False)
    with warnings_of(case):
        results = ps.reduce(losses, tensors, *(ask.reduction for ask in asked.values()))
    check_results(case, leaves, asked, on_cpu(results))
    raise_refused()


def on_cpu(results: Any) -> Any:
    """The same numbers in the same containers, on the CPU."""
    if isinstance(results, Tensor):
        return results.detach().cpu()
    if isinstance(results, Clipping):
        return Clipping(on_cpu(results.norms), on_cpu(results.weights), results.dropped, results.sensitivity)
    if isinstance(results, dict):
        moved = type(results)({name: on_cpu(value) for name, value in results.items()})
        if hasattr(results, "clipping"):
            moved.clipping = on_cpu(results.clipping)
        return moved
    return type(results)(map(on_cpu, results))
