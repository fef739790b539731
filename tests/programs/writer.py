"""Writes a random program line by line: each is run as soon as it is written, and dropped if PyTorch refuses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from random import Random
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import vocabulary
from .values import Value, changes
from .weights import COMPUTED, changed

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


class Writer:
    """The lines so far, what they computed, and the random choices."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.batch = self.pick([0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 5, 6, 8])
        self.mix = self.pick([0.0, 0.0, 0.0, 0.2, 0.4, 0.6])  # how often samples meet
        self.separate = False  # whether they never do, not even in a product with zeros
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
        name, t = self.computed(expression)
        if at >= 0 and (at >= t.ndim or t.shape[at] != outer * self.batch * inner):
            at = -1
        return self.added(Value(name, t, at, outer, inner))

    def computed(self, expression: str) -> tuple[str, Tensor]:
        """Name the result of an expression, if it is a tensor that programs can go on with."""
        name = self.named("h", expression)
        t = self.env[name]
        if not isinstance(t, Tensor) or t.numel() > MOST or t.ndim > 5 or not t.dtype.is_floating_point:
            raise CannotBeWritten(f"{expression}: not a value")
        return name, t

    def added(self, value: Value) -> Value:
        self.values.append(value)
        return value

    def move(self, v: Value, form: str, labels: str = "") -> Value:
        """Move elements about, in any way: the sample of each goes with it.

        The form has `{}` for the value; a second one, for the samples, if the same expression does not do for both.
        """
        name, t = self.computed(form.format(v.name))
        count = len(self.lines)
        before = v.samples or self.named("s", f"samples({v.name}, B, {v.at}, {v.inner})")
        value = self.placed(name, t, self.named("s", (labels or form).format(before)))
        if not value.samples:
            del self.lines[count:]  # nobody will ask for them
        return self.added(value)

    def placed(self, name: str, t: Tensor, samples: str) -> Value:
        """The value whose samples lie where a tensor says: along one dim, if they do."""
        label = self.env[samples]
        if label.shape != t.shape:
            raise CannotBeWritten(f"{name} and {samples} have different shapes")
        along = [d for d in range(t.ndim) if changes(label, d)]
        if len(along) == 1 and self.batch:
            n, line = t.shape[along[0]], label.movedim(along[0], 0).reshape(t.shape[along[0]], -1)[:, 0]
            for inner in [k for k in range(1, n + 1) if n % (k * self.batch) == 0]:
                if torch.equal(line, torch.arange(n) // inner % self.batch):
                    return Value(name, t, along[0], n // (inner * self.batch), inner)
        return Value(name, t, samples=samples, label=label)

    def take(self, least: int = 0, seen: bool = True, anywhere: bool = False) -> Value:
        """A value, often the newest: with so many free dims, in the graph, and with its samples along one dim.

        With `anywhere`, the samples may lie in any way that is known.
        """
        fitting = [
            v
            for v in self.values
            if len(v.free) >= least
            and (not seen or v.tensor.requires_grad)
            and (v.at >= 0 or (anywhere and bool(v.samples)))
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
        if v.samples:
            return self.at_end(v, count)
        if v.at < v.ndim - count and v.ndim >= count + (v.at >= 0):
            return v
        if len(v.free) < count:
            raise CannotBeWritten("too few free dims")
        return self.put(f"{v.name}.movedim({v.at}, 0)", 0, v.outer, v.inner)

    def at_end(self, v: Value, count: int) -> Value:
        """The value with some of its free dims at its end, wherever its samples lie."""
        if len(v.free) < count:
            raise CannotBeWritten("too few free dims")
        if all(d in v.free for d in range(v.ndim - count, v.ndim)):
            return v
        chosen = self.random.sample(v.free, count)
        order = [*(d for d in range(v.ndim) if d not in chosen), *chosen]
        return self.move(v, f"{{}}.permute({', '.join(map(str, order))})")

    def apart(self, v: Value) -> Value:
        """The value with a dim for the samples alone."""
        if v.outer == v.inner == 1:
            return v
        sizes = [str(n) for n in (v.outer, "B", v.inner) if n != 1]
        return self.put(f"{v.name}.unflatten({v.at}, ({', '.join(sizes)}))", v.at + (v.outer != 1))

    def images(self, v: Value, rank: int) -> Value:
        """The value as (N, C, *spatial)."""
        if v.samples:
            v = self.at_end(v, rank + 1)
            more = v.ndim - rank - 2
            return v if not more else self.move(v, f"{{}}.flatten(0, {more})" if more > 0 else "{}.unsqueeze(0)")
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
        if self.chance(0.72) or not sizes:
            return self.leaf(*sizes)
        ranks, computed = self.pick(COMPUTED)
        return computed(self, sizes) if len(sizes) in ranks else changed(self, sizes)

    def maybe(self, *dims: int | str) -> str:
        """A weight or None."""
        return self.weight(*dims) if self.chance() else "None"

    def keep(self, v: Value, expression: str) -> Value:
        """A new value with its samples where they were; free dims may have other sizes."""
        if not v.samples:
            return self.put(expression, v.at, v.outer, v.inner)
        name, t = self.computed(expression)
        if t.shape == v.tensor.shape:
            return self.added(replace(v, name=name, tensor=t))
        if t.ndim != v.ndim or any(t.shape[d] != n and d not in v.free for d, n in enumerate(v.shape)):
            return self.added(Value(name, t))
        samples = self.named("s", f"resized({v.samples}, {name})")
        return self.added(Value(name, t, samples=samples, label=self.env[samples]))

    def alike(self, v: Value) -> list[Value]:
        """The values of the same shape, with their samples in the same places."""
        return [
            u
            for u in self.values
            if (u.shape, u.at, u.outer, u.inner) == (v.shape, v.at, v.outer, v.inner)
            and bool(u.samples) == bool(v.samples)
            and (u.label is v.label or (u.label is not None and v.label is not None and torch.equal(u.label, v.label)))
        ]

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
