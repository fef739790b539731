"""Ops that all samples share and that keep no structure: the cotangents of a few samples at a time go through them.

Nothing is done when the engine is done: what comes to such an op is kept in the form it has, and so is the way from
there to a parameter. Whatever is asked of the parameter's gradients then goes that way, as often as need be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from ...distributed.wrappers import passes_on
from ...factors import Dense, Factor, Pulled, Sum
from ...kernels.norms import wide
from ..layout import Shape
from ..read.nodes import is_opaque
from ..read.saved import in_checkpoint, in_own_task, in_plain_task, metadata
from ..read.site import Site
from .fallback import loops
from .pullback import kept, pull

_SMALL = 2**22  # bytes of a stack that is written out at once: a portion is no cheaper, and nothing is said of it
_TINY = 2**16  # the same whatever memory there is: beside what gradients are made of, it does not count


class Step:
    """One op on the way, and what comes to each of its outputs."""

    __slots__ = ("inputs", "site")

    def __init__(self, site: Site, factors: Sequence[Factor | None]) -> None:
        self.site = site
        self.inputs = [[] if factor is None else list(_sources(factor)) for factor in factors]

    def sizes(self) -> dict[int, int]:
        """The bytes of one sample's gradient for each of the op's operands."""
        every = {k: self.site.metadata(k) for k, _ in self.site.outputs}
        return {k: prod(self.site.target(k)) * meta.dtype.itemsize for k, meta in every.items()}


Source = Factor | tuple[Step, int]  # gradients in some form, or what an op makes of others for one of its operands


def _sources(factor: Factor) -> Iterator[Source]:
    """The terms of a sum one by one, if some of them are on their way already."""
    terms = factor.terms if isinstance(factor, Sum) and is_on_its_way(factor) else [factor]
    for term in terms:
        if isinstance(term, Pulled) and isinstance(term.through, Way):
            yield from term.through.ends
        else:
            yield term


def is_on_its_way(factor: Factor | None) -> bool:
    """Are these gradients, or some terms of theirs, written out in portions?"""
    terms = factor.terms if isinstance(factor, Sum) else [factor]
    return any(isinstance(term, Pulled) for term in terms)


class Way:
    """From gradients in some form to those at one place, through all ops in between; each is called once."""

    def __init__(self, ends: Sequence[Source]) -> None:
        self.ends = list(ends)
        self.steps = _in_order(self.ends)
        every = [source for step in self.steps for sources in step.inputs for source in sources] + self.ends
        found = {id(source): source for source in every if isinstance(source, Factor)}
        self.origins: list[Factor] = list(found.values())
        self._places = {key: place for place, key in enumerate(found)}
        self._uses = Counter(map(self._key, every))
        self._in_checkpoint = any(in_checkpoint(step.site.node) for step in self.steps)

    def _key(self, source: Source) -> object:
        """What a result is kept under: the place of an origin, or an op and which of its operands."""
        return self._places[id(source)] if isinstance(source, Factor) else source

    def __call__(self, write: Callable[[int], Tensor]) -> Tensor:
        """The sum of what comes to the end, for the samples of which ``write`` writes out the origins."""
        if not self._in_checkpoint or in_plain_task():
            return self._go(write)
        results: list[Tensor] = []
        in_own_task(lambda: results.append(self._go(write)))  # one recomputation of each region for all ops
        return results[0]

    @torch.no_grad()
    def _go(self, write: Callable[[int], Tensor]) -> Tensor:
        left, results = self._uses.copy(), dict[object, Tensor]()

        def take(sources: Sequence[Source]) -> Tensor | None:
            total: Tensor | None = None
            for key in map(self._key, sources):
                if isinstance(key, int) and key not in results:
                    results[key] = write(key)
                left[key] -= 1
                value = results.get(key) if left[key] else results.pop(key, None)
                if value is not None:
                    total = value if total is None else total + value
            return total

        for step in self.steps:
            stacks = [take(sources) for sources in step.inputs]
            count = next((len(stack) for stack in stacks if stack is not None), None)
            if count is not None:
                factors = [None if stack is None else Dense(stack) for stack in stacks]
                made, _ = pull(step.site, factors, count)
                step.site.forget()
                results.update({(step, k): f.stack() for k, f in made.items() if left[step, k]})
        total = take(self.ends)
        assert total is not None
        return total

    def bytes_at_once(self) -> int:
        """About how much memory one sample needs at most; an op may need as much again as it is given or returns."""
        sizes: dict[object, int] = {
            place: origin.numel * origin.dtype.itemsize for place, origin in enumerate(self.origins)
        }
        left, live, most = self._uses.copy(), set[object](), 0
        for step in self.steps:
            given = {self._key(source) for sources in step.inputs for source in sources}
            made = {(step, k): size for k, size in step.sizes().items() if (step, k) in left}
            sizes.update(made)
            live |= given | made.keys()
            own = max(sum(sizes[key] for key in given), sum(made.values()))
            most = max(most, own + sum(sizes[key] for key in live))
            left.subtract(self._key(source) for sources in step.inputs for source in sources)
            live = {key for key in live if left[key] > 0}
        ends = [sizes[self._key(end)] for end in self.ends]
        return max(most, sum(ends) + (max(ends) if len(ends) > 1 else 0))

    def lets_sums_pass(self) -> bool:
        """Are all ops PyTorch's own, whose backwards are linear, and nothing in half precision?"""
        dtypes = [m.dtype for step in self.steps for m in metadata(step.site.node)]
        if any(dtype != wide(dtype) for dtype in [*dtypes, *[origin.dtype for origin in self.origins]]):
            return False
        return not any(is_opaque(step.site.node) or step.site.op.in_place for step in self.steps)

    def names(self) -> list[str]:
        """The ops from the parameter on, each once."""
        return list(dict.fromkeys(step.site.name for step in reversed(self.steps)))


def _in_order(ends: Iterable[Source]) -> list[Step]:
    """All ops that lead to the ends, each after those that it is given something by."""
    order: dict[Step, None] = {}
    pending = [(source[0], False) for source in ends if not isinstance(source, Factor)]
    while pending:
        step, ready = pending.pop()
        if step in order:
            continue
        if ready:
            order[step] = None
            continue
        above = [source[0] for sources in step.inputs for source in sources if not isinstance(source, Factor)]
        pending += [(step, True), *[(one, False) for one in above]]
    return list(order)


def _along(ends: Sequence[Source], shape: Shape, dtype: torch.dtype, room: int) -> Pulled:
    """The gradients to which these lead."""
    way = Way(ends)
    return Pulled(way.origins, way, shape, dtype, each=way.bytes_at_once(), room=room, sums_pass=way.lets_sums_pass())


def pull_in_portions(
    site: Site, factors: Sequence[Factor | None], batch: int, room: int
) -> tuple[dict[int, Factor], bool]:
    """`pull`, but what would be written out for all samples is left to be written out when it is asked for."""
    if passes_on(site.node):
        return kept(site, factors), False
    under_way = any(map(is_on_its_way, factors))
    found = {} if under_way else kept(site, factors)
    step = Step(site, factors)
    sizes = {k: size * batch for k, size in step.sizes().items() if k not in found}
    if not sizes:
        return found, False
    given = sum(batch * f.numel * f.dtype.itemsize for f in factors if f is not None)
    small = max(min(room, _SMALL), _TINY)
    if not under_way and max(given, *sizes.values()) <= small:
        return pull(site, factors, batch)
    for k, size in sizes.items():
        pulled = _along([(step, k)], site.target(k), site.metadata(k).dtype, room)
        found[k] = Dense(pulled.stack()) if size <= small else pulled
    return found, loops(site) and site.op.lift is None and site.op.pull is None


def gathered(factor: Factor) -> Factor:
    """A sum of which some terms are on their way, as one such factor: ops that lead to several are called once."""
    if not isinstance(factor, Sum) or not is_on_its_way(factor):
        return factor
    room = max(term.room for term in factor.terms if isinstance(term, Pulled))
    return _along(list(_sources(factor)), factor.shape, factor.dtype, room)


def in_words(pulled: Pulled) -> str | None:
    """What to say of a parameter's gradients that are on their way.

    Nothing (None), if there is room for all of them at once, and if they are small anyway: biases and scales.
    """
    assert isinstance(pulled.through, Way)
    if pulled.stack_bytes <= max(pulled.room, _SMALL):
        return None
    return (
        f"is used through {', '.join(pulled.through.names())}, of which persample knows no gradients that are shorter "
        f"than one of shape {pulled.shape} for every sample. They are exact, but written out, {pulled.at_a_time} of "
        f"{pulled.batch} at a time: all of them take {pulled.stack_bytes / 2**20:,.1f} MB, and max_memory leaves "
        f"{pulled.room / 2**20:,.1f} MB. Sums, products with matrices, scales and masks of parameters are not written "
        f"out; a larger max_memory is faster where several things are asked for."
    )
