"""How many launches and waits a step may have, beside a plain one, on the workloads of the benchmarks.

docs/benchmarks.md has the figures. The large convolutions take long to compute on a CPU: by default they are counted
with fewer samples, where clipped sums choose other ways for some layers; the whole is among the slow tests.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import persample as ps
from benchmarks.launches import counted, on_device
from persample.testing import count_work, definition
from tests.device.chosen import DEVICE, only_on_strict

pytestmark = only_on_strict

BOUNDS = {  # launches of norms and of clipped sums, over those of a plain step
    "mlp": (2.0, 2.2),
    "cnn": (1.6, 1.9),
    "resnet": (2.0, 2.2),
    "depthwise": (1.6, 1.9),
    "gpt": (2.0, 2.2),
}
SIZES = [("mlp", None), ("cnn", None), ("depthwise", None), ("gpt", 4), ("resnet", 4)]
SLOW = [pytest.param(name, None, marks=pytest.mark.slow) for name in ("gpt", "resnet")]


@pytest.mark.parametrize(("workload", "batch"), [*SIZES, *SLOW])
def test_launches_and_waits(workload: str, batch: int | None) -> None:
    task, (norms, clipped) = on_device(workload, batch), BOUNDS[workload]
    plain = counted(task, "plain").launches.total()
    for verb, bound, waits in (("norms", norms, 0), ("clipped_sum", clipped, 1), ("backward", clipped, 1)):
        work = counted(task, verb)
        assert work.waits.total() <= waits, f"{verb}: {work}"
        assert work.launches.total() <= bound * plain, f"{verb}: {work}, a plain step has {plain}"


def test_full_gradients_are_written_without_waiting() -> None:
    for workload in ("cnn", "gpt"):
        assert not counted(on_device(workload, 4), "grad", steps=2).waits


@pytest.mark.parametrize("workload", ["tiny-gpt", "tiny-cnn"])
def test_no_other_verb_waits_but_for_clipped_sums(workload: str) -> None:
    task = on_device(workload, 4)
    params, projection = task.params(), ps.Projection(8)
    direction = {name: torch.ones_like(p, requires_grad=False) for name, p in params.items()}
    reductions = {
        "per parameter": ps.Norms("parameter"),
        "second moment": ps.SecondMoment(),
        "variance": ps.Variance(),
        "gram": ps.Gram(),
        "dot": ps.Dot(direction),
        "project": ps.Project(projection),
        "weighted": ps.WeightedSum(torch.ones(4, device=DEVICE)),
    }
    for name, reduction in reductions.items():
        for _ in range(3):
            with count_work() as work:
                ps.reduce(task.losses(), params, reduction)
        assert not work.waits, name
    for _ in range(3):
        with count_work() as work:
            ps.clipped_sum(task.losses(), params, 1.0, per="parameter")
    assert work.waits.total() == 1


def test_positions_are_looked_at_once_per_graph() -> None:
    """Their number is a multiple of the samples', so that they might be the samples' own."""
    task = on_device("tiny-gpt", 5)
    first = counted(task, "norms", steps=1)
    assert first.waits.total() > 0
    assert counted(task, "norms", steps=1).waits.total() == 0


def test_positions_that_become_data_are_noticed_where_independence_is_promised() -> None:
    """Without that promise the gradients are the same, exact ones, and nobody looks."""
    table = torch.randn(12, 5, device=DEVICE).requires_grad_()
    x, places = torch.randn(4, 12, 5, device=DEVICE), torch.arange(12, device=DEVICE)
    data = torch.tensor([3, 0, 0, 7, 1, 1, 2, 9, 5, 5, 5, 4], device=DEVICE)

    def losses(ids: Tensor) -> Tensor:
        return (x.sum(1) @ F.embedding(ids, table).t()).square().sum(1)

    for options in ({}, {"independent": True}):
        ps.grad(losses(places), [table], **options)
    (got,) = ps.grad(losses(data), [table])
    want = definition(losses(data), [table])["0"]
    torch.testing.assert_close(got.cpu(), want.cpu())
    with pytest.raises(ps.InteractionError):
        ps.grad(losses(data), [table], independent=True)
