"""Reentrant checkpoints, opened: the graph that one node of theirs stands for.

``torch.utils.checkpoint`` with ``use_reentrant=True`` runs a function without recording it. One node of the graph keeps
the function, its inputs and the state of the random numbers, and runs it again when its backward comes. Here it is run
again before, on inputs of its own, and the graph that this records is read like any other. It is recorded as a
non-reentrant checkpoint, so that what its ops save is not kept either: a region costs one more run, and no memory.

The node's attributes are private: they hold for torch 2.13 to 2.15; ``tests/graph/test_reentrant.py`` checks the names
and behaviours used here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.checkpoint import CheckpointError, CheckpointFunction, checkpoint, set_device_states

from ..._errors import UnsupportedError
from ...python_nodes import node_type_of
from .nodes import NodeSlot
from .saved import born, in_checkpoint, in_own_task, let_go, metadata

Outputs = Sequence[Tensor | None]

REENTRANT: type = node_type_of(CheckpointFunction)


def is_reentrant(node: Node | None) -> bool:
    """Does this node stand for a region of reentrant checkpointing?"""
    return type(node) is REENTRANT


@dataclass(frozen=True, slots=True)
class Region:
    """What a reentrant checkpoint hides."""

    outputs: tuple[NodeSlot | None, ...]  # per cotangent of the checkpoint's node; None where no gradient flows
    inputs: tuple[NodeSlot | None, ...]  # per edge of that node: the leaf inside that stands for the tensor there
    start: int  # a number smaller than those of its nodes, and larger than those of all that this thread made before
    own: set[Node] = field(default_factory=set)  # the nodes inside, other than leaves
    leaves: set[Node] = field(default_factory=set)  # those that it leads to
    outside: set[Node] = field(default_factory=set)  # of computed tensors that its function uses without being given


def open_region(node: Any, others: Iterable[Node]) -> Region:
    """Run a region again, and record it; ``others`` are the nodes around the checkpoint."""
    arguments, leaves = list(_kept(node, "inputs")), []
    edges = [child for child, _ in node.next_functions]
    for at, t, below in zip(_kept(node, "tensor_indices"), _tensors(node, others), edges, strict=True):
        arguments[at] = t.detach().requires_grad_(below is not None)
        leaves.append(arguments[at])
    with torch.enable_grad(), _as_in_forward(node) as preserved:
        start = born(torch.zeros((), device="cpu", requires_grad=True).clone().grad_fn)  # type: ignore[arg-type]
        result = checkpoint(
            _on_views(_kept(node, "run_function")), *arguments, use_reentrant=False, preserve_rng_state=preserved
        )
    outputs = result if isinstance(result, tuple) else (result,)
    _check_outputs(node, outputs)
    live = [isinstance(t, Tensor) and t.requires_grad for t in outputs]
    slots = tuple(_slot(t) if flows else None for t, flows in zip(outputs, live, strict=True))
    inputs = tuple(_slot(t) if t.requires_grad else None for t in leaves)
    return Region(slots, inputs, start)


def _on_views(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, given views of its inputs, so that hooks it registers on these belong to one run."""

    def run(*arguments: Any) -> Any:
        wants = [isinstance(t, Tensor) and t.requires_grad for t in arguments]
        return function(*[t.view_as(t) if want else t for t, want in zip(arguments, wants, strict=True)])

    return run


def _slot(t: Tensor) -> NodeSlot:
    edge = get_gradient_edge(t)
    return edge.node, edge.output_nr


def _kept(node: Any, name: str) -> Any:
    try:
        return getattr(node, name)
    except AttributeError as error:
        raise UnsupportedError(
            f"the graph holds a reentrant checkpoint, of which torch {torch.__version__} does not keep {name!r} where "
            f"other releases do: use checkpoint(..., use_reentrant=False)"
        ) from error


def _tensors(node: Any, others: Iterable[Node]) -> Sequence[Tensor]:
    """The tensors among the arguments; where these are recomputed by another checkpoint, once for all of them."""
    if not in_checkpoint(node):
        return tuple(node.saved_tensors)
    tensors: list[Tensor] = []

    def read() -> None:
        tensors.extend(node.saved_tensors)
        for other in others:
            let_go(other)

    with same_again():
        in_own_task(read)
    return tensors


@contextmanager
def same_again() -> Iterator[None]:
    """Where PyTorch finds that a region is not run as it was recorded, raise in terms of the user's checkpoint."""
    try:
        yield
    except CheckpointError as error:
        raise UnsupportedError(
            "the function of a reentrant checkpoint did something else when it was run again: let it do the same every "
            "time, and change or return nothing that it was not given"
        ) from error


@contextmanager
def _as_in_forward(node: Any) -> Iterator[bool]:
    """Random numbers and autocast as they were in the forward pass; the user's random state comes back after.

    Casts are not kept for another use (``cache_enabled``), as regions would share them.
    """
    preserved, kind = bool(_kept(node, "preserve_rng_state")), _kept(node, "device_type")
    on_device = preserved and _kept(node, "had_device_in_fwd")
    devices = _kept(node, "fwd_devices") if on_device else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices, device_type=kind))
        if preserved:
            torch.set_rng_state(_kept(node, "fwd_cpu_state"))
        if on_device:
            set_device_states(devices, _kept(node, "fwd_device_states"), device_type=kind)
        casts = {kind: _kept(node, "device_autocast_kwargs"), "cpu": _kept(node, "cpu_autocast_kwargs")}
        for device, options in casts.items():
            if options is not None:
                stack.enter_context(torch.amp.autocast(device, **{**options, "cache_enabled": False}))
        before = torch.get_rng_state()
        yield preserved
        if not preserved and not torch.equal(before, torch.get_rng_state()):
            raise UnsupportedError(
                "a reentrant checkpoint draws random numbers with preserve_rng_state=False, so that it cannot be run "
                "again as it was: use checkpoint(..., preserve_rng_state=True)"
            )


def _check_outputs(node: Node, outputs: Sequence[Any]) -> None:
    """Refuse a function that returns something else when it is run again."""
    then = [tuple(meta.shape) for meta in metadata(node)]  # nothing is told of those that have no gradients
    known = [isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) for t in outputs]
    now = [tuple(t.shape) if k else shape for t, k, shape in zip(outputs, known, then, strict=False)]
    if len(outputs) != len(then) or now != then:
        raise UnsupportedError(
            f"the function of a reentrant checkpoint returned {len(then)} results of shapes {then} in the forward "
            f"pass, and {len(outputs)} of shapes {now} when it was run again: let it do the same every time"
        )
    if not any(isinstance(t, Tensor) and t.requires_grad for t in outputs):  # PyTorch's backward fails there, too
        raise UnsupportedError(
            f"no result of the function of a reentrant checkpoint, of shapes {then}, has a gradient when it is run "
            f"again: call the function without a checkpoint, and return clones of tensors that it was not given"
        )


@contextmanager
def run_instead(node: Any, backward: Callable[[Outputs], Outputs]) -> Iterator[None]:
    """Let the engine call ``backward`` for a reentrant node, with a cotangent or None for each of its outputs.

    It answers for every edge of the node. The node's own backward would add to the gradients of parameters.
    """

    def apply(*grads: Tensor | None) -> Outputs:
        gradients: list[Tensor | None] = [None] * (2 + len(node.inputs))
        for at, g in zip(node.tensor_indices, backward(grads), strict=True):
            gradients[2 + at] = g
        return tuple(gradients)

    node.apply, node.materialize_grads = apply, False
    try:
        yield
    finally:
        del node.apply
        node.materialize_grads = True
