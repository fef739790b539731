"""`Adam`: the second moments that an optimizer already has, as in LESS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .base import Fitted, Settings, check_damping, of_blocks, stored
from .kinds import FittedIdentity, Identity


@stored
class FittedScales(FittedIdentity):
    """Whole gradients of queries are multiplied element by element; their sketches stay as they are then."""

    kind = "scales"

    def __init__(self, scales: Mapping[str, Tensor]) -> None:
        self._scales = dict(scales)

    @property
    def scales(self) -> Mapping[str, Tensor]:
        return self._scales

    def tensors(self) -> dict[str, Tensor]:
        return {f"scale:{name}": t for name, t in self._scales.items()}

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], settings: Settings) -> FittedScales:
        return cls(of_blocks(tensors, "scale"))


class Adam(Identity):
    """What Adam divides by, 1 / (√v̂ + ε), from the state of an optimizer that has trained the model.

    The diagonal belongs to whole gradients, which sketches do not hold any more. An inner product needs it on one side
    only, so the few queries are scaled before they are sketched, and what is stored of the training data stays as it
    is: <sketch(s ∘ q), sketch(g)> has the mean <s ∘ q, g>. No pass over the data.

    Args:
        optimizer: ``torch.optim.Adam``, ``AdamW`` or another one that keeps ``exp_avg_sq`` and ``step``.
        model: whose parameters have the names that blocks go by.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self.optimizer, self.model = optimizer, model

    def fitted(self, damping: float | None = None) -> Fitted:
        """``damping`` takes the place of the optimizer's ε."""
        check_damping(damping)
        groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        names = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        missing = [n for n, p in names.items() if "exp_avg_sq" not in self.optimizer.state.get(p, {})]
        if missing:
            raise ValueError(
                f"the optimizer has no second moments (exp_avg_sq) for {missing[:5]}: pass an Adam or AdamW of this "
                f"model's parameters that has taken a step, or whose state was loaded"
            )
        return FittedScales({n: _scale(self.optimizer.state[p], groups[id(p)], damping) for n, p in names.items()})


def _scale(state: Mapping[str, Any], group: Mapping[str, Any], damping: float | None) -> Tensor:
    """1 / (√v̂ + ε), where v̂ is corrected for the zeros that Adam starts with."""
    moments: Tensor = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
    corrected = moments.double() / (1 - group["betas"][1] ** float(state["step"]))
    divisor = corrected.sqrt() + (group["eps"] if damping is None else damping)
    return torch.where(divisor > 0, 1 / divisor, 0).to(moments.dtype)
