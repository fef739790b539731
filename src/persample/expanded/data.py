"""Following data from the inputs of a call to the first layers.

Functions of data leave no trace in the graph. They are noted here; and where it matters in which place a tensor of data
carries its samples, they are run again on the batch in another order: where that order shows, the samples are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..graph.layout import Block, Layout
from .trees import leaves, tree_map

_SMALL = 1024  # elements of a constant, as a mean or a scale; a frozen layer's weights have more
_MOST = 256  # functions that are noted

_Note = tuple[Tensor, Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]


class Followed(TorchFunctionMode):
    """Notes functions of the call's inputs that have no gradient."""

    def __init__(self, inputs: Sequence[Tensor], batch: int, dim: int) -> None:
        super().__init__()
        self._inputs, self._batch, self._dim = {id(x): x for x in inputs}, batch, dim
        self._notes: dict[int, _Note] = {}  # by the result's id, with the result itself, so that the id stays its own

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if type(result) is Tensor and not result.requires_grad and len(self._notes) < _MOST:
            self._note(result, func, args, kwargs or {})
        return result

    def _note(self, result: Tensor, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(result is t for t in tensors):  # changed in place: what it was is gone
            self._notes.pop(id(result), None)
        elif any(self.follows(t) for t in tensors) and all(
            self.follows(t) or (type(t) is Tensor and t.numel() <= _SMALL) for t in tensors
        ):
            self._notes[id(result)] = (result, func, args, kwargs)

    def follows(self, t: Tensor) -> bool:
        """Is it an input, or known how this was computed from inputs?"""
        return id(t) in self._inputs or id(t) in self._notes

    def layout(self, t: Tensor, choices: Sequence[Layout]) -> Layout | None:
        """Which of these a tensor of data has, if running its functions again shows it beyond doubt."""
        order = torch.randperm(self._batch, generator=torch.Generator("cpu").manual_seed(0))
        order = order.roll(1) if torch.equal(order, order.sort().values) else order
        devices = [t.device] if t.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices), torch.no_grad():
                again = self._again(t, order.to(t.device), {})
        except Exception:  # user functions on data in another order may do anything
            return None
        if again.shape != t.shape:
            return None
        fits = [lay for lay in choices if _in_order(t, lay, order, again)]
        return fits[0] if len(fits) == 1 else None

    def _again(self, t: Tensor, order: Tensor, done: dict[int, Tensor]) -> Tensor:
        if id(t) in self._inputs:
            return t.index_select(self._dim, order)
        if id(t) not in self._notes:
            return t
        if id(t) not in done:
            _, func, args, kwargs = self._notes[id(t)]
            args, kwargs = tree_map(
                lambda leaf: self._again(leaf, order, done) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
            )
            done[id(t)] = func(*args, **kwargs)
        return done[id(t)]


def _in_order(t: Tensor, layout: Layout, order: Tensor, again: Tensor) -> bool:
    """Is ``again`` the same as ``t`` with the samples of this layout in another order?"""
    if not isinstance(layout, Block):
        return False
    rounds = t.reshape(-1, layout.batch, layout.inner)
    return torch.equal(rounds.index_select(1, order.to(t.device)).reshape(t.shape), again)
