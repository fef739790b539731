"""Losses that are scaled for float16: what a `GradScaler` is given, and what it does with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps
from persample import dp
from tests.reference import definition, vectors

C = 0.5  # a bound that clips some samples


def build(width: int = 16) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3))
    return model, torch.randn(12, 8), torch.randint(3, (12,))


def losses_of(model: nn.Module, x: Tensor, y: Tensor, dtype: torch.dtype | None = torch.float16) -> Tensor:
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        return F.cross_entropy(model(x), y, reduction="none")


def private_like_loop(
    model: nn.Module, x: Tensor, y: Tensor, scaler: torch.amp.GradScaler, dtype: torch.dtype | None, steps: int
) -> tuple[list[float], int]:
    """The loop of docs/half-precision.md: the scales of all steps, and how many were left out."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales, skipped = [], 0
    for _ in range(steps):
        losses = losses_of(model, x, y, dtype)
        scale = scaler.get_scale()
        scales.append(scale)
        try:
            ps.backward(scaler.scale(losses), model, ps.ClippedSum(C * scale))
        except ps.NonFiniteError:
            scaler.update(scale * scaler.get_backoff_factor())
            skipped += 1
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return scales, skipped


def plain_loop(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        ps.backward(losses_of(model, x, y, None), model, ps.ClippedSum(C))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_a_scaled_loop_is_the_plain_one(dtype: torch.dtype | None) -> None:
    scaled, x, y = build()
    plain, _, _ = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    scales, skipped = private_like_loop(scaled, x, y, scaler, dtype, steps=10)
    plain_loop(plain, x, y, steps=10)
    assert scales[:4] == [2.0**12] * 3 + [2.0**13]  # it grows
    assert not skipped
    rtol = {None: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    for p, q in zip(scaled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=rtol * float(q.detach().abs().max()))


def test_a_scale_that_is_too_large_is_backed_off() -> None:
    """Steps in which gradients leave float16 change nothing but the scale."""
    model, x, y = build()
    before = [p.detach().clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    scales, skipped = private_like_loop(model, x, y, scaler, torch.float16, steps=3)
    assert (scales, skipped) == ([2.0**24, 2.0**23, 2.0**22], 3)
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old)
        assert p.grad is None
    scales, skipped = private_like_loop(model, x, y, scaler, torch.float16, steps=12)
    assert 0 < skipped < 12  # some more, and then it trains
    assert not torch.equal(next(model.parameters()), before[0])


def test_a_scaler_that_is_switched_off() -> None:
    switched_off, x, y = build()
    plain, _, _ = build()
    private_like_loop(switched_off, x, y, torch.amp.GradScaler("cpu", enabled=False), None, steps=4)
    plain_loop(plain, x, y, steps=4)
    for p, q in zip(switched_off.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_unscaling_gradients_that_were_accumulated() -> None:
    """Two batches into p.grad, `unscale_` by hand, and clipping what came out as a whole."""
    model, x, y = build()
    want = ps.clipped_sum(losses_of(model, x, y, None), model, C)
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), lr=0.1)
    for some in (slice(0, 5), slice(5, 12)):
        losses = losses_of(model, x[some], y[some])
        clipping = ps.backward(scaler.scale(losses), model, ps.ClippedSum(C * scaler.get_scale()))
        assert clipping.sensitivity == C * scaler.get_scale()
    scaler.unscale_(optimizer)
    for name, p in model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(p.grad, want[name], rtol=1e-2, atol=1e-3)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**16


def test_dropped_samples_are_told_of() -> None:
    """One sample far too large: it is dropped, the others are as they are without a scale."""
    model, x, y = build()
    scale = 2.0**13
    weights = torch.ones(12)
    weights[7] = 1e3
    losses = losses_of(model, x, y)
    total = ps.clipped_sum(losses * weights * scale, model, C * scale, nonfinite="drop")
    assert total.clipping.dropped == [7]
    with pytest.raises(ps.NonFiniteError, match=r"1 of 12 samples are not finite: 7\. .*scale losses less"):
        ps.clipped_sum(losses_of(model, x, y) * weights * scale, model, C * scale)
    others = [i for i in range(12) if i != 7]
    want = ps.clipped_sum(losses_of(model, x[others], y[others], None), model, C)
    for name, found in total.items():
        torch.testing.assert_close(found / scale, want[name], rtol=1e-2, atol=2e-3)


def small_losses(model: nn.Module, x: Tensor, y: Tensor, dtype: torch.dtype | None = torch.float16) -> Tensor:
    """As of a mean over many tokens: most cotangents are too small for float16."""
    return losses_of(model, x, y, dtype) / 2**24


def test_what_is_divided_by_which_power_of_the_scale() -> None:
    """All reductions of scaled losses, unscaled, are right where those of the losses themselves are not."""
    model, x, y = build()
    true = vectors(definition(small_losses(model, x, y, None), model))
    scale = 2.0**30
    unscaled = vectors(ps.grad(small_losses(model, x, y), model)).norm(dim=1)
    assert bool(((unscaled / true.norm(dim=1) - 1).abs() > 0.02).all())  # digits are lost, or everything
    losses = small_losses(model, x, y) * scale
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    vector = torch.cat([v.flatten() for v in direction.values()]).double()
    C = float(true.norm(dim=1).median())
    grads, norms, clipped, moment, gram, dot = ps.reduce(
        losses, model, ps.Stack(), ps.Norms(), ps.ClippedSum(C * scale), ps.SecondMoment(), ps.Gram(), ps.Dot(direction)
    )
    near = lambda got, want: torch.testing.assert_close(  # noqa: E731
        got.double(), want, rtol=1e-2, atol=5e-3 * float(want.abs().max())
    )
    near(vectors(grads) / scale, true)
    near(norms / scale, true.norm(dim=1))
    weights = (C / true.norm(dim=1)).clamp(max=1)
    near(torch.cat([t.flatten() for t in clipped.values()]) / scale, weights @ true)
    near(clipped.clipping.weights, weights)
    near(torch.cat([t.flatten() for t in moment.values()]).double() / scale**2, true.square().mean(0))
    near(gram.double() / scale**2, true @ true.t())
    near(dot / scale, true @ vector)


def test_the_monitor_scales_losses_and_logs_what_is_theirs() -> None:
    model, x, y = build()
    true = vectors(definition(small_losses(model, x, y, None), model))
    scale, logged = 2.0**30, []
    monitor = ps.Monitor(model, log=logged.append, every=1)
    record = monitor(small_losses(model, x, y), scale=scale)
    assert record is not None
    torch.testing.assert_close(record.norms, true.norm(dim=1), rtol=1e-2, atol=0)
    again = monitor.backward(small_losses(model, x, y), scale=scale)
    assert again is not None
    torch.testing.assert_close(again.norms, record.norms)
    assert logged[0]["persample/gradient/norm"] == pytest.approx(float(true.mean(0).norm()), rel=1e-2)
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(
        found.double() / scale, true.mean(0), rtol=1e-2, atol=5e-3 * float(true.mean(0).abs().max())
    )


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan")])
def test_the_monitor_refuses_scales_that_cannot_be_undone(scale: float) -> None:
    model, x, y = build()
    monitor = ps.Monitor(model)
    for call in (monitor, monitor.backward):
        with pytest.raises(ValueError, match=f"scale must be a finite number other than 0, not {scale}"):
            call(losses_of(model, x, y), scale=scale)


def test_private_training_with_a_fixed_scale() -> None:
    """Bound and learning rate take the scale: with hardly any noise, the step is that without a scale."""
    model, x, y = build()
    scale, lr = 2.0**30, 1e6
    data = torch.utils.data.TensorDataset(x, y)
    start = [p.detach().clone() for p in model.parameters()]
    want = ps.clipped_sum(small_losses(model, x, y, None), model, 1e-7)
    plan = dp.Plan(examples=12, batch_size=12, steps=1, noise_multiplier=1e-3, delta=1e-2, accountant="rdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=lr / scale)
    private = dp.Private(model, optimizer, plan, ps.ClippedSum(1e-7 * scale))
    for a, b in private.batches(data):
        private.step(small_losses(model, a, b) * scale)
    for p, old, total in zip(model.parameters(), start, want.values(), strict=True):
        torch.testing.assert_close(p - old, -lr * total / 12, rtol=2e-2, atol=1e-3)
