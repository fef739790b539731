"""The gradient of cross entropy at logits that are computed again."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.nn import functional as F

from persample.kernels.cross_entropy import logit_gradients
from tests.reference import assert_same

DTYPES = [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-5), (torch.float16, 1e-5)]


@pytest.mark.parametrize(("dtype", "rtol"), DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_as_autograd_has_it(dtype: torch.dtype, rtol: float, rows: int) -> None:
    """From the same numbers in float64: half precision is computed in float32."""
    torch.manual_seed(0)
    x, weight, bias, classes = torch.randn(rows, 3), torch.randn(4, 3), torch.randn(4), torch.rand(4)
    g, target = torch.randn(rows), torch.randint(4, (rows,))
    x, weight, bias, classes, g = (t.to(dtype) for t in (x, weight, bias, classes, g))
    for b, w, ignored in product((None, bias), (None, classes), (-100, 2, 7)):
        y = target.masked_fill(target == 0, ignored)
        logits = F.linear(x.double(), weight.double(), None if b is None else b.double()).requires_grad_()
        losses = F.cross_entropy(logits, y, None if w is None else w.double(), ignore_index=ignored, reduction="none")
        (want,) = torch.autograd.grad(losses, logits, g.double())
        found = logit_gradients(x, weight, b, y, w, ignored, g)
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert_same([found.double()], {"0": want}, rtol=rtol)


def test_a_row_that_is_not_finite_keeps_to_itself() -> None:
    x, weight, target, g = torch.randn(3, 2), torch.randn(4, 2), torch.tensor([0, 1, 2]), torch.ones(3)
    want = logit_gradients(x, weight, None, target, None, -100, g)
    x[1] = float("nan")
    found = logit_gradients(x, weight, None, target, None, -100, g)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], want[[0, 2]])
