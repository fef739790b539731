"""Sums of gradients whose contributions are bounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .._errors import NonFiniteError
from ..factors import Factor
from .base import Call, Reduction
from .groups import Groups, Per
from .norms import ParameterNorms

Bounds = float | Sequence[float] | Mapping[str, float]
Weights = Callable[[Tensor], Tensor]


class Clipping(NamedTuple):
    """What a clipped sum did to each sample: its norm before, and the weight it was given.

    Both have shape (B,); with ``per``, they are given in the same form as ``ps.norms(..., per=...)`` gives norms.
    """

    norms: Any
    weights: Any

    @property
    def dropped(self) -> list[int]:
        """The samples that were left out because their gradients are not finite."""
        values = self.norms.values() if isinstance(self.norms, Mapping) else self.norms
        every = [self.norms] if isinstance(self.norms, Tensor) else list(values)
        bad: set[int] = set()
        for norms in every:
            bad.update((~norms.isfinite()).nonzero().flatten().tolist())
        return sorted(bad)


class ClippedDict(dict[str, Tensor]):
    """Clipped sums by parameter name, and how they were clipped."""

    clipping: Clipping


class ClippedTuple(tuple[Tensor, ...]):
    """Clipped sums in the parameters' order, and how they were clipped."""

    clipping: Clipping


class ClippedSum(Reduction):
    """Σ_i w_i · gradient i with weights that bound what one sample can add: w_i = min(1, max_norm / ‖gradient i‖).

    Args:
        max_norm: the bound C. With ``per``, one for all groups, or one for each: a list for a list of groups, a
            dict by name for "parameter" or a dict of groups.
        per: what is clipped together: None for everything, "parameter", or groups that hold every parameter once,
            as for `Norms`.
        gamma: normalise instead of clipping ("automatic clipping"): w_i = max_norm / (‖gradient i‖ + gamma).
        weights: any function from norms (B,) to weights (B,) instead; state its ``sensitivity`` if it has one.
        sensitivity: what one sample adds at most, for ``weights``.
        nonfinite: "raise" names the samples whose gradients are infinite or NaN; with "drop" they add exactly zero
            and are listed in ``result.clipping.dropped``.
    """

    passes = 2
    holds = True

    def __init__(
        self,
        max_norm: Bounds | None = None,
        *,
        per: Per = None,
        gamma: float | None = None,
        weights: Weights | None = None,
        sensitivity: float | None = None,
        nonfinite: Literal["raise", "drop"] = "raise",
    ) -> None:
        if weights is not None and not (max_norm is None and gamma is None):
            raise ValueError("give either weights, or max_norm and gamma")
        if weights is None and max_norm is None:
            raise ValueError("a clipped sum needs max_norm, or a function for weights")
        if weights is None and sensitivity is not None:
            raise ValueError("sensitivity follows from max_norm; it can only be stated for a function of weights")
        if gamma is not None and not gamma > 0:
            raise ValueError(f"gamma must be positive, not {gamma!r}")
        if nonfinite not in ("raise", "drop"):
            raise ValueError(f"nonfinite must be 'raise' or 'drop', not {nonfinite!r}")
        self.max_norm, self.per, self.gamma, self.weights, self.nonfinite = max_norm, per, gamma, weights, nonfinite
        self._stated = sensitivity
        for bound in _values(max_norm):
            if not (isinstance(bound, (int, float)) and 0 < bound < math.inf):
                raise ValueError(f"max_norm must be positive and finite, not {bound!r}")

    @property
    def sensitivity(self) -> float:
        """The largest norm that one sample can add to the sum, up to rounding; inf if ``weights`` states none.

        With one bound for several groups it depends on how many there are: see `sensitivity_for`.
        """
        if self.weights is not None:
            return math.inf if self._stated is None else self._stated
        if self.per is None or not isinstance(self.max_norm, (int, float)):
            return math.hypot(*_values(self.max_norm))
        if isinstance(self.per, str):
            raise ValueError(
                "one bound for every parameter: use sensitivity_for(params), which knows how many there are"
            )
        return self.max_norm * math.sqrt(len(self.per))

    def sensitivity_for(self, count: int) -> float:
        """The same when ``per="parameter"`` is used with one bound and ``count`` parameters."""
        if self.weights is None and self.per == "parameter" and isinstance(self.max_norm, (int, float)):
            return self.max_norm * math.sqrt(count)
        return self.sensitivity

    def start(self, call: Call) -> None:
        self._groups, self._norms = Groups.of(self.per, call), ParameterNorms(call)
        self._groups.check_partition()
        self._bounds = self._bound_each()
        self._factors: dict[str, Factor] = {}

    def add(self, name: str, factor: Factor) -> None:
        self._norms.add(name, factor)
        self._factors[name] = factor

    def result(self) -> Any:
        clipping, sums = self.clip()
        packed = self._groups.call.pack_sums(sums)
        found = ClippedDict(packed) if isinstance(packed, dict) else ClippedTuple(packed)
        found.clipping = clipping
        return found

    def clip(self) -> tuple[Clipping, dict[str, Tensor]]:
        """How every sample was clipped, and the sums of the parameters that the losses reach."""
        groups, call = self._groups, self._groups.call
        norms = self._norms.by_group(groups)
        finite = self._finite(list(norms.values()))
        weights = {key: self._weigh(key, n, finite) for key, n in norms.items()}
        kept = None if finite is None else finite.nonzero().squeeze(1)
        sums: dict[str, Tensor] = {}
        for key, names in groups.members.items():
            for name in [n for n in names if n in self._factors]:
                factor, w = self._factors.pop(name), weights[key]
                if kept is not None:
                    factor, w = factor[kept.to(factor.device)], w[kept]
                sums[name] = factor.weighted_sum(w.to(factor.device), call.space).to(factor.dtype)
        packed = (groups.pack({key: t.to(call.dtype) for key, t in found.items()}) for found in (norms, weights))
        return Clipping(*packed), sums

    def _finite(self, norms: list[Tensor]) -> Tensor | None:
        """Which samples to keep; None if all."""
        finite = torch.stack([n.isfinite() for n in norms]).all(0) if norms else None
        if finite is None or bool(finite.all()):
            return None
        if self.nonfinite == "raise":
            raise NonFiniteError((~finite).nonzero().flatten().tolist(), len(finite))
        return finite

    def _weigh(self, key: Hashable, norms: Tensor, finite: Tensor | None) -> Tensor:
        if self.weights is not None:
            found = self._given_weights(norms)
        elif self.gamma is not None:
            found = self._bounds[key] / (norms + self.gamma)
        else:
            found = (self._bounds[key] / norms).clamp(max=1)  # a gradient of zero has inf, hence 1
        found = found if finite is None else torch.where(finite, found, 0)
        if not bool(found.isfinite().all()):
            raise NonFiniteError((~found.isfinite()).nonzero().flatten().tolist(), len(found), "weights")
        return found

    def _given_weights(self, norms: Tensor) -> Tensor:
        assert self.weights is not None
        found = self.weights(norms.to(self._groups.call.dtype))
        if not isinstance(found, Tensor) or found.shape != norms.shape:
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"weights must return one weight per sample, {tuple(norms.shape)}, but returned {got}")
        return found.detach().to(norms)

    def _bound_each(self) -> dict[Hashable, float]:
        """The bound of every group."""
        keys, given = list(self._groups.members), self.max_norm
        if given is None:
            return {}
        if isinstance(given, Mapping):
            if set(given) != set(keys):
                raise ValueError(f"max_norm must have one bound per group: expected {keys}, got {list(given)}")
            return {key: given[str(key)] for key in keys}
        bounds = [given] * len(keys) if isinstance(given, (int, float)) else list(given)
        if len(bounds) != len(keys):
            raise ValueError(f"max_norm must have one bound per group: expected {len(keys)}, got {len(bounds)}")
        return dict(zip(keys, bounds, strict=True))


def _values(bounds: Bounds | None) -> list[float]:
    if bounds is None:
        return []
    if isinstance(bounds, Mapping):
        return list(bounds.values())
    return list(bounds) if isinstance(bounds, Sequence) else [bounds]
