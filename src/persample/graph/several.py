"""Several losses per sample, of shape (B, K…): how they are taken apart, and the factors of some of their positions.

If no two losses meet on their way to the parameters, each is a sample of its own, and one backward serves all. Else
there is one backward for each of the K positions, from the losses of all samples there, through a graph that is read
and planned once. (The engine under ``vmap`` takes as long, would call nodes that it gets wrong or loops over, and shows
hooks tensors that do not outlive it.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from .._errors import UnsupportedError
from ..factors import Factor, Interleaved, interleave, split
from .entry import capture_from, check_independence, one_sample, planned, planned_anew
from .execute.by_rule import factor_by_rule
from .execute.capture import Sink
from .execute.plan import CapturePlan, plan
from .execute.watch import changed_in_place
from .layout import Block
from .ops.custom import is_known
from .ops.use import Use
from .read.nodes import is_opaque
from .read.notes import noting, unnoted
from .read.roots import Roots, slot_of
from .read.saved import in_checkpoint, memory, metadata, version
from .read.tape import Graph
from .remember import key_of

_MOST = 64  # graphs of which is remembered whether positions meet
_MEETING: OrderedDict[Hashable, bool] = OrderedDict()


def count_positions(losses: Tensor) -> int:
    """K, of losses (B, K…)."""
    return losses[:1].numel() if len(losses) else 0


def positions_meet(losses: Tensor, params: Mapping[str, Tensor]) -> bool:
    """Do the losses of one sample need a backward each? If not, each can be taken for a sample.

    Either is exact: what is remembered of a graph like this one can only cost time.
    """
    if not params or not losses.numel() or count_positions(losses) == 1 or losses.grad_fn is None:
        return False
    every = Roots([slot_of(losses)], [Block(losses.numel(), 1)], losses.numel(), [torch.ones_like(losses)])
    graph = every.read()
    tape = every.tape(params.values(), graph)
    if any(is_opaque(tape.node(n)) and not is_known(tape.node(n)) for n in tape.order):
        return True  # of which every single loss would have to be asked
    key = key_of(graph, every, list(params.values()))
    if key is not None and key in _MEETING:
        _MEETING.move_to_end(key)
        return _MEETING[key]
    with noting() as notes:
        meeting = _is_slow(losses, every, params, graph)
    if key is not None and (meeting or notes.certain):
        _MEETING[key] = meeting
        while len(_MEETING) > _MOST:
            _MEETING.popitem(last=False)
    return meeting


def _is_slow(losses: Tensor, roots: Roots, params: Mapping[str, Tensor], graph: Graph) -> bool:
    """Do any of these samples meet, or would one at a time have to go through a node?"""
    try:
        made, meeting, _ = planned_anew(roots, params, (), graph, independent=False)
        if meeting or not _shared_by_samples(made, losses, params, graph):
            return True
    except UnsupportedError:  # which a backward from fewer losses at a time may do without, or raises again
        return True
    return not _has_rules(made, roots)


def _shared_by_samples(made: CapturePlan, losses: Tensor, params: Mapping[str, Tensor], graph: Graph) -> bool:
    """Is nothing shared by the losses of one sample alone? The engine would not go through that, nor call its hooks."""
    shared = {n for n in made.samples.batched if not (made.tape.is_leaf(n) or made.tape.op(n).view)}
    if shared.isdisjoint(made.tape.fed):  # computed from parameters alone
        return True
    if len(losses) == 1:
        return False
    return shared <= plan(Roots.of_position(losses, 0), list(params.values()), graph=graph).samples.batched


def _has_rules(made: CapturePlan, roots: Roots) -> bool:
    """Is there a rule for every use, with the samples where they are? Rules are tried with cotangents of zeros."""
    flows = made.samples.flows
    for use in made.uses:
        number, site = use.nodes[0], made.samples.sites[use.nodes[0]]
        if len(use.nodes) > 1 or in_checkpoint(site.node):  # several have one; a checkpoint would be run for that
            continue
        there = made.present.get(number)
        layouts = made.samples.layouts(number) if there is None else there.layouts
        if not any(layouts):
            continue
        zeros = [torch.zeros((), dtype=m.dtype, device=m.device).expand(m.shape) for m in metadata(site.node)]
        given = [None if layout is None else zero for zero, layout in zip(zeros, layouts, strict=True)]
        with torch.no_grad(), unnoted():
            batch = roots.batch if there is None else len(there.samples)
            uses = [(Use(site, k, given, layouts, batch), flows[number, k], there) for k in use.outputs]
            lacking = any(factor_by_rule(*one) is None for one in uses)
        site.forget()
        if lacking:
            return False
    return True


class Positions:
    """The positions of losses (B, K…): one backward for each, through one graph."""

    def __init__(self, losses: Tensor, params: Mapping[str, Tensor], *, independent: bool) -> None:
        self.losses, self.params, self._independent = losses, params, independent
        self.count = count_positions(losses)
        self._graph: Graph | None = None  # but regions of reentrant checkpoints are opened for every backward
        self._said: set[str] = set()  # warnings, which are not repeated

    def _roots(self, position: int) -> Roots:
        roots = Roots.of_position(self.losses, position)
        if self._graph is None:
            graph = roots.read()
            self._graph = None if roots.regions.opened else graph
        return roots

    def activation_bytes(self) -> int:
        """About what one backward's factors take; of one sample, the gradients themselves."""
        if len(self.losses) == 1:
            return sum(p.nbytes for p in self.params.values())
        roots = self._roots(0)
        return planned(roots, self.params, graph=self._graph)[0].activations * roots.itemsize

    def capture(self, position: int, sink: Sink, *, retain_graph: bool) -> None:
        """Hand the factors of the losses at one position to ``sink``."""
        roots = self._roots(position)
        if roots.batch == 1:
            one_sample(roots, self.params, sink, retain_graph)
            return
        capture_from(
            roots,
            self.params,
            sink,
            retain_graph=retain_graph,
            independent=self._independent,
            graph=self._graph,
            said=self._said,
        )


def check_samples(losses: Tensor, params: Mapping[str, Tensor]) -> None:
    """Raise if one sample's losses depend on another sample; those of one sample may depend on each other."""
    layout = Block(len(losses), count_positions(losses))
    if len(losses) > 1 and layout.inner and losses.grad_fn is not None:
        check_independence(Roots([slot_of(losses)], [layout], len(losses), [torch.ones_like(losses)]), params)


class Collected:
    """The factors of several positions, until all have come."""

    def __init__(self) -> None:
        self.count = 0  # positions so far
        self._new_bytes = 0  # of what the factors of the last position are made from, without what others have, too
        self._factors: dict[tuple[str, ...], dict[int, Factor]] = {}
        self._before: set[int] = set()  # places in memory that positions before this one have had
        self._now: set[int] = set()
        self._watched: list[tuple[Tensor, int]] = []

    def sink(self) -> Sink:
        """Takes the factors of the next position."""
        self.count += 1
        self._new_bytes = 0
        self._before |= self._now
        self._now.clear()
        return partial(self._add, self.count - 1)

    @property
    def nbytes(self) -> int:
        """About how much memory the factors take, and again while they are joined."""
        return self.count * self._new_bytes * 3 // 2

    @property
    def bytes_with_another(self) -> int:
        """About how much memory one position more would make."""
        return self.nbytes // self.count * (self.count + 1)

    def _add(self, position: int, names: Sequence[str], factor: Factor) -> None:
        self._factors.setdefault(tuple(names), {})[position] = factor
        for t in factor.tensors:
            self._watched.append((t, version(t)))
            place = memory(t)
            self._now.add(place)
            self._new_bytes += 0 if place in self._before else t.nbytes

    def joined(self) -> Iterator[tuple[list[str], Factor]]:
        """Every parameter's factor of B·count samples, in the order of samples; each is let go of here."""
        for t, before in self._watched:
            if version(t) != before:  # a Function may have handed out the same memory twice
                raise changed_in_place(t)
        self._watched.clear()
        alone: dict[str, dict[int, Factor]] = {}
        while self._factors:
            names, parts = self._factors.popitem()
            if len(parts) == self.count:
                yield list(names), interleave([parts[place] for place in range(self.count)])
                continue
            for place, factor in parts.items():
                for name, part in zip(names, split(factor, len(names)), strict=True):
                    alone.setdefault(name, {})[place] = part
        for name, parts in alone.items():  # of which some positions have none, or as part of another whole
            yield [name], Interleaved.of(dict(sorted(parts.items())), self.count)
