"""What is kept of one block of gradients: Kronecker factors with corrected eigenvalues, or the whole covariance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ...factors import Factor, Workspace
from ...factors.stacks import real_rows
from .base import DAMPING, check_finite

MAX_VECTOR = 256  # elements of a vector that is turned: the basis of a bias costs as much as that of its weight


@dataclass(frozen=True)
class Spectrum:
    """A curvature of one block: eigenvalues (l, r) in the bases left (l, l) and right (r, r); None is the identity.

    For a whole covariance, gradients are flattened to one row (1, l·r) first.
    """

    values: Tensor
    left: Tensor | None
    right: Tensor | None

    def damping(self, damping: float | None) -> float:
        """The damping that is given, or `DAMPING` times the mean eigenvalue."""
        if damping is not None:
            return float(damping)
        return DAMPING * float(self.values.mean()) if self.values.numel() else 0.0

    def apply(self, block: Tensor, damping: float) -> Tensor:
        """(Q, l, r): every gradient divided by the damped curvature; zero where that is zero."""
        dtype = torch.promote_types(block.dtype, torch.float32)
        values, left, right = (None if t is None else t.to(block.device, dtype) for t in self._all())
        assert values is not None
        turned = block.to(dtype).reshape(len(block), *values.shape)
        turned = turned if right is None else turned @ right
        turned = turned if left is None else left.t() @ turned
        turned = turned * inverse(values + damping)
        turned = turned if left is None else left @ turned
        turned = turned if right is None else turned @ right.t()
        return turned.reshape(block.shape)

    def _all(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.values, self.left, self.right


def inverse(values: Tensor) -> Tensor:
    """1 / values; zero where they are so small beside the largest that they are rounding errors."""
    if not values.numel():
        return values
    least = values.amax() * torch.finfo(values.dtype).eps
    return torch.where(values > least, 1 / torch.where(values > least, values, 1), 0)


class Block(ABC):
    """What one block's gradients leave behind, over one or two passes."""

    passes: int
    sums: dict[str, Tensor]  # of the pass that is going on, in float64

    @abstractmethod
    def take(self, factor: Factor, space: Workspace) -> None:
        """Add the gradients of a batch."""

    @abstractmethod
    def end_pass(self, name: str, samples: int) -> None:
        """Turn the sums over so many samples into what is needed next."""

    @property
    @abstractmethod
    def spectrum(self) -> Spectrum:
        """The result, after the last pass."""


class Kronecker(Block):
    """Eigenbases of Σ G Gᵀ and Σ GᵀG; sides longer than ``max_side`` (vectors: `MAX_VECTOR`) keep the one they have.

    Eigenvalues are the mean squares of gradients in these bases, found in a second pass (``corrected``), or products
    of both sides' eigenvalues over their sum, as in K-FAC.
    """

    def __init__(self, l: int, r: int, max_side: int, corrected: bool) -> None:  # noqa: E741 (as in the formulas)
        self.shape, self.corrected = (l, r), corrected
        longest = [min(max_side, MAX_VECTOR) if other == 1 else max_side for other in (r, l)]
        self.turned = 1 < l <= longest[0], 1 < r <= longest[1]
        self.bases: tuple[Tensor | None, Tensor | None] = None, None
        self.values: Tensor | None = None
        self.passes = 2 if corrected and any(self.turned) else 1
        self.sums = {}
        if corrected and self.passes == 1:  # nothing to turn: squares can be added up at once
            self._start_squares()
        else:
            self.sums = {side: _zeros(k, k) for side, k in zip(("left", "right"), self.shape, strict=True) if k}
            for side, k, turned in zip(("left", "right"), self.shape, self.turned, strict=True):
                if not turned:
                    self.sums[side] = _zeros(k)  # the diagonal

    def _start_squares(self) -> None:
        self.sums = {"squares": _zeros(*self.shape)}

    def take(self, factor: Factor, space: Workspace) -> None:
        if "squares" in self.sums:
            self.sums["squares"] += factor.rotated_squares(*self.bases, space).to(self.sums["squares"])
            return
        if not self.corrected and not all(self.turned):
            squares = factor.rotated_squares(None, None, space).to(torch.float64).cpu()
            for side, turned, dim in zip(("left", "right"), self.turned, (1, 0), strict=True):
                if not turned:
                    self.sums[side] += squares.sum(dim).to(self.sums[side])
        for side, turned, moment in zip(
            ("left", "right"), self.turned, factor.moments(*self.turned, space), strict=True
        ):
            if turned and moment is not None:
                self.sums[side] += moment.to(self.sums[side])

    def end_pass(self, name: str, samples: int) -> None:
        for total in self.sums.values():
            check_finite(name, total)
        if "squares" in self.sums:
            self.values, self.sums = self.sums["squares"] / samples, {}
            return
        spectra = [_spectrum(self.sums[side] / samples) for side in ("left", "right")]
        self.bases = spectra[0][1], spectra[1][1]
        if self.corrected:
            self._start_squares()
            return
        (left, _), (right, _) = spectra
        self.values, self.sums = left.unsqueeze(1) * right * inverse(left.sum()), {}

    @property
    def spectrum(self) -> Spectrum:
        assert self.values is not None
        return Spectrum(self.values, *self.bases)


class Whole(Block):
    """The covariance of all l·r numbers."""

    passes = 1

    def __init__(self, l: int, r: int) -> None:  # noqa: E741 (as in the formulas)
        self.size = l * r
        self.sums = {"covariance": _zeros(self.size, self.size)}
        self._spectrum: Spectrum | None = None

    def take(self, factor: Factor, space: Workspace) -> None:
        total = self.sums["covariance"]
        for _, stack in factor.stacks(space):
            rows = real_rows(stack).to(total)
            total.addmm_(rows.t(), rows)

    def end_pass(self, name: str, samples: int) -> None:
        total = self.sums.pop("covariance")
        check_finite(name, total)
        values, basis = _spectrum(total / samples)
        self._spectrum = Spectrum(values.unsqueeze(0), None, basis)

    @property
    def spectrum(self) -> Spectrum:
        assert self._spectrum is not None
        return self._spectrum


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64, device="cpu")


def _spectrum(moment: Tensor) -> tuple[Tensor, Tensor | None]:
    """Eigenvalues and eigenvectors of a moment (k, k), or the diagonal (k,) that is all that was kept of it."""
    if moment.ndim == 1:
        return moment, None
    values, vectors = torch.linalg.eigh((moment + moment.t()) / 2)
    return values.clamp(min=0), vectors
