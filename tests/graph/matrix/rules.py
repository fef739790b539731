"""Rules against the definition: stack, norms and weighted sum of every factor that a rule makes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from persample.factors import Factor
from persample.graph.layout import Layout
from persample.graph.ops.table import named
from persample.graph.ops.use import Use
from persample.graph.read.site import Site
from persample.kernels.norms import row_norms
from tests.forms import Make, forms, numbers, seed
from tests.graph.matrix.definition import by_sample, differs, size
from tests.graph.matrix.nodes import harvest, narrowed
from tests.graph.matrix.places import marks, places, with_samples
from tests.graph.sites import wanted

OWN_WAYS = {"Add", "Sub", "Mul", "Div", "Expand"}  # elementwise ops that the rule for all of them has shorter ways for


class Combination(NamedTuple):
    """A node's cotangents: which there are, in which form the first of them comes, and where the samples lie."""

    present: tuple[bool, ...]
    form: str
    make: Make
    layout: Layout  # of the first that is there


def subsets(count: int) -> list[tuple[bool, ...]]:
    """Which of a node's cotangents may come: all, each alone, all but one; never none."""
    if count > 4:  # pieces of one tensor, all alike
        each = [tuple(i == j for i in range(count)) for j in (0, count - 1)]
        return [(True,) * count, *each]
    return [some for some in product((True, False), repeat=count) if any(some)]


def combinations(site: Site, every: bool) -> Iterator[Combination]:
    """``every`` form × every place, or each form in some places and each place in some forms; then every subset."""
    first = (True, *[False] * (len(site.shapes) - 1))
    shape, dtype = site.shapes[0], _dtype(site, 0)
    listed, where = list(forms(shape, dtype)), places(shape)
    for i, layout in enumerate(where):
        for j, (form, make) in enumerate(listed):
            if every or j == i % len(listed) or i == 0 or (i == len(where) // 2 and j % 2):
                yield Combination(first, form, make, layout)
    for present in subsets(len(site.shapes)):
        if present != first:
            for layout in places(site.shapes[present.index(True)])[:: 1 if every else 3]:
                yield Combination(present, "contiguous", numbers, layout)


def planned(name: str, every: bool = False) -> Iterator[tuple[Site, Combination]]:
    """All that is asked of one rule; of elementwise ops, which have one rule for all, some of it at a time."""
    step = 1 if every or not named(name).pointwise else 3 if name in OWN_WAYS else 5
    for i, (site, _) in enumerate(harvest()[name]):
        for j, combination in enumerate(combinations(site, every)):
            if (i + j) % step == 0:
                yield site, combination
        for one in narrowed(site):
            yield from (
                (one, combination) for combination in list(combinations(one, every))[:: 1 if every else 5 * step]
            )


def _dtype(site: Site, nr: int) -> torch.dtype:
    found: torch.dtype = site.node._input_metadata[nr].dtype
    return found


def cotangents(site: Site, this: Combination) -> tuple[list[Tensor | None], list[Layout | None]]:
    """What a node is given."""
    seed(1)
    given: list[Tensor | None] = []
    layouts: list[Layout | None] = []
    for nr, (shape, there) in enumerate(zip(site.shapes, this.present, strict=True)):
        first = nr == this.present.index(True)
        given.append((this.make if first else numbers)(shape, _dtype(site, nr)) if there else None)
        layouts.append(None if not there else this.layout if first else with_samples(shape, this.layout.batch))
    if len(site.shapes) > 1:  # what is nobody's carries nothing, which rules for one cotangent do not rely on
        given = [
            g if g is None or lay is None else _without_nobody(g, lay) for g, lay in zip(given, layouts, strict=True)
        ]
    return given, layouts


def _without_nobody(g: Tensor, layout: Layout) -> Tensor:
    mine = marks(layout, tuple(g.shape)).any(0)
    return g if bool(mine.all()) else torch.where(mine, g, torch.zeros((), dtype=g.dtype))


def wrong_rules(site: Site, combination: Combination) -> tuple[list[str], int]:
    """What the rule of a node gets wrong, and how many of its outputs it has an answer for."""
    given, layouts = cotangents(site, combination)
    batch = combination.layout.batch
    site.memo = {}
    try:
        made = {k: site.op.factor(Use(site, k, given, layouts, batch)) for k in wanted(site)}
    except RuntimeError:
        if by_sample(site, given, layouts) is None:
            return [], 0
        raise
    answers = {k: factor for k, factor in made.items() if factor is not None}
    want = by_sample(site, given, layouts) if answers else None
    if want is None:
        return [], 0
    answers = {k: factor for k, factor in answers.items() if bool(want[k].isfinite().all())}  # NaN times zero is NaN
    found = [
        f"{site.name} {site.shapes} -> output {k} {site.target(k)}, {combination.form} cotangent,"
        f" {combination.present}, {combination.layout}: {what}"
        for k, factor in answers.items()
        for what in wrong_answers(factor, want[k], given)
    ]
    return found, len(answers)


def wrong_answers(factor: Factor, want: Tensor, given: Sequence[Tensor | None]) -> Iterable[str]:
    """What a factor gets wrong of the gradients that it should hold, made from what was given."""
    scale, dtypes = size(*given, want), [g.dtype for g in given if g is not None]
    if factor.dtype != want.dtype:
        yield f"dtype {factor.dtype}, not {want.dtype}"
    if (factor.batch, *factor.shape) != tuple(want.shape):
        yield f"shape {(factor.batch, *factor.shape)}, not {tuple(want.shape)}"
        return
    weights = torch.linspace(0.5, 1.5, factor.batch, dtype=torch.float64)
    rows = want.to(torch.complex128 if want.is_complex() else torch.float64)
    rows = rows.reshape(factor.batch, factor.numel)
    total = (weights.unsqueeze(1) * rows).sum(0).reshape(factor.shape)
    norms = row_norms(rows) if rows.numel() else torch.zeros(factor.batch, dtype=torch.float64)
    questions = {
        "norms": (factor.norms(), norms),
        "weighted sum": (factor.weighted_sum(weights), total),
        "stack": (factor.stack(), want),  # last, as it may be kept
    }
    for name, (got, right) in questions.items():
        scale_here = scale * max(1, rows.shape[1]) ** 0.5 if name == "norms" else scale * factor.batch
        if what := differs(got, right, scale_here, want.dtype, *dtypes):
            yield f"{name} {what}"
