"""What was asked of a graph's nodes while it was planned: the answers that a remembered plan relies on.

Whoever wants to know opens `noting`: every answer is then written down.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from operator import attrgetter
from threading import local
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from ...distributed import is_sharded
from ...numberless import has_numbers

Question = Callable[[Node], Any]


class Notes:
    """What was asked of nodes, and the answers; not ``certain`` if some were data, which no later graph will share."""

    __slots__ = ("answers", "certain", "unknown")

    def __init__(self) -> None:
        self.answers: list[tuple[Node, Question, Any]] = []
        self.certain = True
        self.unknown: dict[Node, None] = {}  # nodes of which data decide, and there are none

    def add(self, node: Node, question: Question, answer: Any) -> None:
        held = answer if isinstance(answer, (tuple, list)) else (answer,)
        if isinstance(answer, Tensor) and _are_few_integers(answer):
            self.answers.append((node, _Listed(question), _Listed.of(answer)))
        elif any(isinstance(one, Tensor) for one in held):
            self.certain = False
        else:
            self.answers.append((node, question, answer))


_FEW = 2**10  # integers that are compared sooner than anything is planned


def _are_few_integers(t: Tensor) -> bool:
    """Is this a short list of numbers, such as the order of the sequences in a batch?"""
    if is_sharded(t):  # processes would have to read it together
        return False
    return t.numel() <= _FEW and not t.is_floating_point() and not t.is_complex() and has_numbers(t) and t.is_cpu


class _Listed:
    """A question whose answer is a tensor, as a list that can be compared."""

    __slots__ = ("_question",)

    def __init__(self, question: Question) -> None:
        self._question = question

    def __call__(self, node: Node) -> Any:
        return self.of(self._question(node))

    @staticmethod
    def of(answer: Any) -> Any:
        """The dtype and the numbers; None of what is no short list."""
        few = isinstance(answer, Tensor) and _are_few_integers(answer)
        return (answer.dtype, answer.tolist()) if few else None


class _Open(local):
    notes: Notes | None = None


_open = _Open()


@contextmanager
def _noted_in(notes: Notes | None) -> Iterator[None]:
    before, _open.notes = _open.notes, notes
    try:
        yield
    finally:
        _open.notes = before


def unnoted() -> AbstractContextManager[None]:
    """A context for reading what no plan relies on."""
    return _noted_in(None)


@contextmanager
def noting() -> Iterator[Notes]:
    """Write down all that this thread reads of nodes."""
    notes = Notes()
    with _noted_in(notes):
        yield notes


def ask(node: Node, question: Question) -> Any:
    """The answer to a question that may read anything of a node, noted as one."""
    notes = _open.notes
    if notes is None:
        return question(node)
    with _noted_in(None):
        answer = question(node)
    notes.add(node, question, answer)
    return answer


def by_data() -> None:
    """Note that data decide: another graph like this one may be different."""
    if _open.notes is not None:
        _open.notes.certain = False


def lacking(node: Node) -> None:
    """Note that data decide of a node, and that the tensors of this graph have none."""
    by_data()
    if _open.notes is not None:
        _open.notes.unknown[node] = None


def unknown() -> Collection[Node]:
    """The nodes of which that was noted so far."""
    return () if _open.notes is None else _open.notes.unknown


def note(node: Node, attribute: str, value: Any) -> None:
    """Note the value of an attribute of a node."""
    if _open.notes is not None:
        _open.notes.add(node, _getter(attribute), value)


_getter = lru_cache(maxsize=4096)(attrgetter)
