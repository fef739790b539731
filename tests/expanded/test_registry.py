"""Teaching expanded weights a function of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps
from persample.expanded import HANDLED_FUNCTIONS, ExpandedWeight, Rule, implements_per_sample_grads
from persample.factors import Dense
from tests.expanded.helpers import Run, both_reductions, check, check_reductions, r, sizes, squares, taken, total
from tests.expanded.rules import AffineRule, Fn, LookupRule, affine, affine_body, net, offered
from tests.reference import assert_same, definition

pytestmark = pytest.mark.usefixtures("registries")


class TestRuleInFactors:
    @sizes
    @both_reductions
    def test_alone(self, B: int, reduction: str) -> None:
        function, x, params = affine(), r(B, 3, 4, grad=True), [r(2, 4, grad=True), r(2, grad=True)]
        plain = squares(affine_body(x, *params, scale=0.5))
        want, (dx,) = definition(plain, params), torch.autograd.grad(plain.sum(), x)
        out = function(x, *[ExpandedWeight(p, B, reduction) for p in params], scale=0.5)
        total(squares(out), reduction).backward()
        assert_same([p.grad_sample for p in params], want)
        assert [p.grad for p in params] == [None, None]
        torch.testing.assert_close(x.grad, dx if reduction == "sum" else dx / max(B, 1))

    @sizes
    @both_reductions
    def test_in_a_module(self, B: int, reduction: str) -> None:
        module, x = net(affine()), r(B, 3, 4, grad=True)
        plain = squares(module(x))
        want, (dx,) = definition(plain, module), torch.autograd.grad(plain.sum(), x)
        out = ps.call_for_per_sample_grads(module, loss_reduction=reduction)(x)
        total(squares(out), reduction).backward()
        assert_same(taken(module), want)
        torch.testing.assert_close(x.grad, dx if reduction == "sum" else dx / max(B, 1))

    @sizes
    @both_reductions
    def test_reductions(self, B: int, reduction: str) -> None:
        check_reductions(net(affine()), r(B, 3, 4), reduction)

    @sizes
    def test_rows_of_a_table(self, B: int) -> None:
        lookup = offered(lambda ids, table: table[ids], "lookup")
        implements_per_sample_grads(lookup)(LookupRule)
        ids, table = torch.randint(0, 6, (B, 4)), r(6, 2, grad=True)
        want = definition(squares(table[ids]), [table])
        squares(lookup(ids, ExpandedWeight(table, B, "sum"))).sum().backward()
        assert_same([table.grad_sample], want)
        module = Run(lambda m, ids: m.head(lookup(ids, m.table)), table=table.detach(), head=nn.Linear(2, 2).double())
        check(module, ids)

    @pytest.mark.parametrize("frozen", [0, 1])
    @pytest.mark.parametrize("where", ["alone", "module"])
    def test_beside_a_frozen_weight(self, frozen: int, where: str) -> None:
        function, x, params = affine(), r(5, 3, 4), [r(2, 4, grad=True), r(2, grad=True)]
        params[frozen].requires_grad_(False)
        want = definition(squares(affine_body(x, *params)), params)
        if where == "alone":
            squares(
                function(x, *[ExpandedWeight(p, 5, "sum") if p.requires_grad else p for p in params])
            ).sum().backward()
            got = {str(i): p.grad_sample for i, p in enumerate(params) if p.requires_grad}
        else:
            module = Run(lambda m, x: function(x, m.w, m.b), w=params[0], b=params[1])
            (module.w, module.b)[frozen].requires_grad_(False)
            squares(ps.call_for_per_sample_grads(module)(x)).sum().backward()
            got = {str(1 - frozen): taken(module)["wb"[1 - frozen]]}
        assert_same(got, want)

    def test_beside_a_plain_parameter_is_refused(self) -> None:
        weight, bias = r(2, 4, grad=True), r(2, grad=True)
        out = affine()(r(5, 3, 4), ExpandedWeight(weight, 5, "sum"), bias)
        with pytest.raises(RuntimeError, match=r"affine|AffineRule"):
            out.sum().backward()

    def test_a_weight_without_part_in_the_result(self) -> None:
        function = offered(lambda x, weight: x * 2, "double")

        @implements_per_sample_grads(function)
        class Double(Rule):
            @staticmethod
            def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
                return 2 * g, None

        module = Run(lambda m, x: function(m.a(x), m.w), a=nn.Linear(3, 2).double(), w=r(4))
        x = r(5, 3)
        check(module, x)

    def test_for_a_function_of_torch(self) -> None:
        @implements_per_sample_grads(torch.atan2)
        class Atan2(Rule):
            calls = 0

            @staticmethod
            def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
                ctx.save_for_backward(x, w)
                Atan2.calls += 1
                return torch.atan2(x, w)

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Dense]:
                x, w = ctx.saved_tensors
                return g * w / (x**2 + w**2), Dense(-g * x / (x**2 + w**2))

        x, w = r(5, 4), r(4, grad=True)
        want = definition(squares(torch.atan2(x, w)), [w])
        squares(torch.atan2(x, ExpandedWeight(w, 5, "sum"))).sum().backward()
        assert Atan2.calls == 1
        assert_same([w.grad_sample], want)


class TestRegistering:
    def test_one_class_for_several_functions(self) -> None:
        one, two = offered(affine_body, "one"), offered(affine_body, "two")
        cls = implements_per_sample_grads(one)(implements_per_sample_grads(two)(AffineRule))
        assert cls is AffineRule
        x, w, v = r(5, 3, 4), r(2, 4, grad=True), r(2, 4, grad=True)
        want = definition(squares(affine_body(x, w) + affine_body(x, v)), [w, v])
        squares(one(x, ExpandedWeight(w, 5, "sum")) + two(x, ExpandedWeight(v, 5, "sum"))).sum().backward()
        assert_same([w.grad_sample, v.grad_sample], want)
        module = Run(lambda m, x: one(x, m.w) + two(x, m.v), w=w.detach(), v=v.detach())
        squares(ps.call_for_per_sample_grads(module)(x)).sum().backward()
        assert_same(list(taken(module).values()), want)

    def test_one_autograd_function_for_several_functions(self) -> None:
        plus, minus = offered(lambda x, b: x + b, "plus"), offered(lambda x, b: x - b, "minus")

        @implements_per_sample_grads(plus)
        @implements_per_sample_grads(minus)
        class Shift(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, kwarg_names: Any, func: Fn, *values: Any) -> Tensor:
                args, kwargs = ps.expanded.standard_kwargs(kwarg_names, values)
                ctx.bias, ctx.sign = args[1], 1 if func is plus else -1
                return ps.expanded.forward_helper(func, args, kwargs)

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> Any:
                ps.expanded.set_grad_sample_if_exists(ctx.bias, lambda _: ctx.sign * g)
                return None, None, g, None

        assert HANDLED_FUNCTIONS[plus] is HANDLED_FUNCTIONS[minus] is Shift
        x, a = r(5, 4), r(4, grad=True)
        module = Run(lambda m, x: minus(plus(x, m.a).exp(), m.b), a=a.detach(), b=r(4))
        check(module, x)

    @pytest.mark.parametrize("cls", [AffineRule, torch.autograd.Function], ids=["rule", "function"])
    def test_a_second_time_is_refused(self, cls: type) -> None:
        function = affine()
        with pytest.raises(RuntimeError, match="affine already has a rule"):
            implements_per_sample_grads(function)(cls)

    def test_what_ships_cannot_be_replaced(self) -> None:
        before = HANDLED_FUNCTIONS[F.linear]
        with pytest.raises(RuntimeError, match="linear already has a rule"):
            implements_per_sample_grads(F.linear)(AffineRule)
        assert HANDLED_FUNCTIONS[F.linear] is before

    @pytest.mark.parametrize(
        "wrong",
        [int, nn.Linear, affine_body, None, AffineRule()],
        ids=["int", "module", "function", "None", "instance"],
    )
    def test_what_is_no_rule_is_refused(self, wrong: Any) -> None:
        function = offered(affine_body, "affine")
        with pytest.raises(RuntimeError, match=r"subclass of Rule or of torch.autograd.Function"):
            implements_per_sample_grads(function)(wrong)
        assert function not in HANDLED_FUNCTIONS

    @pytest.mark.parametrize("wrong", ["linear", None, 3], ids=repr)
    def test_what_is_no_function_is_refused(self, wrong: Any) -> None:
        with pytest.raises(RuntimeError, match=type(wrong).__name__):
            implements_per_sample_grads(wrong)(AffineRule)

    def test_a_refused_class_leaves_no_trace(self) -> None:
        function = affine()
        with pytest.raises(RuntimeError, match="already"):
            implements_per_sample_grads(function)(LookupRule)
        x, w = r(5, 3, 4), r(2, 4, grad=True)
        squares(function(x, ExpandedWeight(w, 5, "sum"))).sum().backward()
        assert_same([w.grad_sample], definition(squares(affine_body(x, w)), [w]))


SHIPPED = [
    *[getattr(F, f"{kind}{d}d") for kind in ("conv", "conv_transpose") for d in (1, 2, 3)],
    *[getattr(F, name) for name in "linear bilinear embedding embedding_bag layer_norm rms_norm group_norm".split()],
    *[getattr(F, name) for name in "instance_norm batch_norm prelu multi_head_attention_forward".split()],
    *[getattr(torch, name) for name in "matmul mm addmm bmm baddbmm einsum add sub mul div".split()],
    *[getattr(torch, name) for name in "rnn_tanh rnn_relu lstm gru".split()],
]


@pytest.mark.parametrize("function", SHIPPED, ids=lambda f: f.__name__)
def test_what_ships(function: Fn) -> None:
    assert function in HANDLED_FUNCTIONS
    assert HANDLED_FUNCTIONS is ExpandedWeight.handled_functions
