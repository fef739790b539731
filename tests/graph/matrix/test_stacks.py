"""Every lift, every bundle of uses, and every node that stacks are pulled through."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from persample.graph.ops.table import named
from persample.graph.read.invoke import call
from persample.graph.read.site import Site
from tests.forms import forms, numbers, plain, seed
from tests.graph.matrix.definition import differs, size
from tests.graph.matrix.nodes import UNMADE, harvest
from tests.graph.matrix.rules import OWN_WAYS
from tests.graph.matrix.stacks import wrong_bundles, wrong_lifts, wrong_pulls, wrong_throughs
from tests.graph.matrix.variants import varied
from tests.graph.sites import wanted
from tests.graph.table import having


def check(wrong: Callable[[Site], tuple[list[str], int]], name: str, most: int | None = None) -> None:
    """Raise unless all is right for the nodes of one name, of which there must be some."""
    found, count = list[str](), 0
    for site, _ in harvest()[name][:most]:
        here, asked = wrong(site)
        found, count = found + here, count + asked
    assert found == []
    assert count


@pytest.mark.parametrize("name", sorted(having("lift") - UNMADE))
def test_lifted_factors_are_what_the_node_makes_of_their_stacks(name: str) -> None:
    check(wrong_lifts, name)


@pytest.mark.parametrize("name", sorted(having("through")))
def test_factors_of_operands_are_what_the_node_makes_of_stacks(name: str) -> None:
    check(wrong_throughs, name)


@pytest.mark.parametrize("name", sorted(having("through")))
def test_factors_of_operands_of_any_dtype_and_form(name: str) -> None:
    """And with other operands frozen."""
    made = list({id(build): build for _, build in harvest()[name]}.values())
    found, count = list[str](), 0
    for build in made[:1] if named(name).pointwise and name not in OWN_WAYS else made[:4]:
        for variant, site in varied(build, name):
            wrong, asked = wrong_throughs(site)
            found, count = found + [f"{variant}: {what}" for what in wrong], count + asked
    assert found == []
    assert count


@pytest.mark.parametrize("name", sorted(having("rowwise")))
def test_uses_asked_together_are_what_each_is_alone(name: str) -> None:
    check(wrong_bundles, name)


@pytest.mark.parametrize("name", sorted(having("vmap") & set(harvest())))
def test_stacks_of_any_form_are_pulled_through(name: str) -> None:
    check(wrong_pulls, name, most=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(harvest()))
def test_stacks_are_pulled_through_every_node(name: str) -> None:
    check(wrong_pulls, name)


@pytest.mark.parametrize("name", sorted(harvest()))
def test_nodes_may_be_called_with_cotangents_of_any_form(name: str) -> None:
    found = list[str]()
    for site, _ in harvest()[name][:4]:
        about = site.node._input_metadata
        for form, make in forms(site.shapes[0], about[0].dtype):
            seed(5)
            given = [(numbers if nr else make)(shape, about[nr].dtype) for nr, shape in enumerate(site.shapes)]
            try:
                want = call(site.node, [plain(g) for g in given], site.edges)
            except RuntimeError:  # PyTorch cannot
                continue
            got = call(site.node, given, site.edges)
            for k in wanted(site):
                one, right = (None if t is None else t.to_dense() for t in (got[k], want[k]))
                assert (one is None) == (right is None)
                if one is not None and right is not None and bool(right.isfinite().all()):
                    what = differs(one, right, size(*given, right), *[g.dtype for g in given])
                    found += [f"{name} {site.shapes} output {k}, {form}: {what}"] if what else []
    assert found == []
