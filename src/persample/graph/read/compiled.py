"""What ``torch.compile`` makes: modules around others, and nodes around whole regions of a graph.

The names used here are private to PyTorch. They hold for torch 2.13 to 2.15; ``tests/graph/test_saved.py`` checks them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch._functorch.config
from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.autograd.graph import Node

from ...python_nodes import is_torchs

F = TypeVar("F", bound=Callable[..., Any])


def original_of(module: Any) -> Any:
    """The module that ``torch.compile`` made this one from, or None."""
    return getattr(module, "_orig_mod", None)


def is_compiled(node: Node) -> bool:
    """A region made by ``torch.compile``: opaque, but linear."""
    return is_torchs(node, "CompiledFunction")


@contextmanager
def scratch_restored(node: Any) -> Iterator[None]:
    """Let a compiled node run without using up what it saved.

    Compiled code may take its saved tensors as scratch memory, and then refuses to run while the graph is kept.
    The refusal is switched off here, and the tensors are put back as they were.
    """
    tensors = [t for t in node.saved_tensors if isinstance(t, Tensor)]
    before = [t.detach().clone() for t in tensors]
    try:
        with torch._functorch.config.patch(donated_buffer=False):
            yield
    finally:
        for now, then in zip(tensors, before, strict=True):
            now.data.copy_(then)


def break_graph(function: F) -> F:
    """Have ``torch.compile`` run a function as it is, in the midst of a program that is compiled before and after it.

    What reads autograd's graph cannot be traced. This is what ``torch.compiler.disable`` would do; that imports the
    whole compiler, which takes longer than importing this package, and puts frames of PyTorch's between a warning and
    whom it is for.
    """
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = f"{function.__qualname__} reads autograd's graph"  # type: ignore[attr-defined]
    return function
