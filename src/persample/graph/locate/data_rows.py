"""Which samples read which rows of the data.

Data that go into an op together with a weight have rows, along the dims that they bring into its result. If B of these
are the samples, every row is read by one of them, and every op that is given such data agrees on by whom. A reshape
that cuts across samples, a loss over the wrong dim, or another sample's row (``roll``, a permutation) does not fit,
although cotangents are nowhere added up.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..layout import NOBODY, Layout, Shape, labels
from ..read.site import Site
from ..read.tape import Tape
from .constants import constant_dims
from .follow import SampleMap


def misread(tape: Tape, samples: SampleMap) -> list[str]:
    """Ops whose rows of data are read by several samples, or by other ones than elsewhere."""
    ops, order = [], None
    for site, sample_index, dims in _given_data(tape, samples):
        if _is_shared(sample_index, site.shapes[0], dims, samples.batch):
            ops.append(site.name)
            continue
        readers = _one_each(sample_index, dims, samples.batch)
        if readers is not None:
            ops += [site.name] if order is not None and not torch.equal(readers, order) else []
            order = readers if order is None else order
    return ops


def _given_data(tape: Tape, samples: SampleMap) -> Iterator[tuple[Site, Tensor, list[int]]]:
    """Separable ops with a weight and data: whose their results are, and the dims of these that the data have."""
    for node in tape.order:
        layout = samples.cotangents.get((node, 0))
        if node in samples.batched or not isinstance(layout, Layout) or not _takes_data(samples, tape, node):
            continue
        site = samples.sites[node]
        shape = site.shapes[0]
        brought = range(len(shape)) if site.op.convolution else constant_dims(site)
        dims = [d for d in brought if shape[d] > 1]  # channels of a convolution are its groups' own affair
        if site.op.read_dims is not None:
            dims = [d for d in dims if d < len(shape) - 1]  # the last one is the table's
        if any(shape[d] % samples.batch == 0 for d in dims):
            yield site, labels(layout, shape), dims


def _takes_data(samples: SampleMap, tape: Tape, node: int) -> bool:
    op = tape.op(node)
    if op.read_dims is not None:
        return samples.sites[node].edges[0] is not None and samples.sites[node].is_weight(0)
    if node not in tape.fed:
        return False
    if op.product is not None:
        site = samples.sites[node]
        return any(site.edges[k] is not None and site.is_weight(k) for k in op.product.operands)
    return (op.mixed_dims or op.mixes) is not None and tape.edges[node][0] is None


def _is_shared(sample_index: Tensor, shape: Shape, dims: list[int], batch: int) -> bool:
    """Does a row, of B or a multiple, belong to several samples?"""
    if any(n > 1 and d not in dims for d, n in enumerate(sample_index.shape)):
        return True
    return _is_cut(sample_index.expand([n if d in dims else 1 for d, n in enumerate(shape)]).reshape(-1), batch)


def _is_cut(row: Tensor, batch: int) -> bool:
    """Several rows for each sample, as many for all, but not in the same order for all of them."""
    several, remainder = divmod(len(row), batch)
    whole = not remainder and several > 1 and bool((row != NOBODY).all())
    if not whole or not bool((row.bincount(minlength=batch) == several).all()):
        return False
    places = row.argsort(stable=True).reshape(batch, several)
    return not bool((places - places[:, :1] == places[0] - places[0, 0]).all())


def _one_each(sample_index: Tensor, dims: list[int], batch: int) -> Tensor | None:
    """The sample of every row, if there is one row for each."""
    varying = [d for d in dims if sample_index.shape[d] > 1]
    if len(varying) != 1 or sample_index.shape[varying[0]] != batch:
        return None
    row = sample_index.reshape(-1)
    complete = bool((row != NOBODY).all()) and len(row.unique()) == batch
    return row if complete else None
