"""Measuring privacy from outside: a lower bound on epsilon from one run with canaries.

Canaries are examples made to be recognised. Each is in the dataset, for the whole run, if a fair coin of its own says
so. Whoever sees what the run has released guesses the coins; the better the guesses, the larger epsilon must be
(Steinke, Nasr, Jagielski: Privacy Auditing with One (1) Training Run, 2023).

>>> import torch
>>> from persample.dp import audit
>>> included = audit.coins(1000, seed=0)
>>> scores = included + 0.1 * torch.randn(1000, generator=torch.Generator().manual_seed(0))  # a careless release
>>> found = audit.measure(scores, included, guesses=100, delta=1e-5)
>>> found
Finding(canaries=1000, guesses=100, right=100, delta=1e-05, confidence=0.95, epsilon=3.4...)
>>> found.refutes(1.0)
True

What a test of a sampled run has to keep apart: a coin decides whether a canary is in the dataset at all, which is what
neighbouring datasets differ by and epsilon is about; Poisson sampling then draws it, if it is there, into some of the
steps. The coins are public to the measurement only, the draws to nobody: a score may use the sampling rate, not the
batches. An excluded canary must leave no trace; if the length of the dataset is public, as a plan's is, an example
without a gradient takes its place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_LARGEST = 100.0  # of the epsilons tried: a right guess is then as certain as floating point allows


@dataclass(frozen=True)
class Finding:
    """What guesses tell: with probability ``confidence``, no mechanism that is (epsilon, delta)-private is so bad."""

    canaries: int
    guesses: int
    right: int
    delta: float
    confidence: float
    epsilon: float

    def refutes(self, epsilon: float) -> bool:
        """Whether a promise is broken, by this measure: if it was kept, this is said with a probability of at most
        1 - confidence, over the coins and the run's own randomness."""
        return self.epsilon > epsilon


def coins(canaries: int, seed: int | None = None) -> Tensor:
    """(canaries,), bool: which canaries are in the dataset, each with probability 1/2.

    >>> from persample.dp import audit
    >>> audit.coins(5, seed=0).tolist()
    [True, False, True, True, True]

    Args:
        canaries: how many there are.
        seed: for coins that can be tossed again.
    """
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return torch.rand(canaries, generator=generator) < 0.5


def measure(scores: Tensor, included: Tensor, guesses: int, delta: float, confidence: float = 0.95) -> Finding:
    """Guess "in" for the canaries with the highest scores, "out" for those with the lowest, and nothing in between.

    Args:
        scores: (canaries,): larger where the releases look more as if the canary was there. They must be computed
            without knowing the coins.
        included: (canaries,), bool: the coins.
        guesses: how many to make, half of them "in". The number has to be chosen before the scores are seen.
        delta: that of the promise.
        confidence: of the bound.

    Returns:
        A `Finding`.
    """
    if scores.ndim != 1 or scores.shape != included.shape:
        raise ValueError(
            f"there must be one score and one coin per canary, but scores have shape {tuple(scores.shape)} and coins "
            f"{tuple(included.shape)}"
        )
    if included.dtype != torch.bool:
        raise TypeError(f"included must be bool, True for canaries in the dataset, not {included.dtype}")
    if bool(scores.isnan().any()):
        raise ValueError(f"{int(scores.isnan().sum())} of {len(scores)} scores are NaN: they have no order")
    if not 0 <= guesses <= len(scores):
        raise ValueError(f"guesses must be between 0 and the number of canaries, {len(scores)}, not {guesses}")
    # Canaries of equal score in random order: theirs may tell something.
    shuffled = torch.randperm(len(scores), generator=torch.Generator().manual_seed(0))
    order = shuffled[scores[shuffled].argsort(stable=True)]
    out, in_ = order[: guesses // 2], order[len(order) - (guesses - guesses // 2) :]
    right = int(included[in_].sum()) + int((~included[out]).sum())
    least = lower_bound(len(scores), guesses, right, delta, confidence)
    return Finding(len(scores), guesses, right, delta, confidence, least)


def lower_bound(canaries: int, guesses: int, right: int, delta: float, confidence: float = 0.95) -> float:
    """The least epsilon with which so many right guesses are not improbable.

    >>> from persample.dp import audit
    >>> round(audit.lower_bound(canaries=1000, guesses=100, right=50, delta=1e-5), 2)
    0.0
    >>> round(audit.lower_bound(canaries=1000, guesses=100, right=90, delta=0.0), 2)
    1.63

    Args:
        canaries: how many there were.
        guesses: how many were guessed, right or wrong.
        right: how many of the guesses were right.
        delta: that of the promise.
        confidence: of the bound.

    Returns:
        epsilon, 0 if the guesses are no better than chance, inf if delta alone cannot explain them.
    """
    if not 0 <= right <= guesses <= canaries:
        raise ValueError(f"of {canaries} canaries {guesses} were guessed, {right} of them right: that cannot be")
    if not 0 <= delta < 1 or not 0 < confidence < 1:
        raise ValueError(f"delta {delta!r} and confidence {confidence!r} must lie between 0 and 1")
    low, high = 0.0, _LARGEST
    if probability(canaries, guesses, right, low, delta) > 1 - confidence:
        return 0.0
    if probability(canaries, guesses, right, high, delta) <= 1 - confidence:
        return math.inf
    for _ in range(60):  # low stays refuted, and with it every smaller epsilon
        middle = (low + high) / 2
        if probability(canaries, guesses, right, middle, delta) <= 1 - confidence:
            low = middle
        else:
            high = middle
    return low


def probability(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """A bound on the probability of so many right guesses, whatever an (epsilon, delta)-private mechanism releases.

    With f(v) = P[Binomial(guesses, e^ε / (1 + e^ε)) ≥ v] it is ``f(right) + 2 canaries δ max_i (f(right - i) -
    f(right)) / i``, as proven in the paper.

    >>> from persample.dp import audit
    >>> round(audit.probability(canaries=10, guesses=10, right=10, epsilon=0.0, delta=0.0) * 2**10, 6)
    1.0

    Args:
        canaries: how many there were.
        guesses: how many were guessed.
        right: how many guesses were right, at least.
        epsilon: that of the promise.
        delta: that of the promise.

    Returns:
        The bound, at most 1.
    """
    tail = _tails(guesses, epsilon)[: right + 1]
    gains = tail[:-1].flip(0) - tail[-1]
    most = float((gains / torch.arange(1, right + 1, dtype=torch.float64)).max()) if right else 0.0
    return min(1.0, float(tail[-1]) + 2 * canaries * delta * most)


def _tails(count: int, epsilon: float) -> Tensor:
    """(count + 1,): P[Binomial(count, e^ε / (1 + e^ε)) ≥ v] for every v."""
    v = torch.arange(count + 1, dtype=torch.float64)
    ways = math.lgamma(count + 1) - torch.lgamma(v + 1) - torch.lgamma(count - v + 1)
    right, wrong = -math.log1p(math.exp(-epsilon)), -epsilon - math.log1p(math.exp(-epsilon))
    terms = (ways + v * right + (count - v) * wrong).exp()
    return terms.flip(0).cumsum(0).flip(0)
