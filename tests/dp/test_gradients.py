"""Gradients beside the private ones: in which order they come, what is refused and what stays legal."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample as ps
from persample import dp
from tests.dp.helpers import dataset, flat, losses_of, network, plan, private


def start(model: nn.Module | None = None) -> tuple[nn.Module, torch.optim.Optimizer, dp.Private, Any]:
    """A run at its second batch."""
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trained = private(model, optimizer=optimizer)
    batches = iter(trained.batches(dataset()))
    trained.step(losses_of(model, next(batches)))
    return model, optimizer, trained, batches


def other_loss(model: nn.Module) -> Tensor:
    return losses_of(model, dataset().tensors).mean()


def clipped_sum(model: nn.Module) -> None:
    ps.backward(losses_of(model, dataset().tensors), model, ps.ClippedSum(1.0))


ADDED: dict[str, Callable[[nn.Module], object]] = {
    "backward": lambda model: other_loss(model).backward(),
    "create_graph": lambda model: torch.autograd.backward([other_loss(model)], create_graph=True),
    "twice": lambda model: [other_loss(model).backward() for _ in range(2)],
    "ps.backward": clipped_sum,
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("add", ADDED.values(), ids=ADDED)
def test_a_backward_between_the_private_one_and_the_optimizer(add: Callable[[nn.Module], object]) -> None:
    model, optimizer, trained, batches = start()
    trained.backward(losses_of(model, next(batches)))
    add(model)
    before = flat(model)
    with pytest.raises(
        dp.PrivacyError, match=r"would apply gradients of \['0.weight', .* that a backward has added to"
    ):
        optimizer.step()
    assert torch.equal(before, flat(model))
    for p in model.parameters():
        p.grad = None  # no reference cycle is left of create_graph


@pytest.mark.parametrize("add", [ADDED["backward"], ADDED["ps.backward"]], ids=["backward", "ps.backward"])
def test_a_backward_between_the_batch_and_the_step(add: Callable[[nn.Module], object]) -> None:
    """It would be lost; nothing is released, and the step can be made without."""
    model, optimizer, trained, batches = start()
    batch = next(batches)
    add(model)
    with pytest.raises(dp.PrivacyError, match=r"added to the gradients of \['0.weight', .* since the batch was drawn"):
        trained.step(losses_of(model, batch))
    assert trained.steps == 1
    optimizer.zero_grad()
    trained.step(losses_of(model, batch))
    assert trained.steps == 2


def test_an_ordinary_loop_over_private_batches() -> None:
    """The first step is refused already."""
    model, optimizer, _, batches = start()
    before = flat(model)
    for batch in batches:
        losses_of(model, batch).mean().backward()
        with pytest.raises(dp.PrivacyError, match="without clipping or noise"):
            optimizer.step()
        break
    assert torch.equal(before, flat(model))


def test_an_ordinary_step_after_a_private_one() -> None:
    model, optimizer, trained, batches = start()
    trained.step(losses_of(model, next(batches)))
    before = flat(model)
    other_loss(model).backward()
    with pytest.raises(dp.PrivacyError, match="without clipping or noise"):
        optimizer.step()
    assert torch.equal(before, flat(model))


def test_a_closure_that_adds_gradients() -> None:
    model, optimizer, trained, batches = start()
    trained.backward(losses_of(model, next(batches)))
    before = flat(model)

    def closure() -> Tensor:
        loss = other_loss(model)
        loss.backward()
        return loss

    with pytest.raises(dp.PrivacyError, match=r"the closure of optimizer.step adds to the gradient"):
        optimizer.step(closure)
    assert torch.equal(before, flat(model))


def frozen_first_layer() -> nn.Module:
    model = network()
    model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    return model


@pytest.mark.parametrize("to_none", [True, False])
def test_a_stale_gradient_of_a_frozen_parameter(to_none: bool) -> None:
    model = network()
    other_loss(model).backward()  # an earlier training, that left its last gradients
    model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trained = private(model, optimizer=optimizer)
    before = flat(model)
    batch = next(iter(trained.batches(dataset())))
    with pytest.raises(dp.PrivacyError, match=r"frozen parameters \['0.weight'\] have gradients, .*zero_grad"):
        trained.step(losses_of(model, batch))
    assert trained.steps == 0
    assert torch.equal(before, flat(model))
    optimizer.zero_grad(set_to_none=to_none)
    trained.step(losses_of(model, batch))
    assert trained.steps == 1


def test_a_gradient_of_a_frozen_parameter_that_comes_later() -> None:
    model = frozen_first_layer()
    weight = model[0].weight  # type: ignore[index]
    model, optimizer, trained, batches = start(model)
    trained.backward(losses_of(model, next(batches)))
    weight.grad = torch.ones_like(weight)  # type: ignore[union-attr, arg-type, call-overload]
    before = flat(model)
    with pytest.raises(dp.PrivacyError, match=r"frozen parameters \['0.weight'\] have"):
        optimizer.step()
    assert torch.equal(before, flat(model))


def test_sparse_gradients_of_another_backward() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trained = private(model, optimizer=optimizer)
    data = torch.utils.data.TensorDataset(torch.randint(9, (60, 2)), torch.randint(3, (60,)))
    batch = next(iter(trained.batches(data)))
    losses_of(model, batch).mean().backward()
    before = flat(model)
    with pytest.raises(dp.PrivacyError, match=r"gradients of \['0.weight', '2.weight', '2.bias'\] that a backward"):
        optimizer.step()
    assert torch.equal(before, flat(model))


def test_gradients_that_are_not_applied() -> None:
    """Accumulation by hand: every release overwrites the one before."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trained = private(model, optimizer=optimizer)
    batches = iter(trained.batches(dataset()))
    trained.backward(losses_of(model, next(batches)))
    with pytest.warns(dp.PrivacyWarning, match="not applied, and are overwritten now; .* physical_batch_size="):
        trained.backward(losses_of(model, next(batches)))
    optimizer.step()
    trained.backward(losses_of(model, next(batches)))


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def replace(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad = p.grad.sign() * 0.01


def rescale(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.data.mul_(0.5)


def look(model: nn.Module) -> None:
    """Gradients elsewhere: of the input, of other parameters, and returned instead of added."""
    x = dataset().tensors[0].clone().requires_grad_()
    torch.autograd.grad(model(x).sum(), x)
    torch.autograd.grad(other_loss(model), list(model.parameters()))
    ps.norms(losses_of(model, dataset().tensors), model)


@pytest.mark.parametrize("change", [clip, replace, rescale, look], ids=lambda f: f.__name__)
def test_released_gradients_may_be_changed(change: Callable[[nn.Module], None]) -> None:
    model, optimizer, trained, batches = start()
    for batch in batches:
        assert trained.backward(losses_of(model, batch)).updated
        change(model)
        before = flat(model)
        optimizer.step(lambda: torch.zeros(()))  # type: ignore[arg-type]  # frameworks pass closures that do nothing
        assert not torch.equal(before, flat(model))
        optimizer.zero_grad()
    assert trained.steps == 6


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_cleared_are_nobodys_business(to_none: bool) -> None:
    """A saliency map between batches, zero_grad wherever it stands, and none at all."""
    model, optimizer, trained, batches = start()
    for batch in batches:
        other_loss(model).backward()
        optimizer.zero_grad(set_to_none=to_none)
        trained.backward(losses_of(model, batch))
        optimizer.step()
        other_loss(model).backward()
        optimizer.zero_grad(set_to_none=to_none)
    assert trained.steps == 6


def test_gradients_from_before_are_overwritten() -> None:
    model = network()
    other_loss(model).backward()
    trained = private(model)
    for batch in trained.batches(dataset()):
        trained.step(losses_of(model, batch))
    assert trained.steps == 6


def test_nothing_is_left_behind() -> None:
    """Hooks go with the run, and neither model nor run is kept alive by them."""
    model, optimizer, trained, batches = start()
    assert any(p._post_accumulate_grad_hooks for p in model.parameters())
    run = weakref.ref(trained)
    del trained, batches
    gc.collect()
    assert run() is None
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    other_loss(model).backward()
    optimizer.step()
    seen = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert seen() is None


def test_a_model_does_not_outlive_its_run() -> None:
    model, optimizer, trained, batches = start()
    seen = weakref.ref(model[0])  # type: ignore[index]
    del model, optimizer, trained, batches
    gc.collect()
    assert seen() is None


def test_steps_of_wrapped_optimizers_are_guarded() -> None:
    """accelerate's has no hooks: those of the inner one are used."""
    accelerate = pytest.importorskip("accelerate")
    model = network()
    wrapped = accelerate.Accelerator(cpu=True).prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    trained = private(model, plan(steps=2), optimizer=wrapped)
    for batch in trained.batches(dataset()):
        trained.backward(losses_of(model, batch))
        if trained.steps == 2:
            other_loss(model).backward()
            with pytest.raises(dp.PrivacyError, match="without clipping or noise"):
                wrapped.step()
        else:
            wrapped.step()
        wrapped.zero_grad()
