"""From losses to reductions: one backward, whatever is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from .api import boundary, check_losses
from .factors import Workspace
from .graph.entry import capture_into
from .kernels.pages import POOL
from .params import Params, named, pack
from .reductions import Call, ClippedSum, Clipping, Reduction, Run

_LEAST = 2**22  # bytes for temporaries, however small the model


def reduce(
    losses: Tensor,
    params: Params,
    *reductions: Reduction,
    retain_graph: bool = False,
    independent: bool = False,
    max_memory: int | None = None,
) -> tuple[Any, ...]:
    """Several things computed from the per-sample gradients, in one backward and without all of them written out.

    >>> import torch, persample as ps
    >>> model = torch.nn.Linear(3, 2)
    >>> losses = model(torch.ones(5, 3)).square().sum(1)
    >>> norms, total, moment = ps.reduce(losses, model, ps.Norms(), ps.ClippedSum(1.0), ps.SecondMoment())
    >>> norms.shape, total["weight"].shape, moment["bias"].shape
    (torch.Size([5]), torch.Size([2, 3]), torch.Size([2]))

    Args:
        losses: one loss per sample, of shape (B,), with its graph.
        params: an ``nn.Module`` (its trainable parameters), a mapping from names to leaf tensors, or a sequence.
        reductions: what to compute: `Norms`, `ClippedSum`, `WeightedSum`, `SecondMoment`, `Variance`, `Gram`, `Dot`,
            `Project`, `Stack`, or a `Reduction` of your own.
        retain_graph: keep the graph for another backward, as in ``torch.autograd.grad``.
        independent: raise ``InteractionError`` if one sample's loss is seen to depend on another sample.
        max_memory: bytes that may be spent on gradients written out, for a few samples at a time and, beside them, kept
            to be used again where that takes more than the inputs and cotangents they are made from; by default about
            what the forward pass has kept for the backward. One sample's gradient of one parameter always fits.

    Returns:
        One result per reduction.
    """
    with _run(losses, params, reductions, retain_graph, independent, max_memory) as running:
        return tuple(r.result() for r in running)


def backward(
    losses: Tensor,
    params: Params,
    reduction: ClippedSum,
    *,
    retain_graph: bool = False,
    independent: bool = False,
    max_memory: int | None = None,
) -> Clipping:
    """Accumulate a clipped sum of the per-sample gradients into ``p.grad``, as ``losses.sum().backward()`` would.

    >>> import torch, persample as ps
    >>> model = torch.nn.Linear(3, 2)
    >>> losses = model(torch.ones(5, 3)).square().sum(1)
    >>> norms, weights = ps.backward(losses, model, ps.ClippedSum(1.0))
    >>> bool(model.weight.grad.norm() <= 5)
    True

    Args:
        losses: one loss per sample, of shape (B,), with its graph.
        params: an ``nn.Module`` (its trainable parameters), a mapping from names to leaf tensors, or a sequence.
        reduction: how to clip: a `ClippedSum`.
        retain_graph: keep the graph for another backward.
        independent: raise ``InteractionError`` if one sample's loss is seen to depend on another sample.
        max_memory: as for ``ps.reduce``.

    Returns:
        A `Clipping`: every sample's norm before clipping, its weight, and which samples were dropped.
    """
    if not isinstance(reduction, ClippedSum):
        raise TypeError(f"backward accumulates a ClippedSum, not a {type(reduction).__name__}")
    tensors = named(params)
    with _run(losses, params, [reduction], retain_graph, independent, max_memory) as running:
        assert isinstance(running[0], ClippedSum)
        clipping, sums = running[0].clip()
    with boundary(losses), torch.enable_grad():
        if tensors and not len(losses):  # an empty batch has no factors, but gradients of zero all the same
            zeros = torch.autograd.grad(
                losses.sum(), list(tensors.values()), retain_graph=retain_graph, allow_unused=True
            )
            sums = {name: g for name, g in zip(tensors, zeros, strict=True) if g is not None}
        once = {id(p): name for name, p in tensors.items() if name in sums}  # a tensor may be given twice
        torch.autograd.backward([tensors[name] for name in once.values()], [sums[name] for name in once.values()])
    return clipping


@contextmanager
def _run(
    losses: Tensor,
    params: Params,
    reductions: Sequence[Reduction],
    retain_graph: bool,
    independent: bool,
    max_memory: int | None,
) -> Iterator[list[Reduction]]:
    """All reductions after the backward, to be asked for their results under the modes of this package."""
    check_reductions(reductions, max_memory)
    tensors = named(params)
    check_losses(losses)
    with boundary(losses):
        run, tell_bytes = start(reductions, params, tensors, len(losses), losses.device, max_memory)
        capture_into(
            losses, tensors, run.add, retain_graph=retain_graph, independent=independent, tell_bytes=tell_bytes
        )
        with torch.no_grad():
            yield run.reductions


def start(
    reductions: Sequence[Reduction],
    params: Params,
    tensors: Mapping[str, Tensor],
    batch: int,
    device: torch.device,
    max_memory: int | None,
) -> tuple[Run, Callable[[int], None] | None]:
    """A run of the reductions; and, where memory was not bounded, whom to tell what the forward pass has kept."""
    POOL.begin_call()
    space = Workspace(max_memory)

    def default_limit(activations: int) -> None:
        space.limit = max(activations, _LEAST)

    call = Call(tensors, batch, device, lambda found: pack(params, found), space)
    return Run(reductions, call), default_limit if max_memory is None else None


def check_reductions(reductions: Sequence[Reduction], max_memory: int | None) -> None:
    """Refuse what is not a reduction, and what is not a number of bytes."""
    for reduction in reductions:
        if not isinstance(cast(object, reduction), Reduction):
            hint = f": write {reduction.__name__}()" if isinstance(reduction, type) else ""
            raise TypeError(f"expected reductions such as ps.Norms(), but got {reduction!r}{hint}")
    check_memory(max_memory)


def check_memory(max_memory: int | None) -> None:
    """Refuse what is not a number of bytes."""
    if max_memory is not None and (not isinstance(max_memory, int) or max_memory < 0):
        raise ValueError(f"max_memory must be a number of bytes, not {max_memory!r}")
