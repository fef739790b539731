"""Every flow × every place of the samples × every subset of outputs and cotangents, broadcast operands included."""

from __future__ import annotations

from typing import NoReturn

import pytest

from persample.graph.layout import Block, Shape
from persample.graph.ops.table import named
from persample.graph.read.site import Flow, Site
from tests.graph.matrix import flows
from tests.graph.matrix.flows import wrong_flows
from tests.graph.matrix.nodes import harvest
from tests.graph.matrix.places import places
from tests.graph.matrix.variants import varied
from tests.graph.sites import wanted
from tests.graph.table import having

NAMES = sorted(having("flow") & set(harvest()))
SEVERAL = {"PreluKernelBackward"}  # cotangents, for which nothing is remembered


@pytest.mark.parametrize("name", NAMES)
def test_a_flow_is_right_wherever_it_answers(name: str) -> None:
    found, answers = list[str](), 0
    for site, combination in flows.planned(name):
        wrong, answered = wrong_flows(site, combination)
        found, answers = found + wrong, answers + answered
    assert found == []
    assert answers


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_combination_and_variant(name: str) -> None:
    asked = list(flows.planned(name, every=True))
    for build in {id(build): build for _, build in harvest()[name]}.values():
        asked += [
            (site, combination) for _, site in varied(build, name) for combination in flows.combinations(site, False)
        ]
    assert [what for site, combination in asked for what in wrong_flows(site, combination)[0]] == []


class Blind:
    """A node of which nothing is known but its name and its shapes."""

    def __init__(self, site: Site, k: int) -> None:
        self.name, self.shapes, self._k, self._target = site.name, site.shapes, k, site.target(k)

    def target(self, k: int) -> Shape:
        assert k == self._k
        return self._target

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"the flow of {self.name} reads {name}")


@pytest.mark.parametrize("name", sorted(having("by_shape") & set(harvest())))
def test_what_is_remembered_depends_on_nothing_else(name: str) -> None:
    """`assign` remembers these flows by name, shape, layout and the target's shape."""
    remembered: dict[object, object] = {}
    for site, _ in harvest()[name]:
        blocks = [layout for layout in places(site.shapes[0]) if isinstance(layout, Block)]
        for layout in blocks if len(site.shapes) == 1 and 0 not in site.shapes[0] else ():
            for k in wanted(site):
                outcome = named(name).where(site, k, [layout])
                if isinstance(outcome, Block) or (isinstance(outcome, Flow) and outcome is not Flow.PROBE):
                    assert named(name).where(Blind(site, k), k, [layout]) == outcome  # type: ignore[arg-type]
                    assert remembered.setdefault((site.shapes[0], layout, site.target(k)), outcome) == outcome
    assert remembered or name in SEVERAL
