"""Numbers that change when tensors or an optimizer's settings do, and are cheap to compare."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..distributed import is_sharded
from ..graph.read.saved import version
from ..kernels.library import end_to_end


@dataclass(frozen=True)
class Copy:
    """Tensors of one dtype on the CPU, put end to end: comparing them costs less than adding them up."""

    names: Sequence[str]
    line: Tensor
    ends: Tensor  # where the first begins, and each of them ends

    @property
    def bits(self) -> Any:
        """All bit patterns, as whole numbers of NumPy."""
        return self.line.view(_WHOLE[self.line.dtype]).numpy()

    @property
    def pieces(self) -> dict[str, Any]:
        """The bit patterns of each tensor."""
        return dict(zip(self.names, np.split(self.bits, self.ends[1:-1].tolist()), strict=True))


@dataclass(frozen=True)
class Taken:
    """One number for each tensor, which are still where they were computed: nothing has been waited for."""

    names: Sequence[str]
    lines: Mapping[torch.device, tuple[Sequence[str], Tensor]]  # the numbers that are on each device
    copies: Sequence[Copy] = ()  # of tensors whose numbers are computed when they are read


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
        for name, t in tensors.items():
            kinds.setdefault((t.device, t.dtype, _is_here(t)) if _is_small(t) else (name,), []).append(name)
        every = [(names, *_ends([tensors[name] for name in names])) for names in kinds.values()]
        self._groups = [group for group in every if not _is_here(group[1][0])]
        self._copied, self._summed = list[tuple[list[str], list[Tensor], Tensor]](), dict[str, Any]()
        for names, few, ends in every:
            if _is_here(few[0]) and _is_small(few[0]):
                self._copied.append((names, [t.detach().view(-1) for t in few], ends))
            elif _is_here(few[0]):
                self._summed[names[0]] = few[0].detach().view(-1).view(_WHOLE[few[0].dtype]).numpy()
        self._here = [t for t in tensors.values() if _is_here(t)]
        self._places, self._sizes = self._where(), [t.numel() for t in tensors.values()]

    def _where(self) -> list[int]:
        return [t.data_ptr() for t in self._here]

    def take(self) -> Taken:
        """One number for each of the tensors as they are now."""
        lines: dict[torch.device, tuple[list[str], list[Tensor]]] = {}
        if [t.numel() for t in self.tensors.values()] != self._sizes or self._where() != self._places:  # by p.data =
            self._group()
        with torch.no_grad():
            copies = [Copy(names, torch.cat(flat), ends) for names, flat, ends in self._copied]
            if self._summed:
                sums = [np.add.reduce(bits, dtype=bits.dtype).item() for bits in self._summed.values()]
                lines[_CPU] = list(self._summed), [torch.tensor(sums, device=_CPU)]
            for names, tensors, ends in self._groups:
                numbers = _bits_of_many(tensors, ends) if len(names) > 1 else _bits(tensors[0].detach()).unsqueeze(0)
                known, each = lines.setdefault(numbers.device, ([], []))
                known += names
                each.append(numbers)
        found = {device: (names, torch.cat(each)) for device, (names, each) in lines.items()}
        return Taken(list(self.tensors), found, copies)


def _ends(tensors: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The tensors, and where each of them begins and ends on one line."""
    places = list(accumulate([0, *[t.numel() for t in tensors]]))
    return tensors, torch.tensor(places, device=tensors[0].device if len(tensors) > 1 else _CPU)


_CPU = torch.device("cpu")
_ORDINARY = {Tensor, nn.Parameter}
_WHOLE = {torch.float32: torch.int32, torch.float64: torch.int64}
_SMALL = 2**13  # elements, below which one call for many tensors costs less than one for each


def _is_small(t: Tensor) -> bool:
    return type(t) in _ORDINARY and t.dtype in _WHOLE and t.numel() <= _SMALL


def _is_here(t: Tensor) -> bool:
    """Are its numbers on the CPU, one after another? A view of them then stays right while they lie there."""
    return type(t) in _ORDINARY and t.dtype in _WHOLE and t.device.type == "cpu" and t.is_contiguous()


def _bits_of_many(tensors: Sequence[Tensor], ends: Tensor) -> Tensor:
    """Like `_bits`, of tensors of one dtype."""
    return _bits_between(end_to_end(tensors), ends)


def _bits_between(line: Tensor, ends: Tensor) -> Tensor:
    """The numbers of tensors that lie end to end, from differences of sums over all of them, which wrap around."""
    sums = line.view(_WHOLE[line.dtype]).cumsum(0, dtype=torch.int64)
    return nn.functional.pad(sums, (1, 0))[ends].diff().to(_WHOLE[line.dtype]).to(torch.int64)


def read(*every: Taken) -> list[dict[str, int]]:
    """The numbers themselves; each device is waited for once."""
    found: list[dict[str, int]] = [{} for _ in every]
    for numbers, taken in zip(found, every, strict=True):
        for copy in taken.copies:
            numbers.update(zip(copy.names, _bits_between(copy.line, copy.ends).tolist(), strict=True))
    for device in dict.fromkeys(device for taken in every for device in taken.lines):
        here = [(place, *taken.lines[device]) for place, taken in enumerate(every) if device in taken.lines]
        values = iter(torch.cat([line for _, _, line in here]).tolist())
        for place, names, _ in here:
            found[place].update(zip(names, values, strict=False))
    return [
        {name: numbers[name] for name in taken.names if name in numbers}
        for taken, numbers in zip(every, found, strict=True)
    ]


def same(before: Taken, now: Taken) -> bool:
    """Are there the same tensors, with the same values?"""
    return before.names == now.names and not changed(before, now)


def changed(before: Taken, now: Taken) -> list[str]:
    """Names of tensors that were not there before, or had other values."""
    found: list[str] = []
    if [copy.names for copy in before.copies] == [copy.names for copy in now.copies]:
        found = [name for pair in zip(before.copies, now.copies, strict=True) for name in _differing(*pair)]
        before, now = replace(before, copies=()), replace(now, copies=())
    old, new = read(before, now)
    return found + [name for name, number in new.items() if old.get(name) != number]


def _differing(before: Copy, now: Copy) -> list[str]:
    if np.array_equal(before.bits, now.bits):
        return []
    pieces = before.pieces
    return [name for name, piece in now.pieces.items() if not np.array_equal(pieces[name], piece)]


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
        return torch.tensor(version(t), device=_CPU)
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
