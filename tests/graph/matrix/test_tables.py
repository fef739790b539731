"""Nothing is in the engine's tables that the matrix does not try, and the matrix does not shrink."""

from __future__ import annotations

import pytest

from tests.graph.matrix import flows, rules, test_flows, test_rules, variants
from tests.graph.matrix.nodes import UNMADE, harvest
from tests.graph.matrix.stacks import factors
from tests.graph.names import NODES, SOME
from tests.graph.table import FIELDS, having

# Nodes that are tried, and combinations of a node, its cotangents' form and the place of the samples.
LEAST = {"nodes": 1850, "rules": 15000, "variants": 7500, "flows": 25000, "lifts": 6300}


@pytest.mark.parametrize("field", FIELDS)
def test_every_entry_has_a_sample(field: str) -> None:
    missing = sorted(having(field) - set(harvest()) - UNMADE - (set(SOME) - NODES))
    assert not missing, f"{missing}: add samples to tests/graph/samples/ that make these nodes"


def test_what_no_cpu_makes_is_not_made() -> None:
    assert not UNMADE & set(harvest())
    assert sorted(UNMADE - having("rule") - having("flow")) == []


def test_the_matrix_is_as_large_as_it_was() -> None:
    sizes = {
        "nodes": sum(len(sites) for sites in harvest().values()),
        "rules": sum(1 for name in test_rules.NAMES for _ in rules.planned(name)),
        "variants": sum(1 for name in test_rules.NAMES for _ in variants.planned(name)),
        "flows": sum(1 for name in test_flows.NAMES for _ in flows.planned(name)),
        "lifts": sum(
            1
            for name in having("lift") - UNMADE
            for site, _ in harvest()[name]
            for _ in factors(site.shapes[0], site.metadata(0).dtype)
        ),
    }
    print(sizes)
    assert {what: size for what, size in sizes.items() if size < LEAST[what]} == {}
