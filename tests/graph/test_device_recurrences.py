"""Recurrences of cuDNN, MIOpen and mps: real nodes, made by kernels in plain ops, in whole programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import persample as ps
from tests.graph.device_recurrences import Calls, device_cell, device_run, on_cpu
from tests.reference import assert_same, definition

B, T, d, h = 4, 5, 3, 4
DEVICES = ["cudnn", "miopen", "mps"]
NETS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "layers": {"num_layers": 3, "batch_first": True},
    "both": {"bidirectional": True},
    "all": {"num_layers": 2, "bidirectional": True, "batch_first": True},
}
every_net = pytest.mark.parametrize(
    ("device", "kind"), [(device, kind) for device in DEVICES for kind in NETS if device != "mps" or kind == "lstm"]
)
packing = pytest.mark.parametrize(
    ("device", "kind"), [(device, kind) for device in ("cudnn", "miopen") for kind in NETS]
)
pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(autouse=True)
def calls() -> Iterator[Calls]:
    with on_cpu() as calls:
        yield calls


class Net(nn.Module):
    """Recurrent layers on a device, with a linear layer below and learned states."""

    def __init__(self, device: str, kind: str = "lstm", **options: Any) -> None:
        super().__init__()
        make, more = NETS[kind]
        self.device, self.below, self.rnn = device, nn.Linear(d, d), make(d, h, **more, **options)
        places = self.rnn.num_layers * (1 + self.rnn.bidirectional)
        self.h, self.c = (nn.Parameter(torch.randn(places, 1, n)) for n in (self.rnn.proj_size or h, h))

    def run(self, x: Tensor | PackedSequence, batch: int) -> tuple[Any, tuple[Tensor, ...]]:
        """Output and last states; the first states are views."""
        states = self.h.expand(-1, batch, -1), self.c.expand(-1, batch, -1)
        return device_run(self.device, self.rnn, x, states if isinstance(self.rnn, nn.LSTM) else states[0])

    def losses(self, x: Tensor, last: bool = True, output: bool = True) -> Tensor:
        y, states = self.run(self.below(x), x.shape[0 if self.rnn.batch_first else 1])
        total = score(y if self.rnn.batch_first else y.transpose(0, 1)) if output else 0
        return total + sum(score(s.transpose(0, 1)) * n for n, s in enumerate(states, 2)) if last else total

    def data(self, batch: int = B, steps: int = T) -> Tensor:
        return torch.randn((batch, steps, d) if self.rnn.batch_first else (steps, batch, d))


def score(y: Tensor) -> Tensor:
    weights = torch.linspace(-1, 2, y[:1].numel(), dtype=y.dtype).view(y.shape[1:]) if len(y) else 1
    return (y * y.cos() * weights).flatten(1).sum(1)


def check(losses: Tensor, params: Any, rtol: float = 1e-8, **options: Any) -> None:
    """Gradients and norms; nothing may be slow, as warnings are errors."""
    want = definition(losses, params)
    assert_same(ps.grad(losses, params, retain_graph=True, **options), want, rtol=rtol)
    rows = [stack.flatten(1) for stack in want.values()]
    torch.testing.assert_close(ps.norms(losses, params), torch.cat(rows, 1).norm(dim=1), rtol=rtol, atol=1e-8)


@every_net
@pytest.mark.parametrize("form", FORMS)
def test_the_kernels_here_are_pytorchs_recurrence(device: str, kind: str, form: str) -> None:
    net = Net(device, kind, **FORMS[form])
    x = net.data()
    y, last = device_run(device, net.rnn, x)
    want, states = net.rnn(x)
    torch.testing.assert_close((y, last), (want, states if kind == "lstm" else (states,)))
    assert y.grad_fn.name() == {"cudnn": "CudnnRnn", "miopen": "MiopenRnn", "mps": "LstmMps"}[device] + "Backward0"


@every_net
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", [0, 1, B])
def test_layers(device: str, kind: str, form: str, batch: int) -> None:
    net = Net(device, kind, **FORMS[form])
    if kind != "lstm":
        net.c.requires_grad_(False)
    check(net.losses(net.data(batch)), net, independent=True)


@every_net
@pytest.mark.parametrize("used", ["output", "last"])
def test_some_results(device: str, kind: str, used: str) -> None:
    net = Net(device, kind, num_layers=2, bidirectional=True)
    check(net.losses(net.data(), last=used == "last", output=used == "output"), net.rnn)


@pytest.mark.parametrize("device", DEVICES)
def test_sums_of_weight_gradients_are_asked_for_only_where_they_cannot_be_left_out(device: str, calls: Calls) -> None:
    net = Net(device, num_layers=2)
    losses = net.losses(net.data())
    ps.norms(losses, net)
    assert calls.sums == (device == "mps")  # which computes all or nothing


@every_net
def test_data_of_any_form(device: str, kind: str) -> None:
    net = Net(device, kind, num_layers=2)
    for x in (
        torch.randn(d, B, T).permute(2, 1, 0),
        torch.randn(1, 1, d).expand(T, B, d),
        torch.randn(T, B, 2 * d)[..., ::2],
    ):
        y, last = net.run(x, B)
        check(score(y.transpose(0, 1)) + score(last[0].transpose(0, 1)), net.rnn, independent=True)


@every_net
def test_as_long_as_the_batch(device: str, kind: str) -> None:
    net = Net(device, kind, batch_first=True)
    net.rnn = type(net.rnn)(d, B)
    x = torch.randn(B, B, d)
    y, _ = device_run(device, net.rnn, x)
    check(score(y.transpose(0, 1)), net.rnn, independent=True)


@every_net
def test_parameters_one_by_one_and_frozen_ones(device: str, kind: str) -> None:
    net = Net(device, kind, num_layers=2, bidirectional=True)
    x = net.data()
    for name, p in net.rnn.named_parameters():
        check(net.losses(x), {name: p})
    for p in (net.rnn.weight_hh_l0, net.rnn.bias_ih_l1_reverse, *net.below.parameters()):
        p.requires_grad_(False)
    check(net.losses(x), [p for p in net.rnn.parameters() if p.requires_grad])


@pytest.mark.parametrize("device", DEVICES)
def test_samples_in_any_order_and_of_several_sequences(device: str) -> None:
    net = Net(device, num_layers=2)
    check(net.losses(net.data())[torch.tensor([2, 0, 3, 1])], net)
    check(net.losses(net.data()).view(2, 2).sum(1), net)
    check(net.losses(net.data()).view(2, 2).sum(0), net)
    check(net.losses(net.data())[1:3], net.rnn)


@pytest.mark.parametrize("device", DEVICES)
def test_used_twice_and_checkpointed(device: str) -> None:
    net = Net(device, num_layers=2, batch_first=True)
    x = net.data()
    top = nn.Linear(h, d)

    def twice(x: Tensor) -> Tensor:
        found: Tensor = net.run(top(net.run(net.below(x), B)[0]), B)[0]
        return found

    check(score(twice(x)), net)
    check(score(checkpoint(twice, x, use_reentrant=False)), net)
    check(score(checkpoint(lambda x: net.run(x, B)[0], x, use_reentrant=False)), net.rnn)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-4), (torch.float16, 0.02), (torch.bfloat16, 0.1)])
def test_dtypes(device: str, dtype: torch.dtype, rtol: float) -> None:
    net = Net(device, num_layers=2, bidirectional=True).to(dtype)
    losses = score(net.run(net.data().to(dtype), B)[0].transpose(0, 1))
    assert_same(ps.grad(losses, net.rnn, retain_graph=True), definition(losses, net.rnn), rtol=rtol)


def test_half_precision_copies_of_weights() -> None:
    """As autocast makes them."""
    net, x, states = nn.LSTM(d, h, 2, dtype=torch.float32), torch.randn(T, B, d).half(), torch.zeros(2, B, h).half()
    flat = [w.half() for w in net.parameters()]
    y = torch._cudnn_rnn(x, flat, 4, None, states, states, 2, h, 0, 2, False, 0.0, True, False, [], None)[0]
    losses = score(y.float().transpose(0, 1))
    assert_same(ps.grad(losses, net, retain_graph=True), definition(losses, net), rtol=0.02)


@pytest.mark.parametrize("device", DEVICES)
def test_a_bad_sample_stays_alone(device: str) -> None:
    net = Net(device, num_layers=2)
    x = net.data()
    want = ps.grad(net.losses(x), net)
    x[2, 1] = torch.nan
    got = ps.grad(net.losses(x), net)
    others = [0, 2, 3]
    assert_same({name: g[others] for name, g in got.items()}, {name: g[others] for name, g in want.items()})
    assert got["rnn.weight_hh_l0"][1].isnan().any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("below", [False, True], ids=["data", "a layer"])
@pytest.mark.parametrize("dims", [(1, 2), (0, 1)], ids=["time", "features"])
def test_samples_that_meet_in_a_sequence(device: str, below: bool, dims: tuple[int, int]) -> None:
    net = Net(device)
    x = net.data()

    def losses() -> Tensor:
        y: Tensor = device_run(device, net.rnn, net.below(x) if below else x)[0]
        return y.square().sum(dims)

    with pytest.raises(ps.InteractionError, match="samples interact in"):
        ps.norms(losses(), net.rnn, independent=True)
    with pytest.warns(ps.PerformanceWarning, match="no fast rule"):
        assert_same(ps.grad(found := losses(), net.rnn, retain_graph=True), definition(found, net.rnn))


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_between_layers_is_exact_and_slow(device: str) -> None:
    """Its masks are the device's own: only the node's backward knows them."""
    net = Net(device, num_layers=3, dropout=0.4)
    losses = net.losses(net.data())
    want = definition(losses, net)
    for keep in (True, False):
        with pytest.warns(ps.PerformanceWarning, match="no fast rule"):
            assert_same(ps.grad(losses, net, retain_graph=keep), want)


@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
@pytest.mark.parametrize("device", DEVICES)
def test_dropout_of_one_layer_is_none(device: str) -> None:
    net = Net(device, dropout=0.4)
    check(net.losses(net.data()), net)


def test_a_projected_lstm_is_exact_and_slow() -> None:
    net = Net("cudnn", num_layers=2, proj_size=2)
    losses = net.losses(net.data())
    with pytest.warns(ps.PerformanceWarning, match="no fast rule"):
        assert_same(ps.grad(losses, net, retain_graph=True), definition(losses, net))


@pytest.mark.parametrize("device", ["cudnn", "miopen"])
def test_evaluation_is_refused_as_by_pytorch(device: str) -> None:
    net = Net(device).eval()
    with pytest.raises(ps.UnsupportedError, match="can only be called in training mode"):
        ps.norms(net.losses(net.data()), net)


def test_evaluation_on_mps() -> None:
    net = Net("mps", num_layers=2, dropout=0.4).eval()
    check(net.losses(net.data()), net)


LENGTHS = [(3, 3, 1), (4, 2, 1), (1, 2, 4), (2, 2, 2), (1, 1, 1), (5,), (2, 5, 1, 5, 3)]


def packed(net: Net, lengths: tuple[int, ...]) -> tuple[Any, tuple[Tensor, ...]]:
    data = pack_sequence([torch.randn(n, d) for n in lengths], enforce_sorted=False)
    return net.run(data._replace(data=net.below(data.data)), len(lengths))


@packing
@pytest.mark.parametrize("both", [False, True], ids=["", "both"])
def test_packed_sequences(device: str, kind: str, both: bool) -> None:
    net = Net(device, kind, num_layers=2, bidirectional=both)
    net.c.requires_grad_(kind == "lstm")
    for lengths in LENGTHS:
        y, last = packed(net, lengths)
        output = score(pad_packed_sequence(y, batch_first=True)[0])
        check(output, net, independent=True)
        y, last = packed(net, lengths)
        check(sum(score(s.transpose(0, 1)) for s in last), net, independent=True)
        y, last = packed(net, lengths)
        both_of_them = score(pad_packed_sequence(y, batch_first=True)[0]) + score(last[0].transpose(0, 1))
        check(both_of_them, net)


def test_packed_sequences_of_other_lengths_have_other_plans() -> None:
    """Nothing but the saved lengths tells these graphs apart."""
    net = Net("cudnn")
    rows = torch.randn(7, d)
    for lengths in ((3, 3, 1), (4, 2, 1), (5, 1, 1), (3, 3, 1)):
        counts = torch.tensor([sum(n > t for n in lengths) for t in range(max(lengths))])
        data = PackedSequence(net.below(rows), counts, None, None)
        check(score(net.run(data, 3)[1][0].transpose(0, 1)), net, independent=True)


@pytest.mark.parametrize("below", [False, True], ids=["data", "a layer"])
def test_packed_rows_that_are_taken_for_samples(below: bool) -> None:
    net = Net("cudnn")
    data = pack_sequence([torch.randn(n, d) for n in (3, 2, 2)])
    data = data._replace(data=net.below(data.data)) if below else data
    with pytest.raises(ps.InteractionError, match="samples interact in CudnnRnn"):
        ps.norms(net.run(data, 3)[0].data.square().sum(1), net.rnn, independent=True)
    losses = net.run(data, 3)[0].data.square().sum(1)
    with pytest.warns(ps.PerformanceWarning, match="no fast rule"):
        assert_same(ps.grad(losses, net.rnn, retain_graph=True), definition(losses, net.rnn))


CELLS = pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])


@CELLS
@pytest.mark.parametrize("batch", [0, 1, B])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_cells_in_a_loop(kind: type[nn.RNNCellBase], batch: int, bias: bool) -> None:
    net, x = kind(d, h, bias=bias), torch.randn(T, batch, d)
    check(_looped(net, x), net, independent=True)
    check(_looped(net, x)[torch.arange(batch - 1, -1, -1)], net)
    if bias:
        net.weight_ih.requires_grad_(False)
        net.weight_hh.requires_grad_(False)
        check(_looped(net, x), net)
        check(_looped(net, x), [net.bias_hh])


def _looped(net: nn.RNNCellBase, x: Tensor) -> Tensor:
    zeros = x.new_zeros(x.shape[1], h)
    state: Any = (zeros, zeros + 0.5) if isinstance(net, nn.LSTMCell) else zeros
    total = x.new_zeros(x.shape[1])
    for step in x:
        state = device_cell(net, step, state)
        total = total + score(state[0] if isinstance(state, tuple) else state)
    return total + score(state[1]) if isinstance(state, tuple) else total


@CELLS
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-4), (torch.float16, 0.05)])
def test_cells_of_other_dtypes(kind: type[nn.RNNCellBase], dtype: torch.dtype, rtol: float) -> None:
    net, x = kind(d, h, dtype=dtype), torch.randn(T, B, d).to(dtype)
    losses = _looped(net, x)
    assert_same(ps.grad(losses, net, retain_graph=True), definition(losses, net), rtol=rtol)
