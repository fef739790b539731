"""One backward that stops at every parameter's use and keeps the factor instead of the sum.

The engine runs once. Cotangents are taken where samples meet what they share, each is turned into a factor, and there
is one way from there to a parameter: a factor is added to those of the shared tensor that the op used, and as soon as
no other is to come, their sum goes on to what that tensor was computed from. Views and casts are passed at once, with
the factor's structure; any other op waits until the engine is done, and is then given the cotangents of all samples, or
of a few at a time. A parameter's factor is handed over as soon as it is complete, so that it need not outlive the
backward.

The engine is not asked for summed weight gradients; fused LSTM nodes, which compute all or nothing, are spared them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from weakref import ref

import torch
from torch import Tensor

from ..._errors import UnsupportedError
from ...distributed.tensor_parallel import wholes
from ...factors import Dense, Factor, Masked, Part, Pulled, combine, placed, split
from ...kernels.certificates import is_traced
from ...kernels.differentiable import carrying_mode, grad_mode
from ...kernels.streams import Streams
from ..compiled.entry import Whole, whole
from ..layout import Block, Layout, Present, together
from ..ops.use import Use
from ..read import saved
from ..read.compiled import is_compiled
from ..read.library import unspent
from ..read.nodes import NodeSlot
from ..read.roots import Roots
from ..read.site import Flow, Site
from ..read.tape import Slot
from .bundles import Bundle, joined, parts_as_one
from .by_rule import factor_by_rule, masked
from .fallback import push_masked
from .plan import CapturePlan
from .portions import gathered, in_words, is_on_its_way, pull_in_portions
from .pullback import lifted, pull
from .watch import Births, Gathering, changed_in_place

# Called with the factor of one parameter, or of several: their samples are one parameter's after another's.
Sink = Callable[[Sequence[str], Factor], None]
# Called with all factors of a call as a function of tensors; if it returns True, the sink is given none.
AtOnce = Callable[[Whole], bool]


class Capture:
    """The state of one backward."""

    def __init__(
        self,
        plan: CapturePlan,
        roots: Roots,
        params: Mapping[str, Tensor],
        sink: Sink,
        ordinary: Sequence[NodeSlot] = (),
        at_once: AtOnce | None = None,
        room: int | None = None,
    ) -> None:
        self.at_once = at_once
        self.room = room  # bytes for gradients behind ops that keep no structure; None: all are written out at once
        self.plan, self.tape, self.samples, self.roots = plan, plan.tape, plan.samples, roots
        self.sink = sink
        self.ordinary = ordinary  # where ordinary gradients are wanted
        self.gradients: tuple[Tensor | None, ...] = (None,) * len(ordinary)  # and those gradients
        self.count = len(params)
        self.names: dict[int, list[str]] = {}  # of a parameter, by the id of its tensor
        for name, p in params.items():
            self.names.setdefault(id(p), []).append(name)
        self.terms: dict[Slot | None, list[Factor]] = {}  # the contributions that have come to shared tensors
        self.waiting = dict(plan.waiting)  # how many are still to come
        self.held: list[int] = []  # complete, but to be pulled back when the engine is done
        self.pending = {use.nodes[0]: use for use in plan.uses if len(use.nodes) == 1}  # no cotangents have come yet
        self.slow: dict[tuple[str, str], str] = {}  # op and parameter -> what to warn of
        self.slow_below: dict[tuple[str, str], str] = {}  # what to warn of for ops that are given B cotangents
        self.record: list[tuple[Site, int, str]] = []  # which use was handled how
        self.watched: list[tuple[ref[Tensor], int]] = []  # tensors that factors are made of, and their versions

    def run(self, retain_graph: bool) -> None:
        """Run the backward; the sink has got every factor when it returns."""
        several = [use for use in self.plan.uses if len(use.nodes) > 1]
        for use in several:
            self._watch([t for one in use.saved for t in one.values() if t is not None])
        gathered = {
            use.nodes: Gathering([self.tape.node(n) for n in use.nodes], use.watch) for use in several if use.passed
        }
        streams = Streams.of_call()
        births = Births(self.plan.sources, self.tape.graph)
        handles = births.hook()
        for number, use in self.pending.items():
            if use.passed:
                consume = streams.noting(carrying_mode(partial(self._consume, number)))
                handles.append(self.tape.node(number).register_prehook(consume))
        for gathering in gathered.values():
            handles += gathering.hook(streams)
        try:
            cotangents = self._backward(retain_graph)
        finally:
            for handle in handles:
                handle.remove()
        streams.join()
        births.check(cotangents)
        self._check_unchanged()
        with grad_mode():
            for use in several:
                arrived = gathered[use.nodes].end() if use.passed else use.taken_from(cotangents)
                if use.by_samples:
                    self._consume_by_samples(use, arrived)
                else:
                    self._consume_several(use, arrived)
            if any(saved.in_checkpoint(self.tape.node(number)) for number in self._left()):
                saved.in_own_task(lambda: self._finish(cotangents))  # one recomputation of each region for all of them
            else:
                self._finish(cotangents)

    def _backward(self, retain_graph: bool) -> dict[Slot, Tensor]:
        requested = self.plan.requested
        if not requested and not self.ordinary:
            return {}
        places = [self.tape.graph.at(slot) for slot in requested]
        with unspent(map(self.tape.node, self.tape.order) if retain_graph else ()):
            grads = self.roots.backward([*places, *self.ordinary], retain_graph=retain_graph)
        self.gradients = grads[len(requested) :]
        return {slot: g for slot, g in zip(requested, grads, strict=False) if g is not None}

    def _watch(self, tensors: Iterable[Tensor]) -> None:
        """These are to stay as they are until the backward is over, or nobody has them any more."""
        self.watched += [(ref(t), saved.version(t)) for t in tensors]

    def _check_unchanged(self) -> None:
        """Factors are made of cotangents and saved tensors, which hooks and custom Functions may change in place."""
        for reference, version in self.watched:
            t = reference()
            if t is not None and saved.version(t) != version:
                raise changed_in_place(t)

    # From a use to its factors.

    def _consume(self, number: int, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None] | None:
        """Turn the cotangents of one op into factors of the shared tensors that it used.

        What comes back, if anything, the engine is to give the node instead.
        """
        use = self.pending.pop(number, None)
        if use is None:
            return None
        there = self.plan.present.get(number)
        layouts = self.samples.layouts(number) if there is None else there.layouts
        cotangents = wholes(None if layout is None else g for g, layout in zip(grads, layouts, strict=True))
        site, factors, instead = self.samples.sites[number], dict[int, Factor](), None
        if any(g is not None for g in cotangents):
            known = [None if g is None else layout for g, layout in zip(cotangents, layouts, strict=True)]
            if self._is_taken_at_once(site, use, cotangents, known):
                return None
            self._read_ahead(site)
            batch = self.samples.batch if there is None else len(there.samples)
            factors = self._factors(site, use.outputs, cotangents, known, batch, there)
            if site.op.instead is not None:
                instead = site.op.instead(site, grads, self.ordinary)
            site.forget()
        for outputs, factor in parts_as_one(self.plan, site, {k: factors.get(k) for k in use.outputs}):
            self._add([site.edges[k] for k in outputs], factor)
        return instead

    def _is_taken_at_once(
        self, site: Site, use: Bundle, cotangents: Sequence[Tensor | None], layouts: Sequence[Layout | None]
    ) -> bool:
        """Has somebody taken all factors of the call at once, where one compiled region makes them?"""
        if self.at_once is None or self.ordinary or self.count != len(use.outputs):
            return False
        common = self.plan.common
        if common.one_region is None:
            common.one_region = self._is_one_region(site, use)
        if not common.one_region:
            return False
        offered = whole(site, cotangents, layouts, lambda k: self._names(site.edges[k][0])[0], common)  # type: ignore[index]
        return offered is not None and self.at_once(offered)

    def _is_one_region(self, site: Site, use: Bundle) -> bool:
        """Does one compiled region, at which the engine stops, make all that comes to every parameter?"""
        if len(self.plan.uses) != 1 or use.passed or not is_compiled(site.node) or saved.in_checkpoint(site.node):
            return False
        leaves = [site.edges[k][0] for k in use.outputs]  # type: ignore[index]
        shared = all(self.samples.flows[site.index, k] is Flow.SHARED for k in use.outputs)
        return shared and all(self.tape.is_leaf(leaf) and self.plan.waiting[leaf] == 1 for leaf in leaves)

    def _consume_several(self, use: Bundle, cotangents: Mapping[int, Tensor]) -> None:
        """Turn the cotangents of ops that are alike, by their places in the bundle, into factors as if of one op."""
        if not cotangents:
            return
        site, (layout, *_) = self.samples.sites[use.nodes[0]], self.samples.layouts(use.nodes[0])
        assert isinstance(layout, Block)
        rounds = prod(site.shapes[0]) // (layout.batch * layout.inner)
        site.recomputed = use.saved_rows(list(cotangents), rounds)
        g, layout = joined(list(cotangents.values()), rounds), Block(len(cotangents) * layout.batch, layout.inner)
        factors = self._factors(site, use.outputs, [g], [layout], layout.batch)
        site.forget()
        for k in use.outputs:
            self._add([self.tape.edges[use.nodes[place]][k] for place in cotangents], factors[k])

    def _consume_by_samples(self, use: Bundle, cotangents: Mapping[int, Tensor]) -> None:
        """Turn the cotangents of ops that use the same tensors, each with some of the samples, into one factor."""
        factors: dict[int, Factor] = {}
        if cotangents:
            site, places = self.samples.sites[use.nodes[0]], list(cotangents)
            g = torch.cat(list(cotangents.values()))
            layout, there = together([self.plan.present[use.nodes[place]] for place in places], tuple(g.shape))
            site.recomputed = use.saved_rows(places, 1)
            factors = self._factors(site, use.outputs, [g], [layout], layout.batch)
            site.forget()
            factors = {k: placed(there, factor, self.samples.batch) for k, factor in factors.items()}
        for k in use.outputs:
            self._add([self.tape.edges[node][k] for node in use.nodes], factors.get(k))

    def _factors(
        self,
        site: Site,
        outputs: Sequence[int],
        cotangents: Sequence[Tensor | None],
        layouts: Sequence[Layout | None],
        batch: int,
        there: Present | None = None,
    ) -> dict[int, Factor]:
        """By rule where there is one for this layout, the rest by pushing sample after sample through the node.

        Where samples are missing, batch and layouts are those of the ones that are ``there``.
        """
        factors: dict[int, Factor] = {}
        for k in outputs:
            factor = factor_by_rule(Use(site, k, cotangents, layouts, batch), self.samples.flows[site.index, k], there)
            if factor is not None:
                self._watch(factor.whole.tensors if isinstance(factor, Part) else factor.tensors)
                self.record.append((site, k, f"rule: {type(factor).__name__}"))
                factors[k] = self._placed(factor, there)
        slow = [k for k in outputs if k not in factors]
        if slow and there is None and batch != self.samples.batch:
            raise LookupError(f"the rule for {site.name} gave nothing for uses that are alike")
        if slow:
            for k in slow:
                self._note_slow(site, k, self.slow)
            for k, value in push_masked(site, cotangents, layouts, batch, slow).items():
                factors[k] = self._placed(Dense(value), there)
        return factors

    def _placed(self, factor: Factor, there: Present | None) -> Factor:
        """The factor of all samples from one of those that are there."""
        if there is None or isinstance(factor, Masked):
            return factor
        return placed(there.samples, factor, self.samples.batch)

    def _read_ahead(self, site: Site) -> None:
        """Read what a checkpointed node saved; and, as its region is there, what the engine will not come to in it."""
        if site.recomputed or not saved.in_checkpoint(site.node):
            return
        site.recomputed = saved.read_ahead(site.node)
        for number, use in self.pending.items():
            if not use.passed and saved.is_recomputed(self.tape.node(number)):
                self.samples.sites[number].recomputed = saved.read_last(self.tape.node(number))

    # From a factor to the parameter.

    def _add(self, slots: Sequence[Slot | None], factor: Factor | None) -> None:
        """A contribution to a shared tensor has come, or turned out to be nothing.

        Several slots are of tensors that are alike and have no other use: their samples are one after another's.
        """
        arrived = [(slots, factor)]
        while arrived:
            slots, factor = arrived.pop()
            nodes = [slot[0] for slot in slots if slot is not None]
            for node in nodes:
                self.waiting[node] -= 1
            nodes = list(dict.fromkeys(nodes))  # several uses of one tensor may have come as one
            if factor is not None:
                self.terms.setdefault(slots[0], []).append(factor)
            if self.waiting[nodes[0]] == 0:
                arrived += self._complete(nodes)

    def _complete(self, nodes: Sequence[int]) -> list[tuple[Sequence[Slot | None], Factor | None]]:
        """All contributions have come: hand the factor over, or pass it on through a view or cast, or hold it."""
        first = nodes[0]
        if self.tape.is_leaf(first):
            self._deliver(nodes, self._take((first, 0)))
            return []
        site = self.samples.sites[first]
        if not any((first, nr) in self.terms for nr in range(len(site.shapes))):
            return [([slot], None) for _, slot in site.outputs]
        if len(site.edges) == len(site.shapes) == 1:
            factor = self._take((first, 0))
            assert factor is not None
            passed = None if is_on_its_way(factor) else lifted(site, factor)
            if passed is not None:
                return [([self.tape.edges[node][0] for node in nodes], passed)]
            self.terms[first, 0] = [factor]
        self.held.append(first)
        return []

    def _left(self) -> list[int]:
        """The ops that are called or read when the engine is done."""
        waiting = [n for n, count in self.waiting.items() if count and not self.tape.is_leaf(n)]
        return [*self.pending, *self.held, *waiting]

    def _finish(self, cotangents: dict[Slot, Tensor]) -> None:
        """Take what the engine returned, and pull back what was held."""
        for number in list(self.pending):
            count = len(self.tape.shapes(number))
            self._consume(number, [cotangents.pop((number, nr), None) for nr in range(count)])
        for slot in self.plan.requested:
            if self.tape.is_leaf(slot[0]):
                g, layout = cotangents.get(slot), self.samples.cotangents[slot]
                assert isinstance(layout, Layout)
                self._add([slot], None if g is None else masked(g, layout))
        while self.held:
            self._pull(self.samples.sites[self.held.pop()])

    def _pull(self, site: Site) -> None:
        """Through an op that all samples share: the cotangents of all samples, or of a few at a time."""
        taken = [self._take((site.index, nr)) for nr in range(len(site.shapes))]
        if self.room is None:
            factors, slow = pull(site, taken, self.samples.batch)
        else:
            factors, slow = pull_in_portions(site, taken, self.samples.batch, self.room)
        site.forget()
        for k, slot in site.outputs:
            if slow and k in factors:
                self._note_slow(site, k, self.slow_below)
            self._add([slot], factors.get(k))

    def _take(self, slot: Slot) -> Factor | None:
        """The sum of all contributions, of which some may have waited."""
        terms = self.terms.pop(slot, None)
        if terms is None:
            return None
        if len(terms) > 1:
            self._check_unchanged()
        return combine(terms)

    def _deliver(self, leaves: Sequence[int], factor: Factor | None) -> None:
        """Hand over the factor of one parameter, or of several; each under all of its names."""
        if factor is None:
            return
        names = [self._names(leaf) for leaf in leaves]
        factor = gathered(factor)
        if isinstance(factor, Pulled) and (words := in_words(factor)) is not None:
            for name in names[0]:
                self.slow_below.setdefault(("portions", name), f"parameter {name!r} {words}")
        if all(len(each) == 1 for each in names):
            self.sink([name for (name,) in names], factor)
            return
        for each, part in zip(names, split(factor, len(leaves)), strict=True):
            for name in each:
                self.sink([name], part)

    def _names(self, leaf: int) -> list[str]:
        return self.names[id(self.tape.graph.leaves[leaf])]

    def _note_slow(self, site: Site, k: int, notes: dict[tuple[str, str], str]) -> None:
        """Remember to say that this op was slow, once per parameter; a graph would hold it once per sample."""
        if is_traced():
            raise UnsupportedError(f"samples go through {site.name} one at a time, as there is no rule or data decide")
        self.record.append((site, k, f"fallback: {self.samples.batch} calls of the node"))
        slot = site.edges[k]
        assert slot is not None
        leaves = [n for n in self.tape.below(slot[0]) if self.tape.is_leaf(n)]
        for name in sorted([name for leaf in leaves for name in self._names(leaf)]):
            notes.setdefault(
                (site.name, name),
                f"persample has no fast rule for {site.memo.get('unread', site.name)} on its way to parameter {name!r} "
                f"(cotangents of shape {[tuple(s) for s in site.shapes]}, output {k}): the answer is exact, but "
                f"{self.samples.batch} samples go through this op one at a time.",
            )
