"""Functions of data, run again with some samples changed: on which sample does each element depend?

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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..graph.layout import NOBODY, Layout, labels, simplify
from ..trees import leaves, tree_map

Place = tuple[int, int]  # a step, and which of its outputs
_Values = dict[int, Tensor]
_MANY = 1024  # elements by which a dependence shows, in whatever function


class Way(NamedTuple):
    """How samples are changed."""

    kinds: tuple[str, ...]  # what stands for numbers, draw after draw
    indices: bool  # are integers and masks changed, too?


_NOISE = ("normal", "uniform", "normal", "uniform")
_WAYS = [Way(kinds, indices) for kinds in (_NOISE, ("data",)) for indices in (True, False)]


class Made:
    """In place of a tensor of data: the input, or the output of a step, of this number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"Made({self.number})"


class Stranger:
    """In place of a tensor that was not followed, such as an activation: any numbers will do."""

    def __init__(self, like: Tensor) -> None:
        self.shape, self.dtype, self.device = tuple(like.shape), like.dtype, like.device

    def __repr__(self) -> str:
        return f"Stranger{self.shape, self.dtype, self.device}"


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

    def run(self, values: _Values, random: torch.Generator) -> list[Tensor]:
        """Its outputs, for other data."""

        def value(leaf: Any) -> Any:
            if isinstance(leaf, Made):
                return values[leaf.number]
            return _noise(leaf, random, torch.randn) if isinstance(leaf, Stranger) else leaf

        args, kwargs = tree_map(value, (self.args, self.kwargs))
        given = [t for t in leaves((args, kwargs)) if isinstance(t, Tensor)]
        result = self.func(*args, **kwargs)
        returned = [t for t in leaves(result) if isinstance(t, Tensor)]
        if "empty" in getattr(self.func, "__name__", ""):
            returned = [t.zero_() for t in returned]
        return returned + [given[i] for i in self.changes]


@dataclass(frozen=True)
class Source:
    """An input of the call, and the sample of every element, in a form that broadcasts."""

    tensor: Tensor
    index: Tensor
    varies: bool  # is it certain where its samples lie? Else they are left as they are

    def values(self, kind: str, ints: bool, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """What stands for the input, and what for a changed one; integers stay what they are, or are exchanged."""
        x = self.tensor.detach()
        if not (x.is_floating_point() or x.is_complex()):
            return x, _exchanged(x, random) if ints else x
        if kind == "data":
            return x, _exchanged(x, random)
        make = torch.randn if kind == "normal" else torch.rand
        return _noise(x, random, make), _noise(x, random, make)


def _noise(like: Tensor | Stranger, random: torch.Generator, make: Callable[..., Tensor]) -> Tensor:
    noise = make(like.shape, generator=random).to(like.device, like.dtype)
    return torch.empty_like(like).copy_(noise) if isinstance(like, Tensor) else noise


def _exchanged(x: Tensor, random: torch.Generator) -> Tensor:
    """The same numbers elsewhere, so that indices stay valid; masks are made anew."""
    if x.dtype == torch.bool:
        return (torch.rand(x.shape, generator=random) < 0.5).to(x.device)
    order = torch.randperm(x.numel(), generator=random)
    return x.flatten()[order.to(x.device)].reshape(x.shape)


@lru_cache(maxsize=1024)
def codes(batch: int) -> tuple[int, tuple[int, ...]]:
    """How many bits are needed, and a code for every sample; none is part of another."""
    n = next(n for n in range(2, 64) if comb(n, n // 2) >= batch)
    return n, tuple(sum(1 << k for k in chosen) for chosen in islice(combinations(range(n), n // 2), batch))


class Unfit(Exception):
    """The functions cannot be run with samples changed in this way, or return something of another shape."""


@dataclass(frozen=True)
class Replay:
    """All functions of data of one call."""

    steps: Sequence[Step]
    sources: Sequence[Source]
    batch: int

    def needed(self, place: Place) -> list[int]:
        """The steps that an output is made by; all before it, if any of them changes data."""
        last, _ = place
        before = self.steps[: last + 1]
        if any(step.changes for step in before):
            return list(range(last + 1))
        makers = {number: i for i, step in enumerate(before) for number in step.numbers if number is not None}
        found, stack = {last}, [last]
        while stack:
            new = {makers[number] for number in self.steps[stack.pop()].uses() if number in makers} - found
            found |= new
            stack += new
        return sorted(found)

    def patterns(
        self,
        places: Sequence[Place],
        way: Way,
        only: int | None = None,
        enough: Callable[[Tensor], bool] = lambda pattern: pattern.numel() > _MANY,
    ) -> dict[Place, Tensor]:
        """In which runs each output changes, element by element; ``only`` one input's samples, if given.

        Functions that jump, as thresholds do, are given several draws, until all patterns are ``enough``.
        """
        found: dict[Place, Tensor] = {}
        for seed, kind in enumerate(way.kinds):
            try:
                drawn = self._patterns(places, kind, way.indices, seed, only)
            except Unfit:
                continue
            if any(drawn[place].shape != pattern.shape for place, pattern in found.items()):
                raise Unfit
            found = {place: pattern | found.get(place, 0) for place, pattern in drawn.items()}
            if all(map(enough, found.values())):
                break
        if not found:
            raise Unfit
        return found

    def _patterns(
        self, places: Sequence[Place], kind: str, indices: bool, seed: int, only: int | None
    ) -> dict[Place, Tensor]:
        wanted, order = set(places), sorted({i for place in places for i in self.needed(place)})
        random = torch.Generator("cpu").manual_seed(seed)
        values = [source.values(kind, indices, random) for source in self.sources]
        n, code = codes(self.batch)
        lookup = torch.tensor(code)
        once = self._run([base for base, _ in values], order, wanted)
        found = {place: torch.zeros(t.shape, dtype=torch.int32, device=t.device) for place, t in once.items()}
        for k in range(n):
            inputs = []
            for number, (source, (base, other)) in enumerate(zip(self.sources, values, strict=True)):
                chosen = (lookup[source.index] >> k & 1).bool().to(base.device)
                varies = source.varies and only in (None, number)
                inputs.append(torch.where(chosen, other, base) if varies else base)
            again = self._run(inputs, order, wanted)
            for place, pattern in found.items():
                if again[place].shape != pattern.shape:
                    raise Unfit
                pattern |= _differs(once[place], again[place]).int() << k
        return found

    def _run(self, inputs: Sequence[Tensor], order: Sequence[int], wanted: Collection[Place]) -> dict[Place, Tensor]:
        values: _Values = {number: x.clone() for number, x in enumerate(inputs)}
        last = {number: i for i in order for number in self.steps[i].uses()}
        random, found = torch.Generator("cpu").manual_seed(1), {}
        devices = list({x.device for x in inputs if x.device.type == "cuda"})
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(0)
            for i in order:
                outputs = self._outputs(self.steps[i], values, random)
                found.update({(i, k): t.clone() for k, t in enumerate(outputs) if (i, k) in wanted})
                made = zip(self.steps[i].numbers, outputs, strict=True)
                values.update({number: t for number, t in made if number is not None})
                for number in [number for number in values if last.get(number, -1) <= i]:
                    del values[number]
        return found

    def _outputs(self, step: Step, values: _Values, random: torch.Generator) -> list[Tensor]:
        try:
            outputs = step.run(values, random)
        except Exception as error:  # functions of noise may do anything
            raise Unfit from error
        if len(outputs) != len(step.numbers):
            raise Unfit
        return outputs

    def is_deterministic(self, place: Place, way: Way) -> bool:
        """Do equal data give equal outputs?"""
        random = torch.Generator("cpu").manual_seed(0)
        inputs = [source.values(way.kinds[-1], False, random)[0] for source in self.sources]
        one, two = (self._run(inputs, self.needed(place), {place})[place] for _ in range(2))
        return not bool(_differs(one, two).any())

    def shown(self, place: Place, fits: Callable[[Tensor], bool], only: int | None = None) -> tuple[Way, Tensor] | None:
        """The pattern of an output, for the first way to change samples that it shows; what ``fits`` is confirmed."""
        numbers = all(s.tensor.is_floating_point() or s.tensor.is_complex() for s in self.sources)
        for way in _WAYS:
            if numbers and not way.indices:
                continue
            try:
                enough = lambda pattern: pattern.numel() > _MANY or not fits(pattern)  # noqa: E731
                pattern = self.patterns([place], way, only, enough)[place]
            except Unfit:
                continue
            if bool(pattern.any()):
                return way, pattern
        return None


def _differs(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors are not the same; NaN is NaN."""
    if a.shape != b.shape:
        raise Unfit
    return (a != b) & ~((a != a) & (b != b))


def bits(pattern: Tensor) -> Tensor:
    """How many are set."""
    return sum((pattern >> k & 1 for k in range(31)), torch.zeros_like(pattern))


def depends_on_several(pattern: Tensor, batch: int) -> bool:
    """Does any element depend on more than one sample?"""
    n, _ = codes(batch)
    return bool((bits(pattern) > n // 2).any())


def fitting(pattern: Tensor, choices: Sequence[Layout], batch: int) -> list[Layout]:
    """The layouts by which every element depends on its own sample alone."""
    lookup = torch.tensor(codes(batch)[1], dtype=torch.int32)
    return [layout for layout in choices if _fits(pattern, lookup[labels(layout, tuple(pattern.shape))])]


def _fits(pattern: Tensor, code: Tensor) -> bool:
    return not bool((pattern & ~code.to(pattern.device)).any())


def decoded(pattern: Tensor, batch: int) -> Layout:
    """The sample of every element, as its pattern shows it, or nobody where it does not."""
    known = {code: sample for sample, code in enumerate(codes(batch)[1])}
    seen, where = pattern.cpu().unique(return_inverse=True)
    samples = torch.tensor([known.get(int(code), NOBODY) for code in seen])
    return simplify(samples[where], tuple(pattern.shape), batch)
