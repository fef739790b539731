"""One use of a parameter, as the rules see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..layout import Layout, Shape
from ..read.site import Site
from ..sample_rows import SampleRows
from .table import Undecided


@dataclass(slots=True)
class Use:
    """Backward output ``k`` of a separable node, whose cotangents have been captured whole."""

    site: Site
    k: int
    cotangents: Sequence[Tensor | None]
    layouts: Sequence[Layout | None]
    batch: int

    @property
    def g(self) -> Tensor:
        """The cotangent of the first output."""
        first = self.cotangents[0]
        if first is None:
            raise Undecided
        return first

    @property
    def layout(self) -> Layout:
        """Where the samples lie in ``g``."""
        first = self.layouts[0]
        if first is None:
            raise Undecided
        return first

    @property
    def target(self) -> Shape:
        """The shape of the tensor whose gradient this is."""
        return self.site.target(self.k)

    def rows(self, row_dims: int) -> SampleRows | None:
        """The first dims of ``g`` as rows that belong to samples."""
        return SampleRows.of(self.layout, tuple(self.g.shape), row_dims)
