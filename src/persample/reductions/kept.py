"""Tensors that are made once and used in every call, up to a bound."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock

from torch import Tensor

from ..numberless import faking


class Kept:
    """Tensors by their owner and what they are; owners that were not asked for a while make room for others.

    An owner never makes room for itself: one that needs more than there is would otherwise keep nothing to the end.
    """

    def __init__(self, limit: int = 2**26) -> None:
        self.limit = limit  # bytes
        self._owners: OrderedDict[Hashable, dict[Hashable, Tensor]] = OrderedDict()  # the last one used comes last
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """How much is kept."""
        return sum(t.nbytes for tensors in self._owners.values() for t in tensors.values())

    def get(self, owner: Hashable, what: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """The tensor, only to be read; made if it is not kept."""
        if faking():  # a tensor of a graph is of that graph alone
            return make()
        with self._lock:
            tensors = self._owners.setdefault(owner, {})
            self._owners.move_to_end(owner)
            found = tensors.get(what)
        if found is not None:
            return found
        made = make()
        with self._lock:
            while self.nbytes + made.nbytes > self.limit and next(iter(self._owners), owner) != owner:
                self._owners.popitem(last=False)
            if self.nbytes + made.nbytes <= self.limit:
                self._owners.setdefault(owner, {})[what] = made
        return made

    def clear(self) -> None:
        """Let go of all."""
        with self._lock:
            self._owners.clear()
