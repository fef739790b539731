"""Every op with the samples in every dim of its result, all dims of one size.

Losses are slices of the result along one dim, so samples meet inside of many of these ops; the definition holds anyway.
"""

from __future__ import annotations

import warnings

import pytest
from torch import Tensor

import persample as ps
from persample.graph.execute.plan import plan
from persample.graph.read.roots import Roots
from tests.graph.claims import refuted_cotangents, refuted_flows
from tests.graph.cubes import CUBE, EVERY, GENERATOR, N, data, on_no_rows
from tests.graph.names import NODES
from tests.graph.versions import HEADLESS, VERSION
from tests.reference import assert_same, definition


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
def test_samples_in_every_dim_of_the_result(name: str) -> None:
    if name == "aminmax" and "Aminmax" not in NODES:
        pytest.skip("this torch has no derivative of aminmax")
    GENERATOR.manual_seed(1)
    leaves = [data(N, N, N), data(N, 1), data(N, 1, 1)]
    params = [p.requires_grad_() for p in leaves]
    state = (params[0] * params[1]).tanh() + params[2] * CUBE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        result = EVERY[name](state)
    value = result * data(*result.shape) + 0.3 * result.square()
    for dim in range(result.ndim):
        losses = value.movedim(dim, 0).flatten(1).sum(1) if result.ndim > 1 else value.clone()
        want = definition(losses, params)
        found = plan(Roots.of_losses(losses), params)
        assert refuted_cotangents(found, losses) == [], f"dim {dim}"
        assert refuted_flows(found) == [], f"dim {dim}"
        assert_same(ps.grad(losses, params, retain_graph=True), want)


NO_HEADS = ("attention four", "attention masked", "attention grouped")  # where there are no rows


def without_rows(name: str) -> tuple[Tensor, list[Tensor]] | None:
    """An expert without tokens: the op is run on no rows at all. None where PyTorch cannot, or makes rows of none."""
    if VERSION < HEADLESS and name in NO_HEADS:
        return None
    GENERATOR.manual_seed(1)
    params = [p.requires_grad_() for p in (data(N, N, N), data(N, 1))]
    return on_no_rows((params[0] * params[1]).tanh(), EVERY[name], params)


@pytest.mark.parametrize("name", [name for name in EVERY if without_rows(name)])
@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
def test_rows_that_nobody_sent(name: str) -> None:
    found = without_rows(name)
    assert found is not None
    losses, params = found
    want = definition(losses, params)
    assert_same(ps.grad(losses, params), want)
