"""The optimizers that can be gone through backwards: what a step did, and its adjoint.

An adjoint has one row per query: (Q, *shape) for a parameter and for each of the numbers that its optimizer keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

Numbers = dict[str, Any]  # what an optimizer keeps of one parameter
_SGD = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
_ADAM = ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay")


def check_optimizer(optimizer: Optimizer) -> str:
    """The kind of an optimizer, which is one of those whose steps are known."""
    if type(optimizer) is SGD:
        kind = "sgd"
    elif type(optimizer) in (Adam, torch.optim.AdamW):
        kind = "adam"
    else:
        name = type(optimizer).__name__
        raise ValueError(f"{name} cannot be replayed: record a run with SGD, Adam or AdamW of torch.optim")
    for group in optimizer.param_groups:
        for option in ("amsgrad", "maximize", "differentiable"):
            if group.get(option):
                raise ValueError(f"{type(optimizer).__name__}({option}=True) cannot be replayed: leave {option} out")
    return kind


def options_of(kind: str, group: Mapping[str, Any]) -> Numbers:
    """The options of a parameter's group, as plain numbers."""
    options = {name: group[name] for name in (_SGD if kind == "sgd" else _ADAM)}
    options["lr"] = float(options["lr"])
    if kind == "adam":
        options["betas"] = [float(beta) for beta in options["betas"]]
    return options


@dataclass
class Adjoint:
    """Derivatives of every query's loss with respect to a parameter and to what its optimizer keeps of it."""

    parameter: Tensor
    kept: dict[str, Tensor]

    def pulled_back(
        self, kind: str, options: Numbers, parameter: Tensor, gradient: Tensor, before: Numbers
    ) -> tuple[Adjoint, Tensor]:
        """The adjoint before a step without what the gradient passes on, and the adjoint of that gradient."""
        pull = _sgd if kind == "sgd" else _adam
        return pull(self, options, parameter, gradient, before)


def _sgd(
    after: Adjoint, options: Numbers, parameter: Tensor, gradient: Tensor, before: Numbers
) -> tuple[Adjoint, Tensor]:
    """Of g = gradient + decay * p; b' = momentum * b + (1 - dampening) * g; p' = p - lr * (b' or g + momentum * b')."""
    moved = -options["lr"] * after.parameter
    momentum, kept = options["momentum"], dict(after.kept)  # without momentum, a buffer waits for steps that have some
    if momentum:
        buffer = after.kept["momentum_buffer"] + (momentum * moved if options["nesterov"] else moved)
        of_gradient = moved if options["nesterov"] else torch.zeros_like(moved)
        if before.get("momentum_buffer") is None:  # the first step: b' = g
            of_gradient = of_gradient + buffer
            kept["momentum_buffer"] = torch.zeros_like(buffer)
        else:
            of_gradient = of_gradient + (1 - options["dampening"]) * buffer
            kept["momentum_buffer"] = momentum * buffer
    else:
        of_gradient = moved
    return Adjoint(after.parameter + options["weight_decay"] * of_gradient, kept), of_gradient


def _adam(
    after: Adjoint, options: Numbers, parameter: Tensor, gradient: Tensor, before: Numbers
) -> tuple[Adjoint, Tensor]:
    """Of m' and v', the moving means of g and g²; p' = p (1 - lr * decay, if decoupled) - lr * m̂ / (sqrt(v̂) + eps)."""
    (beta1, beta2), decay, lr = options["betas"], options["weight_decay"], options["lr"]
    g = gradient if options["decoupled_weight_decay"] else gradient + decay * parameter
    zeros = torch.zeros_like(parameter)
    step = float(before.get("step", 0)) + 1
    first = torch.lerp(before.get("exp_avg", zeros), g, 1 - beta1)
    second = beta2 * before.get("exp_avg_sq", zeros) + (1 - beta2) * g * g
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    root = (second / correction2).sqrt()
    divisor = root + options["eps"]
    of_first = after.kept["exp_avg"] - lr / correction1 * after.parameter / divisor
    # Where all gradients were zero, m'/sqrt(v') has the limit 0 in this product: there is no step to be differentiated.
    slope = torch.where(root > 0, lr / correction1 * first / (2 * root * correction2 * divisor * divisor), zeros)
    of_second = after.kept["exp_avg_sq"] + slope * after.parameter
    of_gradient = (1 - beta1) * of_first + 2 * (1 - beta2) * g * of_second
    own = (
        (1 - lr * decay) * after.parameter
        if options["decoupled_weight_decay"]
        else after.parameter + decay * of_gradient
    )
    return Adjoint(own, {"exp_avg": beta1 * of_first, "exp_avg_sq": beta2 * of_second}), of_gradient


def kept_names(kind: str, options: Numbers) -> list[str]:
    """The numbers that an optimizer keeps of a parameter, and that later steps depend on."""
    if kind == "adam":
        return ["exp_avg", "exp_avg_sq"]
    return ["momentum_buffer"] if options["momentum"] else []
