"""Losses with labels drawn from the model: their gradients have the true Fisher information as second moment."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from math import sqrt
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

OutputsFn = Callable[[nn.Module, Any], Tensor]  # from a model and a batch to outputs (B, ...)
LossesFn = Callable[[nn.Module, Any], Tensor]  # from a model and a batch to losses (B,)
SampleLossesFn = Callable[[nn.Module, Any, torch.Generator], Tensor]  # the same with labels drawn by a generator
Over = Literal["sum", "mean"]


def categorical(logits_fn: OutputsFn, over: Over = "sum") -> SampleLossesFn:
    """Cross entropies of classes drawn from softmax(logits): for ``sample_losses_fn=``.

    Args:
        logits_fn: from a model and a batch to logits (B, C), or (B, T…, C) for several predictions per sample.
        over: how the losses of a sample's T predictions are made one. With "mean", they are added up and divided by
            √T, so that the mean of g gᵀ is the curvature of the mean.
    """
    _check_over(over)

    def sample_losses(model: nn.Module, batch: Any, generator: torch.Generator) -> Tensor:
        logits = logits_fn(model, batch)
        rows = logits.reshape(-1, logits.shape[-1])
        chances = rows.detach().float().softmax(1).to(generator.device)
        labels = torch.multinomial(chances, 1, generator=generator).squeeze(1).to(rows.device)
        return _of_samples(F.cross_entropy(rows, labels, reduction="none").reshape(logits.shape[:-1]), over)

    return sample_losses


def gaussian(outputs_fn: OutputsFn, over: Over = "sum") -> SampleLossesFn:
    """½(output - y)² with y drawn around the output with variance 1: for models trained by squared errors.

    Args:
        outputs_fn: from a model and a batch to outputs (B, ...).
        over: all outputs of a sample, as for `categorical`. Losses without the ½ have twice this curvature.
    """
    _check_over(over)

    def sample_losses(model: nn.Module, batch: Any, generator: torch.Generator) -> Tensor:
        outputs = outputs_fn(model, batch)
        noise = torch.randn(outputs.shape, generator=generator, device=generator.device).to(outputs)
        return _of_samples((outputs - (outputs.detach() + noise)).square() / 2, over)

    return sample_losses


def _check_over(over: str) -> None:
    if over not in ("sum", "mean"):
        raise ValueError(f"over must be 'sum' or 'mean', not {over!r}")


def _of_samples(losses: Tensor, over: Over) -> Tensor:
    """(B, T…) -> (B,)."""
    each = losses.reshape(len(losses), -1)
    return each.sum(1) if over == "sum" else each.sum(1) / sqrt(max(each.shape[1], 1))


def drawing(sample_losses_fn: Callable[..., Tensor], batch: int, seed: int = 0) -> LossesFn:
    """With a generator of its own for every batch, where the function takes one."""
    try:
        signature(sample_losses_fn).bind(None, None, None)
    except TypeError:
        return sample_losses_fn
    return lambda model, given: sample_losses_fn(model, given, generator_of(seed, batch))


def generator_of(seed: int, batch: int, draw: int = 0) -> torch.Generator:
    """The same labels for a batch whenever it is gone through."""
    return torch.Generator().manual_seed(hash((seed, batch, draw)) & (2**63 - 1))
