"""What is used of PyTorch's compilers: Dynamo, which captures losses, and the backends that compile graphs.

The names used here are private to PyTorch. They hold for torch 2.13 to 2.15; ``tests/compiled/test_compilers.py``
checks them. They are imported when something is compiled, as that takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from sys import maxsize
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..graph.read.compiled import as_written, settings_of_inductor

Runnable = Callable[..., Sequence[Any]]


def captured(
    fn: Callable[..., Any], backend: Callable[..., Any], *, dynamic: bool | None, limit: int
) -> Callable[..., Any]:
    """``fn``, whose calls run what ``backend`` makes of the graph that Dynamo captures of them: whole, or not at all.

    Captures of other steps with the same function do not count against its ``limit``.
    """
    options: Any = {"recompile_limit": limit, "isolate_recompiles": True}  # of which its types know nothing
    watched = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic, **options)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return watched(*args, **kwargs)
        except RuntimeError as error:
            if "FX to symbolically trace" in str(error):  # which happens in another thread
                with alone():
                    return watched(*args, **kwargs)
            if "allow_rnn" not in str(error):
                raise
        from torch._dynamo import config

        with config.patch(allow_rnn=True):  # by default, Dynamo leaves recurrent layers alone
            return watched(*args, **kwargs)

    return call


def open_batch(t: Tensor) -> None:
    """Tell Dynamo that the first dim of a tensor will vary, before it has seen that."""
    torch._dynamo.maybe_mark_dynamic(t, 0)


def alone() -> AbstractContextManager[object]:
    """A context in which no other thread captures or traces: both change what all threads see of PyTorch."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


def without_checkpoints(graph: GraphModule) -> GraphModule:
    """The same graph, in which checkpointed regions keep what they compute: compilers decide that by themselves."""
    checkpoint = torch.ops.higher_order.tag_activation_checkpoint
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target is checkpoint:
            with graph.graph.inserting_before(node):
                inside = graph.graph.call_module(node.args[0].target, tuple(node.args[1:]))
            inside.meta = dict(node.meta)
            node.replace_all_uses_with(inside)
            graph.graph.erase_node(node)
    graph.recompile()
    for child in graph.children():
        if isinstance(child, GraphModule):
            without_checkpoints(child)
    return graph


def draws_in_python(graph: GraphModule) -> bool:
    """Is an input of a captured graph a number that Dynamo draws from Python's ``random``?"""
    from torch._dynamo.source import RandomValueSource

    given = [node.meta.get("grapharg") for node in graph.graph.nodes if node.op == "placeholder"]
    return any(isinstance(getattr(arg, "source", None), RandomValueSource) for arg in given)


def could_not_capture(error: Exception) -> bool:
    """Was this raised by Dynamo, about what it cannot capture or has captured too often?"""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def too_many_captures(error: Exception) -> bool:
    """Was this raised by Dynamo because a function has been captured as often as it may be?"""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return isinstance(error, FailOnRecompileLimitHit) or "recompile limit exceeded" in str(error)


def check_backend(backend: str | Callable[..., Any]) -> None:
    """Refuse what is not the name of a backend, or a function like one."""
    from torch._dynamo import list_backends, lookup_backend
    from torch._dynamo.exc import InvalidBackend

    if not isinstance(backend, str):
        if not callable(backend):
            raise TypeError(f"backend must be a name or a function, not a {type(backend).__name__}")
        return
    try:
        lookup_backend(backend)
    except InvalidBackend as error:
        names = ", ".join(sorted({"eager", "aot_eager", *list_backends()}))
        raise ValueError(f"there is no backend {backend!r} of torch.compile; there are {names}") from error


def compiled_by(backend: str | Callable[..., Any], graph: GraphModule, inputs: Sequence[Any]) -> Runnable:
    """What a backend, given by name or as a function, makes of a graph without gradients."""
    from torch._dynamo import lookup_backend

    compiler = lookup_backend(backend) if isinstance(backend, str) else backend
    with as_written([t for t in inputs if isinstance(t, Tensor)]), settings_of_inductor():
        made: Runnable = compiler(graph, list(inputs))
    return made


def traced_graph(fn: Callable[..., Any], inputs: Sequence[Tensor]) -> GraphModule:
    """The graph of all that ``fn`` does to tensors like these, without looking at their numbers."""
    from torch.fx.experimental.proxy_tensor import make_fx

    graph: GraphModule = make_fx(fn, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


@dataclass(frozen=True, slots=True)
class Size:
    """A size or stride of an input: a number, or an expression of sizes that are open."""

    expression: Any
    name: str | None  # if it is one of these itself

    @classmethod
    def of(cls, value: int | torch.SymInt) -> Size:
        """From what Dynamo knows of a tensor."""
        if isinstance(value, int):
            return cls(value, None)
        expression = value.node.expr
        return cls(expression, str(expression) if expression.is_Symbol else None)

    def at(self, values: Mapping[str, int]) -> int:
        """For these values of all open sizes."""
        if isinstance(self.expression, int):
            return self.expression
        return int(self.expression.subs({s: values[str(s)] for s in self.expression.free_symbols}))


@dataclass(frozen=True, slots=True)
class Dims:
    """Sizes and strides of an input, or the one open size that it is."""

    shape: Sequence[Size]
    strides: Sequence[Size]
    is_size: bool

    def like(self, given: Any, values: Mapping[str, int]) -> Any:
        """An input like this one, for other values of open sizes."""
        if self.is_size:
            return self.shape[0].at(values)
        shape = [n.at(values) for n in self.shape]
        if shape == list(given.shape):
            return given
        strides = [n.at(values) for n in self.strides]
        made = torch.empty_strided(shape, strides, dtype=given.dtype, device=given.device)
        return made.requires_grad_(given.requires_grad)


def dims_of(graph: GraphModule) -> list[Dims | None] | None:
    """What Dynamo knows of the inputs of a graph; None where an input is neither a tensor nor a size."""
    dims: list[Dims | None] = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("example_value")
            if isinstance(value, Tensor):
                dims.append(Dims([Size.of(n) for n in value.shape], [Size.of(n) for n in value.stride()], False))
            elif isinstance(value, (int, torch.SymInt)):
                dims.append(Dims([Size.of(value)], [], True))
            else:
                return None
    return dims


def open_sizes(dims: Sequence[Dims | None], inputs: Sequence[Any]) -> dict[str, int]:
    """The values of open sizes in a call, as far as inputs have them."""
    values: dict[str, int] = {}
    for known, given in zip(dims, inputs, strict=True):
        if known is not None:
            numbers = [given] if known.is_size else list(given.shape)
            values |= {size.name: n for size, n in zip(known.shape, numbers, strict=True) if size.name is not None}
    return values


def losses_length(graph: GraphModule, at: int) -> str | None:
    """The open size that the number of losses is; None if it is fixed, or something else."""
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    value = output.args[0][at].meta.get("example_value")
    return Size.of(value.shape[0]).name if isinstance(value, Tensor) and value.ndim == 1 else None


def is_linear(graph: GraphModule, name: str, values: Mapping[str, int]) -> bool:
    """Do all sizes in a graph grow linearly with the open size of this name, and no number in steps?

    Where they do not, as for ``len(x) // 2``, a few sizes say nothing of others.
    """
    nodes = [node for inner in graph.modules() if isinstance(inner, GraphModule) for node in inner.graph.nodes]
    others = {key: value for key, value in values.items() if key != name}
    return all(_is_linear(n, name, others) for node in nodes for n in _numbers(node.meta.get("example_value")))


def _numbers(value: Any) -> list[Any]:
    """All that depends on open sizes in what Dynamo knows of a node."""
    if isinstance(value, Tensor):
        value = tuple(value.shape)
    if isinstance(value, (tuple, list)):
        return [n for item in value for n in _numbers(item)]
    return [value] if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else []


def _is_linear(number: Any, name: str, others: Mapping[str, int]) -> bool:
    from sympy import Poly, preorder_traversal  # type: ignore[import-untyped]

    expression = number.node.expr
    expression = expression.subs({s: others[str(s)] for s in expression.free_symbols if str(s) in others})
    if not expression.free_symbols:
        return True
    if isinstance(number, torch.SymFloat):
        return all(_is_smooth(part) for part in preorder_traversal(expression))
    if isinstance(number, torch.SymBool) or {str(s) for s in expression.free_symbols} != {name}:
        return False
    return bool(expression.is_polynomial()) and Poly(expression).degree() == 1


def _is_smooth(part: Any) -> bool:
    """Is this part of an expression a number, a size, or arithmetic without rounding or cases?"""
    return bool(part.is_Atom or part.is_Add or part.is_Mul or part.is_Pow) or type(part).__name__ in _DIVISIONS


_DIVISIONS = {"ToFloat", "IntTrueDiv", "FloatTrueDiv"}


def cuts_at_a_number(alike: Sequence[Node]) -> bool:
    """Is a dim that grows with the batch cut at a place, the same for all sizes, where a larger one would go on?"""
    at = _CUTS.get(str(alike[0].target))
    if at is None:
        return False
    given: list[Any] = [[*node.args, *[None] * 4] for node in alike]
    sizes = [args[0].meta["val"].shape[args[at.dim] or 0] for args in given]
    ends = {args[at.end] for args in given}
    end = ends.pop()
    return not ends and len(set(sizes)) > 1 and isinstance(end, int) and min(sizes) <= end < maxsize


class _Cut(NamedTuple):
    """Where among the arguments of an op there are the dim that it cuts, and the first place where it does."""

    dim: int
    end: int


_CUTS = {"aten.slice.Tensor": _Cut(1, 3), "aten.split.Tensor": _Cut(2, 1), "aten.unsafe_split.Tensor": _Cut(2, 1)}


class OpenInputs:
    """Tensors without numbers, some of whose dims have an open size, for compilers."""

    def __init__(self, tensors: Sequence[Tensor], is_open: Callable[[int, int], bool]) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

        self._shapes = ShapeEnv(duck_shape=True)
        mode = FakeTensorMode(shape_env=self._shapes, allow_non_fake_inputs=True)
        self.tensors = []
        for i, t in enumerate(tensors):
            dims = [DimDynamic.DUCK if is_open(i, d) else DimDynamic.STATIC for d in range(t.ndim)]
            context: Any = StatelessSymbolicContext(dynamic_sizes=dims)
            self.tensors.append(mode.from_tensor(t.detach(), symbolic_context=context))

    def serve(self, size: int) -> bool:
        """Is what was compiled for these right for another size?"""
        env = self._shapes
        if any(value.is_number for value in env.replacements.values()):
            return False
        free = dict.fromkeys(env.backed_var_to_val, size)
        return all(bool(guard.expr.subs(free)) for guard in env.guards)
