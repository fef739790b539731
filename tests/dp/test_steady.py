"""Parameters that take up data in a forward pass are refused; what is changed between steps is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps
from persample import dp
from tests.dp.helpers import CLASSES, WIDTH, dataset, flat, losses_of, network, private


class ActNorm(nn.Module):
    """Scale and shift, which the first batch that is seen sets; written in one of several ways."""

    def __init__(self, write: Callable[[nn.Parameter, Tensor], object]) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.write, self.ready = write, False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.write(self.scale, 1 / x.detach().std(0))
            self.write(self.shift, -x.detach().mean(0))
            self.ready = True
        return (x + self.shift) * self.scale


def in_place(p: nn.Parameter, value: Tensor) -> None:
    with torch.no_grad():
        p.copy_(value)


def by_data(p: nn.Parameter, value: Tensor) -> None:
    p.data.copy_(value)


def other_data(p: nn.Parameter, value: Tensor) -> None:
    p.data = value


def by_numpy(p: nn.Parameter, value: Tensor) -> None:
    p.detach().numpy()[:] = value.numpy()


def actnorm(write: Callable[[nn.Parameter, Tensor], object], frozen: bool = False) -> nn.Sequential:
    model = nn.Sequential(ActNorm(write), nn.Linear(WIDTH, CLASSES))
    model[0].requires_grad_(not frozen)
    return model


def first_step(model: nn.Module, **more: Any) -> dp.Private:
    trained = private(model, **more)
    trained.step(losses_of(model, next(iter(trained.batches(dataset())))))
    return trained


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("write", [in_place, by_data, other_data, by_numpy], ids=lambda f: f.__name__)
def test_layers_that_initialise_themselves_from_the_first_batch(write: Any, frozen: bool) -> None:
    with pytest.raises(
        dp.PrivacyError, match=r"\['0.scale', '0.shift'\] were changed between the batch and private.step"
    ):
        first_step(actnorm(write, frozen))


@pytest.mark.parametrize("write", [in_place, by_data, other_data, by_numpy], ids=lambda f: f.__name__)
def test_it_is_looked_for_in_every_step(write: Any) -> None:
    model = actnorm(write)
    model[0].ready = True
    trained = private(model, check_every=0)
    for batch in trained.batches(dataset()):
        model[0].ready = trained.steps < 3
        losses = losses_of(model, batch)
        if trained.steps == 3:
            with pytest.raises(dp.PrivacyError, match="were changed between the batch"):
                trained.step(losses)
            break
        trained.step(losses)
    assert trained.steps == 3


class Statistics(nn.Module):
    """Normalises by what the first batch was like; ``flag`` says where it is noted that there was one."""

    def __init__(self, flag: str) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        if flag == "buffer":
            self.register_buffer("ready", torch.zeros((), dtype=torch.bool))
        else:
            self.ready = False
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.mean = x.detach().mean(0)
            self.ready = torch.ones((), dtype=torch.bool) if "ready" in dict(self.named_buffers()) else True
        return self.linear(x - self.mean)  # type: ignore[no-any-return]


@pytest.mark.parametrize("flag", ["buffer", "attribute"])
def test_buffers_that_are_set_by_the_first_batch(flag: str) -> None:
    with pytest.raises(dp.PrivacyError, match=r"in its buffers .*mean.* set by made-up data before"):
        first_step(Statistics(flag))
    model = Statistics(flag)
    model(torch.randn(20, WIDTH))
    assert first_step(model).steps == 1


class Counting(nn.Module):
    """Buffers that change by themselves: a count, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("noise", torch.zeros(WIDTH))
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.noise = torch.randn(WIDTH)
        return self.linear(x)  # type: ignore[no-any-return]


class Positions(nn.Module):
    """Grows a table when inputs are longer than before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(1))
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < x.shape[1]:
            self.table = torch.arange(x.shape[1]).sin()
        return self.linear(x + self.table)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Counting, Positions])
def test_buffers_that_do_not_take_up_data(kind: type[nn.Module]) -> None:
    model = kind()
    trained = private(model, check_every=1)
    for batch in trained.batches(dataset()):
        model(batch[0])  # more calls than one
        trained.step(losses_of(model, batch))
    assert trained.steps == 6


def test_data_seen_before_the_run_are_no_change_during_it() -> None:
    """Made-up data before the run."""
    model = actnorm(in_place)
    model(torch.randn(20, WIDTH))
    assert first_step(model).steps == 1


class Words(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6, **options), nn.Linear(6, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids).mean(1))  # type: ignore[no-any-return]


def step_with_words(model: nn.Module) -> dp.Private:
    trained = private(model)
    data = torch.utils.data.TensorDataset(torch.randint(9, (60, 4)), torch.randint(3, (60,)))
    ids, y = next(iter(trained.batches(data)))
    trained.step(F.cross_entropy(model(ids), y, reduction="none"))
    return trained


def test_embeddings_that_are_renormalised_when_looked_up() -> None:
    """Those of words that are in the batch change, and tell of it."""
    assert step_with_words(Words()).steps == 1
    with pytest.raises(dp.PrivacyError, match=r"\['embed.weight'\] were changed .* Embedding\(max_norm=\)"):
        step_with_words(Words(max_norm=1e-3))


def test_parameters_without_a_shape() -> None:
    with pytest.raises(ValueError, match=r"'0.weight' has no shape yet: call the model once with made-up data"):
        private(nn.Sequential(nn.LazyLinear(CLASSES)))


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_parametrizations_are_no_changes(norm: str) -> None:
    """Spectral norm keeps vectors in buffers, which follow the weights and not the data."""
    model = nn.Sequential(getattr(nn.utils.parametrizations, norm)(nn.Linear(WIDTH, 7)), nn.Linear(7, CLASSES))
    trained = private(model)
    for batch in trained.batches(dataset()):
        trained.step(losses_of(model, batch))
    assert trained.steps == 6


def clamp(model: nn.Module, _: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-1, 1)


def load(model: nn.Module, saved: dict[str, Tensor]) -> None:
    model.load_state_dict(saved)


def assign(model: nn.Module, _: Any) -> None:
    for p in model.parameters():
        p.data = p.data * 0.5


@pytest.mark.parametrize("change", [clamp, load, assign], ids=lambda f: f.__name__)
@pytest.mark.parametrize("check_every", [0, 1])
def test_changes_between_steps_are_the_users_own(change: Any, check_every: int) -> None:
    model = network()
    average, saved = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    trained = private(model, check_every=check_every)
    for batch in trained.batches(dataset(), physical_batch_size=5):
        if trained.step(losses_of(model, batch)).updated:
            change(model, saved)
            with torch.no_grad():
                for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(p, 0.1)  # an average of the weights
    assert trained.steps == 6


def test_evaluation_while_a_batch_waits() -> None:
    model = network()
    trained = private(model)
    for batch in trained.batches(dataset()):
        losses = losses_of(model, batch)
        with torch.no_grad():
            model.eval()(dataset().tensors[0])
        model.train()
        trained.step(losses)
    assert trained.steps == 6


def test_a_step_that_is_tried_again() -> None:
    model = network()
    trained = private(model)
    batch = next(iter(trained.batches(dataset())))
    with pytest.raises(ps.NonFiniteError):
        trained.step(losses_of(model, batch) * torch.inf)
    trained.step(losses_of(model, batch))
    assert trained.steps == 1


def test_an_optimizer_that_steps_when_the_next_batch_is_there() -> None:
    late, usual = network(), network()
    trained = private(late)
    for batch in trained.batches(dataset()):
        trained._optimizer.step()
        trained._optimizer.zero_grad()
        trained.backward(losses_of(late, batch))
    trained._optimizer.step()
    other = private(usual)
    for batch in other.batches(dataset()):
        other.step(losses_of(usual, batch))
    assert torch.equal(flat(late), flat(usual))


def test_a_change_by_hand_while_a_batch_waits() -> None:
    model = network()
    trained = private(model)
    batch = next(iter(trained.batches(dataset())))
    clamp(model, None)
    before = flat(model)
    trained.step(losses_of(model, batch))  # nothing was beyond the bounds: no value has changed
    assert not torch.equal(before, flat(model))
    batch = next(iter(trained.batches(dataset())))
    assign(model, None)
    with pytest.raises(dp.PrivacyError, match="change weights by hand after a step, and before the next batch"):
        trained.step(losses_of(model, batch))
