"""Reentrant checkpointing: what it hides is found, exactly, and nothing is left behind.

PyTorch does not differentiate such graphs by ``torch.autograd.grad``, so the definition is that of the same program
without checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import persample as ps
from tests.case_library.functions import OwnLinear, Square
from tests.reference import assert_same, definition

reentrant = partial(checkpoint, use_reentrant=True)
other = partial(checkpoint, use_reentrant=False)


def plain(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """No checkpoint."""
    return fn(*args)


Run = Callable[..., Any]  # of a function and its arguments: plain, or a checkpoint
Net = Any
# Checkpoints inside of others are run without gradients at first, of which PyTorch warns.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
slow_paths_allowed = pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")


class Layers(nn.Module):
    """What regions are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.linear = nn.ModuleList([nn.Linear(3, 3) for _ in range(5)])
        self.norm, self.table, self.conv = nn.LayerNorm(3), nn.Embedding(5, 3), nn.Conv1d(1, 1, 3, padding=1)
        self.lstm, self.group = nn.LSTM(3, 3, batch_first=True), nn.GroupNorm(1, 3)
        self.matrix, self.vector = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3))

    def pair(self, i: int) -> Callable[[Tensor], Tensor]:
        return lambda h: self.linear[i + 1](self.linear[i](h).tanh()).tanh()


def one(net: Net, h: Tensor, run: Run) -> Tensor:
    return run(net.pair(0), h)


def one_linear(net: Net, h: Tensor, run: Run) -> Tensor:
    return run(net.linear[0], h)


def several_and_between(net: Net, h: Tensor, run: Run) -> Tensor:
    return run(net.pair(2), net.norm(run(net.pair(0), h)))


def around_and_inside(net: Net, h: Tensor, run: Run) -> Tensor:
    """A residual path around every region, and the same parameters inside and outside."""
    for _ in range(3):
        h = h + run(net.pair(0), net.linear[0](h).tanh())
    return net.linear[1](h)


def branches(net: Net, h: Tensor, run: Run) -> Tensor:
    return run(net.pair(0), h) * run(net.pair(1), h) + h


def called_twice(net: Net, h: Tensor, run: Run) -> Tensor:
    return run(net.pair(0), run(net.pair(0), run(net.pair(0), h)))


def tied(net: Net, h: Tensor, run: Run) -> Tensor:
    return run(lambda a: F.linear(F.linear(a, net.matrix).tanh(), net.matrix.t()), h) @ net.matrix


def several_tensors(net: Net, h: Tensor, run: Run) -> Tensor:
    def body(a: Tensor, times: int, b: Tensor, none: None, name: str, mask: Tensor) -> tuple[Any, ...]:
        assert (none, name) == (None, "name")
        return net.linear[0](a * times), "text", (b * mask).tanh() @ net.matrix, a, None

    a, text, b, same, _ = run(body, h, 2, net.linear[1](h), None, "name", torch.tensor([1.0, 0.0, 1.0]).to(h))
    assert text == "text"
    return a * b + same


def an_output_unused(net: Net, h: Tensor, run: Run) -> Tensor:
    return run(lambda a: (net.linear[0](a), net.linear[1](a), net.linear[2](a)), h)[1]


def the_same_output_twice(net: Net, h: Tensor, run: Run) -> Tensor:
    def body(a: Tensor) -> tuple[Tensor, Tensor]:
        y = net.linear[0](a)
        return y, y

    y, z = run(body, h)
    return y * z.exp()


def an_input_unused(net: Net, h: Tensor, run: Run) -> Tensor:
    """Of the second region nothing is used by the first, though the engine's graph says so."""
    return run(lambda a, b: net.linear[0](a), h, run(net.pair(1), net.linear[4](h)))


def an_input_unused_below_a_use(net: Net, h: Tensor, run: Run) -> Tensor:
    """Of the two uses of a layer, the engine takes the one to lead to the other."""
    before = net.linear[0](h)
    after = net.linear[0](run(lambda a, b: net.linear[1](a).tanh(), h.detach().requires_grad_(), before))
    return after * before


def an_input_given_twice(net: Net, h: Tensor, run: Run) -> Tensor:
    return run(lambda a, b: net.linear[0](a) * b, h, h)


def identity(net: Net, h: Tensor, run: Run) -> Tensor:
    return net.linear[0](run(lambda a: a, h))


def detached_inside(net: Net, h: Tensor, run: Run) -> Tensor:
    return net.linear[0](run(lambda a, b: (a.detach() * 2, net.linear[1](b)), h, h)[0])


def parameters_as_inputs(net: Net, h: Tensor, run: Run) -> Tensor:
    return run(F.linear, h, net.matrix, net.vector) + run(lambda a, w: a @ w.tanh(), h, net.matrix)


def weights_from_a_region(net: Net, h: Tensor, run: Run) -> Tensor:
    """Nothing but weights goes in: all below its results is shared."""
    w, b = run(lambda a, b: ((a @ net.linear[0].weight).tanh(), b * 2), net.matrix, net.vector)
    return F.linear(h, w, b)


def merged_weight(net: Net, h: Tensor, run: Run) -> Tensor:
    return run(lambda a, w: F.linear(a, w @ net.matrix).tanh(), h, (net.linear[0].weight * 2).tanh())


def many_kinds(net: Net, h: Tensor, run: Run) -> Tensor:
    def body(a: Tensor) -> Tensor:
        a = net.conv(net.norm(a * net.vector).unsqueeze(1)).squeeze(1)
        a = net.group(a + net.table(torch.arange(len(a)) % 5))
        return net.lstm(a.unsqueeze(1))[0].squeeze(1) @ net.matrix

    return run(body, h)


def other_places(net: Net, h: Tensor, run: Run) -> Tensor:
    """Time first outside, folded inside."""
    steps = torch.stack([h, h * 2])
    return run(lambda a: net.pair(0)(a.reshape(-1, 3)).reshape(a.shape).transpose(0, 1), steps).sum(1)


def reordered(net: Net, h: Tensor, run: Run) -> Tensor:
    rows = torch.arange(len(h)).flip(0)
    return run(lambda a: net.linear[1](net.linear[0](a)[rows].tanh()), h)[rows]


def loop_over_samples(net: Net, h: Tensor, run: Run) -> Tensor:
    rows = [run(net.pair(0), row) for row in h]
    return torch.stack(rows) if rows else h * 0


def in_place(net: Net, h: Tensor, run: Run) -> Tensor:
    y = run(lambda a: net.linear[0](a).mul_(2).tanh_().mul(2), h)
    y *= 3
    return net.linear[1](y)


def nested(net: Net, h: Tensor, run: Run) -> Tensor:
    inner = lambda a: net.linear[0](a).tanh()  # noqa: E731
    body = lambda a: net.linear[1](run(inner, net.linear[2](a).tanh())).tanh()  # noqa: E731
    return run(body, run(body, h))


def nested_three_deep(net: Net, h: Tensor, run: Run) -> Tensor:
    inner = lambda a, b: net.linear[0](a * b).tanh()  # noqa: E731
    middle = lambda a: run(inner, net.linear[1](a).tanh(), a) + run(inner, a, a)  # noqa: E731
    return run(lambda a: net.linear[3](run(middle, net.linear[2](a).tanh())).tanh(), h)


def nested_at_once(net: Net, h: Tensor, run: Run) -> Tensor:
    return run(lambda a: run(lambda b: run(net.linear[0], b), a), h)


def dropout(net: Net, h: Tensor, run: Run) -> Tensor:
    body = lambda a: F.dropout(net.pair(0)(F.dropout(a, 0.5)), 0.5)  # noqa: E731
    return run(body, F.dropout(run(body, h), 0.5))


def nested_dropout(net: Net, h: Tensor, run: Run) -> Tensor:
    inner = lambda a: F.dropout(net.linear[0](F.dropout(a, 0.5)), 0.5)  # noqa: E731
    return run(lambda a: run(inner, F.dropout(net.linear[1](a), 0.5)) + F.dropout(run(inner, a)), h)


def sequential(net: Net, h: Tensor, run: Run) -> Tensor:
    if run is plain:
        return nn.Sequential(*net.linear)(h)
    return checkpoint_sequential(nn.Sequential(*net.linear), 3, h, use_reentrant=True)


def tensor_hooks(net: Net, h: Tensor, run: Run) -> Tensor:
    def body(a: Tensor) -> Tensor:
        y = net.linear[0](a)
        if torch.is_grad_enabled():  # not in the forward pass
            a.register_hook(lambda g: g * 2)
            y.register_hook(lambda g: g * 3)
        return net.linear[1](y).tanh()

    before = net.linear[2](h).tanh()
    before.register_hook(lambda g: g * 5)
    # A leaf inside, the input itself has a hook of its own there; outside it is the tensor that was given.
    after = run(body, before if run is not plain else before.view_as(before))
    after.register_hook(lambda g: g * 7)
    return after


def closure_of_an_unused_output(net: Net, h: Tensor, run: Run) -> Tensor:
    """A tensor from around, for a result that nobody uses."""
    scale = net.linear[2](h).tanh()
    return run(lambda a: (net.linear[0](a), net.linear[1](a) * scale), h)[0] * scale


def closure_that_is_detached(net: Net, h: Tensor, run: Run) -> Tensor:
    scale = net.linear[2](h).tanh()
    return run(lambda a: net.linear[0](a) * scale.detach(), h) * scale


FAST = [
    one, one_linear, several_and_between, around_and_inside, branches, called_twice, tied, several_tensors,
    an_output_unused, the_same_output_twice, an_input_unused, an_input_unused_below_a_use, an_input_given_twice,
    identity, detached_inside,
    closure_of_an_unused_output, closure_that_is_detached, parameters_as_inputs, weights_from_a_region, merged_weight,
    many_kinds, other_places, reordered, loop_over_samples,
    in_place, nested, nested_three_deep, nested_at_once, dropout, nested_dropout, sequential, tensor_hooks,
]  # fmt: skip


def function_elementwise(net: Net, h: Tensor, run: Run) -> Tensor:
    return run(lambda a: net.linear[1](Square.apply(net.linear[0](a))).tanh(), h)


def function_with_weights(net: Net, h: Tensor, run: Run) -> Tensor:
    return run(lambda a: net.linear[1](OwnLinear.apply(net.linear[0](a), net.matrix, net.vector)).tanh(), h)


def op_without_rule(net: Net, h: Tensor, run: Run) -> Tensor:
    return run(lambda a: net.linear[1](torch.cdist(net.linear[0](a), net.matrix)).tanh(), h)


def interaction(net: Net, h: Tensor, run: Run) -> Tensor:
    return run(lambda a: net.linear[1]((lambda z: z - z.mean(0))(net.linear[0](a).tanh())).tanh(), h)


def interaction_above(net: Net, h: Tensor, run: Run) -> Tensor:
    y = run(net.pair(0), h)
    return y - y.mean(0)


def interaction_above_nested(net: Net, h: Tensor, run: Run) -> Tensor:
    y = nested(net, h, run)
    return (y.softmax(0) - y.mean(0)) @ net.matrix


def mixing_matrix(net: Net, h: Tensor, run: Run) -> Tensor:
    mix = torch.eye(len(h)).flip(0).to(h)
    return run(lambda a: net.linear[1]((mix @ net.linear[0](a)).tanh()), h)


SLOW = [
    function_elementwise, function_with_weights, op_without_rule, interaction, interaction_above,
    interaction_above_nested, mixing_matrix,
]  # fmt: skip
Body = Callable[[Net, Tensor, Run], Tensor]


def prepare(body: Body, B: int) -> tuple[Layers, Callable[[Run], Tensor]]:
    torch.manual_seed(0)
    net, x = Layers().double(), torch.randn(B, 3).double()

    def losses(run: Run) -> Tensor:
        torch.manual_seed(1)
        return body(net, net.first(x).tanh(), run).square().sum(1)

    return net, losses


bodies = pytest.mark.parametrize("body", FAST + SLOW, ids=lambda body: body.__name__)


@slow_paths_allowed
@bodies
@pytest.mark.parametrize("B", [0, 1, 2, 5])
def test_reentrant_regions_are_exact(body: Body, B: int) -> None:
    net, losses = prepare(body, B)
    want = definition(losses(plain), net)
    graph = losses(reentrant)
    assert_same(ps.grad(graph, net, retain_graph=True), want)
    assert_same(ps.grad(graph, net), want)
    assert_same(ps.grad(losses(reentrant), net), want)  # from memory, if the plan was kept
    assert all(p.grad is None for p in net.parameters())


@slow_paths_allowed
@bodies
def test_subsets_of_parameters(body: Body) -> None:
    net, losses = prepare(body, 3)
    want = definition(losses(plain), net)
    for name, p in net.named_parameters():
        assert_same(ps.grad(losses(reentrant), {name: p}), {name: want[name]})


class ByDepth:
    """One kind outside, the other inside of it."""

    def __init__(self, *kinds: Run) -> None:
        self.kinds, self.depth = kinds, 0

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        kind = self.kinds[self.depth % len(self.kinds)]
        level = self.depth + 1

        def body(*given: Any) -> Any:
            before, self.depth = self.depth, level
            try:
                return fn(*given)
            finally:
                self.depth = before

        return kind(body, *args)


@slow_paths_allowed
@pytest.mark.parametrize(
    "body", [b for b in FAST + SLOW if b not in (sequential, tensor_hooks)], ids=lambda body: body.__name__
)
@pytest.mark.parametrize("kinds", [(reentrant, other), (other, reentrant)], ids=["reentrant outside", "inside"])
def test_both_kinds_in_one_another(body: Body, kinds: tuple[Run, Run]) -> None:
    net, losses = prepare(body, 3)
    want = definition(losses(plain), net)
    assert_same(ps.grad(losses(ByDepth(*kinds)), net), want)
