"""Do samples meet? What the graph can tell.

A batched region computed from weights alone is shared, not an interaction. One that computes with data is: a sample's
loss then depends on values that were computed from other samples' inputs. What a graph cannot show is interaction
through detached values, or through gates that are zero today.
"""

from __future__ import annotations

from ..layout import Labels, Layout, labels, sample_dims
from ..read import saved
from ..read.library import PRECOMPUTED, op_of
from ..read.nodes import is_opaque
from ..read.site import Flow, computes_with_data
from ..read.tape import Tape
from .constants import Alignment, Below, goes_by_sample, memory_of_rows
from .data_rows import misread
from .follow import SampleMap


def interactions(tape: Tape, map: SampleMap, *, thoroughly: bool = False) -> list[str]:
    """The ops in which samples are seen to meet, nearest to the losses first.

    ``thoroughly``: also where it costs nothing, as cotangents stay apart, and only the losses depend on other samples.
    """
    seen = _batch_statistics(tape, map) + _crossed_rows(tape, map)
    if thoroughly:
        seen += _mixed_data(tape, map) + _mixing_weights(tape, map) + misread(tape, map)
        seen += _counted_rows(tape, map) + _ranked(tape, map)
    found = dict.fromkeys(seen)
    partly = _partly_separable(tape, map)
    meeting = {n for n in map.batched if _meets(tape, map, n, n in partly)} | _holding_samples(tape, map)
    return list(found | _trails(tape, map, meeting)) if meeting else list(found)


def _trails(tape: Tape, map: SampleMap, meeting: set[int]) -> dict[str, None]:
    """The ops by which inseparable cotangents came to these nodes, without those below others of them."""
    found: dict[str, None] = {}
    trails: dict[int, dict[str, None]] = {}  # the same for every batched node
    told: set[int] = set()
    for node in tape.order:
        name, trail = tape.name(node), trails.get(node, {})
        if node in meeting and node not in told:
            found.update(trail)
            told.add(node)
        step = {} if tape.op(node).view else {name: None}
        for slot in tape.edges[node]:
            if slot is not None and slot[0] in map.batched:
                trails.setdefault(slot[0], {}).update({**trail, **step} if node in map.batched else {name: None})
                told.update([slot[0]] if node in told else [])
    return found


def _meets(tape: Tape, map: SampleMap, node: int, partly: bool) -> bool:
    """Do several samples' cotangents meet at a batched node that computes with data?"""
    mixed = partly or any(map.cotangents.get((node, nr)) is Flow.MIXED for nr in range(len(tape.shapes(node))))
    if tape.is_leaf(node):
        return mixed and (node in tape.data or node in tape.maybe_data)
    custom = tape.node(node)
    if saved.is_custom(custom) and op_of(custom) == PRECOMPUTED:  # rows of data, added up where nobody sees it
        return True
    data = {*tape.data, *tape.maybe_data}
    return mixed and any(n in tape.fed or n in data or tape.op(n).new_rows is not None for n in tape.below(node))


def _batch_statistics(tape: Tape, map: SampleMap) -> list[str]:
    """Batch norms that average over samples: seen even where nothing trainable lies below."""
    found = []
    for node in tape.order:
        averages = tape.op(node).averages_batch
        if averages is None or node in map.batched:
            continue
        site = map.sites[node]
        if averages(site):
            layout = map.cotangents.get((node, 0))
            channels = 1 if len(site.shapes[0]) > 1 else 0
            if isinstance(layout, Layout) and any(d != channels for d in sample_dims(layout, site.shapes[0])):
                found.append(site.name)
    return found


def _mixed_data(tape: Tape, map: SampleMap) -> list[str]:
    """Ops that are given data and have results of different samples in one window, norm or sequence of them."""
    found = []
    for node in tape.order:
        mixed = tape.op(node).mixed_dims
        if mixed is None or node in map.batched or node not in tape.fed:
            continue
        site, layout = map.sites[node], map.cotangents.get((node, 0))
        if site.edges[0] is not None or not isinstance(layout, Layout):
            continue
        shape, dims = mixed(site)
        if sample_dims(layout, site.shapes[0]) == (0,) and 0 not in dims:
            continue
        mark = labels(layout, site.shapes[0]).expand(site.shapes[0]).reshape(shape)
        if mark.numel() and any(bool((mark != mark.narrow(d, 0, 1)).any()) for d in dims):
            found.append(site.name)
    return found


def _mixing_weights(tape: Tape, map: SampleMap) -> list[str]:
    """Products of data with a weight that has a row for every sample, and a column for what may be every other."""
    found = []
    for node in tape.order:
        product = tape.op(node).product
        if product is None or node in map.batched or node not in tape.fed:
            continue
        site, layout = map.sites[node], map.cotangents.get((node, 0))
        letters, operands = product.result, product.operands
        weights = [k for k in operands if site.edges[k] is not None and site.is_weight(k)]
        if len(weights) != 1 or not isinstance(layout, Layout):
            continue
        (own,) = (operands[k] for k in weights)
        (data,) = (operands[k] for k in operands if k not in weights)
        samples = {letters[d] for d in sample_dims(layout, site.shapes[0])}
        summed = [site.target(weights[0])[own.index(c)] for c in own if c in data and c not in letters]
        if samples & set(own) and not samples & set(data) and any(n % map.batch == 0 for n in summed):
            found.append(site.name)
    return found


def _counted_rows(tape: Tape, map: SampleMap) -> list[str]:
    """Embeddings whose gradients are divided by how often the whole batch reads a row."""
    found = []
    for node in tape.order:
        if tape.op(node).counts_reads and node not in map.batched:
            site, layout = map.sites[node], map.cotangents.get((node, 0))
            if isinstance(layout, Layout) and site.value("scale_grad_by_freq") and sample_dims(layout, site.shapes[0]):
                found.append(site.name)
    return found


def _crossed_rows(tape: Tape, map: SampleMap) -> list[str]:
    """Ops that take the elements of one row from several samples (a sort along the batch, feature by feature)."""
    found = []
    for node in [n for n in tape.order if n in map.probed] if map.probed else ():
        site = map.sites[node]
        for k, _ in site.outputs:
            outcome, before = map.flows[node, k], map.cotangents.get((node, 0))
            if isinstance(outcome, Labels) and isinstance(before, Layout) and site.shapes[0] == site.target(k):
                spread = len(sample_dims(outcome, site.target(k))) > len(sample_dims(before, site.shapes[0]))
                found += [site.name] if spread else []
    return found


def _ranked(tape: Tape, map: SampleMap) -> list[str]:
    """Ops by which a sample's place depends on the others' numbers."""
    found = []
    for node in tape.order:
        layout, shape = map.cotangents.get((node, 0)), tape.shapes(node)[0]
        if tape.op(node).ranks and node not in map.batched and isinstance(layout, Layout) and shape:
            along = map.sites[node].number("dim") % len(shape)
            found += [tape.name(node)] if along in sample_dims(layout, shape) else []
    return found


def _partly_separable(tape: Tape, map: SampleMap) -> set[int]:
    """Batched nodes that got a contribution of which every element belongs to one of several samples."""
    found = set()
    for (node, k), outcome in map.flows.items():
        slot = tape.edges[node][k]
        if slot is not None and slot[0] in map.batched and isinstance(outcome, Layout):
            found.update([slot[0]] if sample_dims(outcome, tape.shape(slot)) else [])
    return found


def _holding_samples(tape: Tape, map: SampleMap) -> set[int]:
    """Batched nodes that compute with a constant whose rows may be the samples'."""
    fed = {node for node in map.batched if not tape.is_leaf(node) and computes_with_data(tape, node)}
    if not fed:
        return set()
    alignment, found, excused = Alignment(tape, map.sites, map.sizes()), set[int](), set[int]()
    for node in tape.order:
        if node not in map.batched:
            for k, slot in enumerate(tape.edges[node]):
                if slot is not None and slot[0] in map.batched and map.flows.get((node, k)) is not None:
                    alignment.enter(map.sites[node], k)
            continue
        if tape.is_leaf(node):
            continue
        if node in fed:
            origin = alignment.origin(node, map.batch)
            found.update([node] if origin is Below.SAMPLES else [])
            excused.update([node] if origin is Below.ALIGNED and tape.op(node).new_rows is None else [])
        alignment.descend(node)
    return found | (_used_by_sample(tape, map, excused) if excused else set())


def _used_by_sample(tape: Tape, map: SampleMap, nodes: set[int]) -> set[int]:
    """Those of the nodes whose constants are used sample by sample elsewhere: then they are the samples' after all."""
    memory: set[int] = set()
    for node in tape.order:
        layout = map.cotangents.get((node, 0))
        if node in tape.fed and node not in map.batched and isinstance(layout, Layout):
            site = map.sites[node]
            if not is_opaque(site.node) and not saved.in_checkpoint(site.node) and goes_by_sample(site, layout):
                memory |= memory_of_rows(site.node)
    return {node for node in nodes if not memory.isdisjoint(memory_of_rows(tape.node(node)))}
