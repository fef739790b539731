"""The frontier: where samples meet what they share, and what to ask the engine for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd.graph import Node

from .assign import Map, assign
from .gather import Source
from .ops.table import lookup
from .roots import Roots
from .tape import Slot, Tape, is_leaf, leading_to

if TYPE_CHECKING:
    from .bundles import Bundle

Route = tuple[tuple[Node, ...], Node]  # views of a parameter from the nearest to the last, and its leaf


@dataclass(slots=True)
class Plan:
    """What to ask the engine for, and where factors are made."""

    tape: Tape
    map: Map
    frontier: dict[Node, list[int]] = field(default_factory=dict)  # separable node -> outputs into shared tensors
    hooked: list[Node] = field(default_factory=list)  # frontier nodes on the way to others: caught in passing
    requested: list[Slot] = field(default_factory=list)  # cotangents that the engine is to return
    sources: list[Source] = field(default_factory=list)  # where these come from
    direct: dict[tuple[Node, int], Route] = field(default_factory=dict)  # the one use of a parameter -> its way there
    rest: list[Node] = field(default_factory=list)  # batched nodes on no such way, from the losses down
    waiting: dict[Node, int] = field(default_factory=dict)  # batched node -> contributions that will come to it
    activations: int = 0  # about how many numbers the forward pass has kept
    bundles: list[Bundle] = field(default_factory=list)  # frontier nodes whose factors are made together


def plan(
    roots: Roots,
    params: Sequence[Tensor],
    plain: Collection[Slot] = (),
    data: Collection[Node] = (),
    tape: Tape | None = None,
) -> Plan:
    """Read the graph and decide; nothing of it is run, but for probes where this call's data decide.

    The engine will go on to ``plain`` for ordinary gradients, whatever is requested here; ``data`` are leaves among the
    parameters that hold samples. A ``tape`` of the same graph saves another walk.
    """
    tape = tape or roots.walk(params)
    tape.data = data
    found = Plan(tape, assign(tape, roots))
    inner: set[Node] = set()  # nodes from which the engine goes on to something requested
    onward = leading_to(roots.nodes, {node for node, _ in plain}, roots.regions.below) if plain else set()
    cotangents, batched, flows = found.map.cotangents, found.map.batched, found.map.flows
    for node in reversed(tape.order):
        if node in batched:
            continue
        going_on, crossing = node in onward, []
        for k, slot in enumerate(tape.edges[node]):
            if slot is not None:
                going_on = going_on or slot[0] in inner
                if slot[0] in batched and flows.get((node, k)) is not None:
                    crossing.append(k)
        states = [cotangents.get((node, nr)) for nr in range(len(tape.shapes(node)))]
        if all(state is None for state in states):  # zeros flow here, but the engine walks on all the same
            inner.update([node] if going_on else [])
            continue
        if is_leaf(node):
            found.requested.append((node, 0))
            inner.add(node)
            continue
        if crossing:
            found.frontier[node] = crossing
            if going_on:
                found.hooked.append(node)
            else:
                found.requested += [(node, nr) for nr, state in enumerate(states) if state is not None]
        if crossing or going_on:
            inner.add(node)
    ends = set(found.requested)
    found.sources = [(n, k, slot) for n, slots in tape.edges.items() for k, slot in enumerate(slots) if slot in ends]
    found.waiting = _contributions(found)
    found.direct = _routes(found)
    passed = {node for views, leaf in found.direct.values() for node in (*views, leaf)}
    found.rest = [node for node in tape.order if node in batched and node not in passed]
    found.activations = _activations(found)
    return found


def _routes(plan: Plan) -> dict[tuple[Node, int], Route]:
    """From every use of a parameter that is its only one, through its views."""
    found: dict[tuple[Node, int], Route] = {}
    edges, waiting = plan.tape.edges, plan.waiting
    for node, outputs in plan.frontier.items():
        for k in outputs:
            views: list[Node] = []
            slot = edges[node][k]
            while slot is not None and waiting[slot[0]] == 1 and _is_view(plan.tape, slot[0]):
                views.append(slot[0])
                (slot,) = edges[slot[0]]
            if slot is not None and waiting[slot[0]] == 1 and is_leaf(slot[0]):
                found[node, k] = tuple(views), slot[0]
    return found


def _is_view(tape: Tape, node: Node) -> bool:
    return lookup(node).view and len(tape.edges[node]) == len(tape.shapes(node)) == 1


def _contributions(plan: Plan) -> dict[Node, int]:
    """For every batched node, how many contributions come to it."""
    found = dict.fromkeys(plan.map.batched, 0)
    edges = plan.tape.edges
    crossing = [edges[node][k] for node, outputs in plan.frontier.items() for k in outputs]
    for slot in [*crossing, *[slot for node in plan.map.batched for slot in edges[node]]]:
        if slot is not None:
            found[slot[0]] += 1
    return found


def _activations(plan: Plan) -> int:
    """The results of all ops on samples that are not views."""
    ops = [(node, lookup(node)) for node in plan.tape.order if node not in plan.map.batched]
    nodes = [node for node, op in ops if not (op.view or op.shares_memory)]
    return sum(prod(shape) for node in nodes for shape in plan.tape.shapes(node))
