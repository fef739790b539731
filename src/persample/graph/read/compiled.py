"""What ``torch.compile`` makes: modules around others, and nodes around whole regions of a graph.

The names used here are private to PyTorch. They hold for torch 2.13 to 2.15; ``tests/graph/test_saved.py`` and
``tests/graph/compiled`` check them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch._functorch.config
from torch import Tensor, fx
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.autograd.graph import Node

from ...python_nodes import function_of, is_torchs
from .library import schema_of
from .saved import metadata

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
    tensors = [_once(t.detach()) for t in node.saved_tensors if isinstance(t, Tensor)]
    before = [t.clone() for t in tensors]
    try:
        with torch._functorch.config.patch(donated_buffer=False):
            yield
    finally:
        for now, then in zip(tensors, before, strict=True):
            now.data.copy_(then)


def _once(t: Tensor) -> Tensor:
    """The tensor, of what is expanded one place alone: to the others, nothing can be written."""
    for d in [d for d, step in enumerate(t.stride()) if step == 0 and t.shape[d] > 1]:
        t = t.narrow(d, 0, 1)
    return t


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


class Unreadable(Exception):
    """The backward of a compiled region holds something that the reader does not know for certain."""


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward of a compiled region, as its compiler has traced it."""

    graph: fx.GraphModule
    cotangents: tuple[int, ...]  # which of the node's cotangents it is given, as its last arguments
    inductor: bool  # was it to be compiled by Inductor?


def backward_of(node: Any) -> Backward:
    """The backward graph behind a compiled node, also where it came out of a cache of earlier processes.

    Raises:
        Unreadable: it takes or returns more than numbers, or this release of PyTorch keeps it in another way.
    """
    function = function_of(node)
    try:
        known = function.metadata  # type: ignore[attr-defined]
        unusual = {
            "tensor subclasses": function.maybe_subclass_metadata is not None,  # type: ignore[attr-defined]
            "effects that are ordered by tokens": known.num_backward_tokens > 0,
            "random numbers of its own": known.is_rng_op_functionalized or known.num_graphsafe_rng_states > 0,
            "inputs that the backward changes": bool(known.indices_of_inputs_that_requires_grad_with_mutations_in_bw),
            "objects other than tensors": bool(node.opaque_objects),
        }
        for what, holds in unusual.items():
            if holds:
                raise Unreadable(f"{what} in it")
        graph = _traced_by(function)
        return Backward(graph, _cotangents_given(known), _is_inductors(function))
    except (AttributeError, ImportError, AssertionError, TypeError) as error:
        raise Unreadable(
            f"a backward that torch {torch.__version__} keeps in a way this release of persample does not know "
            f"({error}): upgrade persample, or pass the model without torch.compile"
        ) from error


def _traced_by(function: Any) -> fx.GraphModule:
    from torch._dynamo.compiled_autograd import extract_bw_module

    graph = extract_bw_module(function)
    if not isinstance(graph, fx.GraphModule):
        raise TypeError(f"a {type(graph).__name__} in place of a graph")
    return graph


def _cotangents_given(known: Any) -> tuple[int, ...]:
    """Those of inputs that the region has changed, of outputs that are no views of others, and of bases of views."""
    from torch._functorch._aot_autograd.schemas import OutputType

    own = (OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.custom_function_view)
    changed, results = known.num_mutated_inp_runtime_indices, known.num_outputs
    infos = [known.input_info[k] for k in known.mutated_inp_runtime_indices]
    return (
        *[k for k, info in enumerate(infos) if info.mutates_data and info.requires_grad],
        *[
            changed + k
            for k, info in enumerate(known.output_info)
            if info.output_type in own and issubclass(info.raw_type, Tensor) and info.requires_grad_for_backward
        ],
        *range(changed + results, changed + results + known.num_intermediate_bases),
    )


def _is_inductors(function: Any) -> bool:
    return str(getattr(function.compiled_fw, "__module__", "")).startswith("torch._inductor")


def arguments_of(node: Any, cotangents: Sequence[Tensor | None]) -> list[Any]:
    """What the backward graph of a compiled node is called with; for cotangents that are None, zeros."""
    metas = metadata(node)
    filled = [
        torch.zeros(m.shape, dtype=m.dtype, device=m.device) if g is None else g
        for g, m in zip(cotangents, metas, strict=True)
    ]
    saved = (*node.saved_tensors, *node._tensors_no_vc_check)
    with torch.no_grad():
        arguments = function_of(node)._bw_prologue_fn(saved, node.symints, node.opaque_objects, filled)  # type: ignore[attr-defined]
    return list(arguments)


def kinds_given(node: Any) -> Hashable:
    """What there is to know, without its numbers, of what the backward of a compiled node is given and asked for."""
    saved = (*node.saved_tensors, *node._tensors_no_vc_check)
    metas = [(m.dtype, m.device) for m in metadata(node)]
    return tuple(map(kind_of, saved)), tuple(node.symints), tuple(metas), tuple(node.needs_input_grad)


def kind_of(argument: Any) -> Hashable:
    """What code for a tensor depends on; anything else stands for itself."""
    if not isinstance(argument, Tensor):
        return argument  # type: ignore[no-any-return]
    return argument.shape, argument.stride(), argument.dtype, argument.device


def simpler_ops(known: Collection[str]) -> dict[Any, Callable[..., Any]]:
    """How ops are written with fewer kinds of them, by op; not those whose names are ``known``."""
    from torch._decomp import core_aten_decompositions

    return {op: how for op, how in core_aten_decompositions().items() if str(op).removeprefix("aten.") not in known}


@contextmanager
def as_written(tensors: Sequence[Tensor]) -> Iterator[None]:
    """No gradients, and no casts by the caller's autocast: a graph that was traced holds its own."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for kind in {t.device.type for t in tensors} | {"cpu"}:
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def retraced(
    function: Callable[..., Any], example: Sequence[Tensor], simpler: dict[Any, Callable[..., Any]]
) -> fx.GraphModule:
    """What a function does with tensors of these shapes and strides, in few kinds of ops."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with as_written(example):
        return make_fx(function, simpler, tracing_mode="fake", _allow_non_fake_inputs=True)(*example)


def named_arguments(call: fx.Node) -> dict[str, Any]:
    """The arguments of a call of an aten op by name, those that were left out by their defaults."""
    schema = schema_of(call.target)
    given = {a.name: value for a, value in zip(schema.arguments, call.args, strict=False)}
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return {**defaults, **given, **call.kwargs}


def refuse_effects(graph: fx.GraphModule) -> None:
    """Raise `Unreadable` if a graph draws random numbers, writes to tensors or holds graphs within itself."""
    for call in graph.graph.nodes:
        if call.op in ("call_module", "call_method"):
            raise Unreadable(f"{call.target}, a call of a module")
        target = call.target
        if call.op != "call_function" or isinstance(target, type) or getattr(target, "__module__", "") == "_operator":
            continue
        if not isinstance(target, torch._ops.OpOverload):
            if isinstance(target, torch._ops.HigherOrderOperator):
                raise Unreadable(f"{target}, which holds a graph within the graph")
        elif schema_of(target).is_mutable:
            raise Unreadable(f"{target}, which writes to a tensor")
        elif torch.Tag.nondeterministic_seeded in target.tags or "inductor_rand" in str(target):
            # Inductor's own ops have no such tag: its code draws the same numbers from a seed, anybody else others.
            raise Unreadable(f"{target}, which draws random numbers")


# That arguments are as they were is known before; results are kept beyond the next call; random ops draw the numbers
# that they draw without a compiler; and images keep the order of their dims, which kernels would have to change back.
_INDUCTOR = {
    "size_asserts": False,
    "triton.cudagraphs": False,
    "fallback_random": True,
    "layout_optimization": False,
}


def settings_of_inductor() -> AbstractContextManager[object]:
    """A context in which Inductor compiles graphs of ours as they need it."""
    from torch._inductor import config

    return config.patch(_INDUCTOR)  # type: ignore[no-any-return]


def compiled_by_inductor(graph: fx.GraphModule, example: Sequence[Any]) -> Callable[..., Sequence[Tensor]]:
    """A graph without gradients, compiled for arguments of these shapes and strides."""
    from torch._inductor.compile_fx import compile_fx

    with as_written(example), settings_of_inductor():
        run: Any = compile_fx(graph, list(example))
    return run  # type: ignore[no-any-return]
