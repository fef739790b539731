"""Adam for noisy gradients, whose second moments are without what the noise has added."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .gradients import innermost
from .plan import Plan


class AdamBC(Optimizer):
    """Adam with second moments corrected for the bias of noise (DP-AdamBC; Tang, Shpilevskiy, Lécuyer, 2023).

    Noise of standard deviation s on every coordinate adds s² to the second moment, by which Adam divides: where
    gradients are smaller than the noise, it is SGD with another learning rate. Here the same average of s² over the
    steps is taken off, and the update is ``lr · m̂ / √max(v̂ - ŝ², floor²)``.

    >>> import torch, persample as ps
    >>> from persample import dp
    >>> from torch.nn import functional as F
    >>> _ = torch.manual_seed(0)
    >>> data = torch.utils.data.TensorDataset(torch.randn(100, 5), torch.randint(3, (100,)))
    >>> model = torch.nn.Linear(5, 3)
    >>> optimizer = dp.AdamBC(model.parameters(), lr=1e-3, floor=1e-2)
    >>> plan = dp.Plan(examples=100, batch_size=10, steps=3, noise_multiplier=1.0, delta=1e-3, accountant="rdp")
    >>> private = dp.Private(model, optimizer, plan, clip=ps.ClippedSum(1.0))
    >>> for x, y in private.batches(data):
    ...     step = private.step(F.cross_entropy(model(x), y, reduction="none"))
    >>> round(optimizer.noise_std, 3)  # noise multiplier · bound / batch size
    0.1

    `dp.Private` tells it at every step how much noise there is. What is done to ``p.grad`` between ``private.backward``
    and ``optimizer.step`` (clipping, rescaling) changes the noise as well: leave the gradients as they are.

    Args:
        params: as for any optimizer.
        lr: the learning rate.
        betas: how slowly the averages of gradients and of their squares change.
        floor: what is divided by at least. It takes the place of Adam's ``eps``, and has to be chosen: what is left of
            a second moment is noisy, and a floor far below the gradients makes steps of random sizes.
        weight_decay: by which share of ``lr`` weights shrink in every step, apart from the gradients (as in AdamW).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        floor: float = 1e-3,
        weight_decay: float = 0.0,
    ) -> None:
        for name, value, least in (
            ("lr", lr, 0.0),
            ("floor", floor, math.ulp(0.0)),
            ("weight_decay", weight_decay, 0.0),
        ):
            if not least <= value < math.inf:
                raise ValueError(
                    f"{name} must be {'positive' if least else 'a number that is not negative'}, not {value}"
                )
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers from 0 to below 1, not {betas}")
        defaults = {"lr": lr, "betas": tuple(betas), "floor": floor, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.noise_std: float | None = None  # of the gradients that are there

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        noise_std = self._known_noise()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._move(p, p.grad, group, noise_std)
        return loss

    def _known_noise(self) -> float:
        """Gradients of zero have none: by a step of them PyTorch makes the state that it loads for FSDP2."""
        if self.noise_std is not None:
            return self.noise_std
        if any(p.grad is not None and bool(p.grad.any()) for group in self.param_groups for p in group["params"]):
            raise RuntimeError(
                "dp.AdamBC does not know how much noise the gradients have: give it to dp.Private, which tells it, or "
                "set optimizer.noise_std (0.0 where there is none)"
            )
        return 0.0

    def _move(self, p: Tensor, gradient: Tensor, group: dict[str, Any], noise_std: float) -> None:
        state, (beta1, beta2) = self.state[p], group["betas"]
        if not state:
            state["step"], state["noise_avg_sq"] = torch.zeros((), dtype=torch.float64, device="cpu"), 0.0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        noise = state["noise_avg_sq"] = beta2 * state["noise_avg_sq"] + (1 - beta2) * noise_std**2
        steps = float(state["step"])
        tensors = [p, gradient, state["exp_avg"], state["exp_avg_sq"]]
        p, gradient, first, second = map(torch.view_as_real, tensors) if p.is_complex() else tensors
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        left = second.sub(noise).div_(1 - beta2**steps).clamp_(min=group["floor"] ** 2).sqrt_()
        if group["weight_decay"]:
            p.mul_(1 - group["lr"] * group["weight_decay"])
        p.addcdiv_(first, left, value=-float(group["lr"]) / (1 - beta1**steps))


def check_noise(optimizer: Optimizer, plan: Plan) -> None:
    """Refuse noise whose share of a second moment is not known, where it has to be."""
    if isinstance(innermost(optimizer), AdamBC) and plan.mechanism != "gaussian":
        raise ValueError(
            f"dp.AdamBC takes off what independent noise adds to second moments, and mechanism={plan.mechanism!r} "
            f"correlates noise: use mechanism='gaussian', or another optimizer"
        )


def tell_noise(optimizer: Optimizer, noise_std: float) -> None:
    """Tell an optimizer that has to know it how much noise the gradients have."""
    inner = innermost(optimizer)
    if isinstance(inner, AdamBC):
        inner.noise_std = noise_std
