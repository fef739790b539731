"""Functions of one's own, rules for them, and modules that use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.utils._expanded_weights import expanded_weights_impl
from torch.overrides import handle_torch_function, has_torch_function

from persample.expanded import HANDLED_FUNCTIONS, Rule, implements_per_sample_grads
from persample.expanded import rules as rule_module
from persample.factors import Dense, Factor, Outer, Rows
from persample.graph.ops import custom
from tests.expanded.helpers import Run, r

Fn = Callable[..., Tensor]


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


def offered(body: Fn, name: str) -> Fn:
    """A function that offers itself to ``__torch_function__`` before it computes anything."""

    def function(*args: Any, **kwargs: Any) -> Tensor:
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if has_torch_function(given):
            return handle_torch_function(function, given, *args, **kwargs)
        return body(*args, **kwargs)

    function.__name__ = name
    return function


def affine_body(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
    out = scale * x @ weight.t()
    return out if bias is None else out + bias


class AffineRule(Rule):
    """scale · x weightᵀ + bias for x (B, T, d), in factors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scale, ctx.count = scale, 4 if bias is not None else 3
        return affine_body(x, weight, bias, scale=scale)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> list[Tensor | Factor | None]:
        x, weight = ctx.saved_tensors
        found = [ctx.scale * g @ weight, Outer(g, x, ctx.scale), Dense(g.sum(1)), None]
        return found if ctx.count == 4 else [*found[:2], None, None]


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


def right(ctx: Any, g: Tensor) -> tuple[Tensor, Dense]:
    """The backward that belongs there, for x (B, T, d)."""
    x, weight = ctx.saved_tensors
    return g * weight, Dense((g * x).sum(1))
