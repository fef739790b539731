"""Fused LSTM layers in larger graphs: what lies below gets its gradients, and no summed weight gradient is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import persample as ps
from persample.graph.entry import capture_from
from persample.graph.ops.answers import LstmAnswer
from persample.graph.read.roots import Roots, slot_of
from tests.reference import assert_same, definition

B, T, d = 4, 5, 3
Losses = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Layers to build graphs from: what lies below the LSTMs is a linear layer and learned states."""

    def __init__(self, layers: int = 1, both: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.below = nn.Linear(d, d)
        self.lstm = nn.LSTM(d, d, layers, batch_first=True, bidirectional=both)
        self.other = nn.LSTM(d, d, batch_first=True)
        self.h, self.c = (nn.Parameter(torch.randn(1, 1, d)) for _ in range(2))

    def states(self) -> tuple[Tensor, Tensor]:
        return self.h.repeat(1, B, 1), self.c.repeat(1, B, 1)


def score(y: Tensor) -> Tensor:
    return y.square().flatten(1).sum(1)


def through(net: Net, x: Tensor) -> Tensor:
    return score(net.lstm(net.below(x))[0])


def residual(net: Net, x: Tensor) -> Tensor:
    below = net.below(x)
    return score(below + net.lstm(below)[0])


def side_by_side(net: Net, x: Tensor) -> Tensor:
    below = net.below(x)
    return score(net.lstm(below)[0] * net.other(below)[0])


def one_after_another(net: Net, x: Tensor) -> Tensor:
    first = net.lstm(net.below(x))[0]
    return score(first) - score(net.other(first)[0])


def from_learned_states(net: Net, x: Tensor) -> Tensor:
    _, (h, c) = net.lstm(net.below(x), net.states())
    return score(net.other(x, (h, c))[0]) + score(c.transpose(0, 1))


def last_states_alone(net: Net, x: Tensor) -> Tensor:
    _, (h, c) = net.lstm(net.below(x), net.states())
    return score((h * c).transpose(0, 1))


def used_twice(net: Net, x: Tensor) -> Tensor:
    return score(net.lstm(net.lstm(net.below(x))[0])[0])


def checkpointed(net: Net, x: Tensor) -> Tensor:
    below = net.below(x)
    return score(checkpoint(lambda y: net.lstm(net.other(y)[0])[0], below, use_reentrant=False))


NETS = {"one": Net, "layers": lambda: Net(3), "both": lambda: Net(both=True), "all": lambda: Net(2, both=True)}
GRAPHS: dict[str, tuple[Callable[[], Net], Losses]] = {
    **{name: (net, through) for name, net in NETS.items()},
    **{
        graph.__name__: (Net, graph)
        for graph in (
            residual,
            side_by_side,
            one_after_another,
            from_learned_states,
            last_states_alone,
            used_twice,
            checkpointed,
        )
    },
}
every_graph = pytest.mark.parametrize(("build", "graph"), GRAPHS.values(), ids=GRAPHS)


@every_graph
def test_gradients_of_fused_layers_are_exact(build: Callable[[], Net], graph: Losses) -> None:
    net, x = build(), inputs()
    want = definition(graph(net, x), net)
    assert_same(ps.grad(graph(net, x), net), want, rtol=1e-5)


@every_graph
def test_the_fused_backward_is_not_computed(build: Callable[[], Net], graph: Losses) -> None:
    net = build()
    losses = graph(net, inputs())
    with Watch() as watch:
        ps.norms(losses, net)
    assert watch.answered
    assert not watch.computed


def test_nothing_is_answered_where_nothing_lies_below() -> None:
    net, x = Net(), inputs()
    with Watch() as watch:
        ps.norms(score(net.lstm(x)[0]), net)
    assert not watch.answered
    assert not watch.computed


@every_graph
def test_hooks_see_the_ordinary_gradient_once(build: Callable[[], Net], graph: Losses) -> None:
    net, x = build(), inputs()
    with tensor_hooks(net) as seen:
        graph(net, x).sum().backward()
    with tensor_hooks(net) as seen_by_us:
        ps.norms(graph(net, x), net)
    assert len(seen) == len(seen_by_us) > 0
    close(seen_by_us, seen)


def test_full_backward_hooks_of_the_layer() -> None:
    net, x = Net(), inputs()
    seen: list[Tensor] = []
    net.lstm.register_full_backward_hook(lambda _, into, out: seen.extend([into[0], out[0]]))
    through(net, x).sum().backward()
    ps.norms(through(net, x), net)
    close(seen[-2:], seen[:2])  # before it, probes went by


@pytest.mark.parametrize("graph", [through, residual, used_twice])
def test_the_graph_can_be_kept(graph: Losses) -> None:
    net = Net(2)
    losses = graph(net, inputs())
    first = ps.grad(losses, net, retain_graph=True)
    assert_same(ps.grad(losses, net), first, rtol=0)
    with pytest.raises(RuntimeError, match="second time"):
        ps.grad(losses, net)


def test_an_error_below_leaves_nothing_behind() -> None:
    net, x = Net(), inputs()

    def refuse(grad: Tensor) -> None:
        raise ValueError("refused")

    below = net.below(x)
    handle = below.register_hook(refuse)
    losses = score(net.lstm(below)[0])
    with pytest.raises(ValueError, match="refused"):
        ps.norms(losses, net, retain_graph=True)
    handle.remove()
    want = torch.autograd.grad(losses.sum(), list(net.lstm.parameters()), retain_graph=True)
    close([g.sum(0) for g in ps.grad(losses, list(net.lstm.parameters()))], want)


def test_a_nested_call_in_a_hook() -> None:
    net, x = Net(2), inputs()
    want = ps.grad(through(net, x), net)
    inner: list[dict[str, Tensor]] = []
    below = net.below(x)
    again = through(net, x)
    below.register_hook(lambda g: inner.append(ps.grad(again, net)))
    losses = score(net.lstm(below)[0])
    assert_same(ps.grad(losses, net), want, rtol=1e-6)
    assert_same(inner[0], want, rtol=1e-6)


def test_modes_of_the_caller_stay_in_force() -> None:
    net, x = Net(2), inputs()
    want = ps.grad(through(net, x), net)
    with FlopCounterMode(display=False) as counter:
        got = ps.grad(through(net, x), net)
    assert_same(got, want, rtol=1e-6)
    assert counter.get_total_flops()


def test_anomaly_mode_and_profiler() -> None:
    net, x = Net(2), inputs()
    want = ps.grad(through(net, x), net)
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        assert_same(ps.grad(through(net, x), net), want, rtol=1e-6)
    with torch.profiler.profile(record_shapes=True, profile_memory=True):
        assert_same(ps.grad(through(net, x), net), want, rtol=1e-6)


def test_ordinary_gradients_of_inputs_below() -> None:
    net, x = Net(2, both=True), inputs().requires_grad_()
    (want,) = torch.autograd.grad(through(net, x).sum(), x)
    with Watch() as watch:
        (got,) = captured(through(net, x), net, x)
    close([got], [want])
    assert watch.answered


def test_ordinary_gradients_of_weights_are_computed() -> None:
    net, x = Net(), inputs()
    plain = net.lstm.weight_hh_l0
    (want,) = torch.autograd.grad(through(net, x).sum(), plain)
    with Watch() as watch:
        (got,) = captured(through(net, x), net, plain)
    close([got], [want])
    assert not watch.answered


def inputs() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(B, T, d)


def close(got: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> None:
    """The same numbers, but for float32."""
    torch.testing.assert_close(list(got), list(want), rtol=1e-4, atol=1e-6)


def captured(losses: Tensor, net: Net, plain: Tensor) -> tuple[Tensor | None, ...]:
    """A capture of all parameters but ``plain``, whose ordinary gradient comes back."""
    params = {name: p for name, p in net.named_parameters() if p is not plain}
    return capture_from(
        Roots.of_losses(losses), params, lambda names, factor: None, retain_graph=False, ordinary=[slot_of(plain)]
    )


class Watch(TorchDispatchMode):
    """Counts the calls of the fused backward."""

    def __init__(self) -> None:
        super().__init__()
        self.answered = self.computed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mkldnn_rnn_layer_backward.default:
            known = any(isinstance(given, LstmAnswer) for given in args)
            self.answered += known
            self.computed += not known
        return func(*args, **(kwargs or {}))


@contextmanager
def tensor_hooks(net: Net) -> Iterator[list[Tensor]]:
    """What hooks on all tensors that go into and come out of the layers have seen."""
    seen: list[Tensor] = []

    def watch(module: nn.Module, args: Any, out: Any) -> None:
        flat = [*args, *(out if isinstance(out, tuple) else (out,))]
        for t in [t for one in flat for t in (one if isinstance(one, tuple) else (one,))]:
            if t.requires_grad:
                t.register_hook(seen.append)

    handles = [layer.register_forward_hook(watch) for layer in (net.below, net.lstm, net.other)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
