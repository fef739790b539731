"""Looking for samples that interact where the graph does not show it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._errors import InteractionError
from ..graph.saved import original_of
from ..rerun import Call, compare, tolerance
from .errors import PrivacyError

_FIRST = 2  # checks that must have told something before they become rare
_PATIENCE = 5  # checks that told nothing before the user is told


class Guard:
    """Records what the model is called with in some of the steps, and runs it again on parts of it.

    A sample's output must not depend on which other samples are in the batch. Statistics that are detached
    (``h - h.mean(0).detach()``) leave no trace in the graph, but do change outputs. What is computed outside of the
    model is not seen, nor interaction that the tried samples do not show: this finds mistakes, it proves nothing.
    """

    def __init__(self, model: nn.Module, every: int) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 0:
            raise ValueError(f"check_every must be a number of steps, or 0 for never, not {every!r}")
        self._model, self._every = model, every
        self._told, self._silent = 0, 0
        self._calls: list[Call] = []
        self._handles: list[RemovableHandle] = []
        self._depth = 0

    def watch(self, step: int) -> None:
        """Record calls from now on, if a check is due at this step."""
        self._stop()
        starting = self._told < _FIRST and self._silent < _PATIENCE
        if self._every and (starting or step % self._every == 0):
            self._start()

    def check(self, batch: int) -> None:
        """Run what was recorded again; refuse the step if samples interact."""
        if not self._handles:
            return
        self._stop()
        calls, self._calls = self._calls, []
        told = False
        for call in calls:
            told = self._check_call(call, batch) or told
        if told:
            self._told += 1
        elif batch > 1:
            self._silent += 1
            self._warn(calls)

    def _check_call(self, call: Call, batch: int) -> bool:
        """Whether running the call again has told anything."""
        found = compare(call, batch)
        if found is None:
            return False
        if found.buffers:
            raise PrivacyError(
                f"{call} keeps what it has seen of the data in its buffers {', '.join(found.buffers)}, without noise: "
                f"put it into eval mode, or use a layer without running statistics. What is set once, by the first "
                f"batch, has to be set by made-up data before dp.Private is made"
            )
        if found.difference > tolerance(self._model):
            raise InteractionError(
                f"samples interact in {call}: run again on a few samples of the batch, their outputs changed by "
                f"{found.difference:.2g} of the largest, though their inputs did not. One example would have moved the "
                f"gradients of others, which clipping does not bound. Look for statistics of the batch, detached or not"
            )
        return True

    def _warn(self, calls: list[Call]) -> None:
        if self._silent == _PATIENCE and not self._told:
            which = ", ".join(sorted({str(call) for call in calls})) or "the model, which was not called,"
            warnings.warn(
                f"{which} could not be run again on a few samples of its batch, so that samples that interact through "
                f"detached values would not be found: make sure that there are none. check_every=0 silences this",
                stacklevel=4,
            )

    def _start(self) -> None:
        self._calls, self._depth = [], 0
        compiled = any(original_of(part) is not None for part in self._model.modules())
        # Hooks inside of a compiled module would have it compiled again.
        modules = [("", self._model)] if compiled else list(self._model.named_modules())
        for name, module in modules:
            self._handles.append(module.register_forward_pre_hook(self._entering(name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leaving, always_call=True))

    def _stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _entering(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def entering(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._depth:
                self._calls.append(Call(name, module, args, kwargs, before=_buffers(module)))
            self._depth += 1

        return entering

    def _leaving(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            call = self._calls[-1]
            call.after.update(_buffers(call.module))


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: b.detach().clone() for name, b in module.named_buffers()}
