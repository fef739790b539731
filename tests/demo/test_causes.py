"""The causes of wrong answers: whom is asked about, what predicts what, and how it is tried."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from persample import influence as pi
from persample.demo.causes import Causes, Retrain, likeness, worst_answers
from persample.demo.data import Digits, load
from persample.demo.settings import QUICK
from persample.demo.training import losses_fn, train_on

from .conftest import Quick


class Fixed(nn.Module):
    """Says the same of the images it is shown, whatever they are."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, x: Tensor) -> Tensor:
        return self.logits[: len(x)]


def labelled(labels: list[int]) -> Digits:
    x, y = torch.zeros(len(labels), 1, 8, 8), torch.tensor(labels)
    return Digits(x, y, y, x, y)


def test_the_worst_of_the_wrong_answers_come_first() -> None:
    model = Fixed(torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 0.0], [0.1, 0.0]]))  # always 0
    asked, said, wrong = worst_answers(model, labelled([1, 1, 0, 1]), 2)
    assert (asked.tolist(), said.tolist(), wrong) == ([1, 0], [0, 0], 3)
    asked, _, wrong = worst_answers(model, labelled([1, 1, 0, 1]), 8)
    assert (asked.tolist(), wrong) == ([1, 0, 3], 3)


def test_without_wrong_answers_the_least_sure_are_asked_for() -> None:
    model = Fixed(torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.1, 0.0]]))
    asked, said, wrong = worst_answers(model, labelled([0, 0, 0]), 2)
    assert (asked.tolist(), said.tolist(), wrong) == ([2, 0], [0, 0], 0)


def test_retraining_can_be_sent_away_and_is_the_run() -> None:
    retrain = Retrain(replace(QUICK, epochs=1, test=1500), 3, [2, 5])
    kept = torch.arange(0, 297, 2)
    found = pickle.loads(pickle.dumps(retrain))(kept, seed=9)
    digits = load(1500, QUICK.flipped, 3)
    model = train_on(kept, digits, retrain.settings, 3)
    assert torch.allclose(found, losses_fn(model, (digits.test_x[[2, 5]], digits.test_y[[2, 5]])))


def test_likeness_has_the_sign_of_labels() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    x = torch.zeros(3, 1, 8, 8)
    x[0, 0, 0, 0] = x[1, 0, 0, 0] = x[2, 0, 1, 1] = 2
    y = torch.tensor([0, 1, 0])
    found = likeness(model, (x[:1], y[:1]), Digits(x, y, y, x, y))
    assert found.tolist() == [[1.0, -1.0, 0.0]]


def test_what_is_right_afterwards() -> None:
    change = pi.Counterfactual(torch.zeros(3), torch.tensor([-1.0, -0.1, 0.0]), [])
    causes = Causes(torch.arange(3), torch.zeros(3), 3, torch.tensor([1.5, 1.5, 0.1]), torch.zeros(3, 4), change, {})
    assert causes.before.tolist() == pytest.approx([0.2231, 0.2231, 0.9048], abs=1e-4)
    assert causes.after.tolist() == pytest.approx([0.6065, 0.2466, 0.9048], abs=1e-4)
    assert causes.corrected == 1  # the last was right before


def test_replays_predict_what_training_shows(quick: Quick) -> None:
    """Three epochs go nearly straight: changes by the ten most harmful images are right within a third."""
    without = quick.found.causes.without
    assert bool((without.actual < 0).all())
    assert torch.allclose(without.predicted, without.actual, rtol=1 / 3)
