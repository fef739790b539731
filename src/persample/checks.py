"""What is refused before any work is done, and what is added to PyTorch's errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch
from torch import Tensor
from torch.distributed import get_process_group_ranks

from ._errors import UnsupportedError
from .distributed import Leaves, Ranks, held_by_several, is_sharded
from .kernels.devices import looking
from .kernels.streams import streams_of
from .numberless import has_numbers, lacks_numbers, shapes_alone
from .reductions import Reduction


def check_losses(losses: Tensor, *, several: bool = False, why_one: str = "") -> None:
    """Refuse what is not one differentiable loss per sample, or ``several`` where they are allowed.

    ``why_one`` says why they are not, where somebody might expect them to be.
    """
    remedy = "compute one loss per sample, e.g. with reduction='none' and a mean over all dims but the first"
    shape = "(B,) or (B, K…)" if several else "(B,)"
    if not isinstance(losses, Tensor):
        raise TypeError(f"losses must be a tensor of shape {shape}, not {type(losses).__name__}: {remedy}")
    if is_sharded(losses):
        raise TypeError("losses are a DTensor: compute the losses of whole outputs, or pass losses.full_tensor()")
    if losses.ndim == 0 or (losses.ndim > 1 and not several):
        why = f" {why_one}" if losses.ndim > 1 else ""
        raise ValueError(f"losses must have shape {shape}, but have shape {tuple(losses.shape)}:{why} {remedy}")
    if not losses.is_floating_point():
        raise ValueError(f"losses must be real floating-point numbers, but have dtype {losses.dtype}")
    if not losses.requires_grad:
        raise RuntimeError(
            f"losses of shape {tuple(losses.shape)} have no graph: compute them with gradients enabled "
            f"(no torch.no_grad, no .detach()) from parameters that require grad"
        )


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


def check_differentiable(losses: Tensor, leaves: Leaves, ranks: Ranks | None) -> None:
    """Refuse what cannot be differentiated again: sums over processes, and weights of which others hold parts."""
    if losses.ndim > 1:
        raise UnsupportedError(
            f"create_graph=True takes one loss per sample, and these have shape {tuple(losses.shape)}: make one call "
            f"for each position, losses[:, k], or take every loss for a sample, losses.flatten()"
        )
    if ranks is not None:
        raise UnsupportedError(
            "sums over the ranks of a process group cannot be differentiated: leave out process_group=, and add up the "
            "derivatives of all ranks instead"
        )
    sharded = [name for name, p in leaves.full.items() if name in leaves.sharded or is_sharded(p)]
    if sharded:
        raise UnsupportedError(
            f"parameters {sharded} are sharded, and full weights are gone when results are differentiated: use "
            f"create_graph=True with a model that is not sharded"
        )


def refuse_same_samples(leaves: Leaves, ranks: Ranks | None) -> None:
    """Refuse to add up what processes have of the same samples, as those of a tensor parallel model do."""
    shared = [] if ranks is None else held_by_several(leaves.full, get_process_group_ranks(ranks.group))
    if shared:
        raise ValueError(
            f"process_group has processes that hold parts of the same tensors {shared} (tensor parallel), and have the "
            f"same samples: every sample would be counted several times. Pass the group of the mesh's dim for data "
            f"parallelism, or leave out process_group="
        )


def refuse_shards(leaves: Leaves) -> None:
    """Refuse to accumulate a sum over this process's samples into a part of a parameter."""
    if leaves.sharded:
        raise UnsupportedError(
            f"parameters {leaves.sharded} are sharded, and their p.grad has no room for this process's own sum: pass "
            f"process_group= for the sum over ranks; or take w from ps.clipped_sum or ps.norms with retain_graph=True "
            f"and call (w * losses).sum().backward()"
        )


def _without_autocast(losses: Tensor) -> AbstractContextManager[object]:
    """A context without autocast; what is computed on meta, or on a device that has none, is not subject to it."""
    kind = losses.device.type
    if losses.is_meta or not torch.amp.is_autocast_available(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


@contextmanager
def _surroundings(losses: Tensor) -> Iterator[None]:
    """What the losses' device asks for, or the lack of one."""
    look = nullcontext() if has_numbers(losses) else looking(False)
    with shapes_alone([losses]), look, streams_of(losses.device):
        yield


@contextmanager
def boundary(losses: Tensor) -> Iterator[None]:
    """Keep the caller's modes out, and add the remedy to PyTorch's own errors."""
    with explained(losses), torch.inference_mode(False), _without_autocast(losses), _surroundings(losses):
        yield


@contextmanager
def explained(losses: Tensor) -> Iterator[None]:
    """Add the remedy to PyTorch's own errors."""
    try:
        yield
    except RuntimeError as error:
        if "second time" in str(error):
            raise RuntimeError(
                f"the graph of losses {tuple(losses.shape)} was freed by an earlier backward: compute the losses "
                f"again, or pass retain_graph=True to every call but the last. PyTorch says: {error}"
            ) from error
        if "selective activation checkpoint" in str(error):
            raise UnsupportedError(
                "a region of selective checkpointing (create_selective_checkpoint_contexts) can be run backwards once "
                "only, and here data decide where samples lie, for which it has to be run more often: checkpoint it "
                "without context_fn, or not at all"
            ) from error
        if not has_numbers(losses) and lacks_numbers(error):
            raise UnsupportedError(
                f"numbers are needed here, and tensors on meta or of a FakeTensorMode have none: {_first_line(error)}. "
                f"ps.explain(losses, params) tells what follows from shapes alone, and what does not"
            ) from error
        if "donated" in str(error):
            raise UnsupportedError(
                "a compiled region was compiled for one backward only, and more are needed here (retain_graph=True, or "
                "a custom Function beside it): use the model without torch.compile, or set "
                "torch._functorch.config.donated_buffer = False before its first backward"
            ) from error
        raise


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
