"""Following data from the inputs of a call to the first layers.

Functions of data leave no trace in the graph. They are noted here; and where it matters in which place a tensor of data
carries its samples, they are run again on the batch in another order: where that order shows, the samples are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..graph.layout import Block, Layout, Shape
from .trees import leaves, tree_map
from .weight import ExpandedWeight

_SMALL = 1024  # elements of a constant, as a mean or a scale; a frozen layer's weights have more
_MOST = 256  # functions that are noted

_Note = tuple[Tensor, Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]


class Followed(TorchFunctionMode):
    """Notes functions of the call's inputs that have no gradient."""

    def __init__(self, inputs: Sequence[Tensor], batch: int, dim: int) -> None:
        super().__init__()
        self._inputs, self._batch, self._dim = {id(x): x for x in inputs}, batch, dim
        self._shared: dict[int, Tensor] = {}  # computed from weights and constants alone
        self._layers: list[_Note] = []  # where data meet weights
        self._notes: dict[int, _Note] = {}  # by the result's id, with the result itself, so that the id stays its own

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        if type(result) is Tensor and not torch.compiler.is_compiling() and len(self._notes) < _MOST:
            first = args[0] if args else None
            if not isinstance(first, Tensor) or self._follows(first) or self._is_shared(first):  # no activation
                self._note(result, func, args, kwargs or {})
        return result

    def _note(self, result: Tensor, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(result is t for t in tensors):  # changed in place: what it was is gone
            self._notes.pop(id(result), None)
        elif not all(self._follows(t) or self._is_shared(t) for t in tensors):
            pass
        elif not any(self._follows(t) for t in tensors):
            self._shared[id(result)] = result
        else:
            weights = any(isinstance(t, ExpandedWeight) or (id(t) in self._shared and t.requires_grad) for t in tensors)
            args, kwargs = tree_map(lambda t: t.leaf if isinstance(t, ExpandedWeight) else t, (args, kwargs))
            if weights and result.requires_grad:
                self._layers.append((result, func, args, kwargs))
            else:
                self._notes[id(result)] = (result, func, args, kwargs)

    def _follows(self, t: Tensor) -> bool:
        """Is it an input, or known how this was computed from inputs?"""
        return id(t) in self._inputs or id(t) in self._notes

    def _is_shared(self, t: Tensor) -> bool:
        """Is it a weight, or a small constant, or computed from such alone?"""
        small = not t.requires_grad and t.numel() <= _SMALL
        return isinstance(t, ExpandedWeight) or id(t) in self._shared or small

    def found(self, choices: Callable[[Shape], Sequence[Layout]]) -> Iterator[tuple[Tensor, Layout]]:
        """Results of data and weights, with the layout that running them again shows beyond doubt."""
        for layer in self._layers:
            layout = self._layout(layer, choices(tuple(layer[0].shape)))
            if layout is not None:
                yield layer[0], layout

    def _layout(self, layer: _Note, choices: Sequence[Layout]) -> Layout | None:
        t = layer[0]
        order = torch.randperm(self._batch, generator=torch.Generator("cpu").manual_seed(0))
        order = order.roll(1) if torch.equal(order, order.sort().values) else order
        devices = [t.device] if t.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices), torch.no_grad():
                noise = {i: torch.rand_like(x) if x.is_floating_point() else x for i, x in self._inputs.items()}
                moved = {i: x.index_select(self._dim, order.to(x.device)) for i, x in noise.items()}
                once, again = self._run(layer, noise), self._run(layer, moved)
        except Exception:  # user functions on data in another order may do anything
            return None
        fits = [lay for lay in choices if again.shape == t.shape and _in_order(once, lay, order, again)]
        return fits[0] if len(fits) == 1 else None

    def _run(self, note: _Note, done: dict[int, Tensor]) -> Tensor:
        """The same function once more, of other inputs; ``done`` has these, and what was made of them, by id."""

        def other(leaf: Any) -> Any:
            if id(leaf) in self._notes and id(leaf) not in done:
                done[id(leaf)] = self._run(self._notes[id(leaf)], done)
            return done.get(id(leaf), leaf)

        _, func, args, kwargs = note
        args, kwargs = tree_map(other, (args, kwargs))
        made: Tensor = func(*args, **kwargs)
        return made


def _in_order(t: Tensor, layout: Layout, order: Tensor, again: Tensor) -> bool:
    """Is ``again`` the same as ``t`` with the samples of this layout in another order?"""
    if not isinstance(layout, Block):
        return False
    rounds = t.reshape(-1, layout.batch, layout.inner)
    return torch.equal(rounds.index_select(1, order.to(t.device)).reshape(t.shape), again)
