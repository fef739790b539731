"""Teaching expanded weights a function of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils._expanded_weights import expanded_weights_impl
from torch.overrides import handle_torch_function, has_torch_function

import persample as ps
from persample.expanded import HANDLED_FUNCTIONS, ExpandedWeight, Rule, implements_per_sample_grads
from persample.expanded import rule as rule_module
from persample.factors import Dense, Factor, Outer, Rows
from persample.graph import custom
from tests.expanded.peer import Run, taken
from tests.reference import assert_same, definition


@contextmanager
def registries_restored() -> Iterator[None]:
    """What is registered meanwhile, here or with the peer, is forgotten after."""
    tables = [HANDLED_FUNCTIONS, custom._TAUGHT, rule_module._ENGINE_KNOWS, expanded_weights_impl.HANDLED_FUNCTIONS]
    before = [table.copy() for table in tables]
    try:
        yield
    finally:
        for table, then in zip(tables, before, strict=True):
            table.clear()
            table.update(then)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    torch.manual_seed(0)
    with registries_restored():
        yield


both_reductions = pytest.mark.parametrize("reduction", ["sum", "mean"])
sizes = pytest.mark.parametrize("B", [5, 1, 0])
Fn = Callable[..., Tensor]


def r(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=grad)


def squares(out: Tensor, dim: int = 0) -> Tensor:
    return out.square().movedim(dim, 0).unsqueeze(-1).flatten(1).sum(1)


def total(losses: Tensor, reduction: str) -> Tensor:
    return losses.sum() if reduction == "sum" else losses.mean()


def offered(body: Fn, name: str) -> Fn:
    """A function that offers itself to ``__torch_function__`` before it computes anything."""

    def function(*args: Any, **kwargs: Any) -> Tensor:
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if has_torch_function(given):
            return handle_torch_function(function, given, *args, **kwargs)
        return body(*args, **kwargs)

    function.__name__ = name
    return function


class AffineRule(Rule):
    """scale · x weightᵀ + bias for x (B, T, d), in factors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scale, ctx.count = scale, 4 if bias is not None else 3
        out = scale * x @ weight.t()
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> list[Tensor | Factor | None]:
        x, weight = ctx.saved_tensors
        found = [ctx.scale * g @ weight, Outer(g, x, ctx.scale), Dense(g.sum(1)), None]
        return found if ctx.count == 4 else [*found[:2], None, None]


def affine_body(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
    out = scale * x @ weight.t()
    return out if bias is None else out + bias


class LookupRule(Rule):
    """Rows of a table."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.size = len(table)
        return table[ids]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Rows]:
        return None, Rows(ctx.saved_tensors[0], g, ctx.size)


def affine() -> Fn:
    function = offered(affine_body, "affine")
    implements_per_sample_grads(function)(AffineRule)
    return function


class Affine(nn.Module):
    def __init__(self, function: Fn, d: int, p: int, bias: bool = True) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(r(p, d))
        self.bias = nn.Parameter(r(p)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias, scale=0.5)


def net(function: Fn) -> nn.Module:
    shared = Affine(function, 3, 3, bias=False)
    return Run(
        lambda m, x: m.last(m.shared(m.shared(m.first(x)).tanh())),
        first=nn.Linear(4, 3).double(),
        shared=shared,
        last=Affine(function, 3, 2),
    )


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
        module, x = net(affine()), r(B, 3, 4)
        stacks = definition(squares(module(x)), module)
        want = torch.cat([stack.flatten(1) for stack in stacks.values()], 1).norm(dim=1)
        call = ps.call_for_per_sample_grads(
            module, loss_reduction=reduction, reductions=[ps.Norms(), ps.ClippedSum(1.0)]
        )
        total(squares(call(x)), reduction).backward()
        norms, clipped = call.results()
        assert_same([norms], {"0": want})
        factors = (1 / want).clamp(max=1)
        sums = {name: torch.einsum("n,n...->...", factors, stack)[None] for name, stack in stacks.items()}
        assert_same({name: clipped[name][None] for name in sums}, sums)

    @sizes
    def test_rows_of_a_table(self, B: int) -> None:
        lookup = offered(lambda ids, table: table[ids], "lookup")
        implements_per_sample_grads(lookup)(LookupRule)
        ids, table = torch.randint(0, 6, (B, 4)), r(6, 2, grad=True)
        want = definition(squares(table[ids]), [table])
        squares(lookup(ids, ExpandedWeight(table, B, "sum"))).sum().backward()
        assert_same([table.grad_sample], want)
        module = Run(lambda m, ids: m.head(lookup(ids, m.table)), table=table.detach(), head=nn.Linear(2, 2).double())
        want = definition(squares(module(ids)), module)
        squares(ps.call_for_per_sample_grads(module)(ids)).sum().backward()
        assert_same(taken(module), want)

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
        want = definition(squares(module(x)), module)
        squares(ps.call_for_per_sample_grads(module)(x)).sum().backward()
        assert_same(taken(module), want)

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
        want = definition(squares(module(x)), module)
        squares(ps.call_for_per_sample_grads(module)(x)).sum().backward()
        assert_same(taken(module), want)

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

    @pytest.mark.parametrize("wrong", [int, nn.Linear, affine_body, None, AffineRule()], ids=["int", "module", "function", "None", "instance"])
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


def with_backward(backward: Callable[[Any, Tensor], Any]) -> Fn:
    """x · weight over the last dim, with a rule that ends in this backward."""
    function = offered(lambda x, weight: x * weight, "times")

    @implements_per_sample_grads(function)
    class Times(Rule):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return backward(ctx, g)

    return function


BAD = {
    "tensor-for-a-weight": lambda ctx, g: (None, g * ctx.saved_tensors[0]),
    "factor-for-data": lambda ctx, g: (Dense(g * ctx.saved_tensors[1]), Dense((g * ctx.saved_tensors[0]).sum(1))),
    "not-summed-over-positions": lambda ctx, g: (None, Dense(g)),
    "batch-summed": lambda ctx, g: (None, Dense(g.sum(0, keepdim=True).sum(1))),
    "too-few": lambda ctx, g: (None,),
}


def right(ctx: Any, g: Tensor) -> tuple[Tensor, Dense]:
    """The backward that belongs there, for x (B, T, d)."""
    x, weight = ctx.saved_tensors
    return g * weight, Dense((g * x).sum(1))


class TestUses:
    """How a weight with a rule may be used besides once."""

    def check(
        self, body: Callable[..., Any], x: Tensor, losses: Callable[[Any], Tensor] = squares, **parts: Any
    ) -> None:
        module = Run(body, **parts)
        want = definition(losses(module(x)), module)
        losses(ps.call_for_per_sample_grads(module)(x)).sum().backward()
        assert_same(taken(module), want)

    @sizes
    def test_by_the_rule_and_by_other_functions(self, B: int) -> None:
        function = affine()
        self.check(lambda m, x: function(x, m.w).tanh() @ m.w + F.linear(x, m.w) @ m.w, r(B, 3, 4), w=r(2, 4))

    @sizes
    def test_by_two_rules(self, B: int) -> None:
        function, times = affine(), with_backward(right)
        self.check(lambda m, x: times(function(x, m.w, m.b), m.b), r(B, 3, 4), w=r(4, 4), b=r(4))

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
            self.check(lambda m, x: function(x, m.w, m.w), x, w=w.detach())
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
        self.check(lambda m, x: function(x @ m.a, (x @ m.b).sum(1), m.w), r(B, 5, 4), **parts)

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
        self.check(body, r(B, 4), lambda out: squares(picks[used](out)), a=r(4, 3), w=r(3))

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
            self.check(lambda m, x: function((x @ m.a).tanh(), m.w), x, a=r(4, 4), w=w.detach())
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
            self.check(lambda m, x: function((x @ m.a).tanh(), m.w), x, a=r(4, 4), w=w.detach())
        else:
            squares(function(x, ExpandedWeight(w, B, "sum"))).sum().backward()
            assert_same([w.grad_sample], definition(squares(x * w), [w]))


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
        with pytest.raises(RuntimeError, match=r"backwards.* data as its first argument"):
            run(x) if run else function(ExpandedWeight(module.w, 5, "sum"), x)

    @pytest.mark.parametrize("x", [r(), r(4, 3, 4), r(6, 3, 4)], ids=["0-dim", "fewer", "more"])
    def test_data_of_another_size(self, x: Tensor) -> None:
        with pytest.raises(RuntimeError, match="affine was given"):
            affine()(x, ExpandedWeight(r(2, 4, grad=True), 5, "sum"))

    def test_weights_that_disagree(self) -> None:
        function, x = affine(), r(5, 3, 4)
        weight = ExpandedWeight(r(2, 4, grad=True), 5, "sum")
        with pytest.raises(RuntimeError, match=r"affine.* loss_reduction"):
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
        want = definition(squares(module(x)), module)
        squares(ps.call_for_per_sample_grads(module)(x)).sum().backward()
        assert_same(taken(module), want)

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
