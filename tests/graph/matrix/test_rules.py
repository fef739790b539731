"""Every rule × every cotangent × every place of the samples × every subset of outputs and cotangents."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from persample.graph.read.site import Site
from tests.graph.matrix import rules, variants
from tests.graph.matrix.nodes import harvest
from tests.graph.matrix.rules import Combination, wrong_rules
from tests.graph.table import having

NAMES = sorted(having("rule") & set(harvest()))


def check(asked: Iterable[tuple[Site, Combination]]) -> None:
    """Raise unless a rule is right wherever it has an answer, which it must have somewhere."""
    found, answers = list[str](), 0
    for site, combination in asked:
        wrong, answered = wrong_rules(site, combination)
        found, answers = found + wrong, answers + answered
    assert found == []
    assert answers


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_is_right_wherever_it_answers(name: str) -> None:
    check(rules.planned(name))


@pytest.mark.parametrize("name", NAMES)
def test_operands_of_any_dtype_and_form_and_frozen_ones(name: str) -> None:
    asked = list(variants.planned(name))
    assert len({variant for variant, _, _ in asked}) >= 4
    check((site, combination) for _, site, combination in asked)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_combination(name: str) -> None:
    check(rules.planned(name, every=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_variant(name: str) -> None:
    check((site, combination) for _, site, combination in variants.planned(name, every=True))
