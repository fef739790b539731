"""What is used of PyTorch's compilers: Dynamo, which captures losses, and the backends that compile graphs.

The names used here are private to PyTorch. They hold for torch 2.13 to 2.15; ``tests/compiled/test_compilers.py``
checks them. They are imported when something is compiled, as that takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

Runnable = Callable[..., Sequence[Any]]


def captured(fn: Callable[..., Any], backend: Callable[..., Any], *, dynamic: bool | None, limit: int) -> Any:
    """``fn``, whose calls run what ``backend`` makes of the graph that Dynamo captures of them: whole, or not at all.

    Captures of other steps with the same function do not count against its ``limit``.
    """
    return torch.compile(
        fn, backend=backend, fullgraph=True, dynamic=dynamic, recompile_limit=limit, isolate_recompiles=True
    )


def could_not_capture(error: Exception) -> bool:
    """Was this raised by Dynamo, about what it cannot capture or has captured too often?"""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def too_many_captures(error: Exception) -> bool:
    """Was this raised by Dynamo because a function has been captured as often as it may be?"""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return isinstance(error, FailOnRecompileLimitHit)


def compiled_by(backend: str | Callable[..., Any], graph: GraphModule, inputs: Sequence[Any]) -> Runnable:
    """What a backend, given by name or as a function, makes of a graph without gradients."""
    from torch._dynamo import lookup_backend

    compiler = lookup_backend(backend) if isinstance(backend, str) else backend
    with torch.no_grad(), drawing_as_eager():
        made: Runnable = compiler(graph, list(inputs))
    return made


def backends() -> list[str]:
    """The names of all backends."""
    from torch._dynamo import list_backends

    return list(list_backends(exclude_tags=()))


@contextmanager
def drawing_as_eager() -> Iterator[None]:
    """Inside, compile random ops such that they draw the numbers that they draw without a compiler."""
    from torch._inductor import config

    with config.patch(fallback_random=True):
        yield


def traced_graph(fn: Callable[..., Any], inputs: Sequence[Tensor]) -> GraphModule:
    """The graph of all that ``fn`` does to tensors like these, without looking at their numbers."""
    from torch.fx.experimental.proxy_tensor import make_fx

    graph: GraphModule = make_fx(fn, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph
