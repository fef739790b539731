"""Streams of an accelerator: hooks work on those of the forward pass, and the caller goes on with another.

The engine runs every node, and the hooks on it, on the stream that the node's forward op was on. It makes the caller's
stream wait for what it returns, but knows nothing of what hooks have computed. So the caller's stream waits for all
streams that hooks were on. In the end these wait for the caller's: memory of theirs that was let go on the way, and is
used again, is then used after the caller has read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["Streams", "streams_of"]

P = ParamSpec("P")
R = TypeVar("R")


class Streams:
    """The streams that hooks were on during one call; none, on a device that has no streams."""

    def __init__(self, device: torch.device | None = None) -> None:
        module = None if device is None else torch.get_device_module(device)
        self._current: Callable[..., Any] | None = getattr(module, "current_stream", None)
        self._device = device
        self._seen: list[Any] = []

    @staticmethod
    def of_call() -> Streams:
        """Those of the call that is under way in this thread."""
        return _of_call.get() or Streams()

    def noting(self, hook: Callable[P, R]) -> Callable[P, R]:
        """The hook, such that the stream on which it runs is known afterwards."""
        if self._current is None:
            return hook

        @wraps(hook)
        def noted(*args: P.args, **kwargs: P.kwargs) -> R:
            stream = self._own()
            if stream not in self._seen:
                self._seen.append(stream)
            return hook(*args, **kwargs)

        return noted

    def join(self) -> None:
        """Let the caller's stream wait for what hooks have computed."""
        for stream in self._others():
            self._own().wait_stream(stream)

    def part(self) -> None:
        """Let the hooks' streams wait until the caller's has read it."""
        for stream in self._others():
            stream.wait_stream(self._own())

    def _own(self) -> Any:
        return None if self._current is None else self._current(self._device)

    def _others(self) -> list[Any]:
        own = self._own() if self._seen else None
        return [stream for stream in self._seen if stream != own]


_of_call: ContextVar[Streams | None] = ContextVar("streams", default=None)


@contextmanager
def streams_of(device: torch.device) -> Iterator[None]:
    """One call on a device: what hooks compute in it may be used by the caller's stream after `Streams.join`."""
    streams = Streams(None if device.type in ("cpu", "meta") else device)
    token = _of_call.set(streams)
    try:
        yield
    finally:
        _of_call.reset(token)
        streams.part()
