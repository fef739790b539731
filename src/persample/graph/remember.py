"""Plans of graphs that have been seen before.

A training loop builds the same graph at every step. Its form is read in a fraction of the time that planning takes. If
a graph of the same form was planned before, with the same leaves as parameters, and its nodes still answer as they did
to all that was asked of them then, the plan is the same, number for number. Plans that data had a part in are not
remembered, but for a few integers: those are compared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from ..kernels.ragged import is_always_ragged
from .execute.plan import CapturePlan
from .layout import Labels, Layout
from .locate.constants import only_counts
from .read.nodes import NodeSlot
from .read.notes import Notes, Question
from .read.roots import Roots
from .read.tape import Graph

_MOST = 64  # plans
_NOTHING: Mapping[NodeSlot, Layout] = {}


@dataclass(frozen=True, slots=True)
class _Remembered:
    """A plan, and the answers that it relies on."""

    plan: CapturePlan
    answers: Sequence[tuple[int, Question, Any]]

    def holds(self, nodes: Sequence[Node], look: bool) -> bool:
        asked = self.answers if look else [one for one in self.answers if one[1] is not only_counts]
        return all(question(nodes[at]) == answer for at, question, answer in asked)


_PLANS: OrderedDict[Hashable, _Remembered] = OrderedDict()


def key_of(
    graph: Graph,
    roots: Roots,
    params: Sequence[Tensor],
    ordinary: Sequence[NodeSlot] = (),
    known: Mapping[NodeSlot, Layout] = _NOTHING,
    terms: Hashable = None,
) -> Hashable:
    """Equal for calls that one plan serves; None if there are none, as data say where to start or nodes are opaque.

    Nor are there any where samples with as many rows each are not to be seen as such.

    ``ordinary`` is where ordinary gradients are wanted; ``known`` and ``terms`` are what else the plan is checked by.
    """
    if graph.form is None or is_always_ragged():
        return None
    if any(isinstance(layout, Labels) for layout in [*roots.layouts, *known.values()]):
        return None
    if any(region.outside for region in roots.regions.opened.values()):
        return None  # to be looked at, and refused perhaps
    whose = {id(p): i for i, p in enumerate(params)}
    leaves: list[Hashable] = []
    for leaf in graph.leaves.values():
        leaves += (whose.get(id(leaf)), leaf.shape, leaf.dtype, leaf.device, isinstance(leaf, Parameter))
    starts = tuple([(graph.slot(place), layout) for place, layout in roots.places])
    facts = frozenset([(graph.slot(place), layout) for place, layout in known.items()])
    return roots.batch, graph.form, tuple(leaves), starts, tuple(map(graph.slot, ordinary)), facts, terms


def recall(key: Hashable, graph: Graph, look: bool = True) -> CapturePlan | None:
    """The plan of this graph, if one like it was planned before.

    Without a ``look`` at numbers, integers that counted positions then are taken to do so now. Gradients are exact in
    any case: all that could be missed is that samples have begun to interact.
    """
    remembered = _PLANS.pop(key, None)
    if remembered is None:
        return None
    _PLANS[key] = remembered  # as the last one used
    if not remembered.holds(graph.nodes, look):
        return None
    plan = remembered.plan.on(graph)
    return plan if all(use.is_as_planned(plan.tape) for use in plan.uses if len(use.nodes) > 1) else None


def remember(key: Hashable, plan: CapturePlan, notes: Notes) -> None:
    """Keep what a capture needs of a plan, for the next graph like this one."""
    if not notes.certain:
        return
    numbers = plan.tape.graph.numbers
    answers = [(numbers[node], question, answer) for node, question, answer in notes.answers]
    _PLANS[key] = _Remembered(plan.without_tensors(), answers)
    while len(_PLANS) > _MOST:
        _PLANS.popitem(last=False)
