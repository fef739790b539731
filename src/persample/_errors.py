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
    """Some samples' gradients are infinite or NaN; ``samples`` are their indices, ``elsewhere`` counts other ranks'."""

    def __init__(self, samples: list[int], batch: int, elsewhere: int = 0) -> None:
        super().__init__(samples, batch, elsewhere)
        self.samples, self.batch, self.elsewhere = samples, batch, elsewhere

    def __str__(self) -> str:
        remedy = "Look at these samples, scale losses less if it was for float16, or pass nonfinite='drop'"
        if not self.samples:
            return f"gradients of {self.elsewhere} samples on other ranks are not finite. {remedy}"
        shown = ", ".join(map(str, self.samples[:20])) + (", …" if len(self.samples) > 20 else "")
        return (
            f"gradients of {len(self.samples)} of {self.batch} samples are not finite: {shown}"
            + (f", and of {self.elsewhere} on other ranks" if self.elsewhere else "")
            + f". {remedy}"
        )
