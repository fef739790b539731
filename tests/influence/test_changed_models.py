"""Models that are changed between a build and a query: noticed, or answered for as they are now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from persample import influence as pi
from tests.influence.programs import batches_of, index_of, model_of

DATA, QUERY = batches_of(), batches_of(2, 4, 9)[0]


def _assigned(model: nn.Module) -> None:
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)


def _registered_again(model: nn.Module) -> None:
    first = model.get_submodule("0")
    first.weight = nn.Parameter(first.weight.detach().clone())


@pytest.mark.parametrize("change", [_assigned, _registered_again])
def test_other_tensors_with_the_same_numbers(tmp_path: Path, change: Callable[[nn.Module], None]) -> None:
    index = index_of(tmp_path / "i").build(DATA)
    want = index.scores(QUERY)
    change(index.subject.model)
    assert torch.equal(index.scores(QUERY), want)
    assert index.check(QUERY).worst < 1e-5
    states = [model_of(seed).state_dict() for seed in (1, 2)]
    assert torch.equal(
        pi.Index(tmp_path / "j", index.subject.model, index.subject.losses_fn).build(DATA, states).scores(QUERY),
        pi.Index(tmp_path / "k", model_of(), index.subject.losses_fn).build(DATA, states).scores(QUERY),
    )


class Noted(nn.Linear):
    """With a state beside its tensors."""

    note: dict[str, int]

    def get_extra_state(self) -> dict[str, int]:
        return self.note

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.note = dict(state)


def test_states_of_more_than_tensors(tmp_path: Path) -> None:
    model = Noted(6, 3)
    model.note = {"steps": 1}
    other = {**model.state_dict(), "weight": torch.zeros(3, 6), "_extra_state": {"steps": 2}}
    index = pi.Index(tmp_path, model, index_of(tmp_path).subject.losses_fn).build(DATA, [other])
    assert bool(index.scores(QUERY).isfinite().all())
    assert model.note == {"steps": 1}


def _frozen(model: nn.Module) -> None:
    model.requires_grad_(False)


def _renamed(model: nn.Module) -> None:
    model.add_module("other", model.get_submodule("0"))
    del model._modules["0"]


@pytest.mark.parametrize("change", [_frozen, _renamed])
def test_parameters_that_are_gone(tmp_path: Path, change: Callable[[nn.Module], None]) -> None:
    index = index_of(tmp_path / "i").build(DATA)
    change(index.subject.model)
    with pytest.raises(ValueError, match=r"'0\.weight'.* are no trainable parameters of the model any more"):
        index.scores(QUERY)


def _signs(model: nn.Module) -> None:
    model.get_submodule("0").weight.data[:, 1::2].neg_()


def _one_element(model: nn.Module) -> None:
    model.get_submodule("3").bias.detach().numpy()[2] += 1e-6


def _other_storage(model: nn.Module) -> None:
    weight = model.get_submodule("0").weight
    weight.data = weight.data + 1e-6


def _small_step(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-6)
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def _wider(model: nn.Module) -> None:
    model.double()


@pytest.mark.parametrize("change", [_signs, _one_element, _other_storage, _small_step, _wider])
def test_other_numbers_are_noticed(tmp_path: Path, change: Callable[[nn.Module], None]) -> None:
    index = index_of(tmp_path / "i").build(DATA)
    index.scores(QUERY)
    change(index.subject.model)
    with pytest.raises(pi.MismatchError, match="other parameters or buffers"):
        index.scores(QUERY)
