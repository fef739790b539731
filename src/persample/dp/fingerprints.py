"""Numbers that change when tensors or an optimizer's settings do, and are cheap to compare."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..distributed import is_sharded
from ..graph.read.saved import version


@dataclass(frozen=True)
class Taken:
    """One number for each tensor, which are still where they were computed: nothing has been waited for."""

    names: Sequence[str]
    lines: Mapping[torch.device, tuple[Sequence[str], Tensor]]  # the numbers that are on each device


def take(tensors: Mapping[str, Tensor]) -> Taken:
    """One number for each tensor, computed from the part that this process has."""
    with torch.no_grad():
        numbers = {name: _bits(t.detach()) for name, t in tensors.items()}
    on: dict[torch.device, list[str]] = {}
    for name, number in numbers.items():
        on.setdefault(number.device, []).append(name)
    lines = {device: (names, torch.stack([numbers[name] for name in names])) for device, names in on.items()}
    return Taken(list(tensors), lines)


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
