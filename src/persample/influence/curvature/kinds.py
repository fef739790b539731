"""The curvatures that go by gradients block by block: `Shampoo`, `KFAC`, `Covariance`, and `Identity` for none."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...factors import Factor, Workspace
from .base import Curvature, Fitted, Labels, Settings, check_damping, check_labels, of_blocks, stored
from .blocks import Block, Kronecker, Spectrum, Whole


@stored
class FittedBlocks(Fitted):
    """Eigenvalues and eigenbases by block, each with a damping of its own."""

    kind = "blocks"

    def __init__(self, spectra: Mapping[str, Spectrum], damping: Mapping[str, float]) -> None:
        self.spectra, self.damping = dict(spectra), dict(damping)

    def apply(self, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        unknown = sorted(set(blocks) - set(self.spectra))
        if unknown:
            raise ValueError(f"the curvature was not fitted for {unknown}: it knows {sorted(self.spectra)}")
        return {name: self.spectra[name].apply(block, self.damping[name]) for name, block in blocks.items()}

    @property
    def mean_eigenvalue(self) -> float:
        """Over all blocks: the mean squared norm of a gradient over the number of its elements."""
        values = [s.values for s in self.spectra.values()]
        return float(sum(v.sum() for v in values)) / max(sum(v.numel() for v in values), 1)

    def with_damping(self, damping: float) -> FittedBlocks:
        """The same, with one damping for all blocks."""
        return FittedBlocks(self.spectra, dict.fromkeys(self.spectra, damping))

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, spectrum in self.spectra.items():
            sides = {"values": spectrum.values, "left": spectrum.left, "right": spectrum.right}
            found |= {f"{word}:{name}": t for word, t in sides.items() if t is not None}
        return found

    def settings(self) -> dict[str, Any]:
        return {"kind": self.kind, "damping": self.damping}

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], settings: Settings) -> FittedBlocks:
        left, right = of_blocks(tensors, "left"), of_blocks(tensors, "right")
        values = of_blocks(tensors, "values")
        spectra = {name: Spectrum(v, left.get(name), right.get(name)) for name, v in values.items()}
        return cls(spectra, settings["damping"])


class OfBlocks(Curvature):
    """A curvature that keeps something for every block by itself."""

    def __init__(self, *, labels: Labels = "given") -> None:
        check_labels(labels)
        self.labels = labels
        self._blocks: dict[str, Block] = {}

    @abstractmethod
    def block(self, l: int, r: int) -> Block:  # noqa: E741 (as in the formulas)
        """What is kept of gradients with so many rows and columns."""

    def start(self, blocks: Mapping[str, tuple[int, int]]) -> None:
        self._blocks = {name: self.block(*shape) for name, shape in blocks.items()}
        self._ended = 0
        self._count = torch.zeros((), dtype=torch.float64)
        self.passes = max([block.passes for block in self._blocks.values()], default=1)

    def take(self, name: str, factor: Factor, space: Workspace) -> None:
        if name not in self._blocks:
            raise ValueError(f"unknown block {name!r}: the curvature was started with {sorted(self._blocks)}")
        if self._ended < self._blocks[name].passes:
            self._blocks[name].take(factor, space)

    def count(self, samples: int) -> None:
        self._count += samples

    def sums(self) -> dict[str, Tensor]:
        sums = {f"{word}:{name}": t for name, block in self._blocks.items() for word, t in block.sums.items()}
        return {"count": self._count, **sums}

    def end_pass(self) -> None:
        samples = int(self._count)
        if not samples:
            raise ValueError("no samples: a curvature cannot be fitted to an empty loader")
        for name, block in self._blocks.items():
            if self._ended < block.passes:
                block.end_pass(name, samples)
        self._ended += 1
        self._count.zero_()

    def fitted(self, damping: float | None = None) -> FittedBlocks:
        check_damping(damping)
        if not self._blocks or self._ended < self.passes:
            raise RuntimeError(f"the curvature needs {self.passes} passes over the data first")
        spectra = {name: block.spectrum for name, block in self._blocks.items()}
        return FittedBlocks(spectra, {name: s.damping(damping) for name, s in spectra.items()})


class Shampoo(OfBlocks):
    """F ≈ (Q_l ⊗ Q_r) diag(λ) (Q_l ⊗ Q_r)ᵀ: eigenbases of E[G Gᵀ] and E[GᵀG], λ = E[(Q_lᵀ G Q_r)²] of a second pass.

    For one use of a weight per sample these are the bases of EK-FAC; unlike it, they are defined for every use.

    Args:
        labels: "given" for the empirical Fisher, "sampled" for the true one.
        max_side: a side with more rows or columns is not turned; 0 leaves the diagonal of F.
    """

    def __init__(self, *, labels: Labels = "given", max_side: int = 2048) -> None:
        super().__init__(labels=labels)
        self.max_side = max_side

    def block(self, l: int, r: int) -> Block:  # noqa: E741
        return Kronecker(l, r, self.max_side, corrected=True)


class KFAC(OfBlocks):
    """F ≈ E[G Gᵀ] ⊗ E[GᵀG] / E[‖G‖²], from one pass: K-FAC where a weight is used once per sample.

    Args:
        labels: "given" for the empirical Fisher, "sampled" for the true one.
        max_side: of a side with more rows or columns, the diagonal is kept.
    """

    def __init__(self, *, labels: Labels = "given", max_side: int = 2048) -> None:
        super().__init__(labels=labels)
        self.max_side = max_side

    def block(self, l: int, r: int) -> Block:  # noqa: E741
        return Kronecker(l, r, self.max_side, corrected=False)


class Covariance(OfBlocks):
    """F = E[g gᵀ] of every block, from one pass; blocks of more than ``max_size`` elements are as `Shampoo` has them.

    Args:
        labels: "given" for the empirical Fisher, "sampled" for the true one.
        max_size: elements of a block whose covariance is kept whole.
        max_side: of `Shampoo`, for larger blocks.
    """

    def __init__(self, *, labels: Labels = "given", max_size: int = 1024, max_side: int = 2048) -> None:
        super().__init__(labels=labels)
        self.max_size, self.max_side = max_size, max_side

    def block(self, l: int, r: int) -> Block:  # noqa: E741
        return Whole(l, r) if l * r <= self.max_size else Kronecker(l, r, self.max_side, corrected=True)


@stored
class FittedIdentity(Fitted):
    """No curvature: gradients stay as they are."""

    kind = "identity"

    def apply(self, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(blocks)

    def tensors(self) -> dict[str, Tensor]:
        return {}

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], settings: Settings) -> FittedIdentity:
        return cls()


class Identity(Curvature):
    """No curvature: plain inner products of gradients. Nothing is gone through."""

    passes = 0

    def start(self, blocks: Mapping[str, tuple[int, int]]) -> None:
        """Nothing to prepare."""

    def take(self, name: str, factor: Factor, space: Workspace) -> None:
        """Nothing to learn."""

    def count(self, samples: int) -> None:
        """Nothing to count."""

    def sums(self) -> dict[str, Tensor]:
        return {}

    def end_pass(self) -> None:
        """Nothing to end."""

    def fitted(self, damping: float | None = None) -> Fitted:
        check_damping(damping)
        return FittedIdentity()
