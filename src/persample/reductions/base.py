"""The interface of reductions: `start` with a call, `add` every parameter's factor, and return a `result`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..distributed import Ranks, zeros_for
from ..factors import Factor, Workspace
from ..kernels.norms import wide, widest


@dataclass(frozen=True)
class Call:
    """What a reduction knows of the call of ``ps.reduce`` that it belongs to."""

    params: Mapping[str, Tensor]
    batch: int
    device: torch.device
    pack: Callable[[Mapping[str, Any]], Any]  # from results by name to a container like that of the parameters
    space: Workspace = field(default_factory=Workspace)
    ranks: Ranks | None = None  # over which samples are added up; None for this process alone
    losses: tuple[int, ...] | None = None  # (B, K…), if there are several per sample: ``batch`` counts all of them
    positions: range | None = None  # which of the K positions of ``losses`` this is a portion of

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of norms and inner products: float32, or float64 if a parameter has it."""
        common = torch.float32
        for dtype in {p.dtype for p in self.params.values()}:
            common = torch.promote_types(common, wide(dtype).to_real())
        return common

    def zeros(self, *shape: int) -> Tensor:
        """A float64 accumulator on the losses' device."""
        return torch.zeros(shape, dtype=widest(self.device), device=self.device)

    @cached_property
    def samples(self) -> int:
        """How many samples there are on all ranks."""
        return self.batch if self.ranks is None else self.ranks.count([self.batch], self.device)[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the losses: what has one row for each of them is given it at the end."""
        return self.losses or (self.batch,)

    def own(self, values: Tensor) -> Tensor:
        """(batch,): of values like the losses, those of this call's portion."""
        if self.positions is None:
            return values
        return values.flatten(1)[:, self.positions.start : self.positions.stop].flatten()

    def index_of(self, row: int) -> int | tuple[int, ...]:
        """The index in the losses of a row of this call: a number, or a tuple with several losses per sample."""
        if self.positions is None or self.losses is None:
            return row
        sample, position = divmod(row, len(self.positions))
        return sample, *_unravelled(self.positions[position], self.losses[1:])

    def rows(self, portions: Sequence[Any]) -> Any:
        """Rows, one per loss, of all portions in the losses' shape; also of values in dicts and tuples."""
        first = portions[0]
        if isinstance(first, Mapping):
            return {key: self.rows([portion[key] for portion in portions]) for key in first}
        if isinstance(first, tuple):
            return tuple(self.rows(values) for values in zip(*portions, strict=True))
        samples = self.shape[0]
        rows = [t.reshape(samples, len(t) // max(samples, 1), *t.shape[1:]) for t in portions]
        return torch.cat(rows, 1).reshape(*self.shape, *first.shape[1:])

    def over_ranks(self, sums: Mapping[str, Tensor], *, real: bool = False) -> Mapping[str, Tensor]:
        """Sums over the samples of all ranks, for the parameters that the losses of any rank reach.

        Pass ``real=True`` for sums of squares, which are real for complex parameters, too.
        """
        if self.ranks is None:
            return sums
        reached = self.ranks.count([name in sums for name in self.params], self.device)
        mine: dict[str, Tensor] = {}
        for (name, p), times in zip(self.params.items(), reached, strict=True):
            dtype = wide(p.dtype).to_real() if real else wide(p.dtype)
            if times:
                mine[name] = sums[name].to(dtype) if name in sums else zeros_for(p, dtype)
        return self.ranks.sum(mine)

    def pack_sums(self, sums: Mapping[str, Tensor]) -> Any:
        """One tensor like each parameter; zeros for those that the losses do not reach."""
        return self.pack(
            {name: sums[name].to(p.dtype) if name in sums else zeros_for(p, p.dtype) for name, p in self.params.items()}
        )


class Reduction(ABC):
    """Something computed from the gradients of all samples, without writing all of them out.

    To make one, subclass and write three methods; ``ps.reduce`` calls them on a copy of the object, so that what
    they store on ``self`` belongs to one call. ``passes`` says how often `add` goes through a factor (a factor that
    is gone through often may be written out once), ``keeps_factors`` whether factors are kept until `result`,
    ``over_ranks`` whether `result` adds up what the ranks of a ``process_group=`` have (by ``call.over_ranks`` and
    ``call.samples``; others are refused there), ``takes_stacks`` whether gradients may come written out (as small ones
    do on accelerators). The copy is shallow: what changes during a call belongs in `start`, not in ``__init__``.

    With several losses per sample, ``call.batch`` is the number of losses, in the order of ``losses.flatten()``, and
    ``call.losses`` their shape; `result` is what comes back. A reduction that is ``in_portions`` may be given some
    positions of all samples at a time, each time as a call of its own; `join` then makes one result of all.
    """

    passes = 1
    keeps_factors = False
    over_ranks = False
    takes_stacks = True
    in_portions = False

    @abstractmethod
    def start(self, call: Call) -> None:
        """Prepare for a call, of which the parameters and the number of samples are known."""

    @abstractmethod
    def add(self, name: str, factor: Factor) -> None:
        """Take the gradients of one parameter; called once for each that the losses reach, during the backward."""

    @abstractmethod
    def result(self) -> Any:
        """The result of the call; called after the backward."""

    # With several losses per sample: what `result` is made of, portion by portion.

    def for_all(self, call: Call) -> Reduction:
        """The reduction that is given every portion of a ``call`` with several losses per sample."""
        return self

    def portion(self) -> Any:
        """What `join` needs of this portion of a call."""
        return self.result()

    def condense(self, portions: list[Any]) -> list[Any]:
        """The same in less memory, after each portion: sums are added up, so that there is one of them at a time."""
        return portions

    def join(self, portions: Sequence[Any], call: Call) -> Any:
        """The result of the whole ``call``; if the reduction is not ``in_portions``, there is one of them."""
        (only,) = portions
        return only


def is_joined(reduction: Reduction) -> bool:
    """Is `join` about the result that this reduction has? A subclass may have written another one."""
    result, join = (next(kind for kind in type(reduction).__mro__ if name in vars(kind)) for name in ("result", "join"))
    return issubclass(join, result)


def _unravelled(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of an element of a tensor, from its place in row-major order."""
    index: list[int] = []
    for size in reversed(shape):
        place, at = divmod(place, size)
        index.append(at)
    return tuple(reversed(index))
