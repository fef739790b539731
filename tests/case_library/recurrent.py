"""Recurrent networks: fused and decomposed, padded and packed, cells in loops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

from .registry import Program, case, param, score

KINDS: dict[str, dict[str, Any]] = {
    "lstm": {"kind": nn.LSTM},
    "gru": {"kind": nn.GRU},
    "tanh": {"kind": nn.RNN},
    "relu": {"kind": nn.RNN, "nonlinearity": "relu"},
}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"batch_first": True},
    "time-first": {},
    "no-bias": {"batch_first": True, "bias": False},
    "layers": {"batch_first": True, "num_layers": 3},
    "bidirectional": {"batch_first": True, "bidirectional": True},
    "all": {"num_layers": 2, "bidirectional": True, "bias": False},
}
EVERY: dict[str, dict[str, Any]] = {f"{k}-{s}": {**KINDS[k], **SHAPES[s]} for k in KINDS for s in SHAPES}
PROJECTED: dict[str, dict[str, Any]] = {
    "plain": {"batch_first": True},
    "all": {"num_layers": 2, "bidirectional": True},
}


def _batch_first(net: nn.RNNBase, out: Tensor) -> Tensor:
    """The output with the sample dim in front, whatever the layer's convention."""
    return out if net.batch_first else out.transpose(0, 1)


def _sequences(net: nn.RNNBase, B: int, T: int) -> Tensor:
    """Random input in the layer's convention."""
    return torch.randn((B, T, net.input_size) if net.batch_first else (T, B, net.input_size))


@case(EVERY)
def recurrent(B: int, kind: type[nn.RNNBase], **options: Any) -> Program:
    net = kind(3, 4, **options)
    x = _sequences(net, B, 5)
    return net, lambda: score(_batch_first(net, net(x)[0]))


@case(
    {name: v for name, v in EVERY.items() if name.startswith("lstm")},
    dtype=torch.float32,
    rtol=1e-4,
    batches=(4, 1),
    nodes=("MkldnnRnnLayerBackward0",),
)
def fused(B: int, kind: type[nn.RNNBase], **options: Any) -> Program:
    net = kind(3, 4, **options)
    x = _sequences(net, B, 5)
    return net, lambda: score(_batch_first(net, net(x)[0]))


@case(
    {name: v for name, v in EVERY.items() if not name.startswith("lstm")},
    dtype=torch.float32,
    rtol=1e-4,
    batches=(4, 1),
)
def recurrent_float32(B: int, kind: type[nn.RNNBase], **options: Any) -> Program:
    net = kind(3, 4, **options)
    x = _sequences(net, B, 5)
    return net, lambda: score(_batch_first(net, net(x)[0]))


@case(PROJECTED)
def lstm_projected(B: int, **options: Any) -> Program:
    net = nn.LSTM(3, 5, proj_size=2, **options)
    x = _sequences(net, B, 4)
    return net, lambda: score(_batch_first(net, net(x)[0]))


@case(PROJECTED, dtype=torch.float32, rtol=1e-4, batches=(4, 1))
def lstm_projected_float32(B: int, **options: Any) -> Program:
    net = nn.LSTM(3, 5, proj_size=2, **options)
    x = _sequences(net, B, 4)
    return net, lambda: score(_batch_first(net, net(x)[0]))


@case(dtype=torch.float32, rtol=1e-4, batches=(4, 1, 5), nodes=("MkldnnRnnLayerBackward0",))
def fused_as_long_as_the_batch(B: int) -> Program:
    net, x = nn.LSTM(4, 4, num_layers=2, bidirectional=True), torch.randn(B, B, 4)
    return net, lambda: score(net(x)[0].transpose(0, 1))


@case(dtype=torch.float32, rtol=1e-4, batches=(4, 1), nodes=("MkldnnRnnLayerBackward0",))
def fused_after_embedding(B: int) -> Program:
    net = nn.ModuleDict({"e": nn.Embedding(6, 3), "r": nn.LSTM(3, 4, 2, batch_first=True), "o": nn.Linear(4, 6)})
    x = torch.randint(6, (B, 5))
    loss = nn.CrossEntropyLoss(reduction="none")
    return net, lambda: loss(net["o"](net["r"](net["e"](x))[0]).mT, x).mean(1)


@case(dtype=torch.float32, rtol=1e-4, batches=(4, 1), nodes=("MkldnnRnnLayerBackward0",))
def fused_last_states(B: int) -> Program:
    net, x = nn.LSTM(3, 4, 2, bidirectional=True), torch.randn(5, B, 3)

    def losses() -> Tensor:
        _, (h, c) = net(x)
        return score(h.transpose(0, 1)) + score(c.transpose(0, 1).tanh())

    return net, losses


@case(dtype=torch.float32, rtol=1e-4, batches=(4, 1), nodes=("MkldnnRnnLayerBackward0",))
def fused_learned_initial_state(B: int) -> Program:
    net, h, c, x = nn.LSTM(3, 4, batch_first=True), param(1, 1, 4), param(1, 1, 4), torch.randn(B, 5, 3)
    params = {"h": h, "c": c, **dict(net.named_parameters())}
    start = lambda: (h.expand(1, B, 4).contiguous(), c.expand(1, B, 4).contiguous())  # noqa: E731
    return params, lambda: score(net(x, start())[0])


@case(dtype=torch.float32, rtol=1e-4, batches=(4, 1), nodes=("MkldnnRnnLayerBackward0",))
def fused_used_twice(B: int) -> Program:
    net, x, y = nn.LSTM(3, 4, batch_first=True), torch.randn(B, 5, 3), torch.randn(B, 2, 3)
    return net, lambda: score(net(x)[0]) - score(net(y, net(x)[1])[0])


@case(dtype=torch.float32, rtol=1e-4, batches=(4, 1), nodes=("MkldnnRnnLayerBackward0",))
def fused_frozen_recurrence(B: int) -> Program:
    net, x = nn.LSTM(3, 4, batch_first=True), torch.randn(B, 5, 3)
    net.weight_hh_l0.requires_grad_(False)
    net.bias_ih_l0.requires_grad_(False)
    return net, lambda: score(net(x)[0])


@case(dtype=torch.float32, rtol=1e-4, batches=(0, 4))
def fused_unless_empty(B: int) -> Program:
    net, x = nn.LSTM(3, 4, 2, batch_first=True), torch.randn(B, 5, 3)
    return net, lambda: score(net(x)[0])


@case(dtype=torch.float32, rtol=1e-4, batches=(4, 1))
def fused_dropout_between_layers(B: int) -> Program:
    net, x = nn.LSTM(3, 4, 2, batch_first=True, dropout=0.4), torch.randn(B, 5, 3)
    return net, lambda: score(net(x)[0])


@case({name: KINDS[name] for name in KINDS})
def learned_initial_state(B: int, kind: type[nn.RNNBase], **options: Any) -> Program:
    net, h, x = kind(3, 4, num_layers=2, **options), param(2, 1, 4), torch.randn(5, B, 3)
    c = param(2, 1, 4)
    params = {"h": h, **({"c": c} if kind is nn.LSTM else {}), **dict(net.named_parameters())}

    def losses() -> Tensor:
        start = h.expand(2, B, 4).contiguous()
        out, _ = net(x, (start, c.expand(2, B, 4).contiguous()) if kind is nn.LSTM else start)
        return score(out.transpose(0, 1))

    return params, losses


@case({name: KINDS[name] for name in KINDS})
def last_state(B: int, kind: type[nn.RNNBase], **options: Any) -> Program:
    net = nn.ModuleList([kind(3, 4, num_layers=2, **options), nn.Linear(4, 2)])
    x = torch.randn(5, B, 3)

    def losses() -> Tensor:
        last = net[0](x)[1]
        return score(net[1]((last[0] if kind is nn.LSTM else last)[-1]))

    return net, losses


LENGTHS = (3, 5, 1, 4, 2, 5, 3)


def _packed(x: Tensor, enforce_sorted: bool, batch_first: bool) -> PackedSequence:
    """Pack the first samples' steps; lengths descend when the order is promised."""
    lengths = torch.tensor(LENGTHS[: x.shape[0 if batch_first else 1]])
    if enforce_sorted:
        lengths = lengths.sort(descending=True).values
    return pack_padded_sequence(x, lengths, batch_first=batch_first, enforce_sorted=enforce_sorted)


@case(
    {
        f"{name}-{'sorted' if enforce else 'unsorted'}": {**options, "enforce_sorted": enforce}
        for name, options in EVERY.items()
        if not name.endswith(("plain", "layers"))
        for enforce in (True, False)
    },
    batches=(4, 1, 7),
)
def packed(B: int, kind: type[nn.RNNBase], enforce_sorted: bool, **options: Any) -> Program:
    net = kind(3, 4, **options)
    x = _sequences(net, B, 5)

    def losses() -> Tensor:
        out, _ = net(_packed(x, enforce_sorted, net.batch_first))
        return score(pad_packed_sequence(out, batch_first=True, total_length=5)[0])

    return net, losses


@case({"lstm": {"kind": nn.LSTM}, "gru": {"kind": nn.GRU}}, dtype=torch.float32, rtol=1e-4, batches=(4, 1))
def packed_float32(B: int, kind: type[nn.RNNBase]) -> Program:
    net, x = kind(3, 4, num_layers=2, bidirectional=True), torch.randn(5, B, 3)
    return net, lambda: score(pad_packed_sequence(net(_packed(x, False, False))[0], batch_first=True)[0])


@case({"plain": {}, "all": {"num_layers": 2, "bidirectional": True}}, batches=(4, 1))
def packed_projected(B: int, **options: Any) -> Program:
    net, x = nn.LSTM(3, 5, proj_size=2, **options), torch.randn(5, B, 3)
    return net, lambda: score(pad_packed_sequence(net(_packed(x, False, False))[0], batch_first=True)[0])


@case({name: KINDS[name] for name in KINDS}, batches=(4, 1))
def packed_last_state(B: int, kind: type[nn.RNNBase], **options: Any) -> Program:
    net, x = kind(3, 4, batch_first=True, **options), torch.randn(B, 5, 3)

    def losses() -> Tensor:
        last = net(_packed(x, False, True))[1]
        return score((last[0] if kind is nn.LSTM else last)[-1])

    return net, losses


@case(batches=(4, 1))
def packed_after_linear(B: int) -> Program:
    net = nn.ModuleList([nn.Linear(3, 4), nn.GRU(4, 4), nn.Linear(4, 2)])
    xs = [torch.randn(n, 3) for n in LENGTHS[:B]]

    def losses() -> Tensor:
        data = pack_sequence(xs, enforce_sorted=False)
        hidden, _ = net[1](data._replace(data=net[0](data.data).tanh()))
        return score(pad_packed_sequence(hidden._replace(data=net[2](hidden.data)), batch_first=True)[0])

    return net, losses


@case({"lstm": {"kind": nn.LSTMCell}, "gru": {"kind": nn.GRUCell}, "rnn": {"kind": nn.RNNCell}})
def cell_in_a_loop(B: int, kind: type[nn.RNNCellBase]) -> Program:
    net, x = kind(3, 4), torch.randn(5, B, 3)

    def losses() -> Tensor:
        state = None
        for step in x:
            state = net(step, state)
        return score(state[0] if isinstance(state, tuple) else state)

    return net, losses


@case({"lstm": {"kind": nn.LSTMCell}, "gru": {"kind": nn.GRUCell}}, dtype=torch.float32, rtol=1e-4)
def cell_in_a_loop_float32(B: int, kind: type[nn.RNNCellBase]) -> Program:
    net, x = kind(3, 4, bias=False), torch.randn(5, B, 3)

    def losses() -> Tensor:
        state, total = None, 0
        for step in x:
            state = net(step, state)
            total = total + score(state[0] if isinstance(state, tuple) else state)
        return total

    return net, losses


@case(batches=(4, 1))
def recurrent_unbatched_loop(B: int) -> Program:
    net, x = nn.GRU(3, 4), torch.randn(B, 5, 3)
    return net, lambda: torch.stack([net(one)[0].square().mean() for one in x])


@case()
def sequence_to_sequence(B: int) -> Program:
    net = nn.ModuleDict({"enc": nn.GRU(3, 4), "dec": nn.GRU(2, 4), "out": nn.Linear(4, 2)})
    x, y = torch.randn(5, B, 3), torch.randn(4, B, 2)
    return net, lambda: score(net["out"](net["dec"](y, net["enc"](x)[1])[0]).transpose(0, 1))


@case()
def recurrent_as_long_as_the_batch(B: int) -> Program:
    net, x = nn.GRU(4, 4), torch.randn(max(B, 1), B, 4)
    return net, lambda: score(net(x)[0].transpose(0, 1))
