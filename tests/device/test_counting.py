"""`persample.testing.count_work`: what is a launch, and what makes the host wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from persample.testing import count_work, counting
from tests.device.backend import DEVICE

x, ids, mask = torch.randn(3, 4), torch.tensor([2, 0]), torch.tensor([True, False, True])
x, ids, mask, one = x.to(DEVICE), ids.to(DEVICE), mask.to(DEVICE), torch.ones((), device=DEVICE)

NO_WORK: dict[str, Callable[[], object]] = {
    "views": lambda: x.t()[1:].unsqueeze(0).expand(2, -1, -1).detach(),
    "reshape without a copy": lambda: x.reshape(-1),
    "memory": lambda: (torch.empty(3, device=DEVICE), torch.empty_like(x)),
    "shapes": lambda: (len(x), x.numel(), x.stride(), x.is_contiguous()),
    "the CPU": lambda: torch.ones(3).sum().item(),
}
ONE_LAUNCH: dict[str, Callable[[], object]] = {
    "arithmetic": lambda: x + 1,
    "reshape that copies": lambda: x.t().reshape(-1),
    "fill by mask": lambda: x.masked_fill(mask.unsqueeze(1), 0),
    "product": lambda: x @ x.t(),
    "rows by index": lambda: x[ids],
    "a number of the CPU": lambda: x * torch.tensor(2.0),
    "fill where true": lambda: x.index_put_((mask,), one),
    "copy that nobody waits for": lambda: torch.ones(3).to(DEVICE, non_blocking=True),
    "several tensors at once": lambda: torch._foreach_add([x, x], 1.0),
}
WAITING: dict[str, Callable[[], object]] = {
    "item": lambda: x[0, 0].item(),
    "bool": lambda: bool(mask[0]),
    "int": lambda: int(ids[0]),
    "to the host": lambda: x.cpu(),
    "from the host": lambda: torch.ones(3).to(DEVICE),
    "copied into the host's": lambda: torch.empty(3, 4).copy_(x),
    "nonzero": lambda: mask.nonzero(),
    "rows by mask": lambda: x[mask],
    "rows written by mask": lambda: x.clone().index_put_((mask,), x[:2]),
    "selected": lambda: x.masked_select(mask.unsqueeze(1)),
    "unique": lambda: torch.unique(ids),
    "equal": lambda: torch.equal(x, x),
    "list": lambda: ids.tolist(),
    "counts": lambda: torch.bincount(ids),
    "repeats": lambda: torch.repeat_interleave(ids),
}


@pytest.mark.parametrize("name", NO_WORK)
def test_no_work(name: str) -> None:
    assert work(NO_WORK[name]) == (0, 0)


@pytest.mark.parametrize("name", ONE_LAUNCH)
def test_one_launch(name: str) -> None:
    assert work(ONE_LAUNCH[name]) == (1, 0)


@pytest.mark.parametrize("name", WAITING)
def test_waiting(name: str) -> None:
    assert work(WAITING[name])[1] >= 1


def work(run: Callable[[], object]) -> tuple[int, int]:
    """Launches and waits."""
    with count_work() as counted:
        run()
    return counted.launches.total(), counted.waits.total()


def test_the_backward_is_counted_where_hooks_run_in_another_thread() -> None:
    w = x.clone().requires_grad_()
    loss: Tensor = (w * x).sum()
    with count_work() as counted:
        loss.backward()
    assert counted.launches["mul"] == 1


def test_the_report_names_what_waits() -> None:
    with count_work() as counted:
        (x + 1).sum().item()
    assert str(counted) == "3 launches, waits: _local_scalar_dense 1"


@pytest.mark.parametrize("name", sorted(counting._FREE | counting._WAITING | counting._COPIES | counting._INDEXED))
def test_ops_are_pytorchs(name: str) -> None:
    assert hasattr(torch.ops.aten, name)
