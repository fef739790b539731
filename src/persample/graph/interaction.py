"""Do samples meet? What the graph can tell.

A batched region computed from weights alone is shared, not an interaction. One that computes with data is: a sample's
loss then depends on values that were computed from other samples' inputs. What a graph cannot show is interaction
through detached values, or through gates that are zero today.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import Node

from . import saved
from .assign import Map
from .flows.fibres import BATCH_NORMS, normalises_batch
from .layout import Labels, Layout, sample_dims
from .names import READS, WEIGHT_VIEWS
from .site import Flow, computes_with_data
from .tape import Tape, is_leaf, op_name

_BATCH_NORMS = frozenset(BATCH_NORMS.split())


def interactions(tape: Tape, map: Map) -> list[str]:
    """The ops in which samples are seen to meet, nearest to the losses first."""
    found = dict.fromkeys(_batch_statistics(tape, map) + _crossed_rows(tape, map))
    if map.batched:
        partly = _partly_separable(map)
        trails: dict[Node, dict[str, None]] = {}  # ops by which inseparable cotangents came to a batched node
        told: set[Node] = set()  # below an interaction that is already in the list
        for node in tape.order:
            site, trail = map.sites[node], trails.get(node, {})
            if (
                node in map.batched
                and not is_leaf(node)
                and node not in told
                and _meets(tape, map, node, node in partly)
            ):
                found.update(trail)
                told.add(node)
            step = {} if site.name in WEIGHT_VIEWS else {site.name: None}
            for _, (below, _) in site.outputs:
                if below in map.batched:
                    trails.setdefault(below, {}).update({**trail, **step} if node in map.batched else {site.name: None})
                    told.update([below] if node in told else [])
    return list(found)


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
        site = map.sites[node]
        if site.name in _BATCH_NORMS and normalises_batch(site) and node not in map.batched:
            layout = map.cotangents.get((node, 0))
            if layout is not None and not isinstance(layout, Flow) and 1 not in sample_dims(layout, site.shapes[0]):
                found.append(site.name)
    return found


def _crossed_rows(tape: Tape, map: Map) -> list[str]:
    """Ops that take the elements of one row from several samples (a sort along the batch, feature by feature)."""
    found = []
    for node in tape.order:
        site = map.sites[node]
        for k, _ in site.outputs if node in map.probed else ():
            fate, before = map.flows[node, k], map.cotangents.get((node, 0))
            if isinstance(fate, Labels) and isinstance(before, Layout) and site.shapes[0] == site.target(k):
                spread = len(sample_dims(fate, site.target(k))) > len(sample_dims(before, site.shapes[0]))
                found += [site.name] if spread else []
    return found


def _partly_separable(map: Map) -> set[Node]:
    """Batched nodes that got a contribution of which every element belongs to one of several samples."""
    return {
        slot[0]
        for (node, k), fate in map.flows.items()
        if isinstance(fate, Layout)
        and (slot := map.sites[node].edges[k]) is not None
        and slot[0] in map.batched
        and sample_dims(fate, map.sites[node].target(k))
    }


def _holds_batch_data(tape: Tape, node: Node, batch: int) -> bool:
    """Does a batched node compute with a constant of B rows? It cannot be told from data of the batch."""
    if not computes_with_data(tape, node) or saved.in_checkpoint(node):
        return False
    return any(t.ndim > 1 and len(t) == batch and _is_data(t) for t in saved.constants(node))


def _is_data(t: Tensor) -> bool:
    """Numbers or masks; integers are as often places in a table that all samples read (relative positions)."""
    return t.is_floating_point() or t.is_complex() or t.dtype == torch.bool
