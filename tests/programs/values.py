"""A tensor of a random program, and what is known of its samples."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Value:
    """A tensor of the program, and where its samples lie.

    Mostly they lie along dim `at`, `outer` times, `inner` in a row. Where it is less simple, `at` is -1, and `samples`
    names a tensor of the program that holds the sample of every element. With neither, nobody knows.
    """

    name: str
    tensor: Tensor
    at: int = -1
    outer: int = 1
    inner: int = 1
    samples: str = ""
    label: Tensor | None = None  # what `samples` names

    @property
    def known(self) -> bool:
        """Whether it is known where the samples lie."""
        return self.at >= 0 or bool(self.samples)

    @property
    def free(self) -> list[int]:
        """The dims along which the sample does not change."""
        if self.label is not None:
            return [d for d in range(self.ndim) if not changes(self.label, d)]
        return [d for d in range(self.ndim) if d != self.at]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def ndim(self) -> int:
        return self.tensor.ndim


def changes(label: Tensor, d: int) -> bool:
    """Whether the sample changes along a dim."""
    return label.shape[d] > 1 and bool((label != label.narrow(d, 0, 1)).any())
