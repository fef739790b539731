"""Writes a random program line by line: each is run as soon as it is written, and dropped if PyTorch refuses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from random import Random
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import vocabulary

T = TypeVar("T")
MOST = 300  # elements of a value
NAMES = {
    **{
        name: thing
        for name, thing in vars(vocabulary).items()
        if getattr(thing, "__module__", "") == vocabulary.__name__
    },
    **{"torch": torch, "F": F, "nn": nn, "checkpoint": checkpoint},
}

Op = Callable[["Writer"], Any]
OPS: dict[str, Op] = {}
MIXING: set[str] = set()


def op(fn: Op) -> Op:
    """Register what writes a few lines."""
    OPS[fn.__name__] = fn
    return fn


def mixing(fn: Op) -> Op:
    """Register what lets samples meet."""
    MIXING.add(fn.__name__)
    return op(fn)


class CannotBeWritten(Exception):
    """The line that was tried does not run, or there is nothing for it to work on."""


@dataclass(frozen=True)
class Value:
    """A tensor of the program. Samples lie along dim `at`, `outer` times, `inner` in a row; at < 0 if nobody knows."""

    name: str
    tensor: Tensor
    at: int = -1
    outer: int = 1
    inner: int = 1

    @property
    def free(self) -> list[int]:
        return [d for d in range(self.tensor.ndim) if d != self.at]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def ndim(self) -> int:
        return self.tensor.ndim


class Writer:
    """The lines so far, what they computed, and the random choices."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.batch = self.pick([0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 5])
        self.mix = self.pick([0.0, 0.0, 0.0, 0.2, 0.4, 0.6])
        self.anchor = ""  # where all data enter, if they do in one place
        self.lines: list[str] = []
        self.values: list[Value] = []
        self.leaves: list[str] = []
        self.env: dict[str, Any] = dict(NAMES)
        self.counts: dict[str, int] = {}
        self.line(f"B = {self.batch}")

    def pick(self, options: Sequence[T]) -> T:
        return self.random.choice(options)

    def chance(self, share: float = 0.5) -> bool:
        return self.random.random() < share

    def whole(self, low: int, high: int) -> int:
        if high < low:
            raise CannotBeWritten(f"nothing between {low} and {high}")
        return self.random.randint(low, high)

    def size(self) -> int:
        """Often as many as samples."""
        return self.pick([1, 2, 3, 4, max(self.batch, 1), max(self.batch, 1)])

    def name(self, kind: str) -> str:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        return f"{kind}{self.counts[kind]}"

    def line(self, text: str) -> None:
        """Write a statement and run it."""
        try:
            exec(text, self.env)
        except Exception as error:
            raise CannotBeWritten(f"{text}: {error}") from error
        self.lines.append(text)

    def named(self, kind: str, expression: str) -> str:
        """Give something a name."""
        name = self.name(kind)
        self.line(f"{name} = {expression}")
        return name

    def put(self, expression: str, at: int = -1, outer: int = 1, inner: int = 1) -> Value:
        """A new value, if it is one that programs can go on with."""
        name = self.named("h", expression)
        t = self.env[name]
        if not isinstance(t, Tensor) or t.numel() > MOST or t.ndim > 5 or not t.dtype.is_floating_point:
            raise CannotBeWritten(f"{expression}: not a value")
        if at >= 0 and (at >= t.ndim or t.shape[at] != outer * self.batch * inner):
            at = -1
        value = Value(name, t, at, outer, inner)
        self.values.append(value)
        return value

    def take(self, least: int = 0, seen: bool = True, tracked: bool = True) -> Value:
        """A value, often the newest: with so many free dims, in the graph, and with its samples known."""
        fitting = [
            v
            for v in self.values
            if len(v.free) >= least and (not seen or v.tensor.requires_grad) and (not tracked or v.at >= 0)
        ]
        if not fitting:
            raise CannotBeWritten("nothing to take")
        return fitting[-1] if self.chance(0.7) else self.pick(fitting)

    def free(self, v: Value) -> int:
        """A dim to work along: not the samples', but where they may meet."""
        if v.tensor.requires_grad and v.ndim and self.chance(self.mix / 4):
            return self.whole(0, v.ndim - 1)
        if not v.free:
            raise CannotBeWritten("no free dim")
        return self.pick(v.free)

    def last(self, v: Value, count: int = 1) -> Value:
        """The value with free dims at its end."""
        if v.at < v.ndim - count and v.ndim >= count + (v.at >= 0):
            return v
        if len(v.free) < count:
            raise CannotBeWritten("too few free dims")
        return self.put(f"{v.name}.movedim({v.at}, 0)", 0, v.outer, v.inner)

    def apart(self, v: Value) -> Value:
        """The value with a dim for the samples alone."""
        if v.outer == v.inner == 1:
            return v
        sizes = [str(n) for n in (v.outer, "B", v.inner) if n != 1]
        return self.put(f"{v.name}.unflatten({v.at}, ({', '.join(sizes)}))", v.at + (v.outer != 1))

    def images(self, v: Value, rank: int) -> Value:
        """The value as (N, C, *spatial)."""
        if v.at == 0 and v.ndim == rank + 2:
            return v
        text = v.name if v.at == 0 else f"{v.name}.movedim({v.at}, 0)"
        if v.ndim > rank + 2:
            text += f".flatten({rank + 1})"
        text += ".unsqueeze(-1)" * (rank + 2 - v.ndim)
        return self.put(text, 0, v.outer, v.inner)

    def leaf(self, *sizes: str) -> str:
        """A parameter, new or used before."""
        shape = tuple(eval(n, self.env) for n in sizes)
        if prod(shape) > MOST:
            raise CannotBeWritten("a large weight")
        known = [w for w in self.leaves if w[0] == "w" and self.env[w].shape == shape and not self.env[w].is_complex()]
        if known and self.chance(0.2):
            return self.pick(known)
        name = self.named("w", f"weight({', '.join(sizes)})")
        self.leaves.append(name)
        if self.chance(0.04):
            self.line(f"{name}.requires_grad_(flag)")
        return name

    def weight(self, *dims: int | str) -> str:
        """A parameter, or something computed from parameters alone."""
        sizes = [str(n) for n in dims]
        shape = [eval(n, self.env) for n in sizes]
        if self.chance(0.72) or not sizes:
            return self.leaf(*sizes)
        kind = self.whole(0, 15)
        if kind == 0 and len(sizes) == 2:
            return f"{self.leaf(sizes[1], sizes[0])}.t()"
        if kind == 1 and len(sizes) >= 2:
            return f"({self.leaf(*sizes[:-1], '2')} @ {self.leaf(*sizes[:-2], '2', sizes[-1])})"
        if kind == 2:
            return f"{self.leaf(f'{sizes[0]} + 1', *sizes[1:])}[1:]"
        if kind == 3:
            return f"{self.leaf(*sizes)}.flip(0)"
        if kind == 4:
            return f"{self.leaf(' * '.join(sizes))}.view({', '.join(sizes)})"
        if kind == 5:
            return f"torch.cat([{self.leaf('1', *sizes[1:])}, {self.leaf(*sizes)}])[1:]"
        if kind == 6:
            return f"{self.leaf('1', *sizes[1:])}.expand({', '.join(sizes)})"
        if kind == 7:
            return f"F.normalize({self.leaf(*sizes)}, dim=0)"
        if kind == 8:
            mask = self.named("c", f"draw({', '.join(sizes)}) > 0")
            return f"({self.leaf(*sizes)} * {mask})"
        if kind == 9:
            return f"{self.leaf('4', *sizes[1:])}[torch.tensor({[self.whole(0, 3) for _ in range(shape[0])]})]"
        if kind == 10:
            return f"{self.leaf(*sizes)}.contiguous().clone()"
        if kind == 11:
            return f"({self.leaf(*sizes)} + {self.leaf(*sizes)})"
        if kind == 12:
            return f"draw({', '.join(sizes)})"  # frozen
        return self.leaf(*sizes) + self.pick(
            [".tanh()", ".mul(0.5)", ".detach()", ".float().to(torch.get_default_dtype())"]
        )

    def maybe(self, *dims: int | str) -> str:
        """A weight or None."""
        return self.weight(*dims) if self.chance() else "None"

    def keep(self, v: Value, expression: str) -> Value:
        """A new value with its samples where they were."""
        return self.put(expression, v.at, v.outer, v.inner)

    def step(self, names: Sequence[str]) -> None:
        """Write one random op, the first of a few that can be written."""
        for _ in range(6):
            if self.attempt(OPS[self.pick(names)]):
                return

    def attempt(self, fn: Op) -> bool:
        """Write an op whole, or nothing."""
        lines, values, leaves = len(self.lines), len(self.values), len(self.leaves)
        try:
            fn(self)
            return True
        except CannotBeWritten:
            del self.lines[lines:], self.values[values:], self.leaves[leaves:]
            return False
