"""Every case on the strict device, once: all verbs are what the definition gives, with no op that would be refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample as ps
from persample.reductions.clipping import Clipping
from tests.cases import CASES, Case, warnings_of
from tests.device.chosen import DEVICE, raise_refused
from tests.reductions.expected import questions
from tests.reductions.test_cases import check_results
from tests.reference import definition, named, vectors

EACH = [pytest.param(case, case.batches[0], id=str(case)) for case in CASES]


@pytest.fixture(scope="module", autouse=True)
def _quick_seeds() -> Iterator[None]:
    """Cases are seeded thousands of times; for devices that are absent, each time would format a stack trace."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)
        yield


@pytest.mark.parametrize(("case", "B"), EACH)
def test_all_reductions(case: Case, B: int) -> None:
    check_on_device(case, B)


def check_on_device(case: Case, B: int) -> None:
    """All reductions of a case that is built on the device are what the definition gives there."""
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


@pytest.mark.parametrize("max_memory", [None, 1])
def test_clipped_sums_of_parameters_on_two_devices(max_memory: int | None) -> None:
    """What was computed on either device is looked at together."""
    ids = torch.tensor([[1, 2, 1], [0, 2, 2]])
    here, there = nn.Linear(8, 20).double(), nn.Linear(20, 9, device=DEVICE, dtype=torch.float64)
    table = torch.linspace(-1, 1, 24, dtype=torch.float64).view(3, 8)
    model = nn.Sequential(here, there)

    def losses() -> Tensor:
        return there(here(table[ids]).to(DEVICE)).sin().sum((1, 2))

    rows = {name: on_cpu(rows) for name, rows in definition(losses(), model).items()}
    weights = (0.1 / vectors(rows).norm(dim=1)).clamp(max=1)
    total = ps.clipped_sum(losses(), model, 0.1, max_memory=max_memory)
    for name, p in model.named_parameters():
        assert total[name].device == p.device
        torch.testing.assert_close(on_cpu(total[name]), torch.einsum("b,b...->...", weights, rows[name]))
    raise_refused()
