"""Rules of one's own that are wrong, or are given what they cannot take."""

from __future__ import annotations

import pytest
from torch import Tensor

import persample as ps
from persample.expanded import ExpandedWeight, Rule, implements_per_sample_grads
from persample.factors import Dense
from tests.expanded.helpers import Run, check, r, squares
from tests.expanded.rules import AffineRule, affine, affine_body, offered, with_backward

pytestmark = pytest.mark.usefixtures("registries")

BAD = {
    "tensor-for-a-weight": lambda ctx, g: (None, g * ctx.saved_tensors[0]),
    "factor-for-data": lambda ctx, g: (Dense(g * ctx.saved_tensors[1]), Dense((g * ctx.saved_tensors[0]).sum(1))),
    "not-summed-over-positions": lambda ctx, g: (None, Dense(g)),
    "batch-summed": lambda ctx, g: (None, Dense(g.sum(0, keepdim=True).sum(1))),
    "too-few": lambda ctx, g: (None,),
}


class TestWrongRules:
    @pytest.mark.parametrize("where", ["alone", "module"])
    @pytest.mark.parametrize("bad", BAD)
    def test_a_wrong_backward_is_refused(self, bad: str, where: str) -> None:
        function, x = with_backward(BAD[bad]), r(5, 3, 4, grad=True)
        module = Run(lambda m, x: function(x, m.w), w=r(4))
        call = ps.call_for_per_sample_grads(module)
        out = call(x) if where == "module" else function(x, ExpandedWeight(module.w, 5, "sum"))
        with pytest.raises(RuntimeError, match="Times"):
            out.sum().backward()
        assert getattr(module.w, "grad_sample", None) is None

    @pytest.mark.parametrize("where", ["alone", "module"])
    def test_data_must_come_first(self, where: str) -> None:
        function = offered(lambda weight, x: x * weight, "backwards")
        implements_per_sample_grads(function)(AffineRule)
        module, x = Run(lambda m, x: function(m.w, x), w=r(4)), r(5, 4)
        run = ps.call_for_per_sample_grads(module) if where == "module" else None
        with pytest.raises(RuntimeError, match=r"also ExpandedWeights.* first argument of backwards"):
            run(x) if run else function(ExpandedWeight(module.w, 5, "sum"), x)

    @pytest.mark.parametrize("x", [r(), r(4, 3, 4), r(6, 3, 4)], ids=["0-dim", "fewer", "more"])
    def test_data_of_another_size(self, x: Tensor) -> None:
        with pytest.raises(
            RuntimeError, match=r"Expected ExpandedWeights .*affine was given|requires a batch dimension .*affine"
        ):
            affine()(x, ExpandedWeight(r(2, 4, grad=True), 5, "sum"))

    def test_weights_that_disagree(self) -> None:
        function, x = affine(), r(5, 3, 4)
        weight = ExpandedWeight(r(2, 4, grad=True), 5, "sum")
        with pytest.raises(RuntimeError, match=r"same loss_reduction .*affine"):
            function(x, weight, ExpandedWeight(r(2, grad=True), 5, "mean"))
        second = ExpandedWeight(r(2, grad=True), 5, "sum")
        second.set_batch_first(False)
        with pytest.raises(RuntimeError, match="batch_first"):
            function(x, weight, second)

    def test_a_computed_weight_alone_is_refused(self) -> None:
        weight = ExpandedWeight(r(4, 2, grad=True), 5, "sum")
        with pytest.raises(RuntimeError, match=r"affine.* shape \(2, 4\) that was computed"):
            affine()(r(5, 3, 4), weight.t())

    def test_a_computed_weight_in_a_module(self) -> None:
        """There the function runs as written."""
        function = affine()
        module, x = Run(lambda m, x: function(x, m.w.t()), w=r(4, 2)), r(5, 3, 4)
        check(module, x)

    def test_a_computed_weight_beside_another_in_a_module_is_refused(self) -> None:
        function = affine()
        module, x = Run(lambda m, x: function(x, m.w.t(), m.b), w=r(4, 2), b=r(2)), r(5, 3, 4)
        with pytest.raises(RuntimeError, match=r"affine|AffineRule"):
            squares(ps.call_for_per_sample_grads(module)(x)).sum().backward()

    @pytest.mark.parametrize("missing", ["forward", "backward"])
    def test_half_a_rule(self, missing: str) -> None:
        function = offered(affine_body, "affine")
        half = type("Half", (Rule,), {} if missing == "forward" else {"forward": AffineRule.forward})
        implements_per_sample_grads(function)(half)
        with pytest.raises(NotImplementedError):
            function(r(5, 3, 4), ExpandedWeight(r(2, 4, grad=True), 5, "sum")).sum().backward()
