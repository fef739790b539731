"""The device "strict": tensors that PyTorch takes for an accelerator's, whose numbers are held in CPU tensors.

What PyTorch would not do on an accelerator is refused here, too: an op whose operands are on different devices (CPU
numbers without dims may come along), a generator of another device, NumPy on device memory. The engine runs the
backward of such tensors as it runs an accelerator's: hooks are called in another thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from persample.kernels import devices
from tests.device import autocast  # noqa: F401
from tests.device.kernels import KERNELS


class Stream:
    """A queue of work; here, all work is done at once, and only who waits for whom is kept."""

    def __init__(self) -> None:
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        """Work from here on comes after the other's."""
        self.waited_for.append(other)


_threads = threading.local()


class _Module:
    """What PyTorch asks of ``torch.strict``."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def manual_seed_all(self, seed: int) -> None:
        """The CPU's generator is used."""

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_stream(self, device: object = None) -> Stream:
        """One for every thread: as if the forward pass had been on another than the caller's."""
        if not hasattr(_threads, "stream"):
            _threads.stream = Stream()
        return _threads.stream

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


_setup_privateuseone_for_python_backend("strict", backend_module=_Module())
DEVICE = torch.device("strict:0")
_ON_HOST = {"aten::_pack_padded_sequence": 1}  # ops that keep a result on the host, and which
_TAKES_FROM_HOST = ("aten::_pack_padded_sequence", "aten::_pack_padded_sequence_backward", "aten::_pad_packed_sequence")
_COPIES = ("aten::_to_copy", "aten::copy_", "aten::_copy_from")
_aten = torch.ops.aten


class DeviceTensor(torch.Tensor):
    """A tensor on the device; ``held`` has its numbers."""

    held: Tensor
    without_float64 = False  # is float64 refused, as some devices have none?

    @staticmethod
    def __new__(cls, held: Tensor) -> DeviceTensor:
        if cls.without_float64 and held.dtype in (torch.float64, torch.complex128):
            raise TypeError("this device has no float64")
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        return made

    def __init__(self, held: Tensor) -> None:
        self.held = held

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self, **options: Any) -> str:
        return f"DeviceTensor({self.held})"

    @property
    def data(self) -> Tensor:
        """As every tensor's; what is set comes with its numbers."""
        data: Tensor = torch.Tensor.data.__get__(self)
        return data

    @data.setter
    def data(self, value: DeviceTensor) -> None:
        torch.Tensor.data.__set__(self, value)
        self.held = value.held

    def as_subclass(self, cls: type[Tensor]) -> Tensor:
        """A subclass of both: a real device's tensors have no class of their own."""
        made: DeviceTensor = _aten.alias(self)
        made.__class__ = _both(cls)
        return made

    def untyped_storage(self) -> torch.UntypedStorage:
        """Where the numbers are, which views share."""
        return self.held.untyped_storage()

    def data_ptr(self) -> int:
        """Where the numbers begin."""
        return self.held.data_ptr()

    def tolist(self) -> Any:
        """By way of the CPU."""
        return self.cpu().tolist()

    def numpy(self, **options: Any) -> Any:
        """Refused, as it is for every device but the CPU."""
        raise TypeError("can't convert a tensor of this device to numpy: use Tensor.cpu() first")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        onto_device = _place_of_result(kwargs)
        _refuse_mixtures(func, given, kwargs)
        name = func._schema.name
        kernel = KERNELS.get(func, func)
        result = kernel(*tree_map(_held, args), **tree_map(_held, kwargs))
        own = {id(t.held): t for t in given if isinstance(t, DeviceTensor)}
        onto_device &= any(isinstance(t, DeviceTensor) for t in given)

        def wrapped(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            if id(t) in own:
                return own[id(t)]
            return DeviceTensor(_plain(t)) if onto_device or not given else t

        for t in own.values():
            if (t.shape, t.stride()) != (t.held.shape, t.held.stride()):  # reshaped in place, or resized
                torch.Tensor.data.__set__(t, DeviceTensor(t.held))
        if name == "aten::copy_":
            return args[0]
        if name in _ON_HOST:
            return tuple(t if place == _ON_HOST[name] else wrapped(t) for place, t in enumerate(result))
        return tree_map(wrapped, result)


@cache
def _both(cls: type[Tensor]) -> type[Tensor]:
    return type(cls.__name__, (cls, DeviceTensor), {})


def _plain(t: Tensor) -> Tensor:
    """Numbers without what is left to be done; this device has no sparse tensors."""
    return (t if t.layout == torch.strided else t.to_dense()).resolve_conj().resolve_neg()


def _held(value: Any) -> Any:
    return value.held if isinstance(value, DeviceTensor) else value


def _place_of_result(kwargs: dict[str, Any]) -> bool:
    """Is the result on the device? The CPU computes it in any case."""
    device = kwargs.get("device")
    if device is None:
        return True
    kwargs["device"] = torch.device("cpu")
    return torch.device(device).type == DEVICE.type


def _refuse_mixtures(func: Any, given: Sequence[Tensor], kwargs: Mapping[str, Any]) -> None:
    """Raise what an accelerator would raise for operands on several devices."""
    strangers = [t for t in given if not isinstance(t, DeviceTensor) and t.ndim]
    if strangers and func._schema.name not in (*_COPIES, *_TAKES_FROM_HOST):
        _refuse(
            f"Expected all tensors to be on the same device, but {func} was given tensors on cpu of shapes "
            f"{[tuple(t.shape) for t in strangers]} beside those on {DEVICE}"
        )
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type != DEVICE.type:
        _refuse(f"Expected a generator of {DEVICE}, but {func} was given one of {generator.device}")


def _refuse(why: str) -> None:
    """Raise, or remember it in the engine's thread: PyTorch ends the process if a Python backend raises there."""
    if threading.current_thread() is threading.main_thread():
        raise RuntimeError(why)
    _refused.append(why)


_refused: list[str] = []


def raise_refused() -> None:
    """Raise what was refused during a backward."""
    if _refused:
        why = _refused[0]
        _refused.clear()
        raise RuntimeError(why)


def _empty(size: Any, **options: Any) -> DeviceTensor:
    options = {key: value for key, value in options.items() if value is not None} | {"device": "cpu"}
    return DeviceTensor(torch.empty(size, **options))


def _empty_strided(size: Any, stride: Any, **options: Any) -> DeviceTensor:
    options = {key: value for key, value in options.items() if value is not None} | {"device": "cpu"}
    return DeviceTensor(torch.empty_strided(size, stride, **options))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Where PyTorch copies without asking the tensors: ``torch.tensor`` of Python numbers."""
    _held(target).copy_(_held(source))
    return target


_library = torch.library.Library("aten", "IMPL")
_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")


@contextmanager
def no_float64() -> Iterator[None]:
    """Refuse float64 in the block, as devices without it do."""
    DeviceTensor.without_float64 = True
    devices._WITHOUT_FLOAT64.add(DEVICE.type)
    try:
        yield
    finally:
        DeviceTensor.without_float64 = False
        devices._WITHOUT_FLOAT64.remove(DEVICE.type)
