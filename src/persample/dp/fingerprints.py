"""Numbers that change when tensors or an optimizer's settings do, and are cheap to compare."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed import is_sharded
from ..graph.read.saved import version
from ..kernels.library import end_to_end


@dataclass(frozen=True)
class Taken:
    """One number for each tensor, which are still where they were computed: nothing has been waited for."""

    names: Sequence[str]
    lines: Mapping[torch.device, tuple[Sequence[str], Tensor]]  # the numbers that are on each device


def take(tensors: Mapping[str, Tensor]) -> Taken:
    """One number for each tensor, computed from the part that this process has."""
    return Taker(tensors).take()


class Taker:
    """`take` of the same tensors again and again: small ones of one kind are known to be taken together."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self._group()

    def _group(self) -> None:
        tensors, kinds = self.tensors, dict[tuple[object, ...], list[str]]()
        self._sizes = [t.numel() for t in tensors.values()]
        for name, t in tensors.items():
            small = type(t) in _ORDINARY and t.dtype in _WHOLE and t.numel() <= _SMALL
            kinds.setdefault((t.device, t.dtype) if small else (name,), []).append(name)
        self._groups = [(names, *_ends([tensors[name] for name in names])) for names in kinds.values()]

    def take(self) -> Taken:
        """One number for each of the tensors as they are now."""
        lines: dict[torch.device, tuple[list[str], list[Tensor]]] = {}
        if [t.numel() for t in self.tensors.values()] != self._sizes:  # by p.data = ...
            self._group()
        with torch.no_grad():
            for names, tensors, ends in self._groups:
                numbers = _bits_of_many(tensors, ends) if len(names) > 1 else _bits(tensors[0].detach()).unsqueeze(0)
                known, each = lines.setdefault(numbers.device, ([], []))
                known += names
                each.append(numbers)
        return Taken(list(self.tensors), {device: (names, torch.cat(each)) for device, (names, each) in lines.items()})


def _ends(tensors: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The tensors, and where each of them begins and ends on one line."""
    places = list(accumulate([0, *[t.numel() for t in tensors]]))
    return tensors, torch.tensor(places, device=tensors[0].device if len(tensors) > 1 else None)


_ORDINARY = {Tensor, nn.Parameter}
_WHOLE = {torch.float32: torch.int32, torch.float64: torch.int64}
_SMALL = 2**13  # elements, below which one call for many tensors costs less than one for each


def _bits_of_many(tensors: Sequence[Tensor], ends: Tensor) -> Tensor:
    """Like `_bits`, of tensors of one dtype, from differences of sums over all of them, which wrap around."""
    line = end_to_end(tensors)
    sums = line.view(_WHOLE[line.dtype]).cumsum(0, dtype=torch.int64)
    return nn.functional.pad(sums, (1, 0))[ends].diff()


def read(*every: Taken) -> list[dict[str, int]]:
    """The numbers themselves; each device is waited for once."""
    found: list[dict[str, int]] = [{} for _ in every]
    for device in dict.fromkeys(device for taken in every for device in taken.lines):
        here = [(place, *taken.lines[device]) for place, taken in enumerate(every) if device in taken.lines]
        values = iter(torch.cat([line for _, _, line in here]).tolist())
        for place, names, _ in here:
            found[place].update(zip(names, values, strict=False))
    return [{name: numbers[name] for name in taken.names} for taken, numbers in zip(every, found, strict=True)]


def of_tensors(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """`take` and `read`."""
    return read(take(tensors))[0]


def alike(params: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """What has to be the same in all processes: parameters, where each has the whole of them, and settings."""
    whole = {f"parameter {name!r}": p for name, p in params.items() if not is_sharded(p)}
    return {**of_tensors(whole), **of_settings(optimizer)}


def of_settings(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """One number for each setting of an optimizer's groups, such as learning rates."""
    numbers = {}
    for place, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params":
                shown = value.tolist() if isinstance(value, Tensor) else value
                numbers[f"{name} of group {place}"] = _short(repr(shown) if _is_plain(shown) else type(shown).__name__)
    return numbers


def summary(numbers: Mapping[str, int]) -> int:
    """One number for all of these."""
    return _short(repr(sorted(numbers.items())))


def _bits(t: Tensor) -> Tensor:
    """The sum of the bit patterns, which wraps around: as fast as memory is read, in any order."""
    if is_sharded(t):
        t = t.to_local()  # type: ignore[attr-defined]
    if not is_plain(t):  # numbers that are packed in some other way: how often they were written
        return torch.tensor(version(t))
    if t.is_complex():
        t = torch.view_as_real(t)
    if t.element_size() < 4:
        t = t.float()
    whole = torch.int32 if t.element_size() == 4 else torch.int64
    return t.view(whole).sum(dtype=whole).to(torch.int64)


def is_plain(t: Tensor) -> bool:
    """Are its numbers in its own memory, one after another?"""
    return type(t) is Tensor


def _short(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
