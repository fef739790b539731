"""The guard: interaction that the graph does not show is caught, clean models pass, and nothing is left behind."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps
from persample import dp
from persample.dp.guard import Guard
from tests.dp.helpers import CLASSES, WIDTH, dataset, flat, losses_of, network, plan, private


class Of(nn.Module):
    """A module from a function of a linear layer and the input."""

    def __init__(self, fn: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.fn = nn.Linear(WIDTH, CLASSES), fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.linear, x)


def detached_mean(linear: nn.Module, x: Tensor) -> Tensor:
    h = linear(x)
    return h - h.mean(0).detach()  # type: ignore[no-any-return]


def scaled_by_the_largest(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x / x.detach().abs().max())  # type: ignore[no-any-return]


def neighbour(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x) + linear(x.roll(1, 0)).detach()  # type: ignore[no-any-return]


def ranked(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x) * x.sum(1, keepdim=True).argsort(0).argsort(0)  # type: ignore[no-any-return]


def standardised(linear: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        mean, std = x.mean(0), x.std(0)
    return linear((x - mean) / std)  # type: ignore[no-any-return]


INTERACTING = [detached_mean, scaled_by_the_largest, neighbour, ranked, standardised]


@pytest.mark.parametrize("fn", INTERACTING, ids=lambda f: f.__name__)
def test_detached_interaction_is_caught_before_anything_is_released(fn: Callable[..., Tensor]) -> None:
    model = Of(fn)
    trained = private(model)
    before = flat(model)
    batch = next(iter(trained.batches(dataset())))
    with pytest.raises(ps.InteractionError, match=r"samples interact in the model \(Of\): run again on a few samples"):
        trained.step(losses_of(model, batch))
    assert torch.equal(before, flat(model))
    assert trained.steps == 0


def test_the_part_that_was_called_is_named() -> None:
    model = nn.ModuleDict({"body": Of(detached_mean), "head": nn.Linear(CLASSES, CLASSES)})
    trained = private(model)
    x, y = next(iter(trained.batches(dataset())))
    with pytest.raises(ps.InteractionError, match=r"module 'body' \(Of\)"):
        trained.step(F.cross_entropy(model["head"](model["body"](x)), y, reduction="none"))


class Gated(nn.Module):
    """Interacts from some step on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.on = nn.Linear(WIDTH, CLASSES), False

    def forward(self, x: Tensor) -> Tensor:
        return detached_mean(self.linear, x) if self.on else self.linear(x)


def test_it_is_looked_for_from_time_to_time() -> None:
    model = Gated()
    trained = private(model, check_every=4)
    for batch in trained.batches(dataset()):
        model.on = trained.steps >= 2
        if trained.steps == 4:
            with pytest.raises(ps.InteractionError, match="samples interact"):
                trained.step(losses_of(model, batch))
            break
        trained.step(losses_of(model, batch))  # steps 3 and 4 go by unseen


class Clean:
    """Models whose samples do not interact, each called in its own way."""

    class Dropout(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(WIDTH, 20), nn.Dropout(0.5), nn.ReLU(), nn.Linear(20, CLASSES))

    class FunctionalDropout(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.linear(x), 0.5, self.training)  # type: ignore[no-any-return]

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(1, 6, 2, dropout=0.5), nn.Linear(6, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x.t().unsqueeze(2))[0][-1])  # type: ignore[no-any-return]

    class GroupNorm(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(WIDTH, 8), nn.GroupNorm(2, 8), nn.ReLU(), nn.Linear(8, CLASSES))

    class FrozenBatchNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            self.norm.eval()
            return self.linear(self.norm(x))  # type: ignore[no-any-return]

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
            self.lift, self.layer, self.head = nn.Linear(1, 4), layer, nn.Linear(4, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(self.lift(x.unsqueeze(2))).mean(1))  # type: ignore[no-any-return]

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.mul_(2))  # type: ignore[no-any-return]


CLEAN = [c for c in vars(Clean).values() if isinstance(c, type)]


@pytest.mark.parametrize("make", CLEAN, ids=lambda c: c.__name__)
@pytest.mark.parametrize("batch_size", [2, 12, 60])
def test_clean_models_pass(make: Callable[[], nn.Module], batch_size: int) -> None:
    torch.manual_seed(0)
    model = make()
    trained = private(model, plan(batch_size=batch_size), check_every=1)
    larger = 0
    for batch in trained.batches(dataset()):
        larger += len(batch[0]) > 1
        trained.step(losses_of(model, batch))
    assert trained.steps == 6
    assert trained._guard._conclusive == larger  # one sample alone tells nothing


class Nested(nn.Module):
    """Takes dicts and keywords, gives a dict with a scalar beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: dict[str, Any], *, scale: Tensor, flag: bool = True) -> dict[str, Tensor]:
        logits = self.linear(inputs["x"][0]) * scale
        return {"logits": logits, "size": logits.detach().square().mean()}


def test_nested_inputs_and_outputs() -> None:
    model = Nested()
    trained = private(model)
    for x, y in trained.batches(dataset()):
        out = model({"x": [x], "name": "batch"}, scale=torch.tensor(2.0), flag=True)
        trained.step(F.cross_entropy(out["logits"], y, reduction="none"))
    assert trained._guard._conclusive == 2  # in the first two steps, then every hundred
    assert trained.steps == 6


def folded(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x.unsqueeze(1).expand(-1, 4, -1)).flatten(0, 1)  # type: ignore[no-any-return]


def folded_time_first(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x.expand(4, -1, -1)).flatten(0, 1)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("fn", "sample"), [(folded, 0), (folded_time_first, 1)])
def test_folded_outputs(fn: Callable[..., Tensor], sample: int) -> None:
    """(B · T, C): what belongs to a sample is found in either order."""
    model = Of(fn)
    trained = private(model, check_every=1)
    for x, _ in trained.batches(dataset(), steps=2):
        h = model(x).unflatten(0, (len(x), 4) if sample == 0 else (4, len(x)))
        trained.step(h.square().sum((1 - sample, 2)))
    assert trained._guard._conclusive == 2


def test_nothing_is_left_behind() -> None:
    torch.manual_seed(0)
    recurrent = nn.LSTM(8, 4, 2, dropout=0.3, batch_first=True)
    model = nn.Sequential(
        nn.Linear(WIDTH, 8), nn.Dropout(0.5), nn.BatchNorm1d(8).eval(), nn.Unflatten(1, (1, 8)), recurrent
    )
    trained = private(model, check_every=1)
    for x, y in trained.batches(dataset(), steps=1):
        out = model(x)[0][:, 0, :CLASSES]
        state = torch.get_rng_state()
        buffers = {n: (b.clone(), b._version) for n, b in model.named_buffers()}
        trained.step(F.cross_entropy(out, y, reduction="none"))
        assert torch.equal(state, torch.get_rng_state())
        assert all(torch.equal(b, buffers[n][0]) and b._version == buffers[n][1] for n, b in model.named_buffers())
    assert [m.training for m in model] == [True, True, False, True, True]
    assert recurrent.dropout == 0.3
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_buffers_that_take_up_data_are_refused() -> None:
    model = nn.Sequential(
        nn.Unflatten(1, (1, WIDTH)),
        nn.InstanceNorm1d(1, track_running_stats=True),
        nn.Flatten(),
        nn.Linear(WIDTH, CLASSES),
    )
    trained = private(model)
    before = flat(model)
    batch = next(iter(trained.batches(dataset())))
    with pytest.raises(dp.PrivacyError, match=r"keeps what it has seen .* buffers 1.running_mean"):
        trained.step(losses_of(model, batch))
    assert torch.equal(before, flat(model))


class Alone(nn.Module):
    """Cannot be run on fewer samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)
        self.size = 0

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != self.size:
            raise ValueError("another size")
        return self.linear(x)  # type: ignore[no-any-return]


def test_what_cannot_be_run_again_is_told_once() -> None:
    model = Alone()
    trained = private(model, check_every=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in trained.batches(dataset()):
            model.size = len(x)
            trained.step(F.cross_entropy(model(x), y, reduction="none"))
    assert len(caught) == 1
    assert "the model (Alone) could not be run again on a few samples" in str(caught[0].message)
    assert trained.steps == 6


def test_a_model_that_is_not_called() -> None:
    model = network()
    trained = private(model, check_every=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in trained.batches(dataset()):
            h = F.linear(x, model[0].weight, model[0].bias).tanh()  # type: ignore[index, union-attr, arg-type]
            h = F.linear(h, model[2].weight, model[2].bias)  # type: ignore[index, union-attr, arg-type]
            trained.step(F.cross_entropy(h, y, reduction="none"))
    assert ["the model, which was not called, could not be run again" in str(w.message) for w in caught] == [True]


def test_it_can_be_switched_off() -> None:
    model = Of(detached_mean)
    trained = private(model, check_every=0)
    for batch in trained.batches(dataset()):
        trained.step(losses_of(model, batch))
    assert trained.steps == 6


def test_single_samples_prove_nothing() -> None:
    guard = Guard(network(), 1)
    guard.watch(0)
    guard._model(torch.zeros(1, WIDTH))
    guard.check(1)
    assert (guard._conclusive, guard._inconclusive) == (0, 0)
