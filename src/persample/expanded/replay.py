"""Functions of data, run again with some samples changed: on which sample does each element of a result depend?

Sample i has a code of n bits, of which half are set, and no other sample has the same. Run k changes the samples whose
bit k is set. The runs in which an element changes are its *pattern*: the code of the one sample it depends on, a part
of that where values happen to coincide, or more bits than any code has, where it depends on several.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, islice
from math import comb
from typing import Any

import torch
from torch import Tensor

from ..graph.layout import NOBODY, Layout, Shape, labels, simplify
from ..trees import leaves, tree_map
from .functions import name_of
from .samples import Finding

Place = tuple[int, int]  # a step, and which of its outputs
_MANY = 1024  # elements by which a dependence shows, in whatever function

# How samples are changed: what stands for numbers, draw after draw, as some functions jump and others want positive
# numbers; and whether integers and masks are changed, too. The next way is taken if a function cannot be run with such
# numbers, or shows no dependence on them.
_NOISE = ("normal", "uniform", "normal", "uniform")
_WAYS = [(kinds, indices) for kinds in (_NOISE, ("data",)) for indices in (True, False)]


class Made:
    """In place of a tensor of data: the input, or the output of a step, of this number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"Made({self.number})"


class Noise:
    """In place of a tensor that was not followed, such as an activation: any numbers will do."""

    def __init__(self, like: Tensor) -> None:
        self.shape, self.dtype, self.device = tuple(like.shape), like.dtype, like.device

    def __repr__(self) -> str:
        return f"Noise{self.shape, self.dtype, self.device}"


@dataclass(frozen=True)
class Step:
    """One function of data."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    numbers: tuple[int | None, ...]  # of its outputs: the tensors it returns, then those it changes
    changes: tuple[int, ...]  # which of its tensor arguments it changes in place
    by_shape: bool  # do shapes decide where it leaves the samples, and no indices?

    def uses(self) -> Iterator[int]:
        """The numbers of the data it is given."""
        return (leaf.number for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, Made))

    def run(self, values: Mapping[int, Tensor], random: torch.Generator) -> list[Tensor]:
        """Its outputs, for other data."""

        def value(leaf: Any) -> Any:
            if isinstance(leaf, Made):
                return values[leaf.number]
            return _noise(leaf, random, torch.randn) if isinstance(leaf, Noise) else leaf

        args, kwargs = tree_map(value, (self.args, self.kwargs))
        given = [t for t in leaves((args, kwargs)) if isinstance(t, Tensor)]
        try:
            returned = [t for t in leaves(self.func(*args, **kwargs)) if isinstance(t, Tensor)]
        except Exception as error:  # functions of noise may do anything
            raise Unfit from error
        if "empty" in getattr(self.func, "__name__", ""):
            returned = [t.zero_() for t in returned]
        outputs = returned + [given[i] for i in self.changes]
        if len(outputs) != len(self.numbers):
            raise Unfit
        return outputs


@dataclass(frozen=True)
class Source:
    """An input of the call, and the sample of every element, in a form that broadcasts."""

    tensor: Tensor
    index: Tensor
    varies: bool  # is it certain where its samples lie? Else they are left as they are

    def values(self, kind: str, indices: bool, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """What stands for the input, and what for a changed one; integers stay what they are, or are exchanged."""
        x = self.tensor.detach()
        if not (x.is_floating_point() or x.is_complex()):
            return x, _exchanged(x, random) if indices else x
        if kind == "data":
            return x, _exchanged(x, random)
        make = torch.randn if kind == "normal" else torch.rand
        one, other = (torch.empty_like(x).copy_(_noise(x, random, make)) for _ in range(2))
        return one, other


def _noise(like: Tensor | Noise, random: torch.Generator, make: Callable[..., Tensor]) -> Tensor:
    return make(like.shape, generator=random).to(like.device, like.dtype)


def _exchanged(x: Tensor, random: torch.Generator) -> Tensor:
    """A permutation of the numbers, so that indices stay valid; masks are drawn anew."""
    if x.dtype == torch.bool:
        return (torch.rand(x.shape, generator=random) < 0.5).to(x.device)
    order = torch.randperm(x.numel(), generator=random)
    return x.flatten()[order.to(x.device)].reshape(x.shape)


class Unfit(Exception):
    """The functions cannot be run with samples changed in this way, or return something of another shape."""


@dataclass(frozen=True)
class Replay:
    """All functions of data of one call."""

    steps: Sequence[Step]
    sources: Sequence[Source]
    batch: int
    choices: Callable[[Shape], Sequence[Layout]]  # the layouts that fit a shape

    def locate(self, place: Place) -> Finding:
        """Where the samples lie in the result of a function of data and weights, and whether they have met."""
        pattern = self._pattern(place)
        if pattern is None:
            return Finding()
        if not self.choices(tuple(pattern.shape)):  # a mean over samples, say
            return self._met_in_data(place) or self._without_batch(place)
        if fitting := self._fitting(pattern):
            return Finding(fitting[0]) if len(fitting) == 1 else Finding()
        alone = [self._pattern(place, only=number) for number in range(len(self.sources))]
        if len(alone) > 1 and all(one is None or self._fitting(one) for one in alone):
            return Finding()  # each input keeps samples apart: some is a table that is as long as the batch
        meet = self._depends_on_several(pattern)
        return Finding(None if meet else self._decoded(pattern), self._culprits(place), meet)

    def _met_in_data(self, place: Place) -> Finding | None:
        """Have samples met in the data that went into a result which has no batch?"""
        steps, last = self.steps, place[0]
        makers = {number: (i, k) for i, step in enumerate(steps[:last]) for k, number in enumerate(step.numbers)}
        given = [makers[number] for number in steps[last].uses() if number in makers]
        for made, pattern in self._patterns([*given, place]).items():
            if made != place and self._depends_on_several(pattern):
                return Finding(None, self._culprits(made), meet=True)
        return None

    def _without_batch(self, place: Place) -> Finding:
        """What the first input, whose samples are certain, has to do with a result that has no batch."""
        pattern = self._pattern(place, only=0)
        if pattern is None:
            return Finding()
        layout = None if self._depends_on_several(pattern) else self._decoded(pattern)
        is_of_one = layout is not None and len(labels(layout, tuple(pattern.shape)).unique()) == 1
        return Finding() if is_of_one else Finding(layout, name_of(self.steps[place[0]].func))

    def _culprits(self, place: Place) -> str:
        """Of the functions that lead to a result, the first in which samples meet, and the first that moves them."""
        before = [(i, k) for i in self.needed(place) if i != place[0] for k in range(len(self.steps[i].numbers))]
        patterns = self._patterns([*before, place])
        patterns.pop(place, None)
        meet = [i for (i, _), pattern in patterns.items() if self._depends_on_several(pattern)]
        moved = [i for (i, _), p in patterns.items() if len(p[p != 0].unique()) > 1 and not self._fitting(p)]
        first = sorted({*sorted(meet)[:1], *sorted(moved)[:1]}) or [place[0]]
        return ", ".join(name_of(self.steps[i].func) for i in first)

    def needed(self, place: Place) -> list[int]:
        """The steps that an output is made by; all before it, if any of them changes data."""
        last, _ = place
        before = self.steps[: last + 1]
        if any(step.changes for step in before):
            return list(range(last + 1))
        makers = {number: i for i, step in enumerate(before) for number in step.numbers if number is not None}
        steps, stack = {last}, [last]
        while stack:
            new = {makers[number] for number in self.steps[stack.pop()].uses() if number in makers} - steps
            steps |= new
            stack += new
        return sorted(steps)

    def _pattern(self, place: Place, only: int | None = None) -> Tensor | None:
        """The pattern of one output, or None if it shows no dependence."""
        return self._patterns([place], only).get(place)

    def _patterns(self, places: Sequence[Place], only: int | None = None) -> dict[Place, Tensor]:
        """In which runs each output changes, element by element; ``only`` one input's samples, if given.

        Samples are changed in the first way that shows a dependence of the last output.
        """
        numbers = all(s.tensor.is_floating_point() or s.tensor.is_complex() for s in self.sources)
        for kinds, indices in _WAYS:
            patterns = {} if numbers and not indices else self._drawn(places, kinds, indices, only)
            if patterns and bool(patterns[places[-1]].any()):
                return patterns
        return {}

    def _drawn(
        self, places: Sequence[Place], kinds: Sequence[str], indices: bool, only: int | None
    ) -> dict[Place, Tensor]:
        """The patterns of several draws together; nothing if no draw can be run, or shapes are not always the same.

        One draw is enough for large patterns, or for the one wanted if no layout fits it.
        """
        patterns: dict[Place, Tensor] = {}
        for seed, kind in enumerate(kinds):
            try:
                drawn = self._draw(places, kind, indices, seed, only)
            except Unfit:
                continue
            if any(drawn[place].shape != pattern.shape for place, pattern in patterns.items()):
                return {}
            patterns = {place: pattern | patterns.get(place, 0) for place, pattern in drawn.items()}
            large = all(pattern.numel() > _MANY for pattern in patterns.values())
            if large or (len(places) == 1 and not self._fitting(patterns[places[0]])):
                break
        return patterns

    def _draw(
        self, places: Sequence[Place], kind: str, indices: bool, seed: int, only: int | None
    ) -> dict[Place, Tensor]:
        """The patterns for one draw of numbers."""
        order = sorted({i for place in places for i in self.needed(place)})
        random = torch.Generator("cpu").manual_seed(seed)
        values = [source.values(kind, indices, random) for source in self.sources]
        n, codes = _codes(self.batch)
        once = self._run([base for base, _ in values], order, places)
        patterns = {place: torch.zeros(t.shape, dtype=torch.int32, device=t.device) for place, t in once.items()}
        for k in range(-1, n):
            inputs = []
            for number, (source, (base, other)) in enumerate(zip(self.sources, values, strict=True)):
                changed = (codes[source.index] >> max(k, 0) & 1).bool().to(base.device)
                varies = k >= 0 and source.varies and only in (None, number)
                inputs.append(torch.where(changed, other, base) if varies else base)
            again = self._run(inputs, order, places)
            for place, pattern in patterns.items():
                differs = _differs(once[place], again[place])
                if k < 0 and bool(differs.any()):
                    raise Unfit  # equal data give other outputs
                pattern |= differs.int() << max(k, 0)
        return patterns

    def _run(self, inputs: Sequence[Tensor], order: Sequence[int], wanted: Collection[Place]) -> dict[Place, Tensor]:
        """The wanted outputs of all steps in order, each of which gets the same random numbers in every run."""
        values = {number: x.clone() for number, x in enumerate(inputs)}
        last = {number: i for i in order for number in self.steps[i].uses()}
        random, results = torch.Generator("cpu").manual_seed(1), {}
        devices = list({x.device for x in inputs if x.device.type == "cuda"})
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(0)
            for i in order:
                outputs = self.steps[i].run(values, random)
                results.update({(i, k): t.clone() for k, t in enumerate(outputs) if (i, k) in wanted})
                made = zip(self.steps[i].numbers, outputs, strict=True)
                values.update({number: t for number, t in made if number is not None})
                for number in [number for number in values if last.get(number, -1) <= i]:
                    del values[number]
        return results

    def _depends_on_several(self, pattern: Tensor) -> bool:
        """Does any element depend on more than one sample?"""
        n, _ = _codes(self.batch)
        bits = sum((pattern >> k & 1 for k in range(n)), torch.zeros_like(pattern))
        return bool((bits > n // 2).any())

    def _fitting(self, pattern: Tensor) -> list[Layout]:
        """The layouts by which every element depends on its own sample alone."""
        (_, codes), shape = _codes(self.batch), tuple(pattern.shape)
        own = [(layout, codes[labels(layout, shape)].to(pattern.device)) for layout in self.choices(shape)]
        return [layout for layout, code in own if not bool((pattern & ~code).any())]

    def _decoded(self, pattern: Tensor) -> Layout:
        """The sample of every element, as its pattern shows it, or nobody where it does not."""
        known = {int(code): sample for sample, code in enumerate(_codes(self.batch)[1])}
        seen, where = pattern.cpu().unique(return_inverse=True)
        samples = torch.tensor([known.get(int(code), NOBODY) for code in seen])
        return simplify(samples[where], tuple(pattern.shape), self.batch)


@lru_cache(maxsize=1024)
def _codes(batch: int) -> tuple[int, Tensor]:
    """How many bits are needed, and a code for every sample; none is part of another."""
    n = next(n for n in range(2, 32) if comb(n, n // 2) >= batch)
    chosen = islice(combinations(range(n), n // 2), batch)
    return n, torch.tensor([sum(1 << k for k in bits) for bits in chosen], dtype=torch.int32, device="cpu")


def _differs(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors are not the same; NaN is NaN."""
    if a.shape != b.shape:
        raise Unfit
    return (a != b) & ~((a != a) & (b != b))
