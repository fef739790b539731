"""Do samples meet? What the graph can tell.

A batched region computed from weights alone is shared, not an interaction. One that computes with data is: a sample's
loss then depends on values that were computed from other samples' inputs. What a graph cannot show is interaction
through detached values, or through gates that are zero today.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import Node

from . import saved
from .assign import Map
from .flows.fibres import BATCH_NORMS, normalises_batch
from .layout import Labels, Layout, sample_dims
from .names import READS, WEIGHT_VIEWS
from .notes import ask
from .site import Flow, computes_with_data
from .tape import Tape, is_leaf, op_name

_BATCH_NORMS = frozenset(BATCH_NORMS.split())


def interactions(tape: Tape, map: Map) -> list[str]:
    """The ops in which samples are seen to meet, nearest to the losses first."""
    found = dict.fromkeys(_batch_statistics(tape, map) + _crossed_rows(tape, map))
    partly = _partly_separable(tape, map)
    meeting = {n for n in map.batched if not is_leaf(n) and _meets(tape, map, n, n in partly)}
    return list(found | _trails(tape, map, meeting)) if meeting else list(found)


def _trails(tape: Tape, map: Map, meeting: set[Node]) -> dict[str, None]:
    """The ops by which inseparable cotangents came to these nodes, without those below others of them."""
    found: dict[str, None] = {}
    trails: dict[Node, dict[str, None]] = {}  # the same for every batched node
    told: set[Node] = set()
    for node in tape.order:
        name, trail = op_name(node), trails.get(node, {})
        if node in meeting and node not in told:
            found.update(trail)
            told.add(node)
        step = {} if name in WEIGHT_VIEWS else {name: None}
        for slot in tape.edges[node]:
            if slot is not None and slot[0] in map.batched:
                trails.setdefault(slot[0], {}).update({**trail, **step} if node in map.batched else {name: None})
                told.update([slot[0]] if node in told else [])
    return found


def _meets(tape: Tape, map: Map, node: Node, partly: bool) -> bool:
    """Do several samples' cotangents meet at a batched node that computes with data?"""
    mixed = partly or any(map.cotangents.get((node, nr)) is Flow.MIXED for nr in range(len(tape.shapes(node))))
    return (mixed and tape.reaches(node, lambda n: n in tape.fed or op_name(n) in READS)) or _holds_batch_data(
        tape, node, map.batch
    )


def _batch_statistics(tape: Tape, map: Map) -> list[str]:
    """Batch norms that average over samples: seen even where nothing trainable lies below."""
    found = []
    for node in tape.order:
        if op_name(node) not in _BATCH_NORMS:
            continue
        site = map.sites[node]
        if normalises_batch(site) and node not in map.batched:
            layout = map.cotangents.get((node, 0))
            if layout is not None and not isinstance(layout, Flow) and 1 not in sample_dims(layout, site.shapes[0]):
                found.append(site.name)
    return found


def _crossed_rows(tape: Tape, map: Map) -> list[str]:
    """Ops that take the elements of one row from several samples (a sort along the batch, feature by feature)."""
    found = []
    for node in [n for n in tape.order if n in map.probed] if map.probed else ():
        site = map.sites[node]
        for k, _ in site.outputs:
            fate, before = map.flows[node, k], map.cotangents.get((node, 0))
            if isinstance(fate, Labels) and isinstance(before, Layout) and site.shapes[0] == site.target(k):
                spread = len(sample_dims(fate, site.target(k))) > len(sample_dims(before, site.shapes[0]))
                found += [site.name] if spread else []
    return found


def _partly_separable(tape: Tape, map: Map) -> set[Node]:
    """Batched nodes that got a contribution of which every element belongs to one of several samples."""
    found = set()
    for (node, k), fate in map.flows.items():
        slot = tape.edges[node][k]
        if slot is not None and slot[0] in map.batched and isinstance(fate, Layout):
            found.update([slot[0]] if sample_dims(fate, tape.shape(slot)) else [])
    return found


def _holds_batch_data(tape: Tape, node: Node, batch: int) -> bool:
    """Does a batched node compute with a constant of B rows? It cannot be told from data of the batch."""
    if not computes_with_data(tape, node):
        return False
    if saved.in_checkpoint(node):
        return _any_rows(saved.recomputed_constants(node, tape.order), batch)
    return bool(ask(node, partial(_has_rows, batch=batch)))


def _has_rows(node: Node, batch: int) -> bool:
    return _any_rows(saved.constants(node), batch)


def _any_rows(constants: Iterable[Tensor], batch: int) -> bool:
    return any(t.ndim > 1 and len(t) == batch and _is_data(t) for t in constants)


def _is_data(t: Tensor) -> bool:
    """Numbers or masks; integers are as often places in a table that all samples read (relative positions)."""
    return t.is_floating_point() or t.is_complex() or t.dtype == torch.bool
