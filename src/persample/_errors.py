"""What persample raises and warns with, beyond Python's own errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class PerformanceWarning(UserWarning):
    """The answer is exact, but an op without a fast rule made it slow."""


class InteractionError(RuntimeError):
    """Independent samples were asked for, and one sample's loss depends on another sample; ``ops`` say where."""

    ops: tuple[str, ...] = ()


class UnsupportedError(RuntimeError):
    """The graph hides what is needed for an exact answer; the message names the remedy."""


class NonFiniteError(RuntimeError):
    """Some samples' gradients are infinite or NaN; ``samples`` are their indices, ``elsewhere`` counts other ranks'.

    With several losses per sample, an index is that of a loss: a tuple of the sample and the position.
    """

    def __init__(self, samples: Sequence[Any], batch: int, elsewhere: int = 0) -> None:
        super().__init__(samples, batch, elsewhere)
        self.samples, self.batch, self.elsewhere = samples, batch, elsewhere

    def __str__(self) -> str:
        remedy = "Look at these samples, scale losses less if it was for float16, or pass nonfinite='drop'"
        if not self.samples:
            return f"gradients of {self.elsewhere} samples on other ranks are not finite. {remedy}"
        what = "losses" if isinstance(self.samples[0], tuple) else "samples"
        shown = ", ".join(map(str, self.samples[:20])) + (", …" if len(self.samples) > 20 else "")
        return (
            f"gradients of {len(self.samples)} of {self.batch} {what} are not finite: {shown}"
            + (f", and of {self.elsewhere} on other ranks" if self.elsewhere else "")
            + f". {remedy}"
        )
