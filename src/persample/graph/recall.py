"""Plans of graphs that have been seen before.

A training loop builds the same graph at every step. Reading its outline costs a fraction of planning: the kinds of its
nodes, how they hang together, the shapes of their cotangents where these do not follow from others, and which leaves
are whose parameters. If a graph of the same outline was planned before, and its nodes still answer as they did to all
that was asked of them then, the plan is the same, node for node. Plans that data had a part in are not remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from .assign import Map
from .invoke import is_opaque
from .layout import Labels, Layout
from .notes import Notes, Question
from .ops.table import lookup
from .plan import Plan
from .reentrant import REENTRANT
from .roots import Roots
from .saved import metadata
from .site import Sites
from .tape import Slot, Tape, is_leaf, leaf_of

_MOST = 64  # plans
_NOTHING: Mapping[Slot, Layout] = {}


@dataclass(frozen=True, slots=True)
class Outline:
    """A graph's nodes, numbered as they are come upon, and what it has in common with others like it."""

    nodes: list[Node]
    leaves: dict[Node, Tensor]
    key: Hashable


@dataclass(frozen=True, slots=True)
class _Remembered:
    """A plan with numbers for nodes, and the answers that it relies on."""

    plan: Plan
    answers: Sequence[tuple[int, Question, Any]]

    def holds(self, nodes: Sequence[Node]) -> bool:
        return all(question(nodes[at]) == answer for at, question, answer in self.answers)


_PLANS: OrderedDict[Hashable, _Remembered] = OrderedDict()


def outline(
    roots: Roots,
    params: Sequence[Tensor],
    plain: Sequence[Slot] = (),
    known: Mapping[Slot, Layout] = _NOTHING,
    terms: Hashable = None,
) -> Outline | None:
    """Read a graph without planning it; None if it holds nodes whose inside nobody sees, or if data say where to start.

    ``plain`` is where ordinary gradients are wanted; ``known`` and ``terms`` are what else the plan is checked by.
    """
    if any(isinstance(layout, Labels) for layout in [*roots.layouts, *known.values()]):
        return None  # which are data of this call
    regions, places = roots.regions, roots.places
    entries = regions.entries
    whose = {id(p): i for i, p in enumerate(params)}
    numbers = {node: i for i, node in enumerate(dict.fromkeys(node for (node, _), _ in places))}
    nodes, leaves = list(numbers), dict[Node, Tensor]()
    key: list[Hashable] = [roots.batch, *[(numbers[node], nr, layout) for (node, nr), layout in places]]
    for node in nodes:  # which grows
        kind = type(node)
        form = _FORMS.get(kind) or _form(node, kind)
        if form is _OPAQUE:
            return None
        key.append(kind)
        if form is _LEAF:
            variable = leaves[node] = leaf_of(node)
            key += (whose.get(id(variable)), variable.shape, variable.dtype, variable.device)
            key.append(isinstance(variable, Parameter))  # other leaves may be data
            continue
        for child, nr in node.next_functions:
            number = None if child is None else numbers.get(child)
            if number is None:
                if type(child) is REENTRANT or child in entries:
                    child, nr = regions.resolve(child, nr)
                if child is None:
                    key.append(None)
                    form = _OP
                    continue
                number = numbers.setdefault(child, len(nodes))
                if number == len(nodes):
                    nodes.append(child)
            key += (number, nr)
        if form is _OP:
            try:
                key += [tuple(about.shape) for about in metadata(node)]
            except RuntimeError:  # nested tensors have none; planning says so
                return None
    if any(region.outside for region in regions.opened.values()):
        return None  # to be looked at, and refused perhaps
    wanted = tuple([(numbers.get(node), nr) for node, nr in plain])
    facts = frozenset([(numbers.get(node), nr, layout) for (node, nr), layout in known.items()])
    return Outline(nodes, leaves, (tuple(key), wanted, facts, terms))


_OP, _LEAF, _OPAQUE, _FOLLOWS = "op", "leaf", "opaque", "follows"
_FORMS: dict[type, str] = {}


def _form(node: Node, kind: type) -> str:
    if kind.__name__ == "CppFunction" or is_opaque(node):
        return _OPAQUE  # and not kept, as it may be a class of the user's
    form = _LEAF if is_leaf(node) else _FOLLOWS if lookup(node).shape_follows else _OP
    return _FORMS.setdefault(kind, form)


def recall(seen: Outline) -> Plan | None:
    """The plan of this graph, if one like it was planned before."""
    known = _PLANS.pop(seen.key, None)
    if known is None:
        return None
    _PLANS[seen.key] = known  # as the last one used
    if not known.holds(seen.nodes):
        return None
    plan = _renamed(known.plan, seen.nodes)
    plan.tape.leaves = {node: seen.leaves[node] for node in plan.tape.leaves}
    for bundle in plan.bundles:
        bundle.read()
    return plan if all(bundle.is_as_planned() for bundle in plan.bundles) else None


def remember(seen: Outline, plan: Plan, notes: Notes) -> None:
    """Keep what a capture needs of a plan, for the next graph like this one."""
    if not notes.certain:
        return
    numbers = {node: i for i, node in enumerate(seen.nodes)}
    answers = [(numbers[node], question, answer) for node, question, answer in notes.answers]
    _PLANS[seen.key] = _Remembered(_renamed(_trimmed(plan), numbers), answers)
    while len(_PLANS) > _MOST:
        _PLANS.popitem(last=False)


def _trimmed(plan: Plan) -> Plan:
    """What a capture needs of a plan: the nodes that it calls upon, and no tensors."""
    tape, there = plan.tape, plan.map
    views = [view for path, _ in plan.direct.values() for view in path]
    asked = [*plan.frontier, *[node for node, _ in plan.requested]]
    called = dict.fromkeys([*asked, *views, *plan.rest, *[node for bundle in plan.bundles for node in bundle.called]])
    shown = Tape(
        [],
        {node: tape.edges[node] for node in called},
        dict.fromkeys(tape.leaves),  # type: ignore[arg-type]
        tape.others,
        _shapes={node: tape.shapes(node) for node in [*called, *tape.leaves]},
    )
    cotangents = {slot: state for slot, state in there.cotangents.items() if slot[0] in set(asked)}
    flows = {use: fate for use, fate in there.flows.items() if use[0] in plan.frontier}
    waiting = {node: plan.waiting[node] for node in plan.rest}
    return replace(plan, tape=shown, map=Map(there.batch, Sites(shown), cotangents, flows), waiting=waiting)


def _renamed(plan: Plan, names: Any) -> Plan:
    """The same plan, with ``names[node]`` for every node."""
    tape = Tape(
        [],
        {
            names[node]: tuple([None if slot is None else (names[slot[0]], slot[1]) for slot in edges])
            for node, edges in plan.tape.edges.items()
        },
        {names[node]: leaf for node, leaf in plan.tape.leaves.items()},
        [names[node] for node in plan.tape.others],
        _shapes={names[node]: shapes for node, shapes in plan.tape._shapes.items()},
    )
    there = Map(
        plan.map.batch,
        Sites(tape),
        {(names[node], nr): state for (node, nr), state in plan.map.cotangents.items()},
        {(names[node], k): fate for (node, k), fate in plan.map.flows.items()},
    )
    return Plan(
        tape,
        there,
        {names[node]: outputs for node, outputs in plan.frontier.items()},
        [names[node] for node in plan.hooked],
        [(names[node], nr) for node, nr in plan.requested],
        [(names[node], k, (names[to], nr)) for node, k, (to, nr) in plan.sources],
        {
            (names[node], k): (tuple([names[view] for view in views]), names[leaf])
            for (node, k), (views, leaf) in plan.direct.items()
        },
        [names[node] for node in plan.rest],
        {names[node]: count for node, count in plan.waiting.items()},
        plan.activations,
        [bundle.renamed(names) for bundle in plan.bundles],
    )
