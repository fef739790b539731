"""What is compared gives the right results, and what does not is reported as such."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.contender import Contender
from benchmarks.measure import Effort
from benchmarks.methods import METHODS, TABLE
from benchmarks.models import UnrolledLSTM
from benchmarks.reference import WrongResult, check, rows
from benchmarks.worker import measured
from benchmarks.workloads import WORKLOADS, Task

TINY = ["tiny-cnn", "tiny-gpt", "tiny-lstm"]
SHORT = Effort(rounds=1, budget=0.0, fewest=1, warm_up=0)
NO_RULES = {("backpack-grad", "tiny-gpt"), ("backpack-norms", "tiny-gpt")}


@pytest.mark.parametrize("workload", TINY)
@pytest.mark.parametrize("method", [m for m in TABLE if m.kind != "engine"], ids=lambda m: m.name)
def test_results_are_right_step_after_step(method: Any, workload: str) -> None:
    if not method.installed():
        pytest.skip(f"{method.needs} is not installed")
    task = WORKLOADS[workload].build()  # in float32: two of the peers know no other
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        contender = method.prepare(task)
        if (method.name, workload) in NO_RULES:
            with pytest.raises(NotImplementedError, match=r"no \w+ for 10 parameters.*of LayerNorm"):
                contender.step()
            return
        for _ in range(2):
            assert check(task, method.kind, contender.step()) < 1e-5
    assert all(p.grad is None for p in task.model.parameters())


def test_unrolled_lstm() -> None:
    fused = nn.LSTM(3, 4, batch_first=True)
    unrolled, x = UnrolledLSTM(3, 4, batch_first=True), torch.randn(2, 5, 3)
    unrolled.load_state_dict(fused.state_dict())
    torch.testing.assert_close(unrolled(x)[0], fused(x)[0])


def test_reference_is_the_gradient_of_each_loss() -> None:
    task = WORKLOADS["tiny-gpt"].build()
    task.model.double()
    losses = task.losses()
    for i, row in enumerate(rows(task)):
        want = torch.autograd.grad(losses[i], list(task.params().values()), retain_graph=True)
        torch.testing.assert_close(list(row.values()), list(want))


@pytest.mark.parametrize("kind", ["gradients", "clipped sums", "norms"])
@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_wrong_results_are_not_timed(kind: str, factor: float) -> None:
    method = next(m for m in TABLE if m.kind == kind)
    contender = method.prepare(WORKLOADS["tiny-cnn"].build())

    def crooked(losses: Tensor) -> Any:
        result = contender.after(losses)
        return result * factor if kind == "norms" else {name: g * factor for name, g in result.items()}

    wrong = replace(method, prepare=lambda task: Contender(contender.forward, crooked))
    found = measured(wrong, WORKLOADS["tiny-cnn"].build(), SHORT)
    assert found["status"] == "wrong"
    assert "relative error" in found["reason"]


def test_a_sample_in_anothers_place_is_found() -> None:
    task = WORKLOADS["tiny-cnn"].build()
    found = METHODS["grad"].prepare(task).step()
    with pytest.raises(WrongResult, match="relative error"):
        check(task, "gradients", {name: g.roll(1, 0) for name, g in found.items()})


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (TypeError("not this model\nand more"), {"status": "fails", "reason": "TypeError: not this model"}),
        (RuntimeError("can't allocate memory"), {"status": "memory", "reason": "RuntimeError: can't allocate memory"}),
    ],
)
def test_failures_are_reported(failure: Exception, status: dict[str, str]) -> None:
    def fails(task: Task) -> Contender:
        raise failure

    found = measured(replace(METHODS["grad"], prepare=fails), WORKLOADS["tiny-cnn"].build(), SHORT)
    assert found == status


def test_what_is_not_installed_is_reported() -> None:
    found = measured(replace(METHODS["grad"], needs="no_such_package"), WORKLOADS["tiny-cnn"].build(), SHORT)
    assert found == {"status": "missing", "reason": "no_such_package is not installed"}
