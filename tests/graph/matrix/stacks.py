"""What is pulled through nodes that all samples share, against the node called on one sample's stack at a time.

Lifts keep a factor's structure, bundles ask one rule about several nodes, and vmap takes all samples at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from persample.factors import ByRows, Convolution, Dense, Factor, Hadamard, Masked, Outer, Rows, Sum, View
from persample.factors.rearrange import Permute, Reshape
from persample.graph.execute.fallback import push_stacked
from persample.graph.execute.pullback import kept, lifted, pull
from persample.graph.layout import Block, Shape
from persample.graph.ops.use import Use
from persample.graph.read.site import Flow, Site
from persample.kernels.geometry import Geometry
from tests.forms import forms, numbers, plain, seed
from tests.graph.matrix.definition import by_row, differs, size
from tests.graph.matrix.nodes import narrowed
from tests.graph.matrix.rules import subsets, wrong_answers
from tests.graph.sites import wanted

B = 3


def factors(shape: Shape, dtype: torch.dtype) -> Iterator[tuple[str, Factor]]:
    """Every kind of factor of a tensor with this shape, dense ones in every form of memory."""
    seed(2)
    for form, make in forms((B, *shape), dtype):
        yield f"{form} stack", Dense(make((B, *shape), dtype))
    mark = torch.randint(-1, B, shape, generator=torch.Generator().manual_seed(0))
    yield "masked", Masked(numbers(shape, dtype).masked_fill(mark < 0, 0), mark, B)
    if shape:
        ids = torch.tensor([[0, 1, -1, 0]] * B) % max(shape[0], 1) if shape[0] else torch.full((B, 1), -1)
        rows = Rows(ids, numbers((B, ids.shape[1], *shape[1:]), dtype), shape[0])
        yield "rows", rows
        yield "sum", Sum([rows, Dense(numbers((B, *shape), dtype))])
        turned = View(Dense(numbers((B, *shape[::-1]), dtype)), shape, Permute(tuple(reversed(range(len(shape))))))
        yield "view", turned
    if len(shape) > 1:
        for positions in (1, 4, 0):
            left, right = ((B, *shape[:-2], positions, n) for n in shape[-2:])
            yield f"outer products of {positions}", Outer(numbers(left, dtype), numbers(right, dtype), 0.5)
            yield "outer products in columns", Outer(_turned(left, dtype), numbers(right, dtype))


def computed_factors(shape: Shape, dtype: torch.dtype) -> Iterator[tuple[str, Factor]]:
    """`factors`, and those that weights have which are computed from others, or used by convolutions."""
    yield from factors(shape, dtype)
    if dtype.is_complex or not shape or 0 in shape:
        return
    if len(shape) > 1:
        yield "scaled rows", ByRows(numbers((B, shape[0]), dtype), numbers(shape, dtype))
    if len(shape) == 2:
        turned = ByRows(numbers((B, shape[1]), dtype), numbers(shape[::-1], dtype))
        yield "scaled columns", View(turned, shape, Permute((1, 0)))
        outer = Outer(numbers((B, 2, shape[0]), dtype), numbers((B, 2, shape[1]), dtype), 0.5)
        yield "a sum of both", Sum([outer, ByRows(numbers((B, shape[0]), dtype), numbers(shape, dtype))])
        yield "outer products, transposed", View(outer.t(), shape, Permute((1, 0)))
        for positions in (1, 3):
            sides = [numbers((B, positions, n), dtype) for n in shape]
            yield f"a mask of {positions}", Hadamard(Outer(sides[0], sides[1]), numbers(shape, dtype))
        size = (shape[0], 1, shape[1])
        yield "kernels as a matrix", View(_kernels(size, dtype), shape, Reshape(size, shape))
    if len(shape) in (3, 4):
        yield "kernels", _kernels(shape, dtype)
        yield "masked kernels", Hadamard(_kernels(shape, dtype), numbers(shape, dtype))


def _kernels(size: Shape, dtype: torch.dtype) -> Convolution:
    """Of images that are two places longer than the kernels on every side."""
    p, d, *kernel = size
    ones, zeros = (1,) * len(kernel), (0,) * len(kernel)
    x, dy = (B, 1, d, *[n + 2 for n in kernel]), (B, 1, p, *[3 for _ in kernel])
    return Convolution(numbers(x, dtype), numbers(dy, dtype), size, Geometry(ones, zeros, ones, False, zeros, 1))


def _turned(shape: Shape, dtype: torch.dtype) -> Tensor:
    return numbers((*shape[:-2], shape[-1], shape[-2]), dtype).mT


def wrong_lifts(site: Site) -> tuple[list[str], int]:
    """What goes wrong on the way of factors through one view or cast, and how many of them were kept as they are."""
    found, kept = [], 0
    for name, factor in factors(site.shapes[0], _dtype(site)):
        want = by_row(site, [[row] for row in plain(factor.stack())])
        lift = lifted(site, factor)
        if lift is None or want is None:
            continue
        kept += 1
        found += [f"{_called(site)}, {name}: {what}" for what in wrong_answers(lift, want[0], [factor.stack()])]
    return found, kept


def wrong_throughs(site: Site) -> tuple[list[str], int]:
    """What goes wrong on the way of factors to an op's operands, and how many of them kept a form."""
    found, count = [], 0
    if len(site.shapes) != 1:
        return [], 0
    for one in (site, *narrowed(site)):
        for name, factor in computed_factors(one.shapes[0], _dtype(one)):
            want = by_row(one, [[row] for row in plain(factor.stack())])
            passed = {} if want is None else kept(one, [factor])
            one.forget()
            for k, reached in passed.items():
                assert want is not None
                if bool(want[k].isfinite().all()):
                    count += 1
                    wrong = wrong_answers(reached, want[k], [factor.stack()])
                    found += [f"{_called(one)} output {k}, {name}: {what}" for what in wrong]
    return found, count


def wrong_pulls(site: Site) -> tuple[list[str], int]:
    """The same for any node and all of its cotangents, as the batched engine goes."""
    found, count = [], 0
    for present in subsets(len(site.shapes)):
        for form, make in forms((B, *site.shapes[present.index(True)]), _dtype(site, present.index(True))):
            seed(3)
            stacks = [
                (make if nr == present.index(True) else numbers)((B, *shape), _dtype(site, nr)) if there else None
                for nr, (shape, there) in enumerate(zip(site.shapes, present, strict=True))
            ]
            want = by_row(site, [[None if s is None else plain(s[i]) for s in stacks] for i in range(B)])
            if want is None:
                continue
            count += 1
            dense = [None if s is None else Dense(s) for s in stacks]
            got, _ = pull(site, dense, B)
            pushed = push_stacked(site, stacks, B, wanted(site))
            for k, right in want.items():
                if not right.isfinite().all():
                    continue
                for way, value in (
                    ("pulled", got[k].stack() if k in got else torch.zeros_like(right)),
                    ("pushed", pushed[k]),
                ):
                    if what := differs(value, right, size(*stacks, right), *[s.dtype for s in stacks if s is not None]):
                        found.append(f"{_called(site)} output {k}, {form} stack, {present}, {way}: {what}")
    return found, count


def wrong_bundles(site: Site) -> tuple[list[str], int]:
    """Several nodes' rows one after another are as many samples more."""
    assert site.op.rowwise is not None
    reads, shape = site.op.rowwise.reads, site.shapes[0]
    found, count = [], 0
    for batch in (b for b in range(2, shape[0] + 1) if shape[0] % b == 0):
        inner = torch.Size(shape).numel() // batch
        seed(4)
        both = [numbers(shape, _dtype(site)) for _ in range(2)]
        layouts = [Block(batch, inner), *[None] * (len(site.shapes) - 1)]
        outcomes = {k: site.op.where(site, k, layouts) for k in wanted(site) if k in reads}
        for k in (k for k in wanted(site) if outcomes.get(k) is Flow.SHARED):
            saved = {name: site.optional(name) for name in reads[k]}
            if any(t is None for t in saved.values()):
                continue
            site.memo, site.recomputed = {}, {name: torch.cat([t, t]) for name, t in saved.items() if t is not None}
            factor = site.op.factor(Use(site, k, [torch.cat(both)], [Block(2 * batch, inner)], 2 * batch))
            site.forget()
            want = by_row(site, [_alone(g, len(site.shapes) - 1, batch, i) for g in both for i in range(batch)])
            if factor is None or want is None:
                continue
            count += 1
            found += [f"{_called(site)} output {k}, two nodes: {what}" for what in wrong_answers(factor, want[k], both)]
    return found, count


def _alone(g: Tensor, others: int, batch: int, i: int) -> list[Tensor | None]:
    """One sample's rows."""
    parts = [part if j == i else torch.zeros_like(part) for j, part in enumerate(g.chunk(batch))]
    return [torch.cat(parts), *[None] * others]


def _called(site: Site) -> str:
    return f"{site.name} {site.shapes} -> {[site.target(k) for k in wanted(site)]}"


def _dtype(site: Site, nr: int = 0) -> torch.dtype:
    found: torch.dtype = site.node._input_metadata[nr].dtype
    return found
