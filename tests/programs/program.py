"""The state of a random program: one tensor, and the sample that each of its elements belongs to.

Every op does to the labels what it does to the tensor, so the samples are known at every step, whatever happened to
the dims. An op that mixes elements does so along *free* dims only: those along which the sample does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from random import Random
from typing import Any, TypeVar

import torch
from torch import Tensor

MOST = 600  # elements of the state
T = TypeVar("T")
Op = Callable[["Program"], bool]

OPS: dict[str, Op] = {}


def op(fn: Op) -> Op:
    """Register an op: it changes the program's state, or returns False when it cannot be applied."""
    OPS[fn.__name__] = fn
    return fn


class Program:
    """A tensor `h`, its labels, the parameters so far, and the random choices."""

    def __init__(self, seed: int, batch: int) -> None:
        self.random, self.batch = Random(seed), batch
        self.generator = torch.Generator().manual_seed(seed)
        self.params: list[Tensor] = []
        self.log: list[str] = []
        sizes = [self.pick([1, 2, 3, 4, max(batch, 1)]) for _ in range(self.whole(0, 3))]
        place = self.whole(0, len(sizes))
        shape = (*sizes[:place], batch, *sizes[place:])
        self.label = torch.arange(batch).reshape([-1 if d == place else 1 for d in range(len(shape))]).expand(shape)
        self.h = self.randn(*shape) * self.weight(*[n if d != place else 1 for d, n in enumerate(shape)])
        self.past: list[tuple[Tensor, Tensor]] = []
        self.note("start", tuple(shape))

    def whole(self, low: int, high: int) -> int:
        """A number between low and high, both included."""
        return self.random.randint(low, high)

    def pick(self, options: Sequence[T]) -> T:
        """One of several."""
        return self.random.choice(options)

    def shuffled(self, things: Iterable[T]) -> list[T]:
        """All of them, in some order."""
        listed = list(things)
        self.random.shuffle(listed)
        return listed

    def chance(self, one_in: int = 2) -> bool:
        """Now and then."""
        return self.whole(1, one_in) == one_in

    def note(self, *what: Any) -> None:
        """Write a line of the program's log."""
        self.log.append(" ".join(str(w) for w in what))

    def randn(self, *shape: int) -> Tensor:
        """Constants."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def randint(self, high: int, *shape: int) -> Tensor:
        """Constant indices."""
        return torch.randint(high, shape, generator=self.generator)

    def permutation(self, n: int) -> Tensor:
        """A constant order of n rows."""
        return torch.randperm(n, generator=self.generator)

    def leaf(self, *shape: int) -> Tensor:
        """A parameter, new or used before."""
        known = [p for p in self.params if p.shape == shape]
        if known and self.chance(3):
            self.note("  reuses a parameter", shape)
            return self.pick(known)
        p = self.randn(*shape) * 0.6
        if self.chance(8):
            self.note("  frozen", shape)
            return p
        self.params.append(p.requires_grad_())
        return p

    def weight(self, *shape: int) -> Tensor:
        """A parameter, or something computed from parameters alone."""
        kind = self.whole(0, 12)
        if kind == 1 and len(shape) >= 2:
            return self.leaf(*shape[:-2], shape[-1], shape[-2]).mT
        if kind == 2 and len(shape) >= 2:
            return self.leaf(*shape) + self.leaf(*shape[:-1], 1) @ self.leaf(*shape[:-2], 1, shape[-1])
        if kind == 3 and shape:
            v = self.leaf(*shape)
            return v / (v.square().sum(-1, keepdim=True) + 1).sqrt() * self.leaf(*shape[:-1], 1)
        if kind == 4 and shape:
            return self.leaf(shape[0] + 2, *shape[1:])[1:-1]
        if kind == 5 and shape:
            return self.leaf(4, *shape[1:])[self.randint(4, shape[0])]
        if kind == 6:
            return self.leaf(prod(shape)).view(shape)
        if kind == 7 and shape:
            return torch.cat([self.leaf(1, *shape[1:]).tanh(), self.leaf(*shape)])[: shape[0]]
        return self.leaf(*shape)

    def free(self, least: int = 1) -> list[int]:
        """Dims of at least this size along which the sample does not change."""
        return [d for d, n in enumerate(self.h.shape) if n >= least and not _changes(self.label, d)]

    def both(self, fn: Callable[[Tensor], Tensor]) -> bool:
        """Move elements about: the labels go with them."""
        self.h, self.label = fn(self.h), fn(self.label)
        return True

    def to_end(self, *dims: int) -> None:
        """Move these dims to the end, in this order."""
        rest = [d for d in range(self.h.ndim) if d not in dims]
        self.both(lambda t: t.permute(*rest, *dims) if t.ndim else t)

    def become(self, h: Tensor, mixed: int) -> bool:
        """The last `mixed` dims, which were free, now have other sizes."""
        keep = self.label.ndim - mixed
        label = self.label[(..., *[slice(1)] * mixed)].flatten(keep).select(-1, 0) if mixed else self.label
        self.label = label.reshape([*label.shape, *[1] * (h.ndim - keep)]).expand(h.shape)
        self.h = h
        return True

    def images(self, spatial: int) -> bool:
        """Bring the state into the form (N, C, *spatial) with free channels and spatial dims, if it can be."""
        free = self.free()
        if len(free) < spatial + 1:
            return False
        chosen = [free[i] for i in self.shuffled(range(len(free)))[: spatial + 1]]
        self.to_end(*chosen)
        rest = prod(self.h.shape[: -spatial - 1])
        return self.both(lambda t: t.reshape(rest, *t.shape[-spatial - 1 :]))

    def step(self, names: Sequence[str]) -> None:
        """Apply one random op, the first of a few that can be applied."""
        if any(self._applied(self.pick(names)) for _ in range(8)) and self.chance(4):
            self.past.append((self.h, self.label))

    def _applied(self, name: str) -> bool:
        h, label, count, lines = self.h, self.label, len(self.params), len(self.log)
        self.note(name)
        if not OPS[name](self) or self.h.numel() > MOST or self.h.ndim > 5:
            self.h, self.label = h, label
            del self.params[count:], self.log[lines:]
            return False
        assert self.h.shape == self.label.shape
        self.note("  ->", tuple(self.h.shape))
        return True


def _changes(label: Tensor, d: int) -> bool:
    return bool((label != label.narrow(d, 0, 1)).any()) if label.shape[d] > 1 else False


def random_losses(program: Program) -> Tensor:
    """One loss per sample from the state."""
    h, label, batch = program.h, program.label, program.batch
    value = h * program.randn(*h.shape) + 0.3 * h.square()
    changing = [d for d in range(h.ndim) if _changes(label, d)]
    kind = program.whole(0, 4)
    program.note("losses", kind)
    if len(changing) == 1 and kind == 0:
        (d,) = changing
        value, line = value.movedim(d, 0), label.movedim(d, 0).reshape(label.shape[d], -1)[:, 0]
        if torch.equal(line, torch.arange(batch)):
            return value.reshape(batch, -1).sum(1)
    flat, owner = value.reshape(-1), label.reshape(-1)
    if kind == 1:
        return (owner == torch.arange(batch).unsqueeze(1)).to(flat.dtype) @ flat
    if kind == 2:
        return flat.new_zeros(batch).scatter_add(0, owner, flat)
    if kind == 3 and batch and batch < 6:
        return torch.stack([flat[owner == i].sum() for i in range(batch)])
    return flat.new_zeros(batch).index_add(0, owner, flat)
