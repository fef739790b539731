"""Do samples meet? What the graph can tell.

A batched region computed from weights alone is shared, not an interaction. One that computes with data is: a sample's
loss then depends on values that were computed from other samples' inputs. What a graph cannot show is interaction
through detached values, or through gates that are zero today.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...numberless import with_numbers
from ..layout import Labels, Layout, labels, sample_dims
from ..ops.table import Op
from ..read import saved
from ..read.library import PRECOMPUTED, op_of
from ..read.nodes import is_opaque
from ..read.notes import unknown
from ..read.site import Flow, Site, computes_with_data
from ..read.tape import Tape
from .constants import Alignment, Below, goes_by_sample, memory_of_rows
from .data_rows import misread
from .follow import SampleMap


@with_numbers
def interactions(tape: Tape, samples: SampleMap, *, thoroughly: bool = False) -> list[str]:
    """The ops in which samples are seen to meet, nearest to the losses first.

    ``thoroughly``: also where it costs nothing, as cotangents stay apart, and only the losses depend on other samples.
    """
    seen = _batch_statistics(tape, samples) + _crossed_rows(tape, samples)
    if thoroughly:
        seen += _mixed_data(tape, samples) + _mixing_weights(tape, samples) + misread(tape, samples)
        seen += _counted_rows(tape, samples) + _ranked(tape, samples)
    partly = _partly_separable(tape, samples)
    meeting = {n for n in samples.batched if _meets(tape, samples, n, n in partly)} | _holding_samples(tape, samples)
    meeting -= undecided(tape)
    return list(dict.fromkeys(seen + _trails(tape, samples, meeting)))


def undecided(tape: Tape) -> set[int]:
    """The nodes of which data would have to decide where there are none, and all that they lead to."""
    numbers = [tape.graph.numbers.get(node) for node in unknown()]
    return {below for number in numbers if number in tape.edges for below in tape.below(number)}


def _trails(tape: Tape, samples: SampleMap, meeting: set[int]) -> list[str]:
    """The ops by which inseparable cotangents came to these nodes, without those below others of them."""
    ops: dict[str, None] = {}
    trails: dict[int, dict[str, None]] = {}  # the ops by which they came to every batched node
    told: set[int] = set()
    for node in tape.order if meeting else ():
        name, trail = tape.name(node), trails.get(node, {})
        if node in meeting and node not in told:
            ops.update(trail)
            told.add(node)
        step = {} if tape.op(node).view else {name: None}
        for slot in tape.edges[node]:
            if slot is not None and slot[0] in samples.batched:
                trails.setdefault(slot[0], {}).update({**trail, **step} if node in samples.batched else {name: None})
                told.update([slot[0]] if node in told else [])
    return list(ops)


def _meets(tape: Tape, samples: SampleMap, node: int, partly: bool) -> bool:
    """Do several samples' cotangents meet at a batched node that computes with data?"""
    mixed = partly or any(samples.cotangents.get((node, nr)) is Flow.MIXED for nr in range(len(tape.shapes(node))))
    if tape.is_leaf(node):
        return mixed and (node in tape.data or node in tape.maybe_data)
    custom = tape.node(node)
    if saved.is_custom(custom) and op_of(custom) == PRECOMPUTED:  # rows of data, added up where nobody sees it
        return True
    data = {*tape.data, *tape.maybe_data}
    return mixed and any(n in tape.fed or n in data or tape.op(n).new_rows is not None for n in tape.below(node))


def _separable(tape: Tape, samples: SampleMap, concerns: Callable[[Op], object]) -> Iterator[tuple[Site, Layout]]:
    """Separable nodes of some ops, with the layout of their first cotangent."""
    for node in tape.order:
        layout = samples.cotangents.get((node, 0))
        if concerns(tape.op(node)) and node not in samples.batched and isinstance(layout, Layout):
            yield samples.sites[node], layout


def _batch_statistics(tape: Tape, samples: SampleMap) -> list[str]:
    """Batch norms that average over samples: seen even where nothing trainable lies below."""
    ops = []
    for site, layout in _separable(tape, samples, lambda op: op.averages_batch):
        channels = 1 if len(site.shapes[0]) > 1 else 0
        across = any(d != channels for d in sample_dims(layout, site.shapes[0]))
        ops += [site.name] if across and site.op.averages_batch and site.op.averages_batch(site) else []
    return ops


def _mixed_data(tape: Tape, samples: SampleMap) -> list[str]:
    """Ops that are given data and have results of different samples in one window, norm or sequence of them."""
    nodes = _separable(tape, samples, lambda op: op.mixed_dims or op.mixes)
    with_data = [(site, layout) for site, layout in nodes if site.index in tape.fed and site.edges[0] is None]
    return [site.name for site, layout in with_data if _mixes_data(site, layout)]


def _mixes_data(site: Site, layout: Layout) -> bool:
    if site.op.mixes is not None:
        return site.op.mixes(site, layout)
    assert site.op.mixed_dims is not None
    shape, dims = site.op.mixed_dims(site)
    if sample_dims(layout, site.shapes[0]) == (0,) and 0 not in dims:
        return False
    sample_index = labels(layout, site.shapes[0]).expand(site.shapes[0]).reshape(shape)
    return bool(sample_index.numel()) and any(bool((sample_index != sample_index.narrow(d, 0, 1)).any()) for d in dims)


def _mixing_weights(tape: Tape, samples: SampleMap) -> list[str]:
    """Products of data with a weight that has a row for every sample, and a column for what may be every other."""
    nodes = _separable(tape, samples, lambda op: op.product)
    return [site.name for site, layout in nodes if site.index in tape.fed and _is_mixed_by_weight(site, layout)]


def _is_mixed_by_weight(site: Site, layout: Layout) -> bool:
    product = site.op.product
    assert product is not None
    weights = [k for k in product.operands if site.edges[k] is not None and site.is_weight(k)]
    if len(weights) != 1:
        return False
    (weight,) = (product.operands[k] for k in weights)
    (data,) = (letters for k, letters in product.operands.items() if k not in weights)
    of_samples = {product.result[d] for d in sample_dims(layout, site.shapes[0])}
    summed = [site.target(weights[0])[weight.index(c)] for c in weight if c in data and c not in product.result]
    in_weight_alone = bool(of_samples & set(weight)) and not of_samples & set(data)
    return in_weight_alone and any(n % layout.batch == 0 for n in summed)


def _counted_rows(tape: Tape, samples: SampleMap) -> list[str]:
    """Embeddings whose gradients are divided by how often the whole batch reads a row."""
    nodes = _separable(tape, samples, lambda op: op.counts_reads)
    return [
        site.name for site, layout in nodes if site.value("scale_grad_by_freq") and sample_dims(layout, site.shapes[0])
    ]


def _crossed_rows(tape: Tape, samples: SampleMap) -> list[str]:
    """Ops that take the elements of one row from several samples (a sort along the batch, feature by feature)."""
    ops = []
    for node in [n for n in tape.order if n in samples.probed] if samples.probed else ():
        site = samples.sites[node]
        for k, _ in site.outputs:
            outcome, before = samples.flows[node, k], samples.cotangents.get((node, 0))
            if isinstance(outcome, Labels) and isinstance(before, Layout) and site.shapes[0] == site.target(k):
                spread = len(sample_dims(outcome, site.target(k))) > len(sample_dims(before, site.shapes[0]))
                ops += [site.name] if spread else []
    return ops


def _ranked(tape: Tape, samples: SampleMap) -> list[str]:
    """Ops by which a sample's place depends on the others' numbers."""
    nodes = [(site, layout) for site, layout in _separable(tape, samples, lambda op: op.ranks) if site.shapes[0]]
    return [
        site.name
        for site, layout in nodes
        if site.number("dim") % len(site.shapes[0]) in sample_dims(layout, site.shapes[0])
    ]


def _partly_separable(tape: Tape, samples: SampleMap) -> set[int]:
    """Batched nodes that got a contribution of which every element belongs to one of several samples."""
    nodes = set()
    for (node, k), outcome in samples.flows.items():
        slot = tape.edges[node][k]
        if slot is not None and slot[0] in samples.batched and isinstance(outcome, Layout):
            nodes.update([slot[0]] if sample_dims(outcome, tape.shape(slot)) else [])
    return nodes


def _holding_samples(tape: Tape, samples: SampleMap) -> set[int]:
    """Batched nodes that compute with a constant whose rows may be the samples'."""
    fed = {node for node in samples.batched if not tape.is_leaf(node) and computes_with_data(tape, node)}
    if not fed:
        return set()
    alignment, holding, excused = Alignment(tape, samples.sites, samples.sizes()), set[int](), set[int]()
    for node in tape.order:
        if node not in samples.batched:
            for k, slot in enumerate(tape.edges[node]):
                if slot is not None and slot[0] in samples.batched and samples.flows.get((node, k)) is not None:
                    alignment.enter(samples.sites[node], k)
            continue
        if tape.is_leaf(node):
            continue
        if node in fed:
            origin = alignment.origin(node, samples.batch)
            holding.update([node] if origin is Below.SAMPLES else [])
            excused.update([node] if origin is Below.ALIGNED and tape.op(node).new_rows is None else [])
        alignment.descend(node)
    return holding | (_used_by_sample(tape, samples, excused) if excused else set())


def _used_by_sample(tape: Tape, samples: SampleMap, nodes: set[int]) -> set[int]:
    """Those of the nodes whose constants are used sample by sample elsewhere: then they are the samples' after all."""
    memory: set[int] = set()
    for site, layout in _separable(tape, samples, lambda op: True):
        readable = not is_opaque(site.node) and not saved.in_checkpoint(site.node)
        if site.index in tape.fed and readable and goes_by_sample(site, layout):
            memory |= memory_of_rows(site.node)
    return {node for node in nodes if not memory.isdisjoint(memory_of_rows(tape.node(node)))}
