"""The verbs of persample: `reduce`, and the two that do something else with what it computes.

The verbs for one reduction each are in shortcuts.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from .checks import (
    boundary,
    check_differentiable,
    check_losses,
    check_memory,
    check_reductions,
    refuse_same_samples,
    refuse_shards,
)
from .distributed import Ranks, accumulate, undisturbed
from .fused import Fused
from .graph.entry import capture_into
from .graph.execute.capture import AtOnce
from .graph.read.compiled import break_graph
from .graph.read.roots import Roots, slot_of
from .graph.read.saved import late_hooks
from .kernels.differentiable import differentiable
from .params import Params, named, pack
from .reductions import ClippedSum, Clipping, Reduction, Run, Stack
from .reductions.sums import Buffers
from .several import Several

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # which some builds of torch lack


@overload
def grad(
    losses: Tensor,
    params: nn.Module | Mapping[str, Tensor],
    *,
    out: Buffers | None = None,
    retain_graph: bool = False,
    create_graph: bool = False,
    independent: bool = False,
) -> dict[str, Tensor]: ...
@overload
def grad(
    losses: Tensor,
    params: Sequence[Tensor],
    *,
    out: Buffers | None = None,
    retain_graph: bool = False,
    create_graph: bool = False,
    independent: bool = False,
) -> tuple[Tensor, ...]: ...
@break_graph
def grad(
    losses: Tensor,
    params: Params,
    *,
    out: Buffers | None = None,
    retain_graph: bool = False,
    create_graph: bool = False,
    independent: bool = False,
) -> dict[str, Tensor] | tuple[Tensor, ...]:
    """The gradient of every single loss with respect to every parameter.

    ``grad(losses, params)[name][i]`` is ``torch.autograd.grad(losses[i], params[name])``.

    >>> import torch, persample as ps
    >>> model = torch.nn.Linear(3, 2)
    >>> losses = model(torch.ones(5, 3)).square().sum(1)
    >>> g = ps.grad(losses, model)
    >>> {name: tuple(value.shape) for name, value in g.items()}
    {'weight': (5, 2, 3), 'bias': (5, 2)}

    With several losses per sample, (B, K…), every one of them has a gradient: (B, K…, *shape).

    Args:
        losses: one loss per sample, of shape (B,), or several, of shape (B, K…), with their graph.
        params: an ``nn.Module`` (its trainable parameters), a mapping from names to leaf tensors, or a sequence.
        out: buffers from an earlier call, to be written again instead of allocating new ones.
        retain_graph: keep the graph for another backward, as in ``torch.autograd.grad``.
        create_graph: let results be differentiated again, as in ``torch.autograd.grad``; the graph is kept.
        independent: raise ``InteractionError`` if one sample's loss is seen to depend on another sample.

    Returns:
        (*losses.shape, *shape) per parameter: a dict for a module or a mapping, a tuple for a sequence. Parameters
        that the losses do not reach get zeros; frozen ones are left out of a dict. On Linux, the storage of
        a result of 4 MB or more cannot be made larger (``resize_``), as it is not from PyTorch's allocator.
    """
    stacks: dict[str, Tensor] | tuple[Tensor, ...]
    (stacks,) = reduce(
        losses, params, Stack(out), retain_graph=retain_graph, create_graph=create_graph, independent=independent
    )
    return stacks


@break_graph
def reduce(
    losses: Tensor,
    params: Params,
    *reductions: Reduction,
    retain_graph: bool = False,
    create_graph: bool = False,
    independent: bool = False,
    max_memory: int | None = None,
    process_group: ProcessGroup | None = None,
) -> tuple[Any, ...]:
    """Several things computed from the per-sample gradients, in one backward and without all of them written out.

    >>> import torch, persample as ps
    >>> model = torch.nn.Linear(3, 2)
    >>> losses = model(torch.ones(5, 3)).square().sum(1)
    >>> norms, total, moment = ps.reduce(losses, model, ps.Norms(), ps.ClippedSum(1.0), ps.SecondMoment())
    >>> norms.shape, total["weight"].shape, moment["bias"].shape
    (torch.Size([5]), torch.Size([2, 3]), torch.Size([2]))

    Args:
        losses: one loss per sample, of shape (B,), or several, of shape (B, K…), with their graph.
        params: an ``nn.Module`` (its trainable parameters), a mapping from names to leaf tensors, or a sequence.
        reductions: what to compute: `Norms`, `ClippedSum`, `WeightedSum`, `SecondMoment`, `Variance`, `Gram`, `Dot`,
            `Project`, `Stack`, or a `Reduction` of your own.
        retain_graph: keep the graph for another backward, as in ``torch.autograd.grad``.
        create_graph: let results be differentiated again, as in ``torch.autograd.grad``; the graph is kept.
        independent: raise ``InteractionError`` if one sample's loss is seen to depend on another sample.
        max_memory: bytes that may be spent on gradients written out, for a few samples at a time and, beside them, kept
            to be used again where that takes more than the inputs and cotangents they are made from; by default about
            what the forward pass has kept for the backward. One sample's gradient of one parameter always fits. Where
            the losses of a sample meet, also on what the gradients of several of them are made from; all of them are
            kept for `Gram`, for a function of ``weights``, for reductions of your own and with ``process_group``.
        process_group: sums and moments over the samples of all its ranks; by default, of this process alone. Every rank
            makes the same call. What has one row per sample is refused.

    Returns:
        One result per reduction.
    """
    ranks = Ranks.of(process_group)
    check_reductions(reductions, max_memory, ranks)
    tensors = named(params)
    check_losses(losses, several=True)
    retain_graph = retain_graph or create_graph
    with (
        boundary(losses),
        undisturbed(losses, tensors, last=not retain_graph) as leaves,
        differentiable(create_graph),
    ):
        if create_graph:
            check_differentiable(losses, leaves, ranks)
        refuse_same_samples(leaves, ranks)
        if losses.ndim > 1:
            return several_of(
                losses, params, leaves.full, max_memory, ranks, retain_graph=retain_graph, independent=independent
            ).reduce(reductions)
        run = begin_run(reductions, params, leaves.full, len(losses), losses.device, max_memory, ranks)
        fused = Fused.of(run, losses, max_memory, as_sequence=isinstance(params, Sequence), independent=independent)
        at_once = None if fused is None else fused.take
        run_backward(losses, leaves.full, run, retain_graph=retain_graph, independent=independent, at_once=at_once)
        return run.results() if fused is None else fused.results()


@break_graph
def backward(
    losses: Tensor,
    params: Params,
    reduction: ClippedSum,
    *,
    retain_graph: bool = False,
    independent: bool = False,
    max_memory: int | None = None,
    process_group: ProcessGroup | None = None,
) -> Clipping:
    """Accumulate a clipped sum of the per-sample gradients into ``p.grad``, as ``losses.sum().backward()`` would.

    >>> import torch, persample as ps
    >>> model = torch.nn.Linear(3, 2)
    >>> losses = model(torch.ones(5, 3)).square().sum(1)
    >>> norms, weights = ps.backward(losses, model, ps.ClippedSum(1.0))
    >>> bool(model.weight.grad.norm() <= 5)
    True

    Args:
        losses: one loss per sample, of shape (B,), or several, of shape (B, K…), with their graph.
        params: an ``nn.Module`` (its trainable parameters), a mapping from names to leaf tensors, or a sequence.
        reduction: how to clip: a `ClippedSum`.
        retain_graph: keep the graph for another backward.
        independent: raise ``InteractionError`` if one sample's loss is seen to depend on another sample.
        max_memory: as for ``ps.reduce``.
        process_group: accumulate the sum over all its ranks; by default nothing is communicated, whatever wraps the
            model, and ``p.grad`` is of this process's samples alone (which sharded parameters have no room for).

    Returns:
        A `Clipping`: the norm of every sample of this process before clipping, its weight, and which were dropped.
    """
    if not isinstance(reduction, ClippedSum):
        raise TypeError(f"backward accumulates a ClippedSum, not a {type(reduction).__name__}")
    tensors, ranks = named(params), Ranks.of(process_group)
    check_memory(max_memory)
    check_losses(losses, several=True)
    with boundary(losses), undisturbed(losses, tensors, last=not retain_graph) as leaves:
        if ranks is None:
            refuse_shards(leaves)
        refuse_same_samples(leaves, ranks)
        if losses.ndim > 1:
            call, portions = several_of(
                losses, params, leaves.full, max_memory, ranks, retain_graph=retain_graph, independent=independent
            ).portions([reduction], [True])
            clipping, sums = reduction.joined(portions[0], call)
        else:
            run = begin_run([reduction], params, leaves.full, len(losses), losses.device, max_memory, ranks)
            run_backward(losses, leaves.full, run, retain_graph=retain_graph, independent=independent)
            (clipped,), call = run.reductions, run.call
            assert isinstance(clipped, ClippedSum)
            with torch.no_grad():
                clipping, sums = clipped.clip()
        with torch.no_grad():
            if not losses.numel():  # without factors, but with gradients of zero all the same
                sums = _gradients_of_no_samples(losses, leaves.full, retain_graph)
            totals = call.over_ranks(sums)
        # By tensor: one may have been given under two names.
        added = {id(p): (p, totals[name]) for name, p in leaves.owned.items() if name in totals}
    with boundary(losses):
        for p, total in added.values():
            accumulate(p, total, late_hooks(p))
    return clipping


def begin_run(
    reductions: Sequence[Reduction],
    params: Params,
    tensors: Mapping[str, Tensor],
    batch: int,
    device: torch.device,
    max_memory: int | None,
    ranks: Ranks | None = None,
) -> Run:
    """Reductions that wait for factors of ``tensors``; results come in the container of ``params``."""
    return Run.begin(reductions, tensors, batch, device, lambda results: pack(params, results), max_memory, ranks)


def several_of(
    losses: Tensor,
    params: Params,
    tensors: Mapping[str, Tensor],
    max_memory: int | None,
    ranks: Ranks | None = None,
    *,
    retain_graph: bool,
    independent: bool,
) -> Several:
    """A call with several losses per sample; results come in the container of ``params``."""
    return Several(losses, tensors, lambda results: pack(params, results), max_memory, ranks, retain_graph, independent)


def run_backward(
    losses: Tensor,
    params: Mapping[str, Tensor],
    run: Run,
    *,
    retain_graph: bool,
    independent: bool,
    at_once: AtOnce | None = None,
) -> None:
    """One backward, which hands the factor of every parameter to the reductions of a run, or all to ``at_once``."""
    capture_into(
        losses,
        params,
        run.add,
        retain_graph=retain_graph,
        independent=independent,
        tell_bytes=run.set_default_memory,
        at_once=at_once,
    )


def _gradients_of_no_samples(losses: Tensor, params: Mapping[str, Tensor], retain_graph: bool) -> dict[str, Tensor]:
    """The gradients of an empty batch, for the parameters that it reaches: zero, also where PyTorch divides by it."""
    if not params:
        return {}
    with torch.enable_grad():
        roots = Roots.of_losses(losses.flatten())
    roots.read()  # which opens what the graph hides
    grads = roots.backward([slot_of(p) for p in params.values()], retain_graph=retain_graph)
    dense = [g if g is None or g.layout == torch.strided else g.to_dense() for g in grads]
    return {name: torch.zeros_like(g) for name, g in zip(params, dense, strict=True) if g is not None}
