"""The matrix finds what it is there to find: rules, flows and lifts that are wrong in one place only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from persample.factors import Dense, Factor, Outer, View
from persample.factors.maps import scaled
from persample.factors.rearrange import Permute
from persample.graph.layout import Block, Flow, Outcome, Shape, carry, labels, sample_dims, simplify
from persample.graph.ops import table
from persample.graph.ops.dims import leading, only
from persample.graph.ops.table import EVERY, Layouts, Op, Rowwise, named
from persample.graph.ops.use import Use
from persample.graph.read.site import Site
from persample.kernels import library
from tests.graph.matrix import nodes, test_flows, test_rules, test_stacks, test_tables
from tests.graph.table import plant

RULE, FLOW = test_rules.test_a_rule_is_right_wherever_it_answers, test_flows.test_a_flow_is_right_wherever_it_answers
LIFT = test_stacks.test_lifted_factors_are_what_the_node_makes_of_their_stacks
THROUGH = test_stacks.test_factors_of_operands_are_what_the_node_makes_of_stacks
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


def _as_entered(name: str) -> Op:
    """What an entry says before anything is planted."""
    return replace(named(name))


_MM, _ADDMM, _NORM, _BAG = (_as_entered(name).factor for name in ("Mm", "Addmm", "NativeLayerNorm", "Embedding"))


def _keeps_first_dim(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Right for cdist, but for a broadcast operand with as many rows as there are samples."""
    found = carry(only(layouts), site.shapes[0], site.target(k), leading(site.shapes[0], 1))
    return Flow.PROBE if found is None else found


def _counts_from_the_front(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Elementwise ops align operands at the last dim, not at the first."""
    shape, target = site.shapes[0], site.target(k)
    dims = [d if d < len(target) and target[d] == n else None for d, n in enumerate(shape)]
    found = carry(only(layouts), shape, target, dims)
    return Flow.SHARED if found is None else found


def _sections_of_what_is_requested(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Counts the operands before k, of which some may not be requested."""
    layout, shape = only(layouts), site.shapes[0]
    dim = site.number("dim") % len(shape)
    if site.target(k) == (0,) or sample_dims(layout, shape) != (dim,):
        return _CAT(site, k, layouts)
    before = [site.target(j)[dim] for j in range(k) if site.edges[j] is not None and site.target(j) != (0,)]
    return simplify(labels(layout, shape).narrow(dim, sum(before), site.target(k)[dim]), site.target(k), layout.batch)


def _forgets_folds(site: Site, k: int, layouts: Layouts) -> Outcome:
    """A transposed block is not the same block."""
    layout = only(layouts)
    return layout if isinstance(layout, Block) else _TRANSPOSE(site, k, layouts)


_CAT, _TRANSPOSE = (_as_entered(name).where for name in ("Cat", "Transpose"))


def _permutes_forward(site: Site, factor: Factor, target: Shape) -> Factor | None:
    """Right for all permutations that are their own inverse."""
    dims = site.dims("dims", len(target))
    return View(factor, target, Permute(tuple(dims))) if tuple(factor.shape[d] for d in dims) == target else None


def _divides_though_it_rounds(site: Site, k: int, factor: Factor) -> Factor | None:
    """Right but for torch.div(..., rounding_mode="floor"), whose gradients are zeros."""
    other = site.value("other")
    return scaled(factor, other.detach().reciprocal()) if isinstance(other, Tensor) else None


PLANTED: dict[str, tuple[Callable[[str], None], str, dict[str, Any]]] = {
    "a stride": (RULE, "Mm", {"rule": _reads_memory}),
    "a conjugate": (RULE, "Mm", {"rule": _forgets_conjugates}),
    "a scale": (RULE, "Addmm", {"rule": _forgets_alpha}),
    "sizes that coincide": (RULE, "NativeLayerNorm", {"rule": _counts_batches_by_size}),
    "a dtype": (test_rules.test_operands_of_any_dtype_and_form_and_frozen_ones, "Embedding", {"rule": _wide}),
    "a broadcast operand": (FLOW, "Cdist", {"flow": {EVERY: _keeps_first_dim}}),
    "operands of other rank": (FLOW, "Mul", {"flow": {EVERY: _counts_from_the_front}}),
    "operands not requested": (FLOW, "Cat", {"flow": {EVERY: _sections_of_what_is_requested}}),
    "a fold": (FLOW, "Transpose", {"flow": {EVERY: _forgets_folds}}),
    "an option": (THROUGH, "Div", {"through": {0: _divides_though_it_rounds}}),
    "an inverse": (LIFT, "Permute", {"lift": _permutes_forward}),
    "another node's rows": (BUNDLE, "Addmm", {"rowwise": Rowwise({0: (), 2: ()}, ("alpha", "beta"))}),
}


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_planted_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    test, name, wrong = PLANTED[what]
    plant(monkeypatch, name, **wrong)
    with pytest.raises((AssertionError, RuntimeError)):
        test(name)


def test_the_kernel_that_read_past_its_tensors_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "materialized", lambda t: t)
    if torch.__version__ >= "2.14":
        pytest.skip("from torch 2.14 on, PyTorch's kernel takes any strides")
    with pytest.raises(AssertionError, match="expanded"):
        RULE("NativeGroupNorm")


def test_an_entry_without_samples_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table._ENTRIES, "BrandNew", Op(name="BrandNew", rule=lambda use: None))
    with pytest.raises(AssertionError, match=r"BrandNew.*add samples"):
        test_tables.test_every_entry_has_a_sample("rule")


@pytest.mark.parametrize("name", ["Cdist", "Cumsum"])
def test_a_new_entry_is_tried_with_pytorchs_own_samples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nobody had written any."""
    made = {name: nodes.from_the_database(name)}
    assert len(made[name]) > 2
    for module in (test_rules.rules, test_rules.variants, test_flows.flows):
        monkeypatch.setattr(module, "harvest", lambda: made)
    FLOW(name)
    if named(name).rule is not None:
        RULE(name)
        test_rules.test_operands_of_any_dtype_and_form_and_frozen_ones(name)


def test_a_rule_that_never_answers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "Mm", rule=lambda use: None)
    with pytest.raises(AssertionError):
        RULE("Mm")


def test_a_matrix_that_shrinks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: sites[:1] for name, sites in nodes.harvest().items()}
    for module in (test_tables, test_tables.rules, test_tables.flows, test_tables.variants):
        monkeypatch.setattr(module, "harvest", lambda: few)
    with pytest.raises(AssertionError, match="rules"):
        test_tables.test_the_matrix_is_as_large_as_it_was()
