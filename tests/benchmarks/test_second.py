"""The benchmark of second derivatives runs, and all ways to the same number agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import second
from benchmarks.workloads import WORKLOADS


@pytest.mark.parametrize("name", ["tiny-cnn", "tiny-gpt", "tiny-lstm"])
def test_all_ways_to_squared_norms_agree(name: str) -> None:
    """And their derivatives: those of `torch.func` come to a copy of the model, whose weights these are."""
    task, found = WORKLOADS[name].build(), []
    with sdpa_kernel(SDPBackend.MATH):
        for way in ("norms", "grad", "torch.func"):
            total = second.WAYS[way](task)()
            total.backward()
            if way != "torch.func":
                found.append(torch.cat([p.grad.flatten() for p in task.model.parameters()]))
            task.model.zero_grad(set_to_none=True)
            torch.testing.assert_close(total, second.WAYS["norms"](task)(), rtol=1e-4, atol=0, check_dtype=False)
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4 * float(found[0].abs().max()))


def test_results_are_written(tmp_path: Path) -> None:
    arguments = ["--workloads", "tiny-gpt", "--rounds", "1", "--json", str(tmp_path / "found.json")]
    assert second.main(arguments) == 0
    (row,) = json.loads((tmp_path / "found.json").read_text())["results"]
    assert row["over_double"]["double"] == 1
    assert set(row["ms"]) == set(second.WAYS)
