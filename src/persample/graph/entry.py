"""The way in: from losses and parameters to factors, with everything checked that only this call can show."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .._errors import InteractionError, PerformanceWarning, UnsupportedError
from ..factors import Dense, Factor, Masked
from .assign import Map, assign
from .bundles import bundle_up
from .capture import Capture, PartsSink, Sink
from .custom import is_known
from .interaction import interactions
from .invoke import is_opaque
from .layout import Layout, sample_dims
from .notes import noting
from .ops.table import lookup
from .plan import Plan, plan
from .recall import outline, recall, remember
from .roots import Roots, slot_of
from .saved import is_compiled, is_torchs
from .tape import Slot, Tape, leaf_of, op_name


@dataclass(frozen=True, slots=True)
class Check:
    """Something that must hold of a plan: ``test`` raises if it does not, going by ``known`` and ``terms`` alone."""

    test: Callable[[Plan], None]
    known: Mapping[Slot, Layout]
    terms: Hashable


def capture_into(
    losses: Tensor,
    params: Mapping[str, Tensor],
    sink: Sink,
    *,
    retain_graph: bool,
    independent: bool = False,
    tell_bytes: Callable[[int], None] | None = None,
    sink_parts: PartsSink | None = None,
) -> None:
    """Hand the factor of every parameter that the losses reach to ``sink``, as soon as it is complete.

    ``tell_bytes`` is told before, about how much memory the forward pass has kept. ``sink_parts`` is given parameters
    whose factors were made together, if it is there.
    """
    if not len(losses) or not params:
        return
    if losses.grad_fn is None:
        for name, p in params.items():
            if p is losses:
                sink(name, Masked(torch.ones_like(p), torch.arange(len(p), device=p.device), len(p)))
    else:
        roots = Roots.of_losses(losses)
        if roots.batch == 1:
            _one_sample(roots, params, sink, retain_graph)
        else:
            capture_from(
                roots,
                params,
                sink,
                retain_graph=retain_graph,
                independent=independent,
                tell_bytes=tell_bytes,
                sink_parts=sink_parts,
            )


def capture_from(
    roots: Roots,
    params: Mapping[str, Tensor],
    sink: Sink,
    *,
    retain_graph: bool,
    independent: bool = False,
    trust_unseen: bool = False,
    tell_bytes: Callable[[int], None] | None = None,
    sink_parts: PartsSink | None = None,
    check: Check | None = None,
    plain: Sequence[Slot] = (),
    tape: Tape | None = None,
) -> tuple[Tensor | None, ...]:
    """The same from any places of a graph at which samples can be told apart.

    ``trust_unseen`` takes custom Functions to keep samples apart, where ``independent`` alone would refuse them.
    The plan is put to the ``check`` before anything is run. The ordinary gradients at ``plain`` come back. ``tape`` is
    the graph, if it has been walked already.
    """
    found, meeting, unseen = planned(roots, params, plain, tape, check, independent=independent)
    if meeting:
        _report_interaction(meeting, independent)
    elif unseen and not trust_unseen:
        _refuse_unseen(unseen)
    if tell_bytes is not None:
        tell_bytes(found.activations * roots.itemsize)
    running = Capture(found, roots, params, sink, plain, sink_parts)
    running.run(retain_graph)
    # Where samples interact, it has been said that everything below is slow.
    notes = running.slow if meeting else {**running.slow, **running.slow_below}
    for message in notes.values():
        _warn(message)
    return running.gradients


def planned(
    roots: Roots,
    params: Mapping[str, Tensor],
    plain: Sequence[Slot] = (),
    tape: Tape | None = None,
    check: Check | None = None,
    *,
    independent: bool = False,
) -> tuple[Plan, list[str], list[Node]]:
    """What to do with this graph, the ops in which samples meet, and those of which nobody can tell.

    If they are to be ``independent``, all between data and losses is looked at, whatever parameters it leads to.
    """
    tensors = list(params.values())
    terms: Hashable = check.terms if check else None
    terms = ("independent", terms) if independent else terms
    seen = outline(roots, tensors, plain, check.known if check else {}, terms)
    known = None if seen is None else recall(seen)
    if known is not None:
        check_reached(known.tape, params)
        return known, [], []
    with noting() as notes:
        found = plan(roots, tensors, plain, tape=tape)
        check_reached(found.tape, params)
        _refuse_module_hooks(found)
        whole, everywhere = _looked_at(roots, found) if independent else (found.tape, found.map)
        meeting = interactions(whole, everywhere, thoroughly=independent)
        unseen = _unseen(whole) if independent else []
        if not meeting:
            bundle_up(found)
    if check is not None and not meeting:
        check.test(found)
    if seen is not None and not meeting and not unseen:
        remember(seen, found, notes)
    return found, meeting, unseen


def _looked_at(roots: Roots, found: Plan) -> tuple[Tape, Map]:
    try:
        return whole_graph(roots, found)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise UnsupportedError(
            "whether samples interact cannot be told: a tensor that leads to parameters which were not asked for was "
            "changed in place after an op had saved it. Use the op that returns a new tensor, or drop independent=True"
        ) from error


def whole_graph(roots: Roots, found: Plan) -> tuple[Tape, Map]:
    """All of a graph, and where samples lie in it; leaves nobody asked for may be data, if they are no parameters."""
    roots.regions.refuse_taken()
    if not found.tape.others:
        return found.tape, found.map
    others = {node: leaf_of(node) for node in found.tape.others}
    tape = roots.walk([*found.tape.leaves.values(), *others.values()])
    tape.data = {node for node, leaf in others.items() if not isinstance(leaf, torch.nn.Parameter)}
    there = assign(tape, roots)
    apart = _leaves_by_sample(tape, there)
    if len(apart) < len(tape.data):
        tape.data, tape.doubtful = apart, set(tape.data) - apart
        tape.weights.clear()
        there = assign(tape, roots)
    return tape, there


def _leaves_by_sample(tape: Tape, map: Map) -> set[Node]:
    """Leaves that may be data, and of which an op uses the samples apart: these are."""
    found = set()
    for (node, k), fate in map.flows.items():
        slot = tape.edges[node][k]
        if slot is not None and slot[0] in tape.data and isinstance(fate, Layout):
            found.update([slot[0]] if sample_dims(fate, tape.shape(slot)) else [])
    return found


def capture(
    losses: Tensor, params: Mapping[str, Tensor], *, retain_graph: bool, independent: bool = False
) -> dict[str, Factor]:
    """The factor of every parameter that the losses reach."""
    found: dict[str, Factor] = {}
    capture_into(losses, params, found.__setitem__, retain_graph=retain_graph, independent=independent)
    return found


def _one_sample(roots: Roots, params: Mapping[str, Tensor], sink: Sink, retain_graph: bool) -> None:
    """One sample: an ordinary backward, on a graph that was looked at all the same."""
    check_reached(roots.walk(params.values()), params)
    grads = roots.backward([slot_of(p) for p in params.values()], retain_graph=retain_graph)
    for name, g in zip(params, grads, strict=True):
        if g is not None:
            sink(name, Dense.of_one(g))


def check_reached(tape: Tape, params: Mapping[str, Tensor]) -> None:
    """Never answer zeros for a parameter that the graph holds under another name."""
    reached = {id(p) for p in tape.leaves.values()}
    hidden = [name for name, p in params.items() if id(p) not in reached and hasattr(p, "_local_tensor")]
    if hidden and tape.others:
        raise UnsupportedError(
            f"sharded parameters {hidden} are not leaves of this graph, which holds {len(tape.others)} unsharded ones: "
            f"per-sample gradients of sharded models are not supported here"
        )


def _refuse_module_hooks(found: Plan) -> None:
    """Nodes below an interaction are called by hand, and their hooks are not."""
    if any(is_torchs(node, "BackwardHookFunction") for node in [*found.map.batched, *found.frontier]):
        raise UnsupportedError(
            "a module has full backward hooks (register_full_backward_hook) at a place where cotangents are pulled "
            "back by hand, which would pass over the hooks: remove them for this call"
        )


def _unseen(tape: Tape) -> list[Node]:
    """Independence cannot be promised for data that goes straight into a node whose inside nobody sees."""
    return [node for node in tape.order if _is_unseen(tape, node)]


def _refuse_unseen(unseen: Sequence[Node]) -> None:
    hidden = ", ".join(dict.fromkeys(op_name(node) for node in unseen))
    raise InteractionError(
        f"cannot see inside {hidden}, which is given data and weights: whether samples interact there is unknown. "
        f"If they do not, say so: persample.graph.keeps_samples_apart({_target(unseen[0])}). Otherwise ask "
        f"the same of the model without torch.compile or custom Functions, or drop independent=True"
    )


def _is_unseen(tape: Tape, node: Node) -> bool:
    if not is_opaque(node) or is_known(node):
        return False
    return node in tape.fed or any(_is_data_leaf(tape, slot) for slot in tape.edges[node])


def _is_data_leaf(tape: Tape, slot: Slot | None) -> bool:
    """Is this a leaf that may be data, or a view of one?"""
    while slot is not None and lookup(slot[0]).view:
        (slot,) = tape.edges[slot[0]]
    return slot is not None and (slot[0] in tape.data or slot[0] in tape.doubtful)


def _target(node: Node) -> str:
    """What to hand to `keeps_samples_apart` for an opaque node."""
    name = op_name(node).removeprefix("custom ")
    return "persample.graph.COMPILED" if is_compiled(node) else repr(name) if "::" in name else name


def _report_interaction(ops: Sequence[str], independent: bool) -> None:
    where = ", ".join(ops)
    if independent:
        error = InteractionError(
            f"samples interact in {where}: one sample's loss depends on another sample (or the op's backward is not "
            f"linear). Use layers that keep samples apart (GroupNorm for BatchNorm, or model.eval()), or drop "
            f"independent=True for the exact Jacobian rows"
        )
        error.ops = tuple(ops)
        raise error
    _warn(
        f"samples interact in {where}: the answer is the exact Jacobian, at the price of one cotangent per sample for "
        f"everything below."
    )


def _warn(message: str) -> None:
    """Warn, pointing at the first caller outside of this package."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, PerformanceWarning, stacklevel=level)


_PACKAGE = str(Path(__file__).parent.parent) + os.sep
