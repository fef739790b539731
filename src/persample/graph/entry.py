"""The way in: from losses and parameters to factors, with everything checked that only this call can show."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .._errors import InteractionError, PerformanceWarning, UnsupportedError
from ..distributed import is_sharded
from ..factors import Dense, Factor, Masked, one_by_one
from ..kernels.certificates import is_traced, usual_samples
from ..kernels.devices import can_look
from ..kernels.differentiable import differentiable, is_differentiable
from .execute.bundles import bundle_up
from .execute.capture import AtOnce, Capture, Sink
from .execute.once import refuse_once_differentiable
from .execute.plan import CapturePlan, plan
from .layout import Layout, sample_dims
from .locate.follow import SampleMap, assign
from .locate.interaction import interactions
from .ops.custom import is_known
from .read.compiled import is_compiled
from .read.nodes import NodeSlot, is_opaque, op_name
from .read.notes import noting
from .read.roots import Roots, slot_of
from .read.saved import is_torchs
from .read.site import Sites
from .read.tape import Graph, Slot, Tape
from .remember import key_of, recall, remember


@dataclass(frozen=True, slots=True)
class Check:
    """Something that must hold of a plan: ``test`` raises if it does not, going by ``known`` and ``terms`` alone."""

    test: Callable[[CapturePlan], None]
    known: Mapping[NodeSlot, Layout]
    terms: Hashable


def capture_into(
    losses: Tensor,
    params: Mapping[str, Tensor],
    sink: Sink,
    *,
    retain_graph: bool,
    independent: bool = False,
    tell_bytes: Callable[[int], int] | None = None,
    at_once: AtOnce | None = None,
) -> None:
    """Hand the factor of every parameter that the losses reach to ``sink``, as soon as it is complete.

    ``tell_bytes`` is told before, about how much memory the forward pass has kept, and says how much of it gradients
    that are written out may take. Where one compiled region makes all factors, ``at_once`` is offered them, and the
    sink gets them only if it declines.
    """
    if not len(losses) or not params:
        return
    if losses.grad_fn is None:
        for name, p in params.items():
            if p is losses:
                sink([name], Masked(torch.ones_like(p), torch.arange(len(p), device=p.device), len(p)))
    else:
        roots = Roots.of_losses(losses)
        if roots.batch == 1:
            one_sample(roots, params, sink, retain_graph)
        else:
            capture_from(
                roots,
                params,
                sink,
                retain_graph=retain_graph,
                independent=independent,
                tell_bytes=tell_bytes,
                at_once=at_once,
            )


def capture_from(
    roots: Roots,
    params: Mapping[str, Tensor],
    sink: Sink,
    *,
    retain_graph: bool,
    independent: bool = False,
    trust_unseen: bool = False,
    tell_bytes: Callable[[int], int] | None = None,
    check: Check | None = None,
    ordinary: Sequence[NodeSlot] = (),
    graph: Graph | None = None,
    at_once: AtOnce | None = None,
    said: set[str] | None = None,
) -> tuple[Tensor | None, ...]:
    """Hand factors to ``sink``, from any places of a graph at which samples can be told apart.

    ``trust_unseen`` takes custom Functions to keep samples apart, where ``independent`` alone would refuse them.
    The plan is put to the ``check`` before anything is run. Ordinary gradients at ``ordinary`` come back. ``graph`` is
    what lies below the roots, if it has been read already. Warnings that were ``said`` before are not repeated.
    """
    said = set() if said is None else said
    made, meeting, unseen = planned(roots, params, ordinary, graph, check, independent=independent)
    if meeting:
        _report_interaction(meeting, independent, said)
    elif unseen and not trust_unseen:
        _refuse_unseen(unseen)
    if is_differentiable():
        refuse_once_differentiable(roots, made.tape, made.samples.sites)
    room = None if tell_bytes is None else tell_bytes(made.activations * roots.itemsize)
    # Where samples interact, most of the graph is below, and would be gone through once for every parameter. Graphs,
    # and derivatives of results, keep what portions would let go of.
    whole = bool(meeting) or is_traced() or is_differentiable()
    running = Capture(made, roots, params, sink, ordinary, at_once, None if whole else room)
    running.run(retain_graph)
    # Where samples interact, it has been said that everything below is slow; without numbers, nothing is.
    notes = running.slow if meeting else {**running.slow, **running.slow_below}
    notes = notes if roots.has_numbers else {}
    for message in notes.values():
        _warn(message, said)
    return running.gradients


def planned(
    roots: Roots,
    params: Mapping[str, Tensor],
    ordinary: Sequence[NodeSlot] = (),
    graph: Graph | None = None,
    check: Check | None = None,
    *,
    independent: bool = False,
) -> tuple[CapturePlan, list[str], list[Node]]:
    """What to do with this graph, the ops in which samples meet, and the nodes of which nobody can tell.

    If samples are to be ``independent``, all between data and losses is looked at, whatever parameters it leads to.
    """
    tensors, graph = list(params.values()), graph or roots.read()
    terms: Hashable = check.terms if check else None
    terms = ("independent", terms) if independent else terms
    if is_traced():  # which are bundled otherwise
        terms = ("traced", usual_samples(0), terms)
    key = key_of(graph, roots, tensors, ordinary, check.known if check else {}, terms)
    look = independent or check is not None or roots.losses is None or can_look(roots.losses.device)
    made = None if key is None else recall(key, graph, look)
    if made is not None:
        check_reached(made.tape, params)
        return made, [], []
    with noting() as notes:
        made, meeting, unseen = planned_anew(roots, params, ordinary, graph, independent=independent)
    if independent and notes.unknown and not meeting:
        _refuse_undecided(notes.unknown)
    if check is not None and not meeting:
        check.test(made)
    if key is not None and not meeting and not unseen:
        remember(key, made, notes)
    return made, meeting, unseen


def check_independence(roots: Roots, params: Mapping[str, Tensor]) -> None:
    """Raise if samples are seen to interact, or if nobody can tell."""
    _, meeting, unseen = planned(roots, params, independent=True)
    if meeting:
        _report_interaction(meeting, True, set())
    elif unseen:
        _refuse_unseen(unseen)


def planned_anew(
    roots: Roots, params: Mapping[str, Tensor], ordinary: Sequence[NodeSlot], graph: Graph, *, independent: bool
) -> tuple[CapturePlan, list[str], list[Node]]:
    """`planned`, for a graph of which no plan is remembered."""
    with differentiable(False):  # what is asked of the data decides on layouts, and on nothing else
        made = plan(roots, list(params.values()), ordinary, graph=graph)
        check_reached(made.tape, params)
        _refuse_module_hooks(made)
        tape, samples = _everything_below(roots, made) if independent else (made.tape, made.samples)
        meeting = interactions(tape, samples, thoroughly=independent)
    if not meeting:
        bundle_up(made)
    return made, meeting, _unseen(tape) if independent else []


def _everything_below(roots: Roots, made: CapturePlan) -> tuple[Tape, SampleMap]:
    """`whole_graph`, with words for a graph of which a part cannot be read."""
    try:
        return whole_graph(roots, made)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise UnsupportedError(
            "whether samples interact cannot be told: a tensor that leads to parameters which were not asked for was "
            "changed in place after an op had saved it. Use the op that returns a new tensor, or drop independent=True"
        ) from error


def whole_graph(roots: Roots, made: CapturePlan) -> tuple[Tape, SampleMap]:
    """All of a graph, and where samples lie in it; leaves nobody asked for may be data, if they are no parameters."""
    roots.regions.refuse_taken()
    if not made.tape.others:
        return made.tape, made.samples
    leaves = made.tape.graph.leaves
    tape = roots.tape(leaves.values(), made.tape.graph)
    tape.data = {n for n in made.tape.others if not isinstance(leaves[n], torch.nn.Parameter)}
    samples = assign(tape, roots)
    data = _leaves_by_sample(tape, samples)
    if len(data) < len(tape.data):
        tape.data, tape.maybe_data = data, set(tape.data) - data
        tape.weights.clear()
        samples = assign(tape, roots)
    return tape, samples


def _leaves_by_sample(tape: Tape, samples: SampleMap) -> set[int]:
    """Of the leaves that may be data, those that are: an op uses their rows sample by sample."""
    leaves = set()
    for (node, k), flow in samples.flows.items():
        slot = tape.edges[node][k]
        if slot is not None and slot[0] in tape.data and isinstance(flow, Layout):
            leaves.update([slot[0]] if sample_dims(flow, tape.shape(slot)) else [])
    return leaves


def capture(
    losses: Tensor, params: Mapping[str, Tensor], *, retain_graph: bool, independent: bool = False
) -> dict[str, Factor]:
    """The factor of every parameter that the losses reach."""
    factors: dict[str, Factor] = {}
    sink = one_by_one(factors.__setitem__)
    capture_into(losses, params, sink, retain_graph=retain_graph, independent=independent)
    return factors


def one_sample(roots: Roots, params: Mapping[str, Tensor], sink: Sink, retain_graph: bool) -> None:
    """One sample needs only an ordinary backward; the graph is read all the same, to refuse hidden parameters."""
    tape = roots.tape(params.values())
    check_reached(tape, params)
    if is_differentiable():
        refuse_once_differentiable(roots, tape, Sites(tape))
    grads = roots.backward([slot_of(p) for p in params.values()], retain_graph=retain_graph)
    for name, g in zip(params, grads, strict=True):
        if g is not None:
            sink([name], Dense.of_one(g))


def check_reached(tape: Tape, params: Mapping[str, Tensor]) -> None:
    """Never answer zeros for a parameter that the graph holds under another name."""
    reached = {id(tape.graph.leaves[leaf]) for leaf in tape.leaves}
    if len(reached) < len(tape.leaves):
        raise UnsupportedError(
            "a parameter is in this graph twice, as what it was before it was given another dtype or device and as "
            "what it is now: compute the losses again, and convert parameters before or after"
        )
    hidden = [name for name, p in params.items() if id(p) not in reached and is_sharded(p)]
    if hidden and tape.others:
        raise UnsupportedError(
            f"sharded parameters {hidden} are not leaves of this graph, which holds {len(tape.others)} unsharded ones: "
            f"per-sample gradients of sharded models are not supported here"
        )


def _refuse_module_hooks(made: CapturePlan) -> None:
    """Nodes below an interaction are called by hand, and their hooks are not."""
    called = [*made.samples.batched, *[node for use in made.uses for node in use.nodes]]
    if any(is_torchs(made.tape.node(node), "BackwardHookFunction") for node in called):
        raise UnsupportedError(
            "a module has full backward hooks (register_full_backward_hook) at a place where cotangents are pulled "
            "back by hand, which would pass over the hooks: remove them for this call"
        )


def _unseen(tape: Tape) -> list[Node]:
    """Opaque nodes that are given data: whether samples are independent there, nobody can see."""
    return [tape.node(number) for number in tape.order if _is_unseen(tape, number)]


def _refuse_unseen(unseen: Sequence[Node]) -> None:
    hidden = ", ".join(dict.fromkeys(op_name(node) for node in unseen))
    raise InteractionError(
        f"cannot see inside {hidden}, which is given data and weights: whether samples interact there is unknown. "
        f"If they do not, say so: persample.graph.keeps_samples_apart({_target(unseen[0])}). Otherwise ask "
        f"the same of the model without torch.compile or custom Functions, or drop independent=True"
    )


def _refuse_undecided(nodes: Iterable[Node]) -> None:
    ops = ", ".join(dict.fromkeys(op_name(node) for node in nodes))
    raise InteractionError(
        f"data decide whether samples interact in {ops}, and tensors on meta or of a FakeTensorMode have none: ask the "
        f"same of a smaller model with numbers, or drop independent=True"
    )


def _is_unseen(tape: Tape, number: int) -> bool:
    if not is_opaque(tape.node(number)) or is_known(tape.node(number)):
        return False
    return number in tape.fed or any(_is_data_leaf(tape, slot) for slot in tape.edges[number])


def _is_data_leaf(tape: Tape, slot: Slot | None) -> bool:
    """Is this a leaf that may be data, or a view of one?"""
    while slot is not None and tape.op(slot[0]).view:
        (slot,) = tape.edges[slot[0]]
    return slot is not None and (slot[0] in tape.data or slot[0] in tape.maybe_data)


def _target(node: Node) -> str:
    """What to hand to `keeps_samples_apart` for an opaque node."""
    name = op_name(node).removeprefix("custom ")
    return "persample.graph.COMPILED" if is_compiled(node) else repr(name) if "::" in name else name


def _report_interaction(ops: Sequence[str], independent: bool, said: set[str]) -> None:
    where = ", ".join(ops)
    if independent:
        error = InteractionError(
            f"samples interact in {where}: one sample's loss depends on another sample (or the op's backward is not "
            f"linear). Use layers that keep samples apart (GroupNorm for BatchNorm, or model.eval()), or drop "
            f"independent=True for the exact Jacobian rows"
        )
        error.ops = tuple(ops)
        raise error
    if is_traced():
        raise UnsupportedError(f"samples interact in {where}, where every sample needs a backward of its own")
    _warn(
        f"samples interact in {where}: the answer is the exact Jacobian, at the price of one cotangent per sample for "
        f"everything below.",
        said,
    )


def _warn(message: str, said: set[str]) -> None:
    """Warn, pointing at the first caller outside of this package, unless that was said before."""
    if message in said:
        return
    said.add(message)
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, PerformanceWarning, stacklevel=level)


_PACKAGE = str(Path(__file__).parent.parent) + os.sep
