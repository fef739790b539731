"""What `exact` inverts: `GaussNewton`, `Fisher` or `Hessian`, as products with vectors, batch by batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed import is_sharded, owners
from ..shortcuts import dot
from ..verbs import reduce
from .sampling import LossesFn, OutputsFn, SampleLossesFn, generator_of
from .twice import differentiable_twice
from .vectors import WeightedSums, joined, parted


class Product(ABC):
    """A symmetric matrix, the sum of one for every sample, by its products with vectors."""

    @abstractmethod
    def of_batch(
        self,
        model: nn.Module,
        params: Mapping[str, Tensor],
        losses_fn: LossesFn,
        batch: Any,
        number: int,
        vectors: Tensor,
    ) -> Tensor:
        """(Q, P): the sum over the batch's samples, times each of the vectors (Q, P)."""


class Fisher(Product):
    """Σ_i g_i g_iᵀ, by inner products and a weighted sum: exact for every program, and never negative.

    Args:
        sample_losses_fn: losses with labels drawn from the model, ``(model, batch, generator) -> (B,)``, for the true
            Fisher information, which is the Gauss-Newton matrix of cross entropies on average; see `categorical`.
            Without it, the losses as they are: the empirical Fisher, which is a poor curvature of a model that fits.
        draws: labels per sample; the more, the nearer to Gauss-Newton.
        seed: of the labels, which are the same in every product.
    """

    def __init__(self, sample_losses_fn: SampleLossesFn | None = None, *, draws: int = 1, seed: int = 0) -> None:
        if draws < 1:
            raise ValueError(f"draws must be at least 1, not {draws}")
        self.sample_losses_fn, self.seed = sample_losses_fn, seed
        self.draws = draws if sample_losses_fn is not None else 1

    def of_batch(
        self,
        model: nn.Module,
        params: Mapping[str, Tensor],
        losses_fn: LossesFn,
        batch: Any,
        number: int,
        vectors: Tensor,
    ) -> Tensor:
        directions, total = parted(vectors, params), torch.zeros_like(vectors)
        for draw in range(self.draws):
            if self.sample_losses_fn is None:
                losses = losses_fn(model, batch)
            else:
                losses = self.sample_losses_fn(model, batch, generator_of(self.seed, number, draw))
            weights = dot(losses, params, directions, retain_graph=True)
            total += joined(reduce(losses, params, WeightedSums(weights))[0], params).to(total)
        return total / self.draws


class Hessian(Product):
    """Σ_i ∇²loss_i by a double backward. Not positive in general: right with enough damping, or near a minimum."""

    def of_batch(
        self,
        model: nn.Module,
        params: Mapping[str, Tensor],
        losses_fn: LossesFn,
        batch: Any,
        number: int,
        vectors: Tensor,
    ) -> Tensor:
        leaves = _whole(params)
        with differentiable_twice():
            losses = losses_fn(model, batch).sum()
        gradients = torch.autograd.grad(losses, leaves, create_graph=True, allow_unused=True)
        return _of_each(lambda v: _pulled(gradients, leaves, v), params, vectors)


class GaussNewton(Product):
    """Σ_i J_iᵀ H_i J_i, with J_i the derivative of a sample's outputs and H_i the second one of its loss in them.

    Never negative for losses that are convex in the outputs, and what influence functions of trained networks are best
    taken with.

    Args:
        outputs_fn: from the model and a batch to the outputs, (B, ...).
        output_losses_fn: from outputs and the batch to losses (B,); with ``outputs_fn``, it makes the losses.
    """

    def __init__(self, outputs_fn: OutputsFn, output_losses_fn: Callable[[Tensor, Any], Tensor]) -> None:
        self.outputs_fn, self.output_losses_fn = outputs_fn, output_losses_fn

    def of_batch(
        self,
        model: nn.Module,
        params: Mapping[str, Tensor],
        losses_fn: LossesFn,
        batch: Any,
        number: int,
        vectors: Tensor,
    ) -> Tensor:
        leaves = _whole(params)
        with differentiable_twice():
            outputs = self.outputs_fn(model, batch)
        inner = outputs.detach().requires_grad_()
        (slopes,) = torch.autograd.grad(self.output_losses_fn(inner, batch).sum(), inner, create_graph=True)
        probe = torch.zeros_like(outputs, requires_grad=True)
        pulled = torch.autograd.grad(outputs, leaves, probe, create_graph=True, allow_unused=True)  # linear in probe

        def product(vector: Sequence[Tensor]) -> Sequence[Tensor]:
            (moved,) = _pulled(pulled, [probe], vector)
            (bent,) = _pulled([slopes], [inner], [moved])
            return _pulled([outputs], leaves, [bent])

        return _of_each(product, params, vectors)


def _whole(params: Mapping[str, Tensor]) -> list[Tensor]:
    """The parameters, through which PyTorch itself differentiates twice."""
    sharded = [name for name, p in owners(params).items() if is_sharded(p)]
    if sharded:
        raise ValueError(
            f"parameters {sharded[:8]} are sharded (FSDP2, tensor parallel), and derivatives of derivatives need them "
            f"whole: use product=pi.Fisher(sample_losses_fn), or pi.dual"
        )
    return list(params.values())


def _pulled(outputs: Sequence[Tensor | None], leaves: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor]:
    """A vector-Jacobian product whose graph stays; zeros where nothing depends on anything."""
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o is not None and o.requires_grad]
    if not pairs:
        return [torch.zeros_like(leaf) for leaf in leaves]
    tensors, given = zip(*pairs, strict=True)
    found = torch.autograd.grad(tensors, leaves, given, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(leaf) if f is None else f for leaf, f in zip(leaves, found, strict=True)]


def _of_each(
    product: Callable[[Sequence[Tensor]], Sequence[Tensor]], params: Mapping[str, Tensor], vectors: Tensor
) -> Tensor:
    """(Q, P): a product of every vector; the forward pass and what was derived from it are shared."""
    parts, total = parted(vectors, params), torch.empty_like(vectors)
    for q in range(len(vectors)):
        found = product([parts[name][q] for name in params])
        total[q] = torch.cat([t.flatten() for t in found]).to(total)
    return total
