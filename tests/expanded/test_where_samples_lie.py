"""Samples that are moved and folded before the loss, inside the module or outside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from persample import call_for_per_sample_grads
from tests.expanded.helpers import Run, r, taken
from tests.reference import assert_same, definition

PREPARED: dict[str, Callable[[Tensor], Tensor]] = {
    "as_is": lambda x: x,
    "shifted": lambda x: x + 1,
    "padded": lambda x: F.pad(x, (0, 0, 1, 1))[:, 1:-1],
    "copied": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}
INSIDE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # mean losses, of logits (B, T, V) and labels (B, T)
    "plain": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()),
    "classes_second": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "time_major": lambda z, y: F.cross_entropy(z.transpose(0, 1).flatten(0, 1), y.T.flatten()),
    "mean_over_samples_first": lambda z, y: each(z, y).mean(0).mean(),
    "mean_over_positions_first": lambda z, y: each(z, y).mean(1).mean(),
    "turned": lambda z, y: each(z, y).T.mean(1).mean(),
}
OUTSIDE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, int], Tensor]]] = {  # and back to (B, T, V)
    "as_it_is": (lambda z: z, lambda z, B: z),
    "folded": (lambda z: z.flatten(0, 1), lambda z, B: z.unflatten(0, (B, -1))),
    "classes_second": (lambda z: z.transpose(1, 2), lambda z, B: z.transpose(1, 2)),
    "turned": (lambda z: z.transpose(0, 1), lambda z, B: z.transpose(0, 1)),
    "turned_and_folded": (
        lambda z: z.transpose(0, 1).flatten(0, 1),
        lambda z, B: z.unflatten(0, (-1, B)).transpose(0, 1),
    ),
}
PLAIN = ("plain", "classes_second", "mean_over_positions_first", "as_it_is", "folded")  # right, whatever comes before


def each(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


@pytest.mark.parametrize("T", [4, 8, 5])
@pytest.mark.parametrize("prepare", [*PREPARED, "ids"])
class TestWhereSamplesLie:
    """Four samples, four classes, and positions that are as many, twice as many, or something else."""

    def setup(self, T: int, prepare: str) -> tuple[nn.Module, Tensor, Tensor]:
        first, x = nn.Linear(3, 2), r(4, T, 3)
        if prepare == "ids":
            first, x = nn.Embedding(7, 2), torch.randint(6, (4, T))
        net, before = nn.Sequential(first, nn.Tanh(), nn.Linear(2, 4)).double(), PREPARED.get(prepare, lambda x: x + 1)
        return Run(lambda m, x: m.net(before(x)), net=net), x, torch.randint(4, (4, T))

    @pytest.mark.parametrize("inside", INSIDE)
    def test_mean_loss_inside(self, T: int, prepare: str, inside: str) -> None:
        """Right; where integers alone could tell, an error will do, and nothing else."""
        logits, x, y = self.setup(T, prepare)
        module = Run(lambda m, x, y: INSIDE[inside](m.logits(x), y), logits=logits)
        want = definition(each(module.logits(x), y).mean(1), module)
        loss = call_for_per_sample_grads(module, loss_reduction="mean")(x, y)
        if _backward(loss, needed=inside in PLAIN or prepare != "ids"):
            assert_same(taken(module), want)

    @pytest.mark.parametrize("outside", OUTSIDE)
    def test_output(self, T: int, prepare: str, outside: str) -> None:
        """Right; where the samples are not in dim 0, as promised, an error will do, and nothing else."""
        logits, x, y = self.setup(T, prepare)
        turn, back = OUTSIDE[outside]
        module = Run(lambda m, x: turn(m.logits(x)), logits=logits)
        want = definition(each(back(module(x), 4), y).sum(1), module)
        loss = each(back(call_for_per_sample_grads(module)(x), 4), y).sum()
        if _backward(loss, needed=outside in PLAIN):
            assert_same(taken(module), want)


def _backward(loss: Tensor, needed: bool) -> bool:
    """Whether the backward went through; when it is not needed, it may say that it cannot."""
    try:
        loss.backward()
    except RuntimeError:
        if needed:
            raise
        return False
    return True
