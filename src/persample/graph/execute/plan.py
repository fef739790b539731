"""What one backward is to do: where samples meet what they share, and what the engine is asked for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from torch import Tensor

from ...numberless import with_numbers
from ...traverse import leading_to
from ..layout import Present, present
from ..locate.follow import SampleMap, assign
from ..read.nodes import NodeSlot, is_opaque
from ..read.roots import Roots
from ..read.site import Sites
from ..read.tape import Graph, Slot, Tape
from .bundles import Bundle
from .watch import Source


@dataclass(eq=False, slots=True)
class Common:
    """What all calls have in common that one plan serves: the same regions, shapes, strides and dtypes."""

    one_region: bool | None = None  # does one compiled region make the factors of all parameters? None: not asked yet


@dataclass(slots=True)
class CapturePlan:
    """All in numbers of nodes, so that it serves every graph of the same form."""

    tape: Tape
    samples: SampleMap
    uses: list[Bundle] = field(default_factory=list)  # where samples meet shared tensors: factors are made here
    requested: list[Slot] = field(default_factory=list)  # cotangents that the engine is to return
    sources: list[Source] = field(default_factory=list)  # the outputs of nodes that these come from
    waiting: dict[int, int] = field(default_factory=dict)  # contributions that come to a shared tensor, by its node
    present: dict[int, Present] = field(default_factory=dict)  # of uses in which samples are missing, those there are
    activations: int = 0  # about how many numbers the forward pass has kept
    common: Common = field(default_factory=Common)

    def on(self, graph: Graph) -> CapturePlan:
        """This plan, for another graph of the same form."""
        graph.shapes = self.tape.graph.shapes
        tape = replace(self.tape, graph=graph)
        uses = [use if len(use.nodes) == 1 else use.reading(tape) for use in self.uses]
        return replace(self, tape=tape, samples=replace(self.samples, sites=Sites(tape)), uses=uses)

    def without_tensors(self) -> CapturePlan:
        """What there is to remember: numbers and shapes, and layouts only where factors are made."""
        used = {node for bundle in self.uses for node in bundle.nodes}
        reached = used | {node for node, _ in self.requested}
        samples = self.samples
        cotangents = {slot: state for slot, state in samples.cotangents.items() if slot[0] in reached}
        flows = {use: state for use, state in samples.flows.items() if use[0] in used}
        graph = self.tape.graph
        bare = Graph([], [], dict.fromkeys(graph.leaves), {}, graph.starts, None, graph.shapes)  # type: ignore[arg-type]
        tape = replace(self.tape, graph=bare)
        uses = [replace(use, saved=()) for use in self.uses]
        return replace(self, tape=tape, samples=SampleMap(samples.batch, Sites(tape), cotangents, flows), uses=uses)


def plan(
    roots: Roots,
    params: Sequence[Tensor],
    ordinary: Collection[NodeSlot] = (),
    data: Collection[Tensor] = (),
    graph: Graph | None = None,
) -> CapturePlan:
    """Read the graph and decide; nothing of it is run, but for probes where this call's data decide.

    The engine goes on to ``ordinary`` for ordinary gradients, whatever is requested here; ``data`` are leaves among the
    parameters that hold samples. A ``graph`` that was read before saves another reading.
    """
    tape = roots.tape(params, graph)
    tape.data = tape.graph.leaves_of(data)
    made = CapturePlan(tape, assign(tape, roots))
    goals = {slot[0] for place in ordinary if (slot := tape.graph.slot(place)) is not None}
    _choose(made, leading_to(tape.graph.starts, goals, tape.graph.below) if goals else set())
    ends = set(made.requested)
    made.sources = [(n, k, slot) for n, slots in tape.edges.items() for k, slot in enumerate(slots) if slot in ends]
    made.waiting = _contributions(made)
    made.activations = _activations(made)
    made.present = _present(made)
    return made


def _choose(plan: CapturePlan, onward: Collection[int]) -> None:
    """Find where samples meet shared tensors, and whether the engine passes there or stops.

    It passes where something requested lies below, or one of the nodes that lead ``onward``.
    """
    tape, cotangents, batched, flows = plan.tape, plan.samples.cotangents, plan.samples.batched, plan.samples.flows
    passed: set[int] = set()  # nodes from which the engine goes on to something requested
    for node in reversed(tape.order):
        if node in batched:
            continue
        outputs = [(k, slot[0]) for k, slot in enumerate(tape.edges[node]) if slot is not None]
        going_on = node in onward or any(child in passed for _, child in outputs)
        crossing = [k for k, child in outputs if child in batched and flows.get((node, k)) is not None]
        live = [(node, nr) for nr in range(len(tape.shapes(node))) if cotangents.get((node, nr)) is not None]
        # Where no cotangent is live, zeros flow, and the engine walks on all the same.
        if live and tape.is_leaf(node):
            plan.requested.append((node, 0))
            passed.add(node)
        elif live and crossing:
            plan.uses.append(Bundle((node,), tuple(crossing), passed=going_on))
            plan.requested += [] if going_on else live
            passed.add(node)
        elif going_on:
            passed.add(node)


def _contributions(plan: CapturePlan) -> dict[int, int]:
    """For the node of every shared tensor, and of every leaf that holds samples, how many contributions come to it."""
    edges = plan.tape.edges
    counts = dict.fromkeys(plan.samples.batched, 0)
    crossing = [edges[node][k] for use in plan.uses for node in use.nodes for k in use.outputs]
    for slot in [*crossing, *[slot for node in plan.samples.batched for slot in edges[node]]]:
        if slot is not None:
            counts[slot[0]] += 1
    counts.update({node: 1 for node, _ in plan.requested if plan.tape.is_leaf(node)})
    return counts


@with_numbers
def _present(plan: CapturePlan) -> dict[int, Present]:
    """The samples in uses of which some are missing; opaque nodes are taken as they are."""
    found: dict[int, Present] = {}
    for use in plan.uses:
        (number,) = use.nodes
        if not is_opaque(plan.tape.node(number)):
            there = present(plan.samples.layouts(number), plan.tape.shapes(number))
            if there is not None:
                found[number] = there
    return found


def _activations(plan: CapturePlan) -> int:
    """The results of all ops on samples that are not views."""
    nodes = [n for n in plan.tape.order if n not in plan.samples.batched]
    nodes = [n for n in nodes if not (plan.tape.op(n).view or plan.tape.op(n).shares_memory)]
    return sum([prod(shape) for node in nodes for shape in plan.tape.shapes(node)])
