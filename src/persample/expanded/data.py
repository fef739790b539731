"""Following data from the inputs of a call to the first layers.

Functions of data leave no trace in the graph. They are noted here; and where it matters in which place a tensor
carries its samples, they are run again, on noise and on the same noise in another order: where the order shows, the
samples are. Notes name what they were made from by number and hold no data, so that nothing lives longer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..graph.layout import Block, Layout, Shape
from ..graph.roots import slot_of
from ..graph.tape import Slot
from .trees import leaves, tree_map
from .weight import ExpandedWeight

_SMALL = 1024  # elements of a constant of unknown origin, as a mean or a scale
_MOST = 256  # functions that are noted
_KEPT = 4096  # answers

_Values = dict[int, Tensor]  # inputs, and what was made of them, by number
_FOUND: dict[Any, Layout] = {}  # where functions of such shapes have left the samples before


class _Made:
    """In place of a tensor of data: the input, or the note it was made by, of this number."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(frozen=True)
class _Note:
    """A function of data."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    by_shape: bool  # do shapes alone decide where it leaves the samples, and no indices, masks or other constants?


class Followed(TorchFunctionMode):
    """Notes functions of the call's inputs, up to where they meet weights."""

    def __init__(self, inputs: Sequence[Tensor], batch: int, dim: int, module: nn.Module) -> None:
        super().__init__()
        self._inputs, self._batch, self._dim = inputs, batch, dim
        self._numbers: dict[int, int] = {}  # of inputs and of results that live, by id
        self._own = {id(t) for t in [*module.parameters(), *module.buffers()] if t.is_floating_point()}
        # What does not depend on samples: the module's own tensors, and what was computed from them; by id.
        self._shared = {id(t) for t in [*module.parameters(), *module.buffers()]}
        self._weights: set[int] = set()  # those made of trainable weights alone
        self._alive: list[weakref.ref[Tensor]] = []
        self._notes: list[_Note | None] = [None] * len(inputs)
        self._layers: list[tuple[Slot, Shape, _Note]] = []  # where data meet weights
        for number, x in enumerate(inputs):
            self._numbers[id(x)] = number

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        if type(result) is Tensor and not torch.compiler.is_compiling() and len(self._notes) < _MOST:
            first = args[0] if args else None
            if not isinstance(first, Tensor) or id(first) in self._numbers or self._is_shared(first):  # no activation
                self._note(result, func, args, kwargs or {})
        return result

    def _note(self, result: Tensor, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(result is t for t in tensors):  # changed in place: what it was is gone
            self._numbers.pop(id(result), None)
        elif not all(id(t) in self._numbers or self._is_shared(t) for t in tensors):
            pass
        elif not any(id(t) in self._numbers for t in tensors):
            self._shared.add(id(result))
            if tensors and all(self.is_weight(t) for t in tensors):
                self._weights.add(id(result))
            self._watch(result)
        else:
            args, kwargs = tree_map(self._without_data, (args, kwargs))
            note = _Note(func, args, kwargs, all(self._is_usual(t) for t in tensors))
            weights = any(isinstance(t, ExpandedWeight) or (id(t) in self._shared and t.requires_grad) for t in tensors)
            if weights and result.requires_grad and result.grad_fn is not None:
                self._layers.append((slot_of(result), tuple(result.shape), note))
            else:
                self._numbers[id(result)] = len(self._notes)
                self._notes.append(note)
                self._watch(result)

    def _watch(self, t: Tensor) -> None:
        """Forget a tensor's id when it dies."""
        key, numbers, others = id(t), self._numbers, (self._shared, self._weights)

        def forget(_: object) -> None:
            numbers.pop(key, None)
            for ids in others:
                ids.discard(key)

        self._alive.append(weakref.ref(t, forget))

    def is_weight(self, t: Tensor) -> bool:
        """Is it a weight, or computed from weights alone?"""
        return isinstance(t, ExpandedWeight) or id(t) in self._weights

    def _is_shared(self, t: Tensor) -> bool:
        """Is it a weight, of the module, a small constant, or computed from such alone?"""
        small = not t.requires_grad and t.numel() <= _SMALL
        return isinstance(t, ExpandedWeight) or id(t) in self._shared or small

    def _is_usual(self, t: Tensor) -> bool:
        """Numbers that are data or the module's own, and so the same kind of thing in every call."""
        return self.is_weight(t) or id(t) in self._own or (id(t) in self._numbers and t.is_floating_point())

    def _without_data(self, leaf: Any) -> Any:
        if id(leaf) in self._numbers and isinstance(leaf, Tensor):
            return _Made(self._numbers[id(leaf)])
        return ExpandedWeight.unwrap(leaf)

    def found(self, choices: Callable[[Shape], Sequence[Layout]], known: Collection[Slot]) -> dict[Slot, Layout]:
        """Results of data and weights that are not known yet, with the layout that running them again shows."""
        found = {}
        runs: tuple[Tensor, _Values, _Values] | None = None
        for slot, shape, note in self._layers:
            if slot in known:
                continue
            signature = self._signature(note)
            key = (signature, shape, self._batch, self._dim)
            layout = None if signature is None else _FOUND.get(key)
            if layout is None:
                runs = runs or self._noise()
                layout = self._layout(note, shape, choices(shape), *runs)
            if layout is not None:
                found[slot] = layout
                if signature is not None:
                    _FOUND[key] = layout
        while len(_FOUND) > _KEPT:
            _FOUND.pop(next(iter(_FOUND)))
        return found

    def _signature(self, note: _Note) -> tuple[Any, ...] | None:
        """Functions and shapes, if the same ones always leave samples in the same place."""
        parts: list[Any] = [note.func]
        for leaf in leaves((note.args, note.kwargs)):
            if isinstance(leaf, _Made):
                earlier = self._notes[leaf.number]
                parts.append(tuple(self._inputs[leaf.number].shape) if earlier is None else self._signature(earlier))
            else:
                parts.append(tuple(leaf.shape) if isinstance(leaf, Tensor) else repr(leaf))
        return tuple(parts) if note.by_shape and None not in parts else None

    def _noise(self) -> tuple[Tensor, _Values, _Values]:
        """Another order of the samples, and inputs of noise, as they are and in that order; integers stay data."""
        random = torch.Generator("cpu").manual_seed(0)
        order = torch.randperm(self._batch, generator=random)
        order = order.roll(1) if torch.equal(order, order.sort().values) else order
        once, again = {}, {}
        for number, x in enumerate(self._inputs):
            noise = torch.rand(x.shape, generator=random).to(x) if x.is_floating_point() else x.detach()
            once[number], again[number] = noise, noise.index_select(self._dim, order.to(x.device))
        return order, once, again

    def _layout(
        self, note: _Note, shape: Shape, choices: Sequence[Layout], order: Tensor, one: _Values, other: _Values
    ) -> Layout | None:
        """The one layout in which the order of the samples shows, or None."""
        devices = [x.device for x in self._inputs if x.device.type == "cuda"]
        try:
            with torch.random.fork_rng(devices=devices), torch.no_grad():
                once, again = self._run(note, one), self._run(note, other)
        except Exception:  # functions of noise, or of data in another order, may do anything
            return None
        fits = [layout for layout in choices if again.shape == shape and _in_order(once, layout, order, again)]
        return fits[0] if len(fits) == 1 else None

    def _run(self, note: _Note, values: _Values) -> Tensor:
        """The same function once more; ``values`` are other inputs, and what was made of them, by number."""

        def value(leaf: Any) -> Any:
            if not isinstance(leaf, _Made):
                return leaf
            earlier = self._notes[leaf.number]
            if leaf.number not in values and earlier is not None:
                values[leaf.number] = self._run(earlier, values)
            return values[leaf.number]

        args, kwargs = tree_map(value, (note.args, note.kwargs))
        made: Tensor = note.func(*args, **kwargs)
        return made


def _in_order(once: Tensor, layout: Layout, order: Tensor, again: Tensor) -> bool:
    """Is ``again`` the same as ``once`` with the samples of this layout in another order?"""
    if not isinstance(layout, Block):
        return False
    rounds = once.reshape(-1, layout.batch, layout.inner)
    return torch.equal(rounds.index_select(1, order.to(once.device)).reshape(once.shape), again)
