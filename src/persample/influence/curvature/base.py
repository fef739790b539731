"""The interface of curvatures: go through gradients once or more, then divide others by what was seen.

Gradients come in blocks, one per parameter, as matrices (B, l, r): sketches Lᵀ G R, or whole gradients seen as n x m
matrices. The order of calls is `start`, then for every pass `add` (or `take`, for factors that are not written out) for
each batch, an all-reduce of what `sums` returns if there are several processes, and `end_pass`; at last `fitted`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import isfinite
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ...factors import Dense, Factor, Workspace

Labels = Literal["given", "sampled"]
Settings = Mapping[str, Any]  # what can be written as JSON


class Fitted(ABC):
    """A curvature that has seen the data: `apply` multiplies gradients by the inverse of it."""

    kind: ClassVar[str]  # by which `load` finds the class

    @abstractmethod
    def apply(self, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """(Q, l, r) -> (Q, l, r) for every block: the inverse of the damped curvature times each gradient."""

    @property
    def scales(self) -> Mapping[str, Tensor]:
        """Numbers (*shape) by parameter that whole gradients of queries are multiplied by, before any sketch."""
        return {}

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What has to be stored; names are those of the blocks after a word and a colon."""

    def settings(self) -> dict[str, Any]:
        """The rest of what has to be stored, as JSON has it."""
        return {"kind": self.kind}

    @classmethod
    @abstractmethod
    def load(cls, tensors: Mapping[str, Tensor], settings: Settings) -> Fitted:
        """From what `tensors` and `settings` returned."""


class Curvature(ABC):
    """A way to estimate the curvature of the mean loss from gradients.

    ``passes`` says how often the data are gone through (known after `start`), ``labels`` whose gradients are wanted:
    those of the losses as they are ("given"), or of losses with labels drawn from the model ("sampled").
    """

    passes: int = 1
    labels: Labels = "given"

    @abstractmethod
    def start(self, blocks: Mapping[str, tuple[int, int]]) -> None:
        """Prepare for gradients with these rows and columns; everything seen before is forgotten."""

    def add(self, blocks: Mapping[str, Tensor]) -> None:
        """Take the gradients (B, l, r) of a batch; blocks that are missing count as zero."""
        sizes = {len(block) for block in blocks.values()}
        if len(sizes) > 1:
            raise ValueError(f"all blocks of a batch must have the same number of samples, not {sorted(sizes)}")
        for name, block in blocks.items():
            self.take(name, Dense(block), Workspace())
        self.count(sizes.pop() if sizes else 0)

    @abstractmethod
    def take(self, name: str, factor: Factor, space: Workspace) -> None:
        """Take one block of a batch as a factor."""

    @abstractmethod
    def count(self, samples: int) -> None:
        """Note that so many samples have been taken in this pass."""

    @abstractmethod
    def sums(self) -> dict[str, Tensor]:
        """The tensors to be added up over processes at the end of a pass, in place."""

    @abstractmethod
    def end_pass(self) -> None:
        """Turn the sums of a pass into what the next pass or `fitted` needs."""

    @abstractmethod
    def fitted(self, damping: float | None = None) -> Fitted:
        """The result. ``damping`` is added to every eigenvalue; None stands for `DAMPING` times their mean."""


DAMPING = 0.1  # of the mean eigenvalue of a block, where no damping is given
WHOLE_DAMPING = 1.0  # the same for a curvature of all parameters at once, most of whose eigenvalues are next to zero

_KINDS: dict[str, type[Fitted]] = {}


def stored(cls: type[Fitted]) -> type[Fitted]:
    """Register a class with `load`."""
    _KINDS[cls.kind] = cls
    return cls


def load(tensors: Mapping[str, Tensor], settings: Settings) -> Fitted:
    """A fitted curvature from its tensors and settings, whatever its kind."""
    kind = settings.get("kind")
    if kind not in _KINDS:
        raise ValueError(f"unknown kind of curvature {kind!r}: this version knows {sorted(_KINDS)}")
    return _KINDS[str(kind)].load(tensors, settings)


def check_damping(damping: float | None) -> None:
    """Refuse dampings that are negative, infinite or no number."""
    if damping is None:
        return
    if isinstance(damping, bool) or not isinstance(damping, (int, float)):
        raise TypeError(f"damping must be a number or None, not {type(damping).__name__}")
    if not isfinite(damping) or damping < 0:
        raise ValueError(f"damping must be finite and not negative, not {damping}; None chooses it")


def check_labels(labels: str) -> None:
    """Refuse anything but the two kinds of labels."""
    if labels not in ("given", "sampled"):
        raise ValueError(f"labels must be 'given' (empirical Fisher) or 'sampled' (true Fisher), not {labels!r}")


def check_finite(name: str, value: Tensor) -> None:
    """Refuse sums over gradients that are infinite or NaN."""
    if not bool(torch.isfinite(value).all()):
        raise ValueError(
            f"gradients of {name!r} are infinite or NaN, or their squares overflow: find the samples by "
            f"ps.norms(losses, model), and leave them out"
        )


def of_blocks(tensors: Mapping[str, Tensor], word: str) -> dict[str, Tensor]:
    """Those of `Fitted.tensors` that stand for one thing, by the blocks' names."""
    return {key.removeprefix(f"{word}:"): t for key, t in tensors.items() if key.startswith(f"{word}:")}
