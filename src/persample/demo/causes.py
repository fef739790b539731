"""Which training images caused wrong answers, and whether training without them does what they predict."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from persample import influence as pi

from .data import Digits, load
from .progress import Parts
from .settings import Settings
from .training import losses_fn, train_on


@dataclass(frozen=True)
class Causes:
    """Of ``asked`` test images (Q,): what the model said, every training image's influence, and the trials of it."""

    asked: Tensor  # places among the test images
    said: Tensor  # (Q,), classes
    wrong: int  # of all test images
    losses: Tensor  # (Q,), of the model that was trained on everything
    scores: Tensor  # (Q, N), by a replay of the run; positive for helpful images
    without: pi.Counterfactual  # trained without the most harmful images of each
    trials: dict[str, pi.DataModelScore]  # by method, on the same random subsets; the replay is the first

    @property
    def score(self) -> pi.DataModelScore:
        """The trial of the scores that are shown."""
        return next(iter(self.trials.values()))

    @property
    def before(self) -> Tensor:
        """(Q,): the probability that the model gave to the right label."""
        return torch.exp(-self.losses)

    @property
    def after(self) -> Tensor:
        """The same, trained without the images that harmed this answer most."""
        return torch.exp(-(self.losses + self.without.actual))

    @property
    def corrected(self) -> int:
        """How many answers are right then for certain: more than half goes to the right label."""
        return int(((self.before <= 0.5) & (self.after > 0.5)).sum())


def find_causes(model: nn.Module, run: Path, digits: Digits, settings: Settings, seed: int, parts: Parts) -> Causes:
    """Replay the recorded run for the worst answers, and train again without some images."""
    asked, said, wrong = worst_answers(model, digits, settings.asked)
    queries = digits.test_x[asked], digits.test_y[asked]
    with parts.timed("replaying the run"):
        scores = influence(run, model, queries, digits)
    others = {"one checkpoint, Gauss-Newton": at_the_end(model, queries, digits)}
    others["likeness, no gradients"] = likeness(model, queries, digits)
    retrain = Retrain(settings, seed, asked.tolist())
    with parts.timed("training without some images"), tempfile.TemporaryDirectory() as folder:
        without = pi.counterfactual(scores, retrain, count=settings.removed, workers=settings.workers)
        trials = {
            title: pi.lds(
                each,
                retrain,
                subsets=settings.subsets,
                drop=settings.dropped,
                workers=settings.workers,
                folder=folder,  # trained once for all methods
            )
            for title, each in {"replay of the run": scores, **others}.items()
        }
    with torch.no_grad():
        losses = losses_fn(model, queries)
    return Causes(asked, said, wrong, losses, scores, without, trials)


@torch.no_grad()
def worst_answers(model: nn.Module, digits: Digits, count: int) -> tuple[Tensor, Tensor, int]:
    """The wrong answers with the highest losses, what was said, and how many are wrong; if none is, the least sure."""
    logits = model(digits.test_x)
    said, losses = logits.argmax(1), F.cross_entropy(logits, digits.test_y, reduction="none")
    wrong = said != digits.test_y
    asked = losses.masked_fill(~wrong, -1).argsort(descending=True, stable=True)[: min(count, int(wrong.sum()))]
    if not len(asked):
        asked = losses.argsort(descending=True, stable=True)[:count]
    return asked, said[asked], int(wrong.sum())


def influence(run: Path, model: nn.Module, queries: tuple[Tensor, Tensor], digits: Digits) -> Tensor:
    """(Q, N): by how much each query's loss would rise without each training image, through the whole run."""
    return pi.replay(run, model, losses_fn, queries, data=digits.batch, examples=len(digits.x))


def at_the_end(model: nn.Module, queries: tuple[Tensor, Tensor], digits: Digits) -> Tensor:
    """The same by the trained model alone, as if it had been trained to a minimum."""
    newton = pi.GaussNewton(
        lambda model, batch: model(batch[0]), lambda z, batch: F.cross_entropy(z, batch[1], reduction="none")
    )
    loader = [digits.batch(ids) for ids in torch.arange(len(digits.x)).split(256)]
    return pi.exact(model, losses_fn, loader, queries, product=newton)


@torch.no_grad()
def likeness(model: nn.Module, queries: tuple[Tensor, Tensor], digits: Digits) -> Tensor:
    """For comparison: cosines of what the last layer sees, positive for images with the right label, else negative."""
    body = nn.Sequential(*list(model.children())[:-1])
    x, y = queries
    cosines = F.normalize(body(x), dim=1) @ F.normalize(body(digits.x), dim=1).t()
    return torch.where(y.unsqueeze(1) == digits.y, cosines, -cosines)


@dataclass(frozen=True)
class Retrain:
    """From the images to train on to the queries' losses; can be sent to another process."""

    settings: Settings
    data_seed: int
    asked: list[int]

    def __call__(self, kept: Tensor, seed: int) -> Tensor:
        """The same run, so that ``seed`` changes nothing: what is left out is all that differs."""
        digits = load(self.settings.test, self.settings.flipped, self.data_seed)
        model = train_on(kept, digits, self.settings, self.data_seed)
        with torch.no_grad():
            return losses_fn(model, (digits.test_x[self.asked], digits.test_y[self.asked]))
