"""Private steps: what they compute, and what they refuse before anything is released."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps
from persample import dp
from persample.dp import binding
from persample.dp.noise import Scale, add_noise
from persample.dp.sampling import poisson
from persample.dp.sources import Source
from tests.dp.helpers import CLASSES, WIDTH, dataset, flat, losses_of, network, plan, private
from tests.models import mlp


def by_definition(model: nn.Module, batch: Any, bound: float, noisy: bool, source: Source, step: int) -> list[Tensor]:
    """One sample after the other: clip its gradient, add up, add the noise of the step, divide by the expected size."""
    params = list(model.parameters())
    sums = [torch.zeros_like(p) for p in params]
    for i in range(len(batch[0])):
        loss = losses_of(model, (batch[0][i : i + 1], batch[1][i : i + 1]))[0]
        grads = torch.autograd.grad(loss, params)
        norm = torch.cat([g.flatten() for g in grads]).norm()
        for total, g in zip(sums, grads, strict=True):
            total += g * min(1.0, bound / float(norm))
    scale = Scale(sensitivity=bound, noise_multiplier=float(noisy), size=sum(p.numel() for p in params))
    add_noise(sums, scale, source, step)
    return [total / 12 for total in sums]


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_a_run_is_what_it_is_defined_to_be(noisy: bool, kind: type[torch.optim.Optimizer]) -> None:
    model, other = network(), network()
    trained = private(
        model,
        plan(noise_multiplier=float(noisy)),
        optimizer=kind(model.parameters(), lr=0.1),  # type: ignore[call-arg]
    )
    optimizer = kind(other.parameters(), lr=0.1)  # type: ignore[call-arg]
    x, y = dataset().tensors
    for step, batch in enumerate(trained.batches(dataset())):
        record = trained.step(losses_of(model, batch))
        samples = poisson(plan(), trained._source, step)
        found = by_definition(other, (x[samples], y[samples]), 0.3, noisy, trained._source, step)
        for p, g in zip(other.parameters(), found, strict=True):
            p.grad = g
        optimizer.step()
        optimizer.zero_grad()
        assert record.updated
        assert record.number == step + 1
        # Exact sums weigh by a bound of the norm, a little above it; RMSprop makes much of little.
        torch.testing.assert_close(flat(model), flat(other), atol=3e-3, rtol=5e-3)


def test_gradients_are_gone_after_a_step() -> None:
    model = network()
    trained = private(model)
    batch = next(iter(trained.batches(dataset())))
    trained.step(losses_of(model, batch))
    assert all(p.grad is None for p in model.parameters())


def test_backward_leaves_the_optimizer_to_others() -> None:
    model, other = network(), network()
    stepped, backed = private(other), private(model)
    for batch in stepped.batches(dataset()):
        stepped.step(losses_of(other, batch))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in backed.batches(dataset()):
        backed.backward(losses_of(model, batch))
        optimizer.step()
    assert torch.equal(flat(model), flat(other))


def test_runs_are_reproducible_with_a_seed_and_differ_without() -> None:
    def end(**more: Any) -> Tensor:
        model = network()
        trained = private(model, **more)
        for batch in trained.batches(dataset()):
            trained.step(losses_of(model, batch))
        return flat(model)

    assert torch.equal(end(seed=5), end(seed=5))
    assert not torch.equal(end(seed=5), end(seed=6))
    assert not torch.equal(end(seed=None), end(seed=None))
    assert not torch.equal(end(seed=None, secure=True), end(seed=None, secure=True))


def test_noise_has_its_size_in_a_step() -> None:
    """A wide layer, steps of noise alone: chi-square on 64,000 coordinates within 7 standard deviations."""
    model = nn.Linear(320, 200, bias=False)
    trained = private(model, plan(examples=1000, batch_size=1, steps=1, noise_multiplier=2.0), seed=None, secure=True)
    before = model.weight.detach().clone()
    for part in trained.batches([(torch.zeros(320), 0)] * 1000):
        trained.step(model(part[0]).sum(1) * 0.0)
    moved = (before - model.weight.detach()).double() / 0.5  # lr 0.5, divided by the expected batch of 1
    n = moved.numel()
    assert abs(float((moved / (2.0 * 0.3)).square().mean()) - 1) < 7 * (2 / n) ** 0.5 + 1e-3


def test_spent_grows_with_the_steps_to_the_plans_budget() -> None:
    model = network()
    trained = private(model)
    found = [trained.spent().epsilon]
    for batch in trained.batches(dataset()):
        trained.step(losses_of(model, batch))
        found.append(trained.spent().epsilon)
    assert found[0] == 0
    assert found == sorted(set(found))
    assert found[-1] == trained.plan.epsilon
    assert str(trained.spent()) == f"epsilon {found[-1]:.4g} at delta 1e-05 after 6 steps"


def test_the_default_clip() -> None:
    model = network()
    trained = dp.Private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan())
    assert trained.clip.sensitivity == 1.0  # type: ignore[union-attr]
    assert trained.bound is None


def test_schedulers_work_as_usual() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    trained = private(model, optimizer=optimizer)
    for batch in trained.batches(dataset()):
        trained.step(losses_of(model, batch))
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_frozen_parameters_stay() -> None:
    model = network()
    model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    before = model[0].weight.clone()  # type: ignore[index, union-attr, operator]
    trained = private(model)
    for batch in trained.batches(dataset()):
        trained.step(losses_of(model, batch))
    assert torch.equal(before, model[0].weight)  # type: ignore[index, union-attr, arg-type]


# Refusals, before anything is released: no parameter has moved, nothing is accounted.


def first(trained: dp.Private) -> Any:
    return next(iter(trained.batches(dataset())))


def unmoved(trained: dp.Private, before: Tensor) -> bool:
    return trained.steps == 0 and torch.equal(before, flat(trained._model))


def test_losses_that_are_not_of_the_batch() -> None:
    model = network()
    trained = private(model)
    before = flat(model)
    x, y = dataset().tensors
    with pytest.raises(dp.PrivacyError, match="no batch waits for a step"):
        trained.step(losses_of(model, (x, y)))
    batch = first(trained)
    size = len(batch[0])
    with pytest.raises(dp.PrivacyError, match=f"there are 60 losses, but the batch has {size} samples"):
        trained.step(losses_of(model, (x, y)))
    with pytest.raises(dp.PrivacyError, match="computed before the batch was drawn"):
        trained.step(early_of(trained, model))
    with pytest.raises(ValueError, match=r"losses must have shape \(B,\)"):
        trained.step(losses_of(model, batch).mean())
    assert unmoved(trained, before)
    trained.step(losses_of(model, batch))
    with pytest.raises(dp.PrivacyError, match="no batch waits for a step"):
        trained.step(losses_of(model, batch))
    assert trained.steps == 1


def early_of(trained: dp.Private, model: nn.Module) -> Tensor:
    """As many losses as are waited for, computed before the batch."""
    assert trained._part is not None
    size = trained._part.size
    x, y = dataset().tensors
    losses = losses_of(model, (x[:size], y[:size]))
    first(trained)  # the same batch, drawn again
    return losses


def test_losses_of_another_model() -> None:
    trained = private()
    before = flat(trained._model)
    batch = first(trained)
    with pytest.raises(dp.PrivacyError, match=r"depend on none of the trainable parameters: .* not with a copy of it"):
        trained.step(losses_of(copy.deepcopy(trained._model), batch))
    assert unmoved(trained, before)


def test_a_batch_without_a_step() -> None:
    trained = private()
    before = flat(trained._model)
    batches = iter(trained.batches(dataset()))
    next(batches)
    with pytest.raises(dp.PrivacyError, match=r"the last batch of .* samples was not stepped"):
        next(batches)
    assert unmoved(trained, before)


def test_the_last_batch_without_a_step() -> None:
    trained = private(plan_=plan(steps=1))
    with pytest.raises(dp.PrivacyError, match="was not stepped"):
        list(trained.batches(dataset()))


def test_two_loops_at_once() -> None:
    trained = private()
    one = iter(trained.batches(dataset()))
    next(one)
    first(trained)
    with pytest.raises(dp.PrivacyError, match="batches was called again"):
        next(one)


def test_a_changed_clip() -> None:
    clip = ps.ClippedSum(0.3)
    trained = private(clip=clip)
    before = flat(trained._model)
    batch = first(trained)
    clip.max_norm = 3.0
    with pytest.raises(dp.PrivacyError, match=r"clip was changed .* max_norm from 0.3 to 3.0"):
        trained.step(losses_of(trained._model, batch))
    assert unmoved(trained, before)
    with pytest.raises(AttributeError, match="clip"):
        trained.clip = ps.ClippedSum(1.0)  # type: ignore[misc]
    with pytest.raises(AttributeError, match="plan"):
        trained.plan = plan()  # type: ignore[misc]


def test_a_parameter_frozen_during_the_run_is_refused() -> None:
    trained = private()
    before = flat(trained._model)
    batch = first(trained)
    trained._model[0].bias.requires_grad_(False)  # type: ignore[index, union-attr]
    with pytest.raises(dp.PrivacyError, match=r"\['0.bias'\] are gone, \[\] are new"):
        trained.step(losses_of(trained._model, batch))
    assert unmoved(trained, before)


def test_a_changed_optimizer() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained = private(model, optimizer=optimizer)
    before = flat(model)
    batch = first(trained)
    optimizer.add_param_group({"params": [torch.zeros(4, requires_grad=True)]})
    with pytest.raises(ValueError, match=r"not the model's, of shapes \[\(4,\)\]"):
        trained.step(losses_of(model, batch))
    assert unmoved(trained, before)


class Mixing(nn.Module):
    """Sees the other samples, and the graph shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x - x.mean(0)) + self.inner(x).mean(0)  # type: ignore[no-any-return]


def test_samples_that_interact_in_the_graph() -> None:
    model = Mixing()
    trained = private(model, check_every=0)
    before = flat(model)
    batch = first(trained)
    with pytest.raises(ps.InteractionError):
        trained.step(losses_of(model, batch))
    assert unmoved(trained, before)


def test_more_steps_than_planned() -> None:
    trained = private(plan_=plan(steps=1))
    for batch in trained.batches(dataset()):
        trained.step(losses_of(trained._model, batch))
    with pytest.raises(dp.PrivacyError, match="the plan is used up: 1 of 1 steps are done"):
        trained._ledger.account(False)
    assert trained.steps == 1


def test_not_a_number() -> None:
    data = copy.deepcopy(dataset())
    model = network()
    clean = private(model, plan(batch_size=60, steps=1))
    data.tensors[0][7] = float("nan")
    before = flat(model)
    for batch in clean.batches(data):
        with pytest.raises(ps.NonFiniteError, match=r"1 of 60 samples .* 7"):
            clean.step(losses_of(model, batch))
        break
    assert unmoved(clean, before)
    dropping = private(model, plan(batch_size=60, steps=1), clip=ps.ClippedSum(0.3, nonfinite="drop"))
    for batch in dropping.batches(data):
        record = dropping.step(losses_of(model, batch))
    assert record.dropped == dropping.dropped == 1
    assert bool(flat(model).isfinite().all())


def test_infinite_losses_in_one_sample_leave_the_others() -> None:
    model, other = network(), network()
    found = []
    for net, scale in ((model, float("inf")), (other, 0.0)):
        trained = private(net, plan(batch_size=60, steps=1), clip=ps.ClippedSum(0.3, nonfinite="drop"))
        for batch in trained.batches(dataset()):
            weights = torch.ones(60)
            weights[3] = scale
            found.append(trained.step(losses_of(net, batch) * weights))
    torch.testing.assert_close(flat(model), flat(other))
    assert [r.dropped for r in found] == [1, 0]


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda m: dp.Private(m, torch.optim.SGD(m.parameters()), None), TypeError, "plan must be a dp.Plan"),  # type: ignore[arg-type]
    (lambda m: dp.Private([], None, plan()), TypeError, "model must be an nn.Module, not a list"),  # type: ignore[arg-type]
    (lambda m: dp.Private(m, None, plan()), TypeError, "optimizer must be a torch.optim.Optimizer"),  # type: ignore[arg-type]
    (lambda m: private(nn.ReLU(), optimizer=torch.optim.SGD(m.parameters())), ValueError, "no trainable parameters"),
    (
        lambda m: private(m, optimizer=torch.optim.LBFGS(m.parameters())),
        ValueError,
        "LBFGS evaluates the losses several",
    ),
    (
        lambda m: private(m, optimizer=torch.optim.SGD(m[0].parameters())),
        ValueError,
        r"not hold .* \['2.weight', '2.bias'\]",
    ),
    (lambda m: private(m, optimizer=torch.optim.SGD([*m.parameters(), torch.zeros(2)])), ValueError, "not the model's"),
    (lambda m: private(m.half()), ValueError, "parameter '0.weight' is torch.float16, whose range is too small"),
    (
        lambda m: private(m, clip=ps.Norms()),
        TypeError,
        "clip must be a ps.ClippedSum, a dp.AdaptiveClip or a dp.ScheduledClip, not a Norms",
    ),
    (lambda m: private(m, clip=ps.ClippedSum(weights=lambda n: n)), ValueError, "has to state its sensitivity"),
    (lambda m: private(m, check_every=-1), ValueError, "check_every must be a number of steps"),
    (lambda m: private(m, secure=True), ValueError, "secure=True has no seed"),
]


@pytest.mark.parametrize(("make", "error", "message"), REFUSED, ids=[m[:30] for _, _, m in REFUSED])
def test_refusals_at_the_start(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(network())


def test_persample_needs_torch_alone() -> None:
    code = (
        "import sys\n"
        "for name in ('dp_accounting', 'safetensors', 'numpy', 'scipy'): sys.modules[name] = None\n"
        "import persample\n"
        "assert 'persample.dp' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_models_of_all_kinds_train() -> None:
    """An LSTM and an embedding, with several param groups."""

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm, self.head = nn.Embedding(9, 6), nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.lstm(self.embed(ids))[0][:, -1])  # type: ignore[no-any-return]

    model = Text()
    optimizer = torch.optim.AdamW(
        [
            {"params": model.lstm.parameters(), "lr": 1e-2},
            {"params": [*model.embed.parameters(), *model.head.parameters()]},
        ]
    )
    data = torch.utils.data.TensorDataset(torch.randint(9, (60, 4)), torch.randint(3, (60,)))
    trained = private(model, optimizer=optimizer)
    for ids, y in trained.batches(data):
        assert trained.step(F.cross_entropy(model(ids), y, reduction="none")).updated
    assert trained.steps == 6


def test_devices_without_float64_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "widest", lambda device: torch.float32)
    with pytest.raises(ValueError, match=r"'0\.weight' is on cpu, which has no float64"):
        private(network())


KEEP: dict[str, Callable[[Tensor], Tensor]] = {
    "gradients": lambda g: g,
    "rows of them": lambda g: g[-1:],
    "arrays": lambda g: torch.as_tensor(g.numpy()),
}


@pytest.mark.parametrize("keep", KEEP.values(), ids=KEEP)
@pytest.mark.parametrize("width", [7, 2**16])
def test_gradients_of_earlier_steps_are_not_written_over(width: int, keep: Callable[[Tensor], Tensor]) -> None:
    """Memory is used again from step to step, but not that of a gradient, which a user may keep."""
    run, kept = private(mlp(WIDTH, width, CLASSES, dtype=torch.float32, seed=2)), []
    for batch in run.batches(dataset()):
        run.backward(losses_of(run._model, batch))
        some = [keep(p.grad) for p in run._model.parameters() if p.grad is not None]
        kept += [(gradient, gradient.clone()) for gradient in some]
        run._optimizer.step()
        run._optimizer.zero_grad()
    assert len(kept) == 6 * 4
    assert all(torch.equal(gradient, copy) for gradient, copy in kept)


def test_large_gradients_lie_in_memory_that_is_used_again() -> None:
    run, places = private(mlp(WIDTH, 2**17, CLASSES, dtype=torch.float32, seed=2)), []
    for batch in run.batches(dataset()):
        run.backward(losses_of(run._model, batch))
        places.append([p.grad.data_ptr() for p in run._model.parameters() if p.grad is not None and p.nbytes > 2**20])
        run._optimizer.step()
        run._optimizer.zero_grad()
    assert places[-1]
    assert places[-1] == places[-2] == places[-3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_step_does_not_depend_on_the_default_device(dtype: torch.dtype) -> None:
    ends = []
    for device in ("cpu", "meta"):
        model = mlp(WIDTH, 2**13, CLASSES, dtype=dtype, seed=2)
        run = private(model, plan(users=20, examples=0), optimizer=dp.AdamBC(model.parameters()))
        for x, y in run.batches(dataset(), users=torch.arange(60) % 20):
            losses = F.cross_entropy(model(x.to(dtype)).float(), y, reduction="none")
            with torch.device(device):
                run.step(losses)
        ends.append(flat(model))
    assert torch.equal(*ends)
