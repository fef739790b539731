"""The other way in on the strict device: `call_for_per_sample_grads` of every case that is a module."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.cases import Case
from tests.device.backend import DEVICE, raise_refused
from tests.device.test_cases import on_cpu
from tests.expanded.test_agreement import MODULES, REFUSED, both
from tests.reference import assert_same

# Dynamo does not know the tensors of this device.
ACCEPTED = [case for case in MODULES if case not in REFUSED and "compiled" not in case.name]
EACH = [
    pytest.param(case, id=str(case), marks=[pytest.mark.slow] if place % 4 else [])
    for place, case in enumerate(ACCEPTED)
]


@pytest.mark.parametrize("case", EACH)
def test_both_ways_in_agree(case: Case) -> None:
    with warnings.catch_warnings(), torch.device(DEVICE):
        warnings.simplefilter("ignore")
        got, want = both(case, next(b for b in case.batches if b))
    assert {g.device for g in got.values() if g is not None} <= {DEVICE}
    assert_same(on_cpu(got), on_cpu(want), rtol=case.rtol)
    raise_refused()
