"""What the docs say of large results."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import persample as ps
from persample.kernels import pages

PAGE = Path(__file__).parents[2] / "docs" / "reductions.md"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, memory is the allocator's business")


def result(megabytes: int) -> torch.Tensor:
    w = torch.ones(2**17, dtype=torch.float32, requires_grad=True)  # half a megabyte for every sample
    x = torch.ones(2 * megabytes, 1)
    (found,) = ps.grad((x * w).sum(1), [w])
    return found


def test_the_figure_in_the_docs_is_the_one_in_use() -> None:
    megabytes = pages._LEAST_FRESH >> 20
    assert f"Those of {megabytes} MB and more" in PAGE.read_text()
    assert f"a result of {megabytes} MB or" in (ps.grad.__doc__ or "")


def test_results_from_four_megabytes_on_cannot_be_made_larger() -> None:
    with pytest.raises(RuntimeError, match="not resizable"):
        result(4).resize_(2**24)
    result(4).clone().resize_(2**24)
    result(3).resize_(2**24)
