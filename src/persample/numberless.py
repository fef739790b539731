"""Tensors that have a shape and no numbers: on the device ``meta``, or those of a ``FakeTensorMode``.

The names used here are private to PyTorch. They hold for torch 2.13 to 2.15; ``tests/test_numberless.py`` checks them.

While a fake mode is active, every new tensor is without numbers, also those in which this package keeps where samples
lie. `with_numbers` is for functions that compute with these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from weakref import ref

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "LiveBytes",
    "NoNumbers",
    "faking",
    "has_numbers",
    "lacks_numbers",
    "read_numbers",
    "shapes_alone",
    "storage_of",
    "with_numbers",
]

P = ParamSpec("P")
R = TypeVar("R")


class NoNumbers(Exception):
    """What was asked for is decided by numbers, and the tensor has none."""


def has_numbers(t: Tensor) -> bool:
    """Is there anything to look at in this tensor?"""
    return not (isinstance(t, FakeTensor) or t.is_meta)


def read_numbers(t: Tensor) -> Tensor:
    """The tensor, for those who are about to look at its numbers; `NoNumbers` if it has none."""
    if not has_numbers(t):
        raise NoNumbers
    return t


def lacks_numbers(error: RuntimeError) -> bool:
    """Was this raised by an op that cannot do without numbers, or has no way to compute its shapes alone?"""
    return isinstance(error, (*_ERRORS, NotImplementedError)) or "meta tensor" in str(error)


_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


def storage_of(t: Tensor) -> int:
    """Equal for tensors without numbers that would lie in the same memory."""
    return int(t.untyped_storage()._cdata)


def faking() -> bool:
    """Is a fake mode active, in which new tensors have no numbers?"""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def with_numbers(function: Callable[P, R]) -> Callable[P, R]:
    """The function, with new tensors that have numbers whatever mode it is called in."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if not faking():
            return function(*args, **kwargs)
        from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing  # costs a tenth of a second

        with disable_proxy_modes_tracing(), unset_fake_temporarily():
            return function(*args, **kwargs)

    return called


@contextmanager
def shapes_alone(tensors: Iterable[Tensor]) -> Iterator[None]:
    """A context in which new tensors are without numbers if these are, and may be used beside tensors that have some.

    Tensors on ``meta`` need nothing of the kind: what is computed from them is on their device.
    """
    mode = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)
    if mode is None:
        yield
        return
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode:
            yield
    finally:
        mode.allow_non_fake_inputs = before


class LiveBytes(TorchDispatchMode):
    """Adds up what tensors without numbers would take, while there are any that lie in it.

    Tensors from before it was entered are not counted, nor are views of them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live, self.peak = 0, 0
        self._storages: dict[int, ref[UntypedStorage]] = {}

    def begin_peak(self) -> int:
        """Forget the peak so far; what is live now."""
        self.peak = self.live
        return self.live

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the op, and count what it has made."""
        kwargs = kwargs or {}
        for t in _tensors([*args, *kwargs.values()]):
            self._note(t, new=False)
        results = func(*args, **kwargs)
        for t in _tensors([results]):
            self._note(t, new=True)
        return results

    def _note(self, t: Tensor, *, new: bool) -> None:
        if t.layout != torch.strided or has_numbers(t):
            return
        storage = t.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if new else 0
        if key not in self._storages:
            self._storages[key] = ref(storage, lambda _: self._forget(key, size))
            self.live += size
            self.peak = max(self.peak, self.live)

    def _forget(self, key: int, size: int) -> None:
        del self._storages[key]
        self.live -= size


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
