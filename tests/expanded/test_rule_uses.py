"""How a weight with a rule of one's own may be used besides once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import persample as ps
from persample.expanded import ExpandedWeight, Rule, implements_per_sample_grads
from persample.factors import Dense
from tests.expanded.helpers import Run, check, r, sizes, squares, taken
from tests.expanded.rules import Fn, affine, affine_body, net, offered, right, with_backward
from tests.reference import assert_same, definition

pytestmark = pytest.mark.usefixtures("registries")


def check_body(body: Callable[..., Any], x: Tensor, losses: Callable[[Any], Tensor] = squares, **parts: Any) -> None:
    check(Run(body, **parts), x, losses=losses)


class TestUses:
    """How a weight with a rule may be used besides once."""

    @sizes
    def test_by_the_rule_and_by_other_functions(self, B: int) -> None:
        function = affine()
        check_body(lambda m, x: function(x, m.w).tanh() @ m.w + F.linear(x, m.w) @ m.w, r(B, 3, 4), w=r(2, 4))

    @sizes
    def test_by_two_rules(self, B: int) -> None:
        function, times = affine(), with_backward(right)
        check_body(lambda m, x: times(function(x, m.w, m.b), m.b), r(B, 3, 4), w=r(4, 4), b=r(4))

    @sizes
    @pytest.mark.parametrize("where", ["alone", "module"])
    def test_twice_in_one_call(self, B: int, where: str) -> None:
        """One parameter in the place of two weights."""
        function = offered(lambda x, a, b: x * a + b, "shifted")

        @implements_per_sample_grads(function)
        class Shifted(Rule):
            @staticmethod
            def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
                ctx.save_for_backward(x, a)
                return x * a + b

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> Any:
                x, a = ctx.saved_tensors
                return g * a, Dense(g * x), Dense(g)

        x, w = r(B, 4), r(4, grad=True)
        if where == "module":
            check_body(lambda m, x: function(x, m.w, m.w), x, w=w.detach())
        else:
            weight = ExpandedWeight(w, B, "sum")
            squares(function(x, weight, weight)).sum().backward()
            assert_same([w.grad_sample], definition(squares(x * w + w), [w]))

    @pytest.mark.parametrize(
        "given",
        [
            lambda f, x, w, b: f(x, w, b, scale=2.0),
            lambda f, x, w, b: f(x, w, bias=b),
            lambda f, x, w, b: f(x, weight=w, bias=b, scale=2.0),
            lambda f, x, w, b: f(x, bias=b, weight=w),
            lambda f, x, w, b: f(x, w, scale=2.0, bias=b),
            lambda f, x, w, b: f(x, scale=2.0, weight=w),
            lambda f, x, w, b: f(x=x, weight=w, bias=b),
        ],
        ids=["positions", "one", "all", "turned", "option-first", "without-bias", "data-too"],
    )
    @pytest.mark.parametrize("where", ["alone", "module"])
    def test_keywords(self, given: Callable[..., Tensor], where: str) -> None:
        """What a backward returns belongs to the arguments of its forward, however they were given."""
        function, x, w, b = affine(), r(5, 3, 4), r(2, 4, grad=True), r(2, grad=True)
        want = definition(squares(given(affine_body, x, w, b)), [w, b])
        if where == "module":
            module = Run(lambda m, x: given(function, x, m.w, m.b), w=w.detach(), b=b.detach())
            squares(ps.call_for_per_sample_grads(module)(x)).sum().backward()
            assert_same(list(taken(module).values()), want)
        else:
            squares(given(function, x, ExpandedWeight(w, 5, "sum"), ExpandedWeight(b, 5, "sum"))).sum().backward()
            assert_same([getattr(p, "grad_sample", torch.zeros_like(want[n])) for n, p in (("0", w), ("1", b))], want)

    @sizes
    def test_several_data(self, B: int) -> None:
        """All data carry the batch; gradients flow to each."""
        function = offered(lambda x, y, w: (x * w).sum(1) + y, "meet")

        @implements_per_sample_grads(function)
        class Meet(Rule):
            @staticmethod
            def forward(ctx: Any, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
                ctx.save_for_backward(x, w)
                return (x * w).sum(1) + y

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> Any:
                x, w = ctx.saved_tensors
                wide = g[:, None].expand_as(x)
                return wide * w, g, Dense((wide * x).sum(1))

        parts = {"a": r(4, 3), "b": r(4, 3), "w": r(3)}
        check_body(lambda m, x: function(x @ m.a, (x @ m.b).sum(1), m.w), r(B, 5, 4), **parts)

    @sizes
    @pytest.mark.parametrize("used", ["first", "second", "both"])
    def test_several_results(self, B: int, used: str) -> None:
        function = offered(lambda x, w: (x * w, x + w), "pair")

        @implements_per_sample_grads(function)
        class Pair(Rule):
            @staticmethod
            def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
                ctx.save_for_backward(x, w)
                return x * w, x + w

            @staticmethod
            def backward(ctx: Any, g: Tensor, h: Tensor) -> Any:
                x, w = ctx.saved_tensors
                return g * w + h, Dense(g * x + h)

        picks = {"first": lambda out: out[0], "second": lambda out: out[1], "both": lambda out: out[0] * out[1]}
        body = lambda m, x: function(x @ m.a, m.w)  # noqa: E731
        check_body(body, r(B, 4), lambda out: squares(picks[used](out)), a=r(4, 3), w=r(3))

    def test_a_second_backward_is_refused(self) -> None:
        module = net(affine())
        loss = squares(ps.call_for_per_sample_grads(module)(r(5, 3, 4))).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="grad_sample"):
            loss.backward()

    @pytest.mark.parametrize("where", ["alone", "module"])
    def test_an_ordinary_gradient_for_a_weight_is_refused(self, where: str) -> None:
        """A rule that forgets samples would leave zeros behind."""
        function = offered(lambda x, w: x * w, "forgetful")

        @implements_per_sample_grads(function)
        class Forgetful(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, kwarg_names: Any, func: Fn, *values: Any) -> Tensor:
                ctx.x = values[0]
                return ps.expanded.forward_helper(func, values, {})

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> Any:
                return None, None, None, (g * ctx.x).sum(0)

        module, x = Run(lambda m, x: function(x, m.w), w=r(4)), r(5, 4)
        out = (
            ps.call_for_per_sample_grads(module)(x)
            if where == "module"
            else function(x, ExpandedWeight(module.w, 5, "sum"))
        )
        with pytest.raises(RuntimeError, match=r"Forgetful|gradient came to an expanded weight"):
            out.sum().backward()

    NAMES = "count weights weight batch_dim dim names args kwargs kwarg_names func function rule samples batch".split()

    @pytest.mark.parametrize("where", ["alone", "module"])
    @pytest.mark.parametrize("kind", [Rule, torch.autograd.Function], ids=["rule", "function"])
    def test_ctx_belongs_to_the_rule(self, kind: type, where: str) -> None:
        """Whatever an author keeps on it, under whatever name."""
        function = offered(lambda x, w: x * w, "times")

        def keep(ctx: Any) -> None:
            for name in self.NAMES:
                setattr(ctx, name, name)

        def forward(ctx: Any, *values: Any) -> Tensor:
            keep(ctx)
            if kind is Rule:
                ctx.mine = values
                return values[0] * values[1]
            ctx.mine = values[2:]
            return ps.expanded.forward_helper(values[1], values[2:], {})

        def backward(ctx: Any, g: Tensor) -> Any:
            assert [getattr(ctx, name) for name in self.NAMES] == self.NAMES
            x, w = ctx.mine
            if kind is Rule:
                return g * w, Dense(g * x)
            ps.expanded.set_grad_sample_if_exists(w, lambda _: g * x)
            return None, None, g * ps.expanded.unpack_expanded_weight_or_tensor(w), None

        body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        implements_per_sample_grads(function)(type("Times", (kind,), body))
        x, w = r(5, 4), r(4, grad=True)
        if where == "module":
            check_body(lambda m, x: function((x @ m.a).tanh(), m.w), x, a=r(4, 4), w=w.detach())
        else:
            squares(function(x, ExpandedWeight(w, 5, "sum"))).sum().backward()
            assert_same([w.grad_sample], definition(squares(x * w), [w]))

    @sizes
    @pytest.mark.parametrize("where", ["alone", "module"])
    def test_weights_saved_for_backward(self, B: int, where: str) -> None:
        """An autograd.Function may keep its expanded weight by save_for_backward."""
        function = offered(lambda x, w: x * w, "saved")

        @implements_per_sample_grads(function)
        class Saved(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, kwarg_names: Any, func: Fn, *values: Any) -> Tensor:
                ctx.save_for_backward(*values)
                return ps.expanded.forward_helper(func, values, {})

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> Any:
                x, w = ctx.saved_tensors
                ps.expanded.set_grad_sample_if_exists(w, lambda _: g * x)
                return None, None, g * ps.expanded.unpack_expanded_weight_or_tensor(w), None

        x, w = r(B, 4), r(4, grad=True)
        if where == "module":
            check_body(lambda m, x: function((x @ m.a).tanh(), m.w), x, a=r(4, 4), w=w.detach())
        else:
            squares(function(x, ExpandedWeight(w, B, "sum"))).sum().backward()
            assert_same([w.grad_sample], definition(squares(x * w), [w]))
