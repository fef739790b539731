"""A rule of its own for a node that no CPU makes, asked with what such a node has saved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from persample.graph.layout import Layout, Shape
from persample.graph.ops.table import named
from persample.graph.ops.use import Use
from tests.forms import forms, numbers, plain, seed
from tests.graph.matrix.places import marks, places
from tests.graph.matrix.rules import wrong_answers


class RmsNorm:
    """What the rule reads of a fused RMS norm over the last dims."""

    name = "FusedRmsNorm"

    def __init__(self, x: Tensor, weight: Tensor) -> None:
        wide, dims = x.double(), tuple(range(-weight.ndim, 0))
        rstd = (wide.square().mean(dims, keepdim=True) + 1e-5).rsqrt()
        self.saved = {"input": x, "result1": rstd.to(torch.promote_types(x.dtype, torch.float32))}
        self.weight, self.memo = weight, dict[str, Any]()

    def tensor(self, name: str) -> Tensor:
        return self.saved[name]

    def target(self, k: int) -> Shape:
        assert k == 1
        return tuple(self.weight.shape)

    def metadata(self, k: int) -> Any:
        assert k == 1
        return SimpleNamespace(dtype=self.weight.dtype)


def definition(site: RmsNorm, g: Tensor, layout: Layout) -> Tensor:
    """One backward for each sample."""
    x, weight = site.saved["input"], site.weight.detach().requires_grad_()
    y = F.rms_norm(x, weight.shape, weight.to(x.dtype), 1e-5)
    rows = torch.where(marks(layout, tuple(g.shape)), plain(g), torch.zeros((), dtype=g.dtype))
    return torch.stack([torch.autograd.grad(y, weight, row, retain_graph=True)[0] for row in rows])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dims", [1, 2])
def test_the_fused_rms_norm(dims: int, dtype: torch.dtype) -> None:
    shape, answers = (4, 3, 4), 0
    for form, make in forms(shape, dtype):
        for layout in places(shape):
            seed(0)
            site, g = RmsNorm(make(shape, dtype), numbers(shape[-dims:], dtype)), make(shape, dtype)
            factor = named("FusedRmsNorm").factor(Use(site, 1, [g], [layout], layout.batch))  # type: ignore[arg-type]
            if factor is not None:
                answers += 1
                assert list(wrong_answers(factor, definition(site, g, layout), [g])) == [], (form, layout)
    assert answers > 50
