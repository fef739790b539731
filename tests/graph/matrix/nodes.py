"""The nodes that the matrix is made of: those in the graphs of every sample that there is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from persample.graph.ops.table import entries
from persample.graph.read.saved import metadata
from persample.graph.read.site import Site
from persample.graph.read.tape import read
from tests.forms import seed
from tests.graph import cubes, test_every_use
from tests.graph.claims import _numbers
from tests.graph.names import NODES
from tests.graph.samples import SAMPLES
from tests.graph.samples.database import samples_of
from tests.graph.samples.rarer import RARER
from tests.graph.saved_rows import SAVED
from tests.graph.sites import nodes
from tests.graph.test_fallback import MASKED, REFUSED
from tests.graph.test_names import SPELT

Build = Callable[[], Tensor]

# Entries of the tables that no op makes on a CPU, or whose cotangents are no ordinary tensors.
UNMADE = frozenset(
    """
    ConvolutionOverrideable CudnnBatchNorm CudnnConvolution CudnnCtcLoss CudnnGridSampler CudnnRnn FusedDropout
    FusedRmsNorm LstmMps MaxPool2D MiopenBatchNorm MiopenRnn MkldnnAdaptiveAvgPool2D MkldnnMaxPool2D MkldnnMaxPool3D
    MkldnnReshape Redistribute RegisterPostBackwardFunction ScaledDotProductCudnnAttention
    ScaledDotProductEfficientAttention
    ScaledDotProductFlashAttention ScaledDotProductFusedAttentionOverrideable ThnnFusedGruCell ThnnFusedLstmCell
    _DDPSink _FromTorchTensor _ToTorchTensor
    """.split()
)


def builds() -> Iterator[Build]:
    """Everything that makes a graph."""
    for library in (SAMPLES, RARER, REFUSED, MASKED):
        for name, samples in library.items():
            yield from samples if name in NODES else ()  # which this torch may not have
    yield from SPELT.values()
    yield from (row.build for row in SAVED)
    for op in cubes.EVERY.values():
        yield lambda op=op: op(cubes.data(cubes.N, cubes.N, cubes.N).requires_grad_() * 1)
    for shapes, use in test_every_use.USES.values():
        yield lambda shapes=shapes, use=use: _used(use, shapes, hidden=False)
        yield lambda shapes=shapes, use=use: _used(use, shapes, hidden=True)


def _used(use: Callable[..., Tensor], shapes: test_every_use.Shapes, hidden: bool) -> Tensor:
    params = [test_every_use.data(*shape).requires_grad_() for shape in shapes]
    x = test_every_use.data(cubes.N, cubes.N, cubes.N)
    return use(x.requires_grad_() * 1 if hidden else x, *params)


def sites(build: Build, under: Any = None) -> list[Site]:
    """The nodes of a graph with all its leaves requested; none where PyTorch cannot build it ``under`` a mode."""
    seed(0)
    torch.manual_seed(0)
    for generator in (cubes.GENERATOR, test_every_use._GENERATOR):
        generator.manual_seed(0)
    try:
        with warnings.catch_warnings(), under or nullcontext():
            warnings.simplefilter("ignore")
            output = build()
    except (RuntimeError, IndexError, ValueError, TypeError):
        if under is None:
            raise
        return []
    if output.grad_fn is None:
        return []
    found = list(nodes(output))
    graph = read([output.grad_fn])
    tape, numbers = graph.tape(graph.leaves.values()), [graph.numbers[node] for node in found]
    return [Site(tape, number) for number in numbers if not tape.is_leaf(number) and number in tape.edges]


def kind(site: Site) -> Hashable:
    """Equal for nodes that differ in nothing but numbers."""
    targets = [None if slot is None else (site.target(k), site.metadata(k).dtype) for k, slot in enumerate(site.edges)]
    about = [(m.dtype, str(m.layout) if hasattr(m, "layout") else "") for m in metadata(site.node)]
    return site.name, site.shapes, *targets, *about, *_numbers(site.node)


@lru_cache
def harvest() -> dict[str, list[tuple[Site, Build]]]:
    """For every name, its nodes of every kind, and what made each."""
    found: dict[str, list[tuple[Site, Build]]] = {}
    _gather(builds(), found)
    unheard = {op.name for op in entries()} & NODES - set(found) - UNMADE
    _gather(samples_of(unheard), found, unheard)
    return found


def _gather(
    made: Iterable[Build], found: dict[str, list[tuple[Site, Build]]], names: Collection[str] | None = None
) -> None:
    """Add the nodes of every kind that are made, of all names or of some."""
    seen = {kind(site) for listed in found.values() for site, _ in listed}
    for build in made:
        for site in sites(build):
            this = kind(site)
            if this not in seen and site.name not in UNMADE and (names is None or site.name in names):
                seen.add(this)
                found.setdefault(site.name, []).append((site, build))


def from_the_database(name: str) -> list[tuple[Site, Build]]:
    """The nodes of one name that PyTorch's own samples make."""
    found: dict[str, list[tuple[Site, Build]]] = {}
    _gather(samples_of([name]), found, [name])
    return found.get(name, [])


def narrowed(site: Site) -> Iterator[Site]:
    """The same node with one of its outputs requested, for every one of several."""
    wanted = [k for k, slot in enumerate(site.edges) if slot is not None]
    for kept in wanted if len(wanted) > 1 else ():
        one = Site(site._tape, site.index)
        one.edges = tuple(slot if k == kept else None for k, slot in enumerate(site.edges))
        one.outputs = [(k, slot) for k, slot in site.outputs if k == kept]
        yield one
