"""What a plan claims about a graph, checked by the definition: one sample's cotangent at a time."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from persample.graph.execute.plan import CapturePlan
from persample.graph.layout import Block, Layout, Shape, labels
from persample.graph.locate.follow import SampleMap
from persample.graph.locate.probe import probe_node
from persample.graph.read.invoke import call, sum_to
from persample.graph.read.nodes import is_leaf
from persample.graph.read.saved import in_checkpoint
from persample.graph.read.site import Flow, Outcome, Site


def some_samples(batch: int) -> list[int]:
    """All samples of a batch, or some of a large one, the first and the last among them."""
    return sorted({*range(0, batch, -(-batch // 5)), batch - 1})


def refuted_cotangents(plan: CapturePlan, losses: Tensor, floor: float = 0.0) -> list[str]:
    """Backpropagate every single loss: whatever it reaches must be labelled as its own.

    Gradients up to `floor` are passed over: what a real backward shows below a custom function may be rounding noise.
    """
    tape, samples = plan.tape, plan.samples
    every = [(node, nr) for node in tape.order for nr in range(len(tape.shapes(node)))]
    slots = [slot for slot in every if not isinstance(samples.cotangents.get(slot), Flow)]
    if not slots:
        return []
    claims = [samples.cotangents.get(slot) for slot in slots]
    edges = [GradientEdge(*tape.graph.at(slot)) for slot in slots]
    refuted = {}
    for i in some_samples(len(losses)):
        one = torch.zeros_like(losses).index_fill_(0, torch.tensor(i), 1)
        grads = torch.autograd.grad(losses, edges, one, retain_graph=True, allow_unused=True)
        for slot, claim, g in zip(slots, claims, grads, strict=True):
            if (why := _refutes(claim, g, i, floor)) and slot not in refuted:
                refuted[slot] = f"cotangent {slot[1]} of {tape.node(slot[0]).name()} {tape.shape(slot)}: {why}"
    return list(refuted.values())


def refuted_flows(plan: CapturePlan) -> list[str]:
    """Send random cotangents of every single sample through every separable node: the same for each edge.

    The probe's answer is held against this, and the rule's where the plan goes by a rule.
    """
    refuted = []
    for site, layouts in _separable(plan.samples):
        if _seen_before(plan, site, layouts):
            continue
        answers = {"probe": probe_node(site, layouts, plan.samples.batch)}
        if site.index not in plan.samples.probed:
            answers["rule"] = [plan.samples.flows.get((site.index, k)) for k in range(len(site.edges))]
        for i in some_samples(plan.samples.batch):
            for k, g in _outputs(site, layouts, i).items():
                for who, outcomes in answers.items():
                    if why := _refutes(outcomes[k], g, i):
                        refuted.append(f"{who} on output {k} of {site.name} {site.shapes} -> {site.target(k)}: {why}")
    return refuted


def _refutes(claim: Outcome, g: Tensor | None, i: int, floor: float = 0.0) -> str | None:
    """Why sample i's gradient contradicts the claim, or None. Batched tensors claim nothing."""
    if g is None or isinstance(claim, Flow):
        return None
    reached = g.to_dense().abs() > floor
    if claim is None:
        return f"nothing should arrive, but sample {i} does" if bool(reached.any()) else None
    mark = _marks(claim, tuple(g.shape))
    stray = reached & (mark != i)
    if not bool(stray.any()):
        return None
    where = stray.nonzero()[0].tolist()
    return f"{claim} says {int(mark.expand(g.shape)[tuple(where)])} at {where}, but sample {i} is there"


def _marks(claim: Layout, shape: Shape) -> Tensor:
    return _block_marks(claim, shape) if isinstance(claim, Block) else labels(claim, shape)


_block_marks = lru_cache(maxsize=1024)(labels)

_SEEN: set[Hashable] = set()


def _seen_before(plan: CapturePlan, site: Site, layouts: Sequence[Layout | None]) -> bool:
    """Most rules go by shapes and dims alone, which cases and loops repeat many times over: ask each once."""
    targets = [None if slot is None else site.target(k) for k, slot in enumerate(site.edges)]
    key = (site.name, site.shapes, *targets, str(layouts), *_numbers(site.node))
    seen = key in _SEEN
    _SEEN.add(key)
    return seen and site.index not in plan.samples.probed and site.name not in READS_INDEX


READS_INDEX = frozenset("Index UnsafeIndex IndexSelect Embedding EmbeddingBag IndexAdd IndexCopy".split())


def _numbers(node: Node) -> Iterator[Hashable]:
    """The dims, steps and flags that a node has saved, but no tensors."""
    for name in _saved_names(type(node)):
        value = getattr(node, name)
        if value is None or isinstance(value, (int, float, str)):
            yield value
        elif isinstance(value, tuple) and not any(isinstance(v, Tensor) for v in value):
            yield str(value)


@lru_cache
def _saved_names(kind: type[Node]) -> tuple[str, ...]:
    tensors = {name.removeprefix("_raw") for name in dir(kind) if name.startswith("_raw_saved_")}
    return tuple(name for name in dir(kind) if name.startswith("_saved_") and name not in tensors)


def _separable(samples: SampleMap) -> Iterator[tuple[Site, Sequence[Layout | None]]]:
    for number, site in samples.sites.items():
        node = site.node
        if number in samples.batched or is_leaf(node) or not _built_in(node) or in_checkpoint(node):
            continue
        layouts = samples.layouts(number)
        if any(layout is not None for layout in layouts):
            yield site, layouts


def _built_in(node: Node) -> bool:
    """Linear in its cotangents, so that it may be asked with any."""
    return not isinstance(node, BackwardCFunction) and "CppNode" not in node.name()


def _outputs(site: Site, layouts: Sequence[Layout | None], i: int) -> dict[int, Tensor]:
    """The node's outputs for sample i alone, summed to their targets' shapes as the engine would."""
    cotangents = [None if lay is None else _noise(site.node, nr, lay, i) for nr, lay in enumerate(layouts)]
    outputs = call(site.node, cotangents, site.edges)
    return {
        k: sum_to(value, site.target(k), site.metadata(k).dtype)
        for k, value in enumerate(outputs)
        if value is not None and site.edges[k] is not None
    }


def _noise(node: Node, nr: int, layout: Layout, i: int) -> Tensor:
    meta = node._input_metadata[nr]
    noise = torch.randn(meta.shape, dtype=meta.dtype, generator=torch.Generator().manual_seed(nr))
    return noise.masked_fill(labels(layout, tuple(meta.shape)) != i, 0)
