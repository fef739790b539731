"""How often a program gives work to an accelerator, and how often it makes the host wait for the result.

A host that only hands out work is ahead of its device, and the device is never idle. Whatever reads a number back,
copies to or from ordinary memory, or has as many results as the data say, stops the host until all work is done. Both
are counted op by op, as they come to the dispatcher: views are free, everything else is one launch. (A library may use
several kernels for one op; what is counted is what a program asks for.)

The names of ops are PyTorch's own. They hold for torch 2.13 to 2.15; ``tests/device/test_counting.py`` checks them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..trees import leaves

__all__ = ["Work", "count_work"]

# Ops that give no work to the device, beside views.
_FREE = frozenset(
    """
    empty empty_like empty_strided new_empty new_empty_strided empty_permuted detach detach_ alias lift lift_fresh
    _unsafe_view _reshape_alias resize_ set_ is_same_size _has_same_storage_numel is_pinned _fused_sdp_choice
    """.split()
)
# Ops whose results the host has to wait for: numbers, or as many rows as the data say.
_WAITING = frozenset(
    """
    _local_scalar_dense item is_nonzero equal nonzero masked_select _unique _unique2 unique_dim unique_consecutive
    unique_dim_consecutive bincount multinomial embedding_renorm_ _linalg_check_errors
    """.split()
)


_COPIES = frozenset("_to_copy copy_ _copy_from".split())
_INDEXED = frozenset("index index_put index_put_ _index_put_impl_ _unsafe_index _unsafe_index_put".split())


@dataclass
class Work:
    """What an accelerator was given to do, by op: ``launches``, and ``waits`` of the host among them."""

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        waits = ", ".join(f"{name} {n}" for name, n in self.waits.most_common()) or "none"
        return f"{self.launches.total()} launches, waits: {waits}"

    def see(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Count one op of the dispatcher."""
        places = _places(args, kwargs)
        if all(place == "cpu" for place in places):
            return
        name = op.name().partition("::")[2].partition(".")[0]
        if name in _FREE or op.is_view:
            return
        self.launches[name] += 1
        if _waits(name, args, kwargs, places):
            self.waits[name] += 1


def _places(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """The kinds of device of an op's operands and of its result, if one is asked for."""
    places = [t.device.type for t in leaves([args, kwargs]) if isinstance(t, Tensor)]
    device = kwargs.get("device")
    return places if device is None else [*places, torch.device(device).type]


def _waits(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], places: Sequence[str]) -> bool:
    if name in _COPIES:  # from the host or to it
        return "cpu" in places and not (kwargs.get("non_blocking") or True in args[2:3])
    if name in _INDEXED:
        chosen = any(t.dtype in (torch.bool, torch.uint8) for t in args[1] if t is not None)
        return chosen and not (name.startswith("index_put") and args[2].numel() == 1)  # then it fills where it is true
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None and any(isinstance(a, Tensor) for a in args[-1:])
    return name in _WAITING


class _Counting(TorchDispatchMode):
    def __init__(self, work: Work) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._work.see(func, args, kwargs)
        return func(*args, **kwargs)


@contextmanager
def count_work() -> Iterator[Work]:
    """Count what the block gives to accelerators; work on the CPU is not counted.

    >>> import torch
    >>> from persample.testing import count_work
    >>> with count_work() as work:
    ...     loss = torch.ones(3).sum().item()
    >>> print(work)
    0 launches, waits: none
    """
    work = Work()
    with _Counting(work):
        yield work
