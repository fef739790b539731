"""From losses to reductions: one backward, whatever is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ._errors import UnsupportedError
from .api import boundary, check_losses
from .distributed import Leaves, Ranks, accumulate, undisturbed
from .factors import Workspace
from .graph.entry import capture_into
from .graph.roots import Roots, slot_of
from .graph.saved import late_hooks
from .kernels.pages import POOL
from .params import Params, named, pack
from .reductions import Call, ClippedSum, Clipping, Reduction, Run

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # which some builds of torch lack

_LEAST = 2**22  # bytes for temporaries, however small the model


def reduce(
    losses: Tensor,
    params: Params,
    *reductions: Reduction,
    retain_graph: bool = False,
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
        losses: one loss per sample, of shape (B,), with its graph.
        params: an ``nn.Module`` (its trainable parameters), a mapping from names to leaf tensors, or a sequence.
        reductions: what to compute: `Norms`, `ClippedSum`, `WeightedSum`, `SecondMoment`, `Variance`, `Gram`, `Dot`,
            `Project`, `Stack`, or a `Reduction` of your own.
        retain_graph: keep the graph for another backward, as in ``torch.autograd.grad``.
        independent: raise ``InteractionError`` if one sample's loss is seen to depend on another sample.
        max_memory: bytes that may be spent on gradients written out, for a few samples at a time and, beside them, kept
            to be used again where that takes more than the inputs and cotangents they are made from; by default about
            what the forward pass has kept for the backward. One sample's gradient of one parameter always fits.
        process_group: sums and moments over the samples of all its ranks; by default, of this process alone. Every rank
            makes the same call. What has one row per sample is refused.

    Returns:
        One result per reduction.
    """
    ranks = Ranks.of(process_group)
    check_reductions(reductions, max_memory, ranks)
    tensors = named(params)
    check_losses(losses)
    with boundary(losses), undisturbed(losses, tensors, last=not retain_graph) as leaves:
        run, tell = start(reductions, params, leaves.full, len(losses), losses.device, max_memory, ranks)
        _feed(run, losses, leaves.full, tell, retain_graph=retain_graph, independent=independent)
        with torch.no_grad():
            return tuple(r.result() for r in run.reductions)


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
        losses: one loss per sample, of shape (B,), with its graph.
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
    check_losses(losses)
    with boundary(losses), undisturbed(losses, tensors, last=not retain_graph) as leaves:
        if ranks is None:
            _refuse_shards(leaves)
        run, tell = start([reduction], params, leaves.full, len(losses), losses.device, max_memory, ranks)
        _feed(run, losses, leaves.full, tell, retain_graph=retain_graph, independent=independent)
        (running,) = run.reductions
        assert isinstance(running, ClippedSum)
        with torch.no_grad():
            clipping, sums = running.clip()
            if not len(losses):  # without factors, but with gradients of zero all the same
                sums = _zeros(losses, leaves.full, retain_graph)
            found = run.call.over_ranks(sums)
        once = {id(p): (p, found[name]) for name, p in leaves.owned.items() if name in found}  # may be given twice
    with boundary(losses):
        for p, total in once.values():
            accumulate(p, total, late_hooks(p))
    return clipping


def _feed(
    run: Run,
    losses: Tensor,
    params: Mapping[str, Tensor],
    tell: Callable[[int], None] | None,
    *,
    retain_graph: bool,
    independent: bool,
) -> None:
    """One backward into a run's reductions."""
    capture_into(
        losses,
        params,
        run.add,
        retain_graph=retain_graph,
        independent=independent,
        tell_bytes=tell,
    )


def _refuse_shards(leaves: Leaves) -> None:
    if leaves.sharded:
        raise UnsupportedError(
            f"parameters {leaves.sharded} are sharded, and their p.grad has no room for this process's own sum: pass "
            f"process_group= for the sum over ranks; or take w from ps.clipped_sum or ps.norms with retain_graph=True "
            f"and call (w * losses).sum().backward()"
        )


def _zeros(losses: Tensor, params: Mapping[str, Tensor], retain_graph: bool) -> dict[str, Tensor]:
    """The gradients of an empty batch, for the parameters that it reaches."""
    if not params:
        return {}
    roots = Roots.of_losses(losses)
    roots.read()  # which opens what the graph hides
    found = roots.backward([slot_of(p) for p in params.values()], retain_graph=retain_graph)
    return {name: g for name, g in zip(params, found, strict=True) if g is not None}


def start(
    reductions: Sequence[Reduction],
    params: Params,
    tensors: Mapping[str, Tensor],
    batch: int,
    device: torch.device,
    max_memory: int | None,
    ranks: Ranks | None = None,
) -> tuple[Run, Callable[[int], None] | None]:
    """A run of the reductions; and, where memory was not bounded, whom to tell what the forward pass has kept."""
    POOL.begin_call()
    space = Workspace(max_memory)

    def default_limit(activations: int) -> None:
        space.limit = max(activations, _LEAST)

    call = Call(tensors, batch, device, lambda found: pack(params, found), space, ranks)
    return Run(reductions, call), default_limit if max_memory is None else None


def check_reductions(reductions: Sequence[Reduction], max_memory: int | None, ranks: Ranks | None = None) -> None:
    """Refuse what is not a reduction or has no sum over ranks, and what is not a number of bytes."""
    for reduction in reductions:
        if not isinstance(cast(object, reduction), Reduction):
            hint = f": write {reduction.__name__}()" if isinstance(reduction, type) else ""
            raise TypeError(f"expected reductions such as ps.Norms(), but got {reduction!r}{hint}")
        if ranks is not None and not reduction.over_ranks:
            raise ValueError(
                f"{type(reduction).__name__} has rows for the samples of this process and no sum over ranks: leave out "
                f"process_group=, and gather the rows by torch.distributed.all_gather if need be"
            )
    check_memory(max_memory)


def check_memory(max_memory: int | None) -> None:
    """Refuse what is not a number of bytes."""
    if max_memory is not None and (not isinstance(max_memory, int) or max_memory < 0):
        raise ValueError(f"max_memory must be a number of bytes, not {max_memory!r}")
