"""How long and how large: one full run, and a quick one that only shows that everything works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that is chosen by hand."""

    # data
    test: int = 360  # images kept back
    flipped: float = 0.05  # share of the training labels
    # ordinary training: SGD with momentum, a cosine to zero
    epochs: int = 15
    batch: int = 64
    lr: float = 0.02
    momentum: float = 0.9
    weight_decay: float = 1e-3
    # causes of wrong answers, and training without them
    asked: int = 8  # wrong answers at most
    causes: int = 6  # shown of each kind
    removed: int = 10  # the most harmful, for each answer
    subsets: int = 40  # random ones, to train without
    dropped: float = 0.05  # share of the examples that each is without
    workers: int = 2  # processes to train in; 0 for this one
    # private training
    epsilons: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0)
    repeats: int = 3  # runs for each epsilon
    delta: float = 1e-5
    private_epochs: int = 25
    private_batch: int = 256
    private_lr: float = 2.0
    max_norm: float = 1.0
    accountant: Literal["pld", "rdp"] = "pld"
    # what is shown, and what is checked
    shown: int = 12
    checked: int = 64


FULL = Settings()
QUICK = Settings(
    epochs=3,
    asked=3,
    subsets=4,
    workers=0,
    epsilons=(8.0,),
    repeats=1,
    private_epochs=2,
    accountant="rdp",
    checked=16,
)
