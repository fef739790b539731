"""What persample raises and warns with, beyond Python's own errors."""

from __future__ import annotations


class PerformanceWarning(UserWarning):
    """The answer is exact, but an op without a fast rule made it slow."""


class InteractionError(RuntimeError):
    """Independent samples were asked for, and one sample's loss depends on another sample; ``ops`` say where."""

    ops: tuple[str, ...] = ()


class UnsupportedError(RuntimeError):
    """The graph hides what is needed for an exact answer; the message names the remedy."""


class NonFiniteError(RuntimeError):
    """Some samples' gradients are infinite or NaN; ``samples`` are their indices."""

    def __init__(self, samples: list[int], batch: int) -> None:
        super().__init__(samples, batch)
        self.samples, self.batch = samples, batch

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.samples[:20])) + (", …" if len(self.samples) > 20 else "")
        return (
            f"gradients of {len(self.samples)} of {self.batch} samples are not finite: {shown}. Look at these samples, "
            f"or leave them out with nonfinite='drop'"
        )
