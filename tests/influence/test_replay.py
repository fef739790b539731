"""Replays against training again with one weight changed, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from persample import influence as pi

EXAMPLES, STEPS = 12, 7


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def losses_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Run:
    """A small run, recorded or not, with weights for the examples."""

    def __init__(self, make: Callable[[Any], Optimizer], *, dropout: float = 0.0, gamma: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x, self.y = torch.randn(EXAMPLES, 4, generator=generator), torch.arange(EXAMPLES) % 3
        self.batches = [torch.randint(EXAMPLES, (5,), generator=generator) for _ in range(STEPS)]
        self.queries = torch.randn(2, 4, generator=generator), torch.tensor([0, 2])
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3))
        self.optimizer = make(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma)
        torch.manual_seed(1)

    def data(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.x[ids], self.y[ids]

    def train(self, losses: Callable[[Tensor], Tensor], weights: Tensor | None = None) -> Tensor:
        for ids in self.batches:
            self.optimizer.zero_grad()
            found = losses(ids)
            (found if weights is None else found * weights[ids]).mean().backward()
            self.optimizer.step()
            self.schedule.step()
        self.model.eval()
        with torch.no_grad():
            return losses_fn(self.model, self.queries)

    def weighted(self, weights: Tensor) -> Tensor:
        return self.train(lambda ids: losses_fn(self.model, self.data(ids)), weights)

    def record(self, folder: Path, **options: Any) -> Tensor:
        with pi.Recording(folder, self.model, self.optimizer, losses_fn, every=3, **options) as recording:
            return self.train(lambda ids: recording.losses(self.data(ids), ids))


def differences(make: Callable[[], Run], example: int, size: float = 1e-5) -> Tensor:
    outcomes = []
    for sign in (1, -1):
        weights = torch.ones(EXAMPLES)
        weights[example] += sign * size
        outcomes.append(make().weighted(weights))
    return (outcomes[0] - outcomes[1]) / (2 * size)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.3),
    "decay": lambda p: SGD(p, lr=0.3, weight_decay=0.1),
    "momentum": lambda p: SGD(p, lr=0.3, momentum=0.9),
    "dampening": lambda p: SGD(p, lr=0.3, momentum=0.8, dampening=0.3, weight_decay=0.05),
    "nesterov": lambda p: SGD(p, lr=0.2, momentum=0.9, nesterov=True, weight_decay=0.05),
    "adam": lambda p: Adam(p, lr=0.05),
    "adam-decay": lambda p: Adam(p, lr=0.05, betas=(0.7, 0.9), eps=1e-3, weight_decay=0.1),
    "adamw": lambda p: AdamW(p, lr=0.05, eps=1e-4, weight_decay=0.2),
    "lr-tensor": lambda p: AdamW(p, lr=torch.tensor(0.05), foreach=False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scores_are_minus_the_derivatives(name: str, tmp_path: Path) -> None:
    def make() -> Run:
        return Run(OPTIMIZERS[name])

    run = make()
    run.record(tmp_path)
    scores = pi.replay(tmp_path, run.model, losses_fn, run.queries, data=run.data, examples=EXAMPLES)
    assert scores.shape == (2, EXAMPLES)
    for example in (int(run.batches[0][0]), int(run.batches[-1][1])):
        want = -differences(make, example)
        torch.testing.assert_close(scores[:, example], want, rtol=1e-4, atol=1e-8)
        assert want.norm() > 1e-4


def test_dropout_and_schedules_are_repeated(tmp_path: Path) -> None:
    def make() -> Run:
        return Run(OPTIMIZERS["nesterov"], dropout=0.4, gamma=0.7)

    run = make()
    run.record(tmp_path, keep_batches=True)
    scores = pi.replay(tmp_path, run.model, losses_fn, run.queries)
    example = int(run.batches[2][0])
    torch.testing.assert_close(scores[:, example], -differences(make, example), rtol=1e-4, atol=1e-8)


def test_parameters_that_steps_do_not_reach_and_groups(tmp_path: Path) -> None:
    """Unused in some steps; frozen; and with another learning rate."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 3)
            self.c.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(torch.tanh(self.a(x) + (self.b(x) if len(x) == 5 else 0)))

    class Own(Run):
        def __init__(self) -> None:
            super().__init__(OPTIMIZERS["sgd"])
            self.model = Halves()
            torch.manual_seed(5)
            for p in self.model.parameters():
                nn.init.normal_(p)
            groups = [{"params": self.model.a.parameters()}, {"params": self.model.b.parameters(), "lr": 0.01}]
            self.optimizer = AdamW(groups, lr=0.1, weight_decay=0.1)
            self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
            self.batches[1], self.batches[4] = self.batches[1][:1], self.batches[4][:3]

    run = Own()
    run.record(tmp_path)
    scores = pi.replay(tmp_path, run.model, losses_fn, run.queries, data=run.data, examples=EXAMPLES)
    for example in (int(run.batches[1][0]), int(run.batches[0][0])):
        torch.testing.assert_close(scores[:, example], -differences(Own, example), rtol=1e-4, atol=1e-8)


def test_the_model_and_the_random_numbers_are_as_before(tmp_path: Path) -> None:
    run = Run(OPTIMIZERS["adam"], dropout=0.5)
    run.record(tmp_path)
    run.model.train()
    before, random = {n: t.clone() for n, t in run.model.state_dict().items()}, torch.get_rng_state()
    grads = [p.grad for p in run.model.parameters()]
    pi.replay(tmp_path, run.model, losses_fn, run.queries, data=run.data)
    assert all(torch.equal(t, before[n]) for n, t in run.model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert run.model.training
    assert all(p.grad is own is not None for p, own in zip(run.model.parameters(), grads, strict=True))


def test_frozen_parameters_that_an_optimizer_has(tmp_path: Path) -> None:
    class Frozen(Run):
        def __init__(self) -> None:
            super().__init__(OPTIMIZERS["nesterov"])
            self.model.get_submodule("0").requires_grad_(False)

    run = Frozen()
    run.record(tmp_path)
    scores = pi.replay(tmp_path, run.model, losses_fn, run.queries, data=run.data, examples=EXAMPLES)
    example = int(run.batches[0][0])
    torch.testing.assert_close(scores[:, example], -differences(Frozen, example), rtol=1e-4, atol=1e-8)


def test_momentum_that_is_off_for_some_steps(tmp_path: Path) -> None:
    class Pausing(Run):
        def train(self, losses: Callable[[Tensor], Tensor], weights: Tensor | None = None) -> Tensor:
            batches, self.batches = self.batches, []
            for step, ids in enumerate(batches):
                self.optimizer.param_groups[0]["momentum"] = 0.0 if step in (2, 3) else 0.9
                self.batches = [ids]
                found = super().train(losses, weights)
            self.batches = batches
            return found

    def make() -> Run:
        return Pausing(OPTIMIZERS["momentum"])

    run = make()
    run.record(tmp_path)
    scores = pi.replay(tmp_path, run.model, losses_fn, run.queries, data=run.data, examples=EXAMPLES)
    example = int(run.batches[0][0])
    torch.testing.assert_close(scores[:, example], -differences(make, example), rtol=1e-4, atol=1e-8)


def test_a_replay_goes_on_where_it_stopped(tmp_path: Path) -> None:
    run = Run(OPTIMIZERS["momentum"])
    run.record(tmp_path / "run")
    want = pi.replay(tmp_path / "run", run.model, losses_fn, run.queries, data=run.data)
    calls = 0

    def failing(ids: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise KeyboardInterrupt
        return run.data(ids)

    part = tmp_path / "part.pt"
    with pytest.raises(KeyboardInterrupt):
        pi.replay(tmp_path / "run", run.model, losses_fn, run.queries, data=failing, resume_from=part)
    assert part.exists()
    asked: list[Tensor] = []
    got = pi.replay(
        tmp_path / "run",
        run.model,
        losses_fn,
        run.queries,
        data=lambda ids: (asked.append(ids), run.data(ids))[1],  # type: ignore[func-returns-value]
        resume_from=part,
    )
    assert torch.equal(got, want)
    assert len(asked) < 2 * STEPS
    with pytest.raises(ValueError, match="other queries"):
        pi.replay(
            tmp_path / "run",
            run.model,
            losses_fn,
            (run.queries[0] + 1, run.queries[1]),
            data=run.data,
            resume_from=part,
        )


def test_a_recording_goes_on_after_a_kill(tmp_path: Path) -> None:
    whole = Run(OPTIMIZERS["adamw"], dropout=0.3)
    whole.record(tmp_path / "whole")
    killed = Run(OPTIMIZERS["adamw"], dropout=0.3)
    recording = pi.Recording(tmp_path / "killed", killed.model, killed.optimizer, losses_fn, every=3)
    killed.batches, rest = killed.batches[:4], killed.batches
    killed.train(lambda ids: recording.losses(killed.data(ids), ids))  # never closed: step 3 was written last
    again = Run(OPTIMIZERS["adamw"], dropout=0.3)
    with pi.Recording(tmp_path / "killed", again.model, again.optimizer, losses_fn, every=3) as continued:
        done = continued.resume()
        assert done == 3
        again.batches = rest[done:]
        again.train(lambda ids: continued.losses(again.data(ids), ids))
    one, other = (
        pi.replay(tmp_path / name, whole.model, losses_fn, whole.queries, data=whole.data)
        for name in ("whole", "killed")
    )
    assert torch.equal(one, other)


def test_another_run_is_found_out(tmp_path: Path) -> None:
    run = Run(OPTIMIZERS["sgd"])
    run.record(tmp_path)
    with pytest.raises(pi.ReplayError, match="not deterministic"):
        pi.replay(tmp_path, run.model, losses_fn, run.queries, data=lambda ids: run.data(ids.flip(0) * 0))
    with pytest.raises(ValueError, match="give data="):
        pi.replay(tmp_path, run.model, losses_fn, run.queries)
    with pytest.raises(ValueError, match="does not have"):
        pi.replay(tmp_path, nn.Linear(4, 3), losses_fn, run.queries, data=run.data)
    with pytest.raises(ValueError, match="there are 2 examples"):
        pi.replay(tmp_path, run.model, losses_fn, run.queries, data=run.data, examples=2)
    with pytest.raises(FileNotFoundError, match="no recorded run"):
        pi.replay(tmp_path / "nowhere", run.model, losses_fn, run.queries, data=run.data)
    (tmp_path / "steps-00000003.pt").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="damaged"):
        pi.replay(tmp_path, run.model, losses_fn, run.queries, data=run.data)


def test_what_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    run = Run(OPTIMIZERS["sgd"])
    with pytest.raises(ValueError, match="amsgrad"):
        pi.Recording(tmp_path, run.model, Adam(run.model.parameters(), amsgrad=True), losses_fn)
    with pytest.raises(ValueError, match="RMSprop cannot be replayed"):
        pi.Recording(tmp_path, run.model, torch.optim.RMSprop(run.model.parameters()), losses_fn)
    with pytest.raises(ValueError, match="not the model's"):
        pi.Recording(tmp_path, nn.Linear(2, 2), run.optimizer, losses_fn)
    norm = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    recording = pi.Recording(tmp_path, norm, SGD(norm.parameters(), lr=0.1), losses_fn)
    with pytest.raises(ValueError, match="running_mean"):
        recording.losses(run.data(torch.arange(5)), torch.arange(5))


def test_steps_out_of_order_are_refused(tmp_path: Path) -> None:
    run = Run(OPTIMIZERS["sgd"])
    with pi.Recording(tmp_path, run.model, run.optimizer, losses_fn) as recording:
        with pytest.raises(RuntimeError, match="without recording"):
            run.optimizer.step()
        recording.losses(run.data(torch.arange(2)), torch.arange(2))
        with pytest.raises(RuntimeError, match="one batch"):
            recording.losses(run.data(torch.arange(2)), torch.arange(2))
    with pytest.raises(RuntimeError, match="closed"):
        recording.losses(run.data(torch.arange(2)), torch.arange(2))
    with pi.Recording(tmp_path, run.model, run.optimizer, losses_fn) as again, pytest.raises(FileExistsError):
        again.losses(run.data(torch.arange(2)), torch.arange(2))
