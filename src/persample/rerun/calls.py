"""Recording how the modules of a model are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..graph.read.compiled import original_of


@dataclass(frozen=True)
class RecordedCall:
    """A call of a module with its inputs, and its buffers before and after where they were recorded."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    buffers_before: dict[str, Tensor] = field(default_factory=dict)
    buffers_after: dict[str, Tensor] = field(default_factory=dict)

    def __str__(self) -> str:
        kind = type(self.module).__name__
        return f"module {self.name!r} ({kind})" if self.name else f"the model ({kind})"


class CallRecorder:
    """Records calls of a model's modules between `start` and `stop`, by hooks that change nothing.

    Args:
        model: the model; where a part of it is compiled, calls of the whole model alone are recorded.
        inner: also record calls that are made during a recorded one.
        buffers: also copy the buffers of a recorded module, before and after its call.
    """

    def __init__(self, model: nn.Module, *, inner: bool = False, buffers: bool = False) -> None:
        self._model, self._inner, self._buffers = model, inner, buffers
        self._calls: list[RecordedCall] = []
        self._running: list[RecordedCall | None] = []  # innermost last; None for a call that is not recorded
        self._handles: list[RemovableHandle] = []

    @property
    def is_recording(self) -> bool:
        """Has it been started and not stopped?"""
        return bool(self._handles)

    def start(self) -> None:
        """Record calls from now on; those of an earlier start are forgotten."""
        self.stop()
        self._running = []
        for name, module in self._modules():
            self._handles.append(module.register_forward_pre_hook(self._before_call(name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after_call, always_call=True))

    def stop(self) -> list[RecordedCall]:
        """Remove the hooks; the calls recorded since `start`, in their order, are handed over."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        calls, self._calls = self._calls, []
        return calls

    def _modules(self) -> list[tuple[str, nn.Module]]:
        """Those that get hooks: inside of a compiled module, hooks would have it compiled again."""
        if any(original_of(part) is not None for part in self._model.modules()):
            return [("", self._model)]
        return list(self._model.named_modules())

    def _before_call(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def before_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = None
            if self._inner or not self._running:
                call = RecordedCall(name, module, args, kwargs, buffers_before=self._copied_buffers(module))
                self._calls.append(call)
            self._running.append(call)

        return before_call

    def _after_call(self, module: nn.Module, *_: object) -> None:
        call = self._running.pop() if self._running else None  # empty if the call began before `start`
        if call is not None:
            call.buffers_after.update(self._copied_buffers(module))

    def _copied_buffers(self, module: nn.Module) -> dict[str, Tensor]:
        return {name: b.detach().clone() for name, b in module.named_buffers()} if self._buffers else {}
