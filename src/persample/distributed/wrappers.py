"""A backward for per-sample gradients below which DDP and FSDP2 notice nothing.

The names used here are private to PyTorch. They hold for torch 2.13 to 2.15; ``tests/distributed/test_names.py`` looks
them up. Those of FSDP2's own state are in shards.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeGuard

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from .._errors import UnsupportedError
from ..python_nodes import is_torchs
from ..traverse import ordered
from .shards import Leaves, gathered, is_flattened, is_sharded
from .tensor_parallel import check_graph, there_are_processes

_DDP_OUTPUTS = "_DDPSink"  # what DDP puts between a model and its outputs
_FSDP_INPUTS = "RegisterPostBackwardFunction"  # what FSDP2 puts before a module's inputs
WRAPPER_FUNCTIONS = (_DDP_OUTPUTS, _FSDP_INPUTS)  # whose nodes hand cotangents on as they are


def passes_on(node: Node) -> TypeGuard[BackwardCFunction]:
    """Does this node only call a wrapper of the model, and give its cotangents to its inputs?"""
    return is_torchs(node, *WRAPPER_FUNCTIONS)


def passed_from(node: BackwardCFunction, k: int) -> int:
    """The cotangent that such a node hands on as output k; its first argument is the wrapper, the others are inputs."""
    live = [i for i, (child, _) in enumerate(node.next_functions) if child is not None]
    needed = [i for i, wanted in enumerate(node.needs_input_grad) if wanted]
    return needed[live.index(k)] - 1


@contextmanager
def undisturbed(losses: Tensor, params: Mapping[str, Tensor], *, last: bool) -> Iterator[Leaves]:
    """The tensors that the losses' graph knows the parameters by, while wrappers leave backwards alone.

    DDP's reducer is not called. Modules of FSDP2 hold their full weights, and are sharded again at the end; ``last``
    says that the graph will not be used again, as an ordinary backward would take it.
    """
    if not there_are_processes():
        yield Leaves(params, params)
        return
    _refuse_flattened(params)
    with ExitStack() as stack:
        nodes = _nodes_of(losses)
        sinks: list[Any] = [node for node in nodes if is_torchs(node, _DDP_OUTPUTS)]
        for sink in sinks:
            stack.enter_context(_no_delayed_reduction(sink.ddp_weakref()))
        groups = [_parameter_group(node) for node in nodes if is_torchs(node, _FSDP_INPUTS)]
        leaves = [node.variable for node in nodes if type(node).__name__ == "AccumulateGrad"]
        gathered_leaves = stack.enter_context(gathered(params, leaves, groups, last=last))
        check_graph(losses, gathered_leaves.full, nodes)
        _refuse_other_shards(gathered_leaves.full, leaves)
        yield gathered_leaves


def _nodes_of(losses: Tensor) -> list[Any]:
    """All nodes of a graph, each before those that it leads to."""
    start = losses.grad_fn
    return ordered([] if start is None else [start], _children)


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _parameter_group(node: Any) -> Any:
    """What FSDP2 gathers for the module before whose inputs this node is."""
    return node.param_group


@contextmanager
def _no_delayed_reduction(ddp: Any) -> Iterator[None]:
    """With ``static_graph=True``, the first backward that passes DDP's outputs reduces all gradients at its end."""
    if ddp is None or not ddp.static_graph:
        yield
        return
    before, ddp._static_graph_delay_allreduce_enqueued = ddp._static_graph_delay_allreduce_enqueued, True
    try:
        yield
    finally:
        ddp._static_graph_delay_allreduce_enqueued = before


def _refuse_flattened(params: Mapping[str, Tensor]) -> None:
    flat = [name for name, p in params.items() if is_flattened(p)]
    if flat:
        raise UnsupportedError(
            f"parameters {flat} are parts of a flat one (FullyShardedDataParallel), of which the graph shows nothing: "
            f"shard the model by torch.distributed.fsdp.fully_shard instead"
        )


def _refuse_other_shards(params: Mapping[str, Tensor], leaves: Sequence[Tensor]) -> None:
    """Refuse parameters that no module of FSDP2 holds whole, in a graph that knows no DTensors."""
    left = [name for name, p in params.items() if is_sharded(p)]
    if left and not any(is_sharded(leaf) for leaf in leaves):
        raise UnsupportedError(
            f"parameters {left} are DTensors, for which no fully_shard module of this process holds a full one, and "
            f"none of the graph's leaves is a DTensor: compute the losses with these very parameters"
        )
