"""One graph node as the rules see it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..._errors import UnsupportedError
from ...kernels.differentiable import is_differentiable
from ..layout import Flow, Outcome, Shape
from ..ops.table import Op
from . import saved
from .tape import Slot, Tape

__all__ = ["Flow", "Outcome", "Site", "Sites", "computes_with_data", "weights_only"]


class Site:
    """A node with its shapes, its saved values and the places its outputs go to."""

    __slots__ = ("_tape", "edges", "index", "memo", "name", "node", "op", "outputs", "recomputed", "shapes")

    def __init__(self, tape: Tape, number: int) -> None:
        self.index = number  # on the tape
        self.node = tape.node(number)
        self.name = tape.name(number)
        self.op: Op = tape.op(number)
        self.shapes = tape.shapes(number)
        self.edges = tape.edges[number]
        # The backward outputs that lead to requested parameters, with the place each goes to.
        self.outputs: list[tuple[int, Slot]] = [(k, slot) for k, slot in enumerate(self.edges) if slot is not None]
        self._tape = tape
        self.recomputed: dict[str, Tensor] = {}  # saved tensors of a checkpointed region, read ahead
        self.memo: dict[str, Any] = {}  # what several rules of one node share

    def target(self, k: int) -> Shape:
        """The shape of the tensor whose gradient is backward output k."""
        slot = self.edges[k]
        assert slot is not None
        return self._tape.shape(slot)

    def target_or_saved(self, k: int, name: str) -> Shape:
        """The shape of that tensor, read from what was saved of it if nothing requested lies beyond."""
        return tuple(self.tensor(name).shape) if self.edges[k] is None else self.target(k)

    def metadata(self, k: int) -> Any:
        """Shape, dtype and device of the tensor whose gradient is backward output k."""
        slot = self.edges[k]
        assert slot is not None
        return saved.metadata(self._tape.node(slot[0]))[slot[1]]

    def forget(self) -> None:
        """Let go of what was only needed while factors were made."""
        self.recomputed, self.memo = {}, {}

    def tensor(self, name: str) -> Tensor:
        """A saved tensor that the rule cannot do without."""
        t = self.optional(name)
        if t is None:
            raise LookupError(f"{self.name} did not save {name!r}")
        return t

    def optional(self, name: str) -> Tensor | None:
        """A saved tensor, or None if it was not saved.

        Where results are to be differentiated again, a saved result without a graph would lack a term: a rule computes
        it again from what has one.
        """
        t = self._read(name)
        if t is not None and is_differentiable() and _is_result_without_graph(name, t):
            raise UnsupportedError(
                f"the rule for {self.name} goes by a result ({name}) that the op has saved without a graph: the answer "
                f"cannot be differentiated again (create_graph=True)"
            )
        return t

    def result(self, name: str) -> Tensor:
        """A saved result, cut off from its graph: what is computed from it must not be what is differentiated."""
        t = self._read(name)
        assert t is not None
        return t.detach()

    def _read(self, name: str) -> Tensor | None:
        t = self.recomputed.get(name)
        return saved.tensor(self.node, name) if t is None else t

    def tensors(self, name: str) -> tuple[Tensor, ...]:
        """A saved list of tensors; of a checkpointed node, it can be read where `saved.unpacked_often` lets it."""
        return saved.tensors(self.node, name)

    def has(self, name: str) -> bool:
        """Does this kind of node have such an attribute?"""
        return saved.has(self.node, name)

    def number(self, name: str) -> int:
        """A saved integer."""
        return saved.signed(int(saved.read(self.node, name)))

    def numbers(self, name: str) -> tuple[int, ...]:
        """A saved list of integers."""
        return tuple([saved.signed(int(n)) for n in saved.read(self.node, name)])

    def value(self, name: str) -> Any:
        """A saved flag or scalar."""
        return saved.read(self.node, name)

    def indices(self) -> list[Any]:
        """What an op has indexed each dim by: of a checkpointed node, to be read any number of times."""
        with saved.unpacked_often(self.node):
            return list(self.value("indices"))

    def dims(self, name: str, ndim: int) -> tuple[int, ...]:
        """Saved dims, counted from the front; none saved means all of them."""
        dims = self.value(name)
        if dims is None:
            return tuple(range(ndim))
        listed = (dims,) if isinstance(dims, int) else tuple(dims)
        return tuple(saved.signed(int(d)) % ndim for d in listed) or tuple(range(ndim))

    def is_weight(self, k: int) -> bool:
        """Does output k lead to parameters through computations with weights and numbers alone?"""
        slot = self.edges[k]
        assert slot is not None
        return weights_only(self._tape, slot[0])


def _is_result_without_graph(name: str, t: Tensor) -> bool:
    return name.startswith("result") and t.is_floating_point() and not t.requires_grad


class Sites(dict[int, Site]):
    """The sites of a tape by number, made when they are asked for: most nodes are passed by shape alone."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __missing__(self, number: int) -> Site:
        site = self[number] = Site(self._tape, number)
        return site


def weights_only(tape: Tape, number: int) -> bool:
    """Is everything from this node down computed from weights and numbers alone?"""
    if number not in tape.weights:
        for n in reversed(tape.below(number)):
            if n not in tape.weights:
                below = [slot[0] for slot in tape.edges[n] if slot is not None]
                tape.weights[n] = not computes_with_data(tape, n) and all(tape.weights[child] for child in below)
    return tape.weights[number]


def computes_with_data(tape: Tape, number: int) -> bool:
    """An operand without gradient is data, unless it may be a number or a mask that left a weight its shape."""
    op = tape.op(number)
    if op.new_rows is not None or number in tape.data:
        return True
    if number not in tape.fed:
        return False
    shape = tape.shapes(number)[0]
    return not op.pointwise or any(slot is not None and tape.shape(slot) != shape for slot in tape.edges[number])
