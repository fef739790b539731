"""The verbs of persample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import overload

import torch
from torch import Tensor, nn

from ._errors import UnsupportedError
from .distributed import undisturbed
from .factors import Factor, one_by_one
from .graph.entry import capture_into
from .kernels.pages import POOL, fresh
from .params import Params, named, pack

Buffers = Mapping[str, Tensor] | Sequence[Tensor]


@overload
def grad(
    losses: Tensor,
    params: nn.Module | Mapping[str, Tensor],
    *,
    out: Buffers | None = None,
    retain_graph: bool = False,
    independent: bool = False,
) -> dict[str, Tensor]: ...
@overload
def grad(
    losses: Tensor,
    params: Sequence[Tensor],
    *,
    out: Buffers | None = None,
    retain_graph: bool = False,
    independent: bool = False,
) -> tuple[Tensor, ...]: ...
def grad(
    losses: Tensor,
    params: Params,
    *,
    out: Buffers | None = None,
    retain_graph: bool = False,
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

    Args:
        losses: one loss per sample, of shape (B,), with its graph.
        params: an ``nn.Module`` (its trainable parameters), a mapping from names to leaf tensors, or a sequence.
        out: buffers from an earlier call, to be written again instead of allocating new ones.
        retain_graph: keep the graph for another backward, as in ``torch.autograd.grad``.
        independent: raise ``InteractionError`` if one sample's loss is seen to depend on another sample.

    Returns:
        (B, *shape) per parameter: a dict for a module or a mapping, a tuple for a sequence. Parameters that the
        losses do not reach get zeros; frozen ones are left out of a dict. On Linux, the storage of a result of 4 MB or
        more cannot be made larger (``resize_``), as it is not from PyTorch's allocator.
    """
    tensors = named(params)
    check_losses(losses)
    with boundary(losses), undisturbed(losses, tensors, last=not retain_graph) as leaves:
        POOL.begin_call()
        buffers = _buffers(out, leaves.full, len(losses))
        missing = dict(buffers)

        def write(name: str, factor: Factor) -> None:
            factor.stack(missing.pop(name))

        capture_into(losses, leaves.full, one_by_one(write), retain_graph=retain_graph, independent=independent)
        for buffer in missing.values():
            buffer.zero_()
    return pack(params, buffers)


def empty_cache() -> None:
    """Release the memory that is kept on the CPU to be used again by the next call.

    >>> import persample as ps
    >>> ps.empty_cache()

    Temporaries are written into pages that earlier calls have used, because fresh ones are slow; what the last few
    calls did not use is released without being asked. Results own their memory.
    """
    POOL.empty()


@contextmanager
def boundary(losses: Tensor) -> Iterator[None]:
    """Keep the caller's modes out, and add the remedy to PyTorch's own errors."""
    try:
        with torch.inference_mode(False), torch.autocast(losses.device.type, enabled=False):
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
        if "donated" in str(error):
            raise UnsupportedError(
                "a compiled region was compiled for one backward only, and more are needed here (retain_graph=True, or "
                "a custom Function beside it): use the model without torch.compile, or set "
                "torch._functorch.config.donated_buffer = False before its first backward"
            ) from error
        raise


def check_losses(losses: Tensor) -> None:
    """Refuse what is not one differentiable loss per sample."""
    remedy = "compute one loss per sample, e.g. with reduction='none' and a mean over all dims but the first"
    if not isinstance(losses, Tensor):
        raise TypeError(f"losses must be a tensor of shape (B,), not {type(losses).__name__}: {remedy}")
    if losses.ndim != 1:
        raise ValueError(f"losses must have shape (B,), but have shape {tuple(losses.shape)}: {remedy}")
    if not losses.is_floating_point():
        raise ValueError(f"losses must be real floating-point numbers, but have dtype {losses.dtype}")
    if not losses.requires_grad:
        raise RuntimeError(
            f"losses of shape {tuple(losses.shape)} have no graph: compute them with gradients enabled "
            f"(no torch.no_grad, no .detach()) from parameters that require grad"
        )


def _buffers(out: Buffers | None, params: Mapping[str, Tensor], batch: int) -> dict[str, Tensor]:
    """Where the results go, by parameter name in the order of ``params``: ``out``, checked, or new tensors."""
    if out is None:
        return {name: fresh((batch, *p.shape), p.dtype, p.device) for name, p in params.items()}
    given = dict(out) if isinstance(out, Mapping) else {str(i): t for i, t in enumerate(out)}
    if set(given) != set(params):
        raise ValueError(f"out must hold one buffer per parameter: expected {list(params)}, got {list(given)}")
    for name, p in params.items():
        buffer, expected = given[name], (batch, *p.shape)
        if not isinstance(buffer, Tensor):
            raise TypeError(f"out[{name!r}] must be a tensor of shape {expected}, not {type(buffer).__name__}")
        if tuple(buffer.shape) != expected or buffer.dtype != p.dtype or buffer.device != p.device:
            raise ValueError(
                f"out[{name!r}] must be {expected} {p.dtype} on {p.device}, "
                f"but is {tuple(buffer.shape)} {buffer.dtype} on {buffer.device}"
            )
    return {name: given[name] for name in params}
