"""`ps.Monitor` and projections on the strict device: the records of the CPU, and few waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample as ps
from persample.monitor import Record
from persample.reductions.projection import KEPT
from persample.reductions.spread import MeanAndNorms
from persample.testing import Work, count_work
from tests.device.backend import DEVICE, raise_refused
from tests.device.private_models import KINDS, Kind

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _refused() -> Iterator[None]:
    yield
    raise_refused()


def built(kind: Kind, device: torch.device, spoilt: bool = False, B: int = 8) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    data, model = kind.data()[:B], kind.make()
    if spoilt:
        data[2, ..., 0], data[5, ..., 1] = float("nan"), float("inf")
    return model.to(device), data.to(device)


def records(kind: Kind, device: torch.device, spoilt: bool, **options: Any) -> tuple[list[Record], Work, nn.Module]:
    """Of three steps, the last of them counted."""
    model, data = built(kind, device, spoilt)
    monitor, found = ps.Monitor(model, every=1), []
    for _ in range(3):
        losses = kind.losses(model, data)
        model.zero_grad()
        with count_work() as work:
            record = monitor.backward(losses, **options)
        assert record is not None
        found.append(record)
    return found, work, model


CASES = [(name, False) for name in KINDS] + [(name, True) for name in KINDS if name not in ("bag", "gpt")]


@pytest.mark.parametrize(("name", "spoilt"), CASES)
def test_records(name: str, spoilt: bool) -> None:
    kind = KINDS[name]
    (mine, work, model), (want, _, other) = (records(kind, device, spoilt) for device in (DEVICE, CPU))
    for found, expected in zip(mine, want, strict=True):
        assert found.norms.device == DEVICE
        assert found.nonfinite == expected.nonfinite == ([2, 5] if spoilt else [])
        assert [sample for sample, _ in found.unusual] == [sample for sample, _ in expected.unusual]
        assert found.values == pytest.approx(expected.values, rel=1e-2 if name == "bfloat16" else 1e-4, abs=1e-6)
        torch.testing.assert_close(found.norms.cpu(), expected.norms, rtol=1e-2, atol=0, equal_nan=True)
    for (_, p), (_, q) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-2, atol=1e-4, equal_nan=True)
    if not spoilt:
        assert work.waits.total() <= 2, work


def test_a_look_at_losses_that_are_used_again() -> None:
    kind = KINDS["positions"]
    model, data = built(kind, DEVICE)
    losses = kind.losses(model, data)
    record = ps.Monitor(model)(losses, ids=list("abcdefgh"))
    assert record is not None
    losses.sum().backward()
    assert {sample for sample, _ in record.unusual} < set("abcdefgh")


def test_little_memory_is_kept_until_the_end() -> None:
    """Factors are held until all are looked at: no more of them than memory is allowed for temporaries."""
    kind = KINDS["sequence"]
    model, data = built(kind, DEVICE, spoilt=True)
    other, on_cpu = built(kind, CPU, spoilt=True)

    (found,) = ps.reduce(kind.losses(model, data), model, MeanAndNorms(), max_memory=1)
    (want,) = ps.reduce(kind.losses(other, on_cpu), other, MeanAndNorms())
    torch.testing.assert_close(found.mean_norms.cpu(), want.mean_norms, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["rademacher", "gaussian", "kronecker"])
@pytest.mark.parametrize("name", ["mlp", "positions", "cnn", "gpt"])
def test_projections(name: str, kind: Any) -> None:
    """The same map on every device."""
    found = []
    for device in (DEVICE, CPU):
        model, data = built(KINDS[name], device)
        found.append(ps.project(KINDS[name].losses(model, data), model, ps.Projection(12, seed=3, kind=kind)).cpu())
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["rademacher", "kronecker"])
def test_matrices_are_copied_once(kind: Any) -> None:
    """They are kept from call to call."""
    projection, waits = ps.Projection(12, seed=5, kind=kind), []
    model, data = built(KINDS["mlp"], DEVICE)
    for _ in range(3):
        losses = KINDS["mlp"].losses(model, data)
        with count_work() as work:
            ps.project(losses, model, projection)
        waits.append(work.waits.total())
    assert waits[0] > 0 == waits[2]
    assert 0 < KEPT.nbytes <= KEPT.limit  # for whoever asks for an equal projection


def test_moments_and_products_do_not_wait() -> None:
    for name in ("mlp", "positions", "cnn", "gpt"):
        model, data = built(KINDS[name], DEVICE)
        direction = {n: torch.ones_like(p) for n, p in model.named_parameters()}
        for _ in range(3):
            losses = KINDS[name].losses(model, data)
            with count_work() as work:
                ps.reduce(losses, model, ps.SecondMoment(), ps.Variance(), ps.Gram(), ps.Dot(direction))
        assert not work.waits, (name, str(work))
