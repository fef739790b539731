"""One call in the backward graph of a compiled region, as the rules of the table see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from ..layout import Shape
from ..ops.table import Aten, Op
from ..read.compiled import named_arguments
from ..read.site import Site
from .states import value_of

Values = Callable[[fx.Node], Any]  # what a node of the graph has computed


class CallSite(Site):
    """A call in place of a node of autograd's graph: its arguments are what the node would have saved.

    Whatever sums over samples is taken for something that they share: in a graph that was traced, all that is left to
    find out is how to compute it.
    """

    __slots__ = ("_arguments", "_aten", "_computed", "_targets")

    def __init__(self, call: fx.Node, op: Op, aten: Aten, values: Values) -> None:
        self.index, self.name, self.op, self.node = -1, str(call.target), op, None  # type: ignore[assignment]
        self._aten, self._computed = aten, values
        self._arguments: Mapping[str, Any] = named_arguments(call)
        self.shapes = tuple(tuple(value_of(c).shape) for c in self.cotangents)
        results = value_of(call)
        if aten.output is None:
            self._targets = dict(enumerate(results))
        else:
            self._targets = {aten.output: results}
        self.edges = ()
        self.outputs = []
        self.recomputed, self.memo = {}, {}

    @property
    def cotangents(self) -> list[fx.Node]:
        """The arguments that are cotangents, in order."""
        given = [self._arguments[name] for name in self._aten.cotangents]
        return [c for one in given for c in (one if isinstance(one, (list, tuple)) else [one])]

    @property
    def others(self) -> list[fx.Node]:
        """The nodes among all other arguments."""
        found: list[fx.Node] = []
        fx.node.map_arg([a for name, a in self._arguments.items() if name not in self._aten.cotangents], found.append)
        return found

    def argument(self, name: str) -> Any:
        """An argument as the graph has it: a node, or something that is the same in every call."""
        return self._arguments.get(name)

    def read(self, name: str) -> Any:
        """An argument, computed."""
        return fx.node.map_arg(self._arguments[name], self._computed)

    def target(self, k: int) -> Shape:
        return tuple(self._targets[k].shape)

    def metadata(self, k: int) -> Any:
        return self._targets[k]

    def value(self, name: str) -> Any:
        own = self._aten.saved.get(name)
        return self.read(name) if own is None else own(self.read)

    def optional(self, name: str) -> Tensor | None:
        found = self.value(name) if self.has(name) else None
        return found if isinstance(found, Tensor) else None

    def tensors(self, name: str) -> tuple[Tensor, ...]:
        return tuple(self.value(name))

    def has(self, name: str) -> bool:
        return name in self._aten.saved or name in self._arguments

    def number(self, name: str) -> int:
        return int(self.value(name))

    def numbers(self, name: str) -> tuple[int, ...]:
        return tuple(int(n) for n in self.value(name))

    def indices(self) -> list[Any]:
        return list(self.value("indices"))

    def dims(self, name: str, ndim: int) -> tuple[int, ...]:
        found = self.value(name)
        listed: Sequence[int] = (found,) if isinstance(found, int) else tuple(found or ())
        return tuple(d % ndim for d in listed) or tuple(range(ndim))

    def is_weight(self, k: int) -> bool:
        return True
