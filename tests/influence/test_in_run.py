"""Values of examples while training, against autograd, one example at a time."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from persample import influence as pi
from persample.factors import Factor

Batch = tuple[Tensor, Tensor]


def losses_fn(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def task(seed: int = 0) -> tuple[nn.Module, Batch, Batch]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.ReLU(), nn.LayerNorm(9), nn.Linear(9, 4)).double()
    x, y = torch.randn(11, 2, 5).double(), torch.arange(11) % 4
    return model, (x[:7], y[:7]), (x[7:], y[7:])


def reference(model: nn.Module, train: Batch, validation: Batch, scale: dict[str, Tensor] | None = None) -> Tensor:
    """<g_i, P v> / B."""
    params = dict(model.named_parameters())
    v = torch.autograd.grad(losses_fn(model, validation).mean(), list(params.values()))
    scaled = [g if scale is None else g * scale[n] for n, g in zip(params, v, strict=True)]
    rows = []
    for loss in losses_fn(model, train):
        own = torch.autograd.grad(loss, list(params.values()), retain_graph=True)
        rows.append(sum((a * b).sum() for a, b in zip(own, scaled, strict=True)))
    return torch.stack(rows).detach() / len(rows)


def test_gradient_and_values_are_those_of_autograd() -> None:
    model, train, validation = task()
    run = pi.InRun(model, validation, losses_fn, lr=0.1)
    plain = copy.deepcopy(model)
    for _ in range(2):  # gradients add up
        losses_fn(plain, train).mean().backward()
        run.backward(losses_fn(model, train), torch.arange(7))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    torch.testing.assert_close(run.values(), 2 * 0.1 * reference(model, train, validation))
    assert run.times().tolist() == [2] * 7


def test_values_add_up_to_what_the_validation_loss_loses() -> None:
    model, train, validation = task()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    run = pi.InRun(model, validation, losses_fn, optimizer=optimizer)
    before = losses_fn(model, validation).mean().item()
    run.backward(losses_fn(model, train), torch.arange(7))
    optimizer.step()
    lost = before - losses_fn(model, validation).mean().item()
    assert run.values().sum().item() == pytest.approx(lost, rel=1e-3)


def test_momentum_counts_to_the_end() -> None:
    model, train, validation = task()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.75, dampening=0.2)
    run = pi.InRun(model, validation, losses_fn, optimizer=optimizer)
    run.backward(losses_fn(model, train), torch.arange(7))
    torch.testing.assert_close(run.values(), 0.1 * 0.8 / 0.25 * reference(model, train, validation))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_divides_by_its_second_moments(kind: type[torch.optim.Adam]) -> None:
    model, train, validation = task()
    optimizer = kind(model.parameters(), lr=0.01, betas=(0.9, 0.8), eps=1e-3)
    run = pi.InRun(model, validation, losses_fn, optimizer=optimizer)
    second = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    want = torch.zeros(7, dtype=torch.float64)
    for step in range(3):
        optimizer.zero_grad()
        if step:
            scale = {n: 1 / ((s / (1 - 0.8**step)).sqrt() + 1e-3) for n, s in second.items()}
        else:
            names = list(second)
            own = torch.autograd.grad(losses_fn(model, train).mean(), list(model.parameters()))
            scale = {n: 1 / (g.abs() + 1e-3) for n, g in zip(names, own, strict=True)}
        want += 0.01 * reference(model, train, validation, scale)
        run.backward(losses_fn(model, train), torch.arange(7))
        for n, p in model.named_parameters():
            assert p.grad is not None
            second[n] = 0.8 * second[n] + 0.2 * p.grad.square()
        optimizer.step()
    torch.testing.assert_close(run.values(), want)


def test_adam_that_climbs_or_keeps_its_largest_moments() -> None:
    model, train, validation = task()
    options = {"lr": 0.01, "betas": (0.9, 0.8), "amsgrad": True, "maximize": True}
    optimizer = torch.optim.AdamW(model.parameters(), **options)  # type: ignore[arg-type]
    names = dict(model.named_parameters())
    run = pi.InRun(model, validation, losses_fn, optimizer=optimizer)
    run.backward(losses_fn(model, train), torch.arange(7))
    optimizer.step()
    for p in names.values():  # smaller gradients: the largest moment is that of the step before
        p.grad = 1e-3 * p.grad  # type: ignore[operator]
    optimizer.step()
    before = run.values()
    largest = {n: optimizer.state[p]["max_exp_avg_sq"] for n, p in names.items()}
    scale = {n: 1 / ((s / (1 - 0.8**2)).sqrt() + 1e-8) for n, s in largest.items()}
    want = -0.01 * reference(model, train, validation, scale)
    run.backward(losses_fn(model, train), torch.arange(7))
    torch.testing.assert_close(run.values() - before, want)


def test_unreached_and_frozen_parameters_and_one_example() -> None:
    model, train, validation = task()
    model.register_parameter("unused", nn.Parameter(torch.ones(3).double()))
    model[0].bias.requires_grad_(False)
    run = pi.InRun(model, validation, losses_fn, lr=1.0)
    run.backward(losses_fn(model, (train[0][:1], train[1][:1])), torch.tensor([5]))
    run.backward(losses_fn(model, (train[0][:0], train[1][:0])), torch.zeros(0, dtype=torch.int64))
    assert model.unused.grad is None
    assert model[0].bias.grad is None
    assert run.values()[:5].tolist() == [0] * 5
    assert run.values()[5] != 0
    assert run.steps == 1


def test_an_example_may_come_twice_and_the_gradient_be_old() -> None:
    model, train, validation = task()
    asked = 0

    def batch() -> Batch:
        nonlocal asked
        asked += 1
        return validation

    run = pi.InRun(model, batch, losses_fn, lr=1.0, every=2)
    ids = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    for _ in range(4):
        run.backward(losses_fn(model, train), ids)
    want = torch.zeros(3).double().index_add(0, ids, reference(model, train, validation))
    torch.testing.assert_close(run.values(), 4 * want)
    assert asked == 2


def test_modes_and_random_numbers_are_left_alone() -> None:
    model, train, validation = task()
    model.append(nn.Dropout(0.5))
    random = torch.get_rng_state()
    losses = losses_fn(model, train)
    after = torch.get_rng_state()
    pi.InRun(model, validation, losses_fn, lr=1.0).backward(losses, torch.arange(7))
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(random, after)
    assert model.training


def test_saved_and_continued(tmp_path: Path) -> None:
    model, train, validation = task()
    whole, first, second = (pi.InRun(model, validation, losses_fn, lr=0.5, every=2) for _ in range(3))
    for run in (whole, whole, first):
        run.backward(losses_fn(model, train), torch.arange(7))
    first.save(tmp_path / "run.pt")
    second.load(tmp_path / "run.pt")
    second.backward(losses_fn(model, train), torch.arange(7))
    assert torch.equal(second.values(), whole.values())
    assert second.steps == 2
    with pytest.raises(ValueError, match="every=2"):
        pi.InRun(model, validation, losses_fn, lr=0.5).load(tmp_path / "run.pt")
    with pytest.raises(ValueError, match="another run"):
        pi.InRun(nn.Linear(2, 2), validation, losses_fn, lr=0.5, every=2).load(tmp_path / "run.pt")
    with pytest.raises(ValueError, match="missing"):
        second.load_state_dict({})
    (tmp_path / "run.pt").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="damaged"):
        second.load(tmp_path / "run.pt")


def test_bad_input_is_refused() -> None:
    model, train, validation = task()
    with pytest.raises(ValueError, match="learning rate"):
        pi.InRun(model, validation, losses_fn)
    with pytest.raises(ValueError, match="at least 1 step"):
        pi.InRun(model, validation, losses_fn, lr=0.1, every=0)
    run = pi.InRun(model, validation, losses_fn, lr=0.1)
    losses = losses_fn(model, train)
    with pytest.raises(ValueError, match="reduction='none'"):
        run.backward(losses.mean(), torch.arange(7))
    with pytest.raises(ValueError, match="name the 7 examples"):
        run.backward(losses, torch.arange(6))
    with pytest.raises(ValueError, match="whole numbers"):
        run.backward(losses, torch.arange(7) - 1)
    endless = pi.InRun(model, validation, losses_fn, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=1))
    with pytest.raises(ValueError, match="without end"):
        endless.backward(losses, torch.arange(7))
    losses = losses_fn(model, train)
    scalar = pi.InRun(model, validation, lambda model, batch: losses_fn(model, batch).mean(), lr=0.1)
    with pytest.raises(ValueError, match="per validation example"):
        scalar.backward(losses, torch.arange(7))


class Wide(nn.Module):
    """Layers whose validation gradient is kept as two matrices: of one position, of several, and of two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(40, 30), nn.Linear(30, 30), nn.Linear(90, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x.flatten(1)[:, :40]))
        return self.last(torch.stack([x, self.shared(x).tanh(), self.shared(self.shared(x))], 1).flatten(1))


def wide_task() -> tuple[nn.Module, Batch, Batch]:
    torch.manual_seed(1)
    x, y = torch.randn(11, 40).double(), torch.arange(11) % 4
    return Wide().double(), (x[:7], y[:7]), (x[7:], y[7:])


@pytest.mark.parametrize("every", [1, 3])
def test_wide_layers(every: int) -> None:
    model, train, validation = wide_task()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    batch = (validation[0].clone(), validation[1])
    run = pi.InRun(model, batch, losses_fn, optimizer=optimizer, every=every)
    wanted = 0.2 * reference(model, train, validation)
    run.backward(losses_fn(model, train), torch.arange(7))
    assert any(isinstance(g, tuple) for g in run._gradient.values())
    torch.testing.assert_close(run.values(), wanted)
    if every == 3:
        batch[0].zero_()  # a buffer that is used for something else meanwhile
        run.backward(losses_fn(model, train), torch.arange(7))
        torch.testing.assert_close(run.values(), 2 * wanted)


def test_wide_layers_of_a_resumed_run(tmp_path: Path) -> None:
    model, train, validation = wide_task()
    run = pi.InRun(model, validation, losses_fn, lr=0.1, every=4)
    run.backward(losses_fn(model, train), torch.arange(7))
    run.save(tmp_path / "run")
    again = pi.InRun(model, validation, losses_fn, lr=0.1, every=4)
    again.load(tmp_path / "run")
    for one in (run, again):
        one.backward(losses_fn(model, train), torch.arange(7))
    torch.testing.assert_close(run.values(), again.values())


def test_validation_losses_may_interact() -> None:
    model, train, validation = wide_task()

    def centred(model: nn.Module, batch: Batch) -> Tensor:
        losses = losses_fn(model, batch)
        return losses - 0.5 * losses.mean() if len(losses) == 4 else losses

    run = pi.InRun(model, validation, centred, lr=0.1)
    run.backward(losses_fn(model, train), torch.arange(7))
    torch.testing.assert_close(run.values(), 0.5 * 0.1 * reference(model, train, validation))


class Long(nn.Module):
    """Layers with many positions, whose gradients are written out for both the products and the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.per_pixel = nn.Conv2d(2, 6, 3, padding=1), nn.Linear(6, 5)
        self.grouped, self.last = nn.Conv2d(6, 6, 3, groups=3), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.grouped(torch.tanh(self.conv(x))))
        return self.last(torch.tanh(self.per_pixel(x.flatten(2).mT)).mean(1))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_layers_with_many_positions(kind: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    model = Long().double()
    x, y = torch.randn(12, 2, 14, 14).double(), torch.arange(12) % 4
    train, validation, plain = (x[:9], y[:9]), (x[9:], y[9:]), copy.deepcopy(model)
    asked, stacks = [], Factor._dot_and_sum_of_stacks
    monkeypatch.setattr(Factor, "_dot_and_sum_of_stacks", lambda f, *given: asked.append(f.shape) or stacks(f, *given))
    optimizer = kind(model.parameters(), lr=0.1)
    run = pi.InRun(model, validation, losses_fn, optimizer=optimizer)
    losses_fn(plain, train).mean().backward()
    scale = {n: 1 / (p.grad.abs() + 1e-8) for n, p in plain.named_parameters()} if kind is torch.optim.AdamW else None
    run.backward(losses_fn(model, train), torch.arange(9))
    torch.testing.assert_close(run.values(), 0.1 * reference(plain, train, validation, scale))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert (torch.Size([5, 6]) in asked) == (kind is torch.optim.SGD)  # the first step of Adam takes the sum before
