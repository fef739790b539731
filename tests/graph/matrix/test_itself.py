"""The matrix finds what it is there to find: rules, flows and lifts that are wrong in one place only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from persample.factors import Dense, Factor, Outer, View
from persample.factors.moves import Permute
from persample.graph.bundles import _ROWWISE
from persample.graph.flows import FLOWS
from persample.graph.flows.fibres import leading
from persample.graph.flows.registry import Layouts, keep, only
from persample.graph.layout import Block, Shape, labels, sample_dims, simplify
from persample.graph.pullback import LIFTS
from persample.graph.rules import RULES, Use
from persample.graph.site import Fate, Flow, Site
from persample.kernels import library
from tests.graph.matrix import nodes, test_flows, test_rules, test_stacks, test_tables

RULE, FLOW = test_rules.test_a_rule_is_right_wherever_it_answers, test_flows.test_a_flow_is_right_wherever_it_answers
LIFT = test_stacks.test_lifted_factors_are_what_the_node_makes_of_their_stacks
BUNDLE = test_stacks.test_uses_asked_together_are_what_each_is_alone


def _reads_memory(use: Use) -> Factor | None:
    """Takes its cotangent for contiguous."""
    g = use.g.as_strided(use.g.shape, torch.empty(use.g.shape, device="meta").stride(), use.g.storage_offset())
    return _MM(replace(use, cotangents=[g]))


def _forgets_conjugates(use: Use) -> Factor | None:
    """A complex product whose other operand is taken as it is."""
    factor = _MM(use)
    if not isinstance(factor, Outer) or not factor.left.is_complex() or use.k != 1:
        return factor
    return Outer(factor.left.conj(), factor.right, factor.scale)


def _forgets_alpha(use: Use) -> Factor | None:
    factor = _ADDMM(use)
    return Outer(factor.left, factor.right) if isinstance(factor, Outer) else factor


def _counts_batches_by_size(use: Use) -> Factor | None:
    """Takes the first dim that has as many places as there are samples."""
    if use.k != 2 or use.batch not in use.g.shape:
        return _NORM(use)
    dim = tuple(use.g.shape).index(use.batch)
    if dim >= use.g.ndim - len(use.target):
        return _NORM(use)
    return Dense(use.g.movedim(dim, 0).reshape(use.batch, -1, *use.target).sum(1))


def _wide(use: Use) -> Factor | None:
    """Right numbers in another dtype than the parameter's."""
    factor = _BAG(use)
    return None if factor is None else Dense(factor.stack().double())


_MM, _ADDMM, _NORM, _BAG = (RULES[name] for name in ("Mm", "Addmm", "NativeLayerNorm", "Embedding"))


def _keeps_first_dim(site: Site, k: int, layouts: Layouts) -> Fate:
    """Right for cdist, but for a broadcast operand with as many rows as there are samples."""
    return keep(only(layouts), site.shapes[0], site.target(k), leading(site.shapes[0], 1))


def _counts_from_the_front(site: Site, k: int, layouts: Layouts) -> Fate:
    """Elementwise ops align operands at the last dim, not at the first."""
    shape, target = site.shapes[0], site.target(k)
    dims = [d if d < len(target) and target[d] == n else None for d, n in enumerate(shape)]
    found = keep(only(layouts), shape, target, dims)
    return Flow.SHARED if found is Flow.PROBE else found


def _sections_of_what_is_requested(site: Site, k: int, layouts: Layouts) -> Fate:
    """Counts the operands before k, of which some may not be requested."""
    layout, shape = only(layouts), site.shapes[0]
    dim = site.number("dim") % len(shape)
    if site.target(k) == (0,) or sample_dims(layout, shape) != (dim,):
        return _CAT(site, k, layouts)
    before = [site.target(j)[dim] for j in range(k) if site.edges[j] is not None and site.target(j) != (0,)]
    return simplify(labels(layout, shape).narrow(dim, sum(before), site.target(k)[dim]), site.target(k), layout.batch)


def _forgets_folds(site: Site, k: int, layouts: Layouts) -> Fate:
    """A transposed block is not the same block."""
    layout = only(layouts)
    return layout if isinstance(layout, Block) else _TRANSPOSE(site, k, layouts)


_CAT, _TRANSPOSE = FLOWS["Cat"], FLOWS["Transpose"]


def _permutes_forward(site: Site, factor: Factor, target: Shape) -> Factor | None:
    """Right for all permutations that are their own inverse."""
    dims = site.dims("dims", len(target))
    return View(factor, target, Permute(tuple(dims))) if tuple(factor.shape[d] for d in dims) == target else None


PLANTED: dict[str, tuple[Callable[[str], None], dict[str, Any], str, Any]] = {
    "a stride": (RULE, RULES, "Mm", _reads_memory),
    "a conjugate": (RULE, RULES, "Mm", _forgets_conjugates),
    "a scale": (RULE, RULES, "Addmm", _forgets_alpha),
    "sizes that coincide": (RULE, RULES, "NativeLayerNorm", _counts_batches_by_size),
    "a dtype": (test_rules.test_operands_of_any_dtype_and_form_and_frozen_ones, RULES, "Embedding", _wide),
    "a broadcast operand": (FLOW, FLOWS, "Cdist", _keeps_first_dim),
    "operands of other rank": (FLOW, FLOWS, "Mul", _counts_from_the_front),
    "operands not requested": (FLOW, FLOWS, "Cat", _sections_of_what_is_requested),
    "a fold": (FLOW, FLOWS, "Transpose", _forgets_folds),
    "an inverse": (LIFT, LIFTS, "Permute", _permutes_forward),
    "another node's rows": (BUNDLE, _ROWWISE, "Addmm", ({0: (), 2: ()}, ("alpha", "beta"))),
}


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_planted_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    test, table, name, wrong = PLANTED[what]
    monkeypatch.setitem(table, name, wrong)
    with pytest.raises((AssertionError, RuntimeError)):
        test(name)


def test_the_kernel_that_read_past_its_tensors_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "materialized", lambda t: t)
    if torch.__version__ >= "2.14":
        pytest.skip("from torch 2.14 on, PyTorch's kernel takes any strides")
    with pytest.raises(AssertionError, match="expanded"):
        RULE("NativeGroupNorm")


def test_an_entry_without_samples_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "BrandNew", _MM)
    with pytest.raises(AssertionError, match=r"BrandNew.*add samples"):
        test_tables.test_every_entry_has_a_sample("rules")


def test_a_rule_that_never_answers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "Mm", lambda use: None)
    with pytest.raises(AssertionError):
        RULE("Mm")


def test_a_matrix_that_shrinks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: sites[:1] for name, sites in nodes.harvest().items()}
    for module in (test_tables, test_tables.rules, test_tables.flows, test_tables.variants):
        monkeypatch.setattr(module, "harvest", lambda: few)
    with pytest.raises(AssertionError, match="rules"):
        test_tables.test_the_matrix_is_as_large_as_it_was()
