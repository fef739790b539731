"""Who takes part in a step. One process alone here; `Replicas` and `Shards` are several."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..reductions.exact import ExactClippedSum, ExactSums
from ..verbs import reduce
from .errors import PrivacyError
from .sums import Clipped, Line, Whole

Parts = list[tuple[list[int], int]]
Alike = Callable[[], Mapping[str, int]]  # numbers by name that must be the same in all processes

SHOWN = 0  # the index of what is run where there is no sample: a public choice


class AddNoise(Protocol):
    """Sums with a step's noise, in float64.

    Each ``stream`` has its own, of which these are the numbers from a block on. Noise that is remembered is made where
    it was made before.
    """

    @property
    def is_remembered(self) -> bool: ...

    def __call__(self, sums: Sequence[Whole], stream: int = 0, first_block: int = 0) -> Line: ...


class Team:
    """One process. A subclass overrides what several processes do differently; everything else is the same for both.

    Every process of a team draws the same samples and keeps the same accounts; `parts` says which of the samples are
    its own, `release` makes one noisy sum of the local ones.
    """

    rank = 0
    size = 1
    share, shares = 0, 1  # which of how many shares of a batch's samples this process takes
    reruns = True  # whether the model may be run again by this process alone
    lockstep = False  # whether the processes make every backward together, for samples that do not count, too

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
        result, wrong = json.loads(self.agree(json.dumps(said).encode()))
        if failed is not None:
            raise failed
        if wrong is not None:
            raise PrivacyError(f"the first process says: {wrong}")
        return result

    def together(self, alike: Alike) -> AbstractContextManager[None]:
        """Around what may fail in one process, while others wait for it in `release`, which looks what is alike."""
        return nullcontext()

    def accounting(self) -> AbstractContextManager[None]:
        """Around writing a step down: where it fails in one process, no other may go on to `release`."""
        return nullcontext()

    def parts(self, samples: list[int], physical: int | None) -> Parts:
        """Those of a batch's samples that this process takes, in parts; and how many at a part's end do not count.

        All processes get equally many parts, and one at least, so that their loops make the same turns: where no sample
        is left, there is one to run that does not count. A sample that is left alone is run twice, and counts once.
        """
        own = split(samples[self.share :: self.shares], physical)
        turns = max(len(split(samples[:: self.shares], physical)), 1)  # the first share is the largest
        alone = physical == 1  # always, or never: the gradient of a single sample is computed in another way
        parts = [(part, 0) if len(part) > 1 or alone else (part * 2, 1) for part in own]
        return parts + [([SHOWN], 1)] * (turns - len(own))

    def own(self, p: Tensor) -> Tensor:
        """The part of a parameter that this process holds."""
        return p.detach()

    def makes_noise_for(self, name: str) -> bool:
        """Whether this process makes the noise of its part of a parameter, and no other that holds it, too."""
        return self.rank == 0

    @property
    def part(self) -> str | None:
        """Which part of the model this process makes noise for, in words to compare by; None for all or nothing."""
        return None

    def give(self, p: Tensor, gradient: Tensor) -> None:
        """Make this the gradient of that part, in the dtype it is to have; complex numbers come as pairs."""
        if p.is_complex():
            gradient = torch.view_as_complex(gradient.contiguous())
        p.grad = gradient.to(p.grad_dtype or p.dtype)

    def clipped(self, losses: Tensor, params: Mapping[str, Tensor], clip: ExactClippedSum) -> Clipped:
        """The clipped sum over this process's losses, by name, with its ``clipping``."""
        sums: ExactSums = reduce(losses, params, clip, independent=True)[0]
        return sums

    def release(self, sums: Sequence[Whole], add_noise: AddNoise) -> Line:
        """From local sums to their noisy total, the same in all processes; noise is drawn once."""
        return add_noise(sums)

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
