"""How both sides of a product are scaled before they are rounded to whole numbers."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

__all__ = ["Balance", "TermSizes"]

# From weights (B,) and a number of parts to (parts,): how large the terms of all samples of each part are in sum.
TermSizes = Callable[[Tensor, int], Tensor]
_Scales = tuple[tuple[Tensor, Tensor], Tensor]


class Balance:
    """What the sides of every sample are multiplied by: weight and unit, and a power of two that makes them equal.

    It knows the norms of both sides, and not the sides.
    """

    def __init__(
        self,
        norms: tuple[Tensor, Tensor],  # (B,) each, of the sides
        errors: tuple[float, float],  # of rounding the sides, as norms, in their units
        units: tuple[float, float],
        scale: float,  # a factor of all products
    ) -> None:
        self._norms, self._errors, self._units, self._scale = norms, errors, units, scale
        self._last: tuple[Tensor, _Scales] | None = None

    def scales(self, weights: Tensor) -> _Scales:
        """What the sides are multiplied by, and (B,): how large the terms of a sample then are at most, in units."""
        if self._last is None or self._last[0] is not weights:
            self._last = weights, self._computed(weights)
        return self._last[1]

    def term_sizes(self, weights: Tensor, parts: int) -> Tensor:
        """(parts,): how large the terms of all samples of a part are at most."""
        terms = self.scales(weights)[1]
        return terms.view(parts, len(terms) // parts).sum(1)

    def _computed(self, weights: Tensor) -> _Scales:
        weights = weights.to(self._norms[0]) * self._scale
        ratio = self._norms[1].log2() - self._norms[0].log2() - weights.abs().log2()
        zero = ~ratio.isfinite()  # where a side or a weight is zero
        power = ratio.div(2).round_().exp2_()
        left = (weights * power / self._units[0]).masked_fill_(zero, 0)
        right = (1 / (power * self._units[1])).masked_fill_(zero, 0)
        sizes = [n * s.abs() + error for n, s, error in zip(self._norms, (left, right), self._errors, strict=True)]
        return (left, right), sizes[0] * sizes[1]
