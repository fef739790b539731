"""Non-reentrant checkpointing: exact, one more recomputation and no more memory. Reentrant: test_reentrant.py."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as _checkpoint

import persample as ps
from tests.case_library.functions import OwnLinear, Square
from tests.modes import megabytes
from tests.reference import assert_same, definition

checkpoint = partial(_checkpoint, use_reentrant=False)
Fn = Callable[[Tensor], Tensor]


class Counted:
    """A function that knows how often it was called."""

    def __init__(self, fn: Fn) -> None:
        self.fn, self.calls = fn, 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fn(x)


class Layers(nn.Module):
    """What the checkpointed regions are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])
        self.norm, self.table, self.conv = nn.LayerNorm(3), nn.Embedding(5, 3), nn.Conv1d(1, 1, 3, padding=1)
        self.matrix, self.vector = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3))

    def pair(self, i: int) -> Fn:
        return lambda h: self.linear[i + 1](self.linear[i](h).tanh()).tanh()


Regions = tuple[list[Counted], Fn]


def one(net: Layers) -> Regions:
    region = Counted(net.pair(0))
    return [region], lambda x: checkpoint(region, x)


def several(net: Layers) -> Regions:
    first, second = Counted(net.pair(0)), Counted(net.pair(2))
    return [first, second], lambda x: checkpoint(second, net.norm(checkpoint(first, x)))


def reused(net: Layers) -> Regions:
    region = Counted(net.pair(0))
    return [region], lambda x: checkpoint(region, checkpoint(region, checkpoint(region, x)))


def branches(net: Layers) -> Regions:
    first, second = Counted(net.pair(0)), Counted(net.pair(1))
    return [first, second], lambda x: checkpoint(first, x) * checkpoint(second, x)


def nested(net: Layers) -> Regions:
    inner = Counted(lambda h: net.linear[0](h).tanh())
    outer = Counted(lambda h: net.linear[1](checkpoint(inner, net.linear[2](h).tanh())).tanh())
    return [inner, outer], lambda x: checkpoint(outer, x)


def nested_three_deep(net: Layers) -> Regions:
    inner = Counted(lambda h: net.linear[0](h).tanh())
    middle = Counted(lambda h: checkpoint(inner, net.linear[1](h).tanh()))
    outer = Counted(lambda h: net.linear[3](checkpoint(middle, net.linear[2](h).tanh())).tanh())
    return [inner, middle, outer], lambda x: checkpoint(outer, checkpoint(outer, x))


def many_kinds(net: Layers) -> Regions:
    def body(h: Tensor) -> Tensor:
        h = net.conv(net.norm(h * net.vector).unsqueeze(1)).squeeze(1)
        return (h + net.table(torch.arange(len(h)) % 5)).tanh() @ net.matrix

    region = Counted(body)
    return [region], lambda x: checkpoint(region, x)


def scaled(net: Layers) -> Regions:
    """An op of a parameter and of data that have gradients, too: both are read, and the engine comes by after."""
    region = Counted(lambda h: (h * net.vector).tanh() + net.vector)
    return [region], lambda x: checkpoint(region, net.linear[0](x))


def indexed_weight(net: Layers) -> Regions:
    """Indices are saved as a list, beside other things that the engine will not come to."""
    ids = torch.tensor([3, 1, 1, 0, 2, 4, 4, 1, 0])
    region = Counted(lambda h: (net.table.weight[ids[: len(h)]] + net.linear[0](h)).tanh() @ net.matrix)
    return [region], lambda x: checkpoint(region, x)


def rows_by_index(net: Layers) -> Regions:
    region = Counted(lambda h: net.linear[1](net.linear[0](h)[torch.arange(len(h)).flip(0)].tanh()))
    return [region], lambda x: checkpoint(region, x)


def merged_weight(net: Layers) -> Regions:
    region = Counted(lambda h: F.linear(h, (net.linear[0].weight @ net.matrix).tanh()).tanh())
    return [region], lambda x: checkpoint(region, x)


def function_elementwise(net: Layers) -> Regions:
    region = Counted(lambda h: net.linear[1](Square.apply(net.linear[0](h))).tanh())
    return [region], lambda x: checkpoint(region, x)


def function_with_weights(net: Layers) -> Regions:
    region = Counted(lambda h: net.linear[1](OwnLinear.apply(net.linear[0](h), net.matrix, net.vector)).tanh())
    return [region], lambda x: checkpoint(region, x)


def op_without_rule(net: Layers) -> Regions:
    region = Counted(lambda h: net.linear[1](torch.cdist(net.linear[0](h), net.matrix)).tanh())
    return [region], lambda x: checkpoint(region, x)


def interaction(net: Layers) -> Regions:
    region = Counted(lambda h: net.linear[1]((lambda z: z - z.mean(0))(net.linear[0](h).tanh())).tanh())
    return [region], lambda x: checkpoint(region, x)


FAST = [one, several, reused, branches, nested, nested_three_deep, many_kinds, scaled, rows_by_index, merged_weight]
SLOW = [indexed_weight, function_elementwise, function_with_weights, op_without_rule, interaction]
slow_paths_allowed = pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")


def prepare(make: Callable[[Layers], Regions], B: int) -> tuple[Layers, list[Counted], Callable[[], Tensor]]:
    torch.manual_seed(0)
    net, x = Layers().double(), torch.randn(B, 3).double()
    counters, forward = make(net)
    return net, counters, lambda: forward(x).square().sum(1)


def recomputations(counters: list[Counted], run: Callable[[], object]) -> list[int]:
    for counter in counters:
        counter.calls = 0
    run()
    return [counter.calls for counter in counters]


@slow_paths_allowed
@pytest.mark.parametrize("make", FAST + SLOW, ids=lambda make: make.__name__)
def test_checkpointed_regions_are_exact(make: Callable[[Layers], Regions]) -> None:
    net, _, forward = prepare(make, 5)
    want = definition(forward(), net)
    losses = forward()
    assert_same(ps.grad(losses, net, retain_graph=True), want)
    assert_same(ps.grad(losses, net), want)


@pytest.mark.parametrize("make", FAST, ids=lambda make: make.__name__)
@pytest.mark.parametrize("B", [2, 6])
def test_recomputed_at_most_once_more(make: Callable[[Layers], Regions], B: int) -> None:
    """An inner region is recomputed with every one around it: once more means twice as often in all."""
    net, counters, forward = prepare(make, B)
    losses = forward()
    ordinary = recomputations(counters, losses.sum().backward)
    losses = forward()
    ours = recomputations(counters, lambda: ps.grad(losses, net))
    assert all(0 < a <= 2 * b for a, b in zip(ours, ordinary, strict=True)), f"{ours}, ordinary backward {ordinary}"


@slow_paths_allowed
@pytest.mark.parametrize("make", SLOW, ids=lambda make: make.__name__)
def test_recomputations_do_not_grow_with_the_batch(make: Callable[[Layers], Regions]) -> None:
    counts = []
    for B in (3, 9):
        net, counters, forward = prepare(make, B)
        losses = forward()
        counts.append(recomputations(counters, lambda losses=losses, net=net: ps.grad(losses, net)))  # type: ignore[misc]
    assert counts[0] == counts[1]


def test_one_sample_costs_what_a_backward_costs() -> None:
    net, counters, forward = prepare(several, 1)
    losses = forward()
    assert recomputations(counters, lambda: ps.grad(losses, net)) == [1, 1]


@pytest.mark.parametrize("kind", [True, False])
def test_data_that_meet_inside_are_seen(kind: bool) -> None:
    """A mean over the batch of data that have no gradients: the only trace is what the layer has saved."""
    net, _, _ = prepare(one, 3)
    x = torch.randn(3, 3).double()
    losses = _checkpoint(lambda h: h + net.linear[1](x).mean(0), net.linear[0](x), use_reentrant=kind).square().sum(1)
    with pytest.raises(ps.InteractionError, match="Mean"):
        ps.grad(losses, net, independent=True)


@pytest.mark.parametrize("make", FAST, ids=lambda make: make.__name__)
def test_samples_that_do_not_meet_are_not_said_to(make: Callable[[Layers], Regions]) -> None:
    for B in (3, 5):
        net, _, forward = prepare(make, B)
        want = definition(forward(), net)
        assert_same(ps.grad(forward(), net, independent=True), want)


@slow_paths_allowed
@pytest.mark.parametrize("kind", [True, False])
def test_a_weight_whose_view_is_changed_in_place_is_refused(kind: bool) -> None:
    """The op's own node is hidden in another, so that what it saved cannot be kept for a second call."""

    def region(net: Layers, h: Tensor) -> Tensor:
        table = net.linear[0](net.matrix.view(1, 3, 3) + 1).sigmoid_()
        return h @ net.linear[1](table)[0]

    net, _, _ = prepare(one, 3)
    x = torch.randn(3, 3).double()
    losses = _checkpoint(region, net, net.linear[2](x), use_reentrant=kind).square().sum(1)
    try:
        found = ps.grad(losses, net)
    except ps.UnsupportedError as error:
        said = str(error)
        assert re.search(r"changes a view of weights in place.*returns a new tensor", said)
    else:  # in releases that keep what the op saved
        assert_same(found, definition(region(net, net.linear[2](x)).square().sum(1), net))


MEMORY = """
import sys, torch, persample as ps
from torch import nn
from torch.utils.checkpoint import checkpoint

def step(x):
    h = x
    for block in net:
        h = checkpoint(block, h, use_reentrant=False) if sys.argv[1] == "checkpoint" else block(h)
    losses = h.square().sum((1, 2))
    ps.grad(losses, net) if sys.argv[2] == "grad" else losses.sum().backward()

torch.set_num_threads(1)
net = nn.ModuleList(nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(64, 64), nn.Tanh())]) for _ in range(24))
x = torch.randn(2, 4096, 64)  # 2 MB per activation
step(x[:, :9])  # what a first use loads is not counted, nor is the peak of loading it
open("/proc/self/clear_refs", "w").write("5")
before = peak()
step(x)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and sets up glibc")
def test_checkpointing_still_saves_memory() -> None:
    ours, plain = megabytes(MEMORY, "checkpoint", "grad"), megabytes(MEMORY, "plain", "grad")
    ordinary = megabytes(MEMORY, "checkpoint", "backward")
    assert ours < 0.75 * plain, f"{ours:.0f} MB with, {plain:.0f} MB without checkpointing"
    assert ours < 1.5 * ordinary, f"{ours:.0f} MB, an ordinary backward {ordinary:.0f} MB"


def test_a_table_in_a_checkpoint_at_the_gate() -> None:
    """What the table was read by is not looked at where it could be unpacked only once."""

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(2, 1).double())

        def forward(self, x: Tensor) -> Tensor:
            inner = lambda t: t @ self.table[[1, 1, 0]]  # noqa: E731
            return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False).amax((1, 2))  # type: ignore[no-any-return]

    model, x = Scores(), torch.randn(2, 2, 3).double()
    want = definition(model(x), model)
    ps.call_for_per_sample_grads(model)(x).sum().backward()
    assert_same({"table": model.table.grad_sample}, want)  # type: ignore[attr-defined]
