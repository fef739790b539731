"""Who takes part in a step. One process alone here; `Replicas` and `Shards` are several."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..reduce import reduce
from ..reductions import ClippedSum
from .errors import PrivacyError

Parts = list[tuple[list[int], int]]


class AddNoise(Protocol):
    """Adds a step's noise to tensors, in place; each ``stream`` has its own."""

    def __call__(self, tensors: Sequence[Tensor], stream: int = 0) -> None: ...


class Team:
    """One process. A subclass overrides what several processes do differently; everything else is the same for both.

    Every process of a team draws the same samples and keeps the same accounts; `parts` says which of the samples are
    its own, `release` makes one noisy sum of the local ones.
    """

    rank = 0
    size = 1
    reruns = True  # whether the model may be run again by this process alone

    def agree(self, value: bytes) -> bytes:
        """The first process's value, in all of them: keys and nonces of random numbers."""
        return value

    def by_first(self, do: Callable[[], Any]) -> Any:
        """Done by the first process alone: what it returns, which must be JSON, or its error, in all of them."""
        failed: Exception | None = None
        said: list[Any] = [None, None]
        if self.rank == 0:
            try:
                said[0] = do()
            except Exception as error:
                failed, said[1] = error, str(error)
        found, wrong = json.loads(self.agree(json.dumps(said).encode()))
        if failed is not None:
            raise failed
        if wrong is not None:
            raise PrivacyError(f"the first process says: {wrong}")
        return found

    def together(self) -> AbstractContextManager[None]:
        """Around what may fail in one process, while others wait for it in `release`."""
        return nullcontext()

    def accounting(self) -> AbstractContextManager[None]:
        """Around writing a step down: where it fails in one process, no other may go on to `release`."""
        return nullcontext()

    def parts(self, samples: list[int], physical: int | None) -> Parts:
        """Those of a batch's samples that this process takes, in parts; and how many at a part's end do not count."""
        own = samples[self.rank :: self.size]
        return [(part, 0) for part in split(own, physical)]

    def clipped(self, losses: Tensor, params: Mapping[str, Tensor], clip: ClippedSum, padding: int) -> Any:
        """The clipped sum over this process's losses, by name, with its ``clipping``."""
        return reduce(losses, params, clip, independent=True)[0]

    def release(self, sums: Sequence[Tensor], add_noise: AddNoise) -> None:
        """From local sums to their noisy total, in place and the same in all processes; noise is drawn once."""
        add_noise(sums)

    def states(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What is saved of model and optimizer."""
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_states(self, model: nn.Module, optimizer: torch.optim.Optimizer, states: dict[str, Any]) -> None:
        """Go on from what was saved."""
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])


def split(samples: list[int], physical: int | None) -> list[list[int]]:
    """In parts of at most this size; none for no samples."""
    size = physical or max(len(samples), 1)
    return [samples[start : start + size] for start in range(0, len(samples), size)]
