"""The LSTM replay against one-sample-at-a-time autograd, fed by the fused nodes and by float64 layers."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from persample.kernels.recurrence import LstmLayer, LstmReplay, replay_lstm
from tests.graph.versions import VERSION
from tests.reference import assert_same, definition

d, h = 3, 4
FUSED = "MkldnnRnnLayerBackward0"
BOTH = [False, True]
OUTPUTS = {"output": (0,), "h_n": (1,), "c_n": (2,), "all": (0, 1, 2)}


@pytest.mark.parametrize("T", [1, 2, 7])
@pytest.mark.parametrize("B", [1, 2, 5])
@pytest.mark.parametrize("init", BOTH)
@pytest.mark.parametrize("bias", BOTH)
@pytest.mark.parametrize("batch_first", BOTH)
@pytest.mark.parametrize("both", BOTH)
@pytest.mark.parametrize("stacked", BOTH)
def test_fused_nodes(stacked: bool, both: bool, batch_first: bool, bias: bool, init: bool, B: int, T: int) -> None:
    torch.manual_seed(T * 10 + B)
    model = nn.LSTM(d, h, 1 + stacked, bias=bias, batch_first=batch_first, bidirectional=both)
    losses = run(model, B, T, init=init)
    assert len(fused(losses.grad_fn)) == (1 + stacked) * (1 + both)
    assert_same(replay(losses, model), definition(losses, model), rtol=1e-5)


@pytest.mark.parametrize("used", OUTPUTS.values(), ids=OUTPUTS)
@pytest.mark.parametrize("both", BOTH)
def test_cotangents_that_are_missing_count_as_zero(both: bool, used: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.LSTM(d, h, 2, bidirectional=both)
    losses = run(model, B=3, T=4, used=used)
    assert_same(replay(losses, model), definition(losses, model), rtol=1e-5)


@pytest.mark.skipif(VERSION < (2, 13), reason="older releases of torch do not fuse them")
def test_packed_sequences_of_one_length_are_fused_too() -> None:
    torch.manual_seed(5)
    model = nn.LSTM(d, h, 2, bidirectional=True)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(4, 3, d), [4, 4, 4])
    output, (h_n, _) = model(packed)
    losses = output.data.view(4, 3, -1).square().sum((0, 2)) + h_n.square().sum((0, 2))
    assert len(fused(losses.grad_fn)) == 4
    assert_same(replay(losses, model), definition(losses, model), rtol=1e-5)


@pytest.mark.parametrize("both", BOTH)
@pytest.mark.parametrize("bias", BOTH)
def test_fused_nodes_against_float64(both: bool, bias: bool) -> None:
    torch.manual_seed(1)
    model = nn.LSTM(d, h, 2, bias=bias, bidirectional=both)
    wide = nn.LSTM(d, h, 2, bias=bias, bidirectional=both, dtype=torch.float64)
    wide.load_state_dict(model.state_dict())
    losses, exact = (run(m, B=5, T=7, init=True, seed=2) for m in (model, wide))
    assert not fused(exact.grad_fn)
    want = {name: g.float() for name, g in definition(exact, wide).items()}
    assert_same(replay(losses, model), want, rtol=1e-5)


@pytest.mark.parametrize("reverse", BOTH)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_dtypes_against_a_float64_layer(dtype: torch.dtype, rtol: float, reverse: bool) -> None:
    layer, cotangents, want = example(reverse, dtype)
    got = contract(replay_lstm(layer, *cotangents))
    assert {g.dtype for g in got} == {torch.promote_types(dtype, torch.float32)}
    assert_same([g.double() for g in got], want, rtol=rtol)


@pytest.mark.parametrize("reverse", BOTH)
def test_arguments_are_left_alone_and_may_have_any_strides(reverse: bool) -> None:
    layer, (d_output, d_hn, d_cn), _ = example(reverse, torch.float64)
    d_output, d_hn, d_cn = d_output[0, 0].expand(7, 5, h), d_hn[0].expand(5, h), d_cn.t().contiguous().t()
    arguments = [layer.input, layer.h0, layer.c0, layer.w_ih, layer.w_hh, layer.output, d_output, d_hn, d_cn]
    before = [a.clone() for a in arguments]
    replayed = everything(replay_lstm(layer, d_output, d_hn, d_cn))
    for argument, copy in zip(arguments, before, strict=True):
        torch.testing.assert_close(argument, copy, rtol=0, atol=0)
    again = replay_lstm(layer, *(c.contiguous() for c in (d_output, d_hn, d_cn)))
    torch.testing.assert_close(replayed, everything(again), rtol=0, atol=0)
    assert not any(t.requires_grad for t in replayed)


@pytest.mark.parametrize("reverse", BOTH)
def test_previous_states_follow_the_time_of_the_input(reverse: bool) -> None:
    layer, cotangents, _ = example(reverse, torch.float64)
    h_previous = replay_lstm(layer, *cotangents).h_previous
    shifted = [*layer.output[1:], layer.h0] if reverse else [layer.h0, *layer.output[:-1]]
    torch.testing.assert_close(h_previous, torch.stack(shifted), rtol=0, atol=0)


def test_no_cotangent_at_all_gives_zeros() -> None:
    layer, _, _ = example(False, torch.float64)
    d_gates, _, *data = everything(replay_lstm(layer, None, None, None))
    assert d_gates.shape == (7, 5, 4 * h)
    assert [tuple(t.shape) for t in data] == [(7, 5, d), (5, h), (5, h)]
    assert not any(t.any() for t in (d_gates, *data))


def test_a_bad_sample_stays_in_its_column() -> None:
    layer, (d_output, d_hn, d_cn), _ = example(False, torch.float64)
    clean = replay_lstm(layer, d_output, d_hn, d_cn).d_gates
    d_output[3, 1] = float("nan")
    d_hn[2] = float("inf")
    d_gates = replay_lstm(layer, d_output, d_hn, d_cn).d_gates
    others = [0, 3, 4]
    torch.testing.assert_close(d_gates[:, others], clean[:, others], rtol=0, atol=0)
    assert d_gates[:, 1].isnan().any()
    assert not d_gates[:, 2].isfinite().all()


@pytest.mark.parametrize("reverse", BOTH)
def test_saturated_gates_stay_finite_and_exact(reverse: bool) -> None:
    layer, cotangents, want = example(reverse, torch.float64, scale=60)
    got = contract(replay_lstm(layer, *cotangents))
    assert_same(got, want, rtol=1e-9)


@pytest.mark.parametrize("used", OUTPUTS.values(), ids=OUTPUTS)
@pytest.mark.parametrize("T", [1, 2, 7])
@pytest.mark.parametrize("B", [0, 1, 5])
@pytest.mark.parametrize("reverse", BOTH)
def test_cotangents_of_the_data(reverse: bool, B: int, T: int, used: tuple[int, ...]) -> None:
    layer, cotangents, data, outputs = differentiable(reverse, B, T)
    given = [g if nr in used else None for nr, g in enumerate(cotangents)]
    want = torch.autograd.grad([outputs[nr] for nr in used], data, [cotangents[nr] for nr in used])
    _, _, *got = everything(replay_lstm(layer, *given))
    torch.testing.assert_close(got, list(want), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cotangents_of_the_data_are_float32_for_narrower_layers(dtype: torch.dtype) -> None:
    layer, cotangents, _ = example(True, dtype)
    layer = replace(layer, biases=None)
    got = everything(replay_lstm(layer, *cotangents))
    wide = LstmLayer(**{f.name: as_double(getattr(layer, f.name)) for f in fields(layer)})
    exact = everything(replay_lstm(wide, *map(as_double, cotangents)))
    torch.testing.assert_close(got, [g.float() for g in exact], rtol=1e-4, atol=1e-5)


def run(model: nn.LSTM, B: int, T: int, init: bool = False, used: tuple[int, ...] = (0, 1, 2), seed: int = 0) -> Tensor:
    """Losses (B,) that read the given outputs of an LSTM with random weights."""
    random = torch.Generator().manual_seed(seed)
    kind = model.weight_ih_l0.dtype

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(kind)

    D = model.num_layers * (1 + model.bidirectional)
    x = draw(B, T, d) if model.batch_first else draw(T, B, d)
    states = (draw(D, B, h), draw(D, B, h)) if init else None
    output, (h_n, c_n) = model(x, states)
    outputs = (
        output if model.batch_first else output.transpose(0, 1),
        h_n.transpose(0, 1),
        c_n.transpose(0, 1),
    )
    return sum((outputs[k] * draw(*outputs[k].shape)).flatten(1).sum(1) for k in used)


def fused(root: Node | None) -> list[Node]:
    """The fused LSTM nodes of a graph."""
    seen: dict[Node, None] = {}
    todo = [root]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen[node] = None
            todo += [child for child, _ in node.next_functions]
    return [node for node in seen if node.name() == FUSED]


def replay(losses: Tensor, model: nn.LSTM) -> dict[str, Tensor]:
    """Per-sample gradients of all weights: cotangents of the fused nodes by one backward, then the kernel."""
    nodes = fused(losses.grad_fn)
    edges = [GradientEdge(node, k) for node in nodes for k in range(3)]
    arrived = torch.autograd.grad(losses, edges, torch.ones_like(losses), retain_graph=True, allow_unused=True)
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, Tensor] = {}
    for n, node in enumerate(nodes):
        layer = from_node(node)
        factors = contract(replay_lstm(layer, *arrived[3 * n : 3 * n + 3]))
        targets = [child for child, _ in node.next_functions[1:5]]
        found |= {names[id(t.variable)]: g for t, g in zip(targets, factors, strict=False) if t is not None}
    return {name: found[name] for name, _ in model.named_parameters()}


def from_node(node: Any) -> LstmLayer:
    """What the fused node saved."""
    biases = (node._saved_weight2, node._saved_weight3) if node._saved_has_biases else None
    return LstmLayer(
        input=node._saved_input,
        h0=node._saved_hx_,
        c0=node._saved_cx_,
        w_ih=node._saved_weight0,
        w_hh=node._saved_weight1,
        biases=biases,
        output=node._saved_result0,
        reverse=node._saved_reverse,
    )


def everything(replay: LstmReplay) -> list[Tensor]:
    """All that a replay can be asked for."""
    return [replay.d_gates, replay.h_previous, replay.d_input(), replay.d_h0(), replay.d_c0]


def as_double(value: Any) -> Any:
    """A tensor in float64; anything else as it is."""
    return value.double() if isinstance(value, Tensor) else value


def contract(replay: LstmReplay) -> tuple[Tensor, ...]:
    """Per-sample gradients of w_ih, w_hh, b_ih and b_hh, in the order of the node's edges."""
    d_gates = replay.d_gates
    x = replay.layer.input.detach().to(d_gates.dtype)
    bias = d_gates.sum(0)
    outer = "tbp,tbd->bpd"
    return torch.einsum(outer, d_gates, x), torch.einsum(outer, d_gates, replay.h_previous), bias, bias.clone()


def differentiable(reverse: bool, B: int, T: int) -> tuple[LstmLayer, list[Tensor], list[Tensor], list[Tensor]]:
    """One direction in float64: the layer, cotangents of its outputs, its input and states, and its outputs."""
    torch.manual_seed(6)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    x, h0, c0 = (draw(*s).requires_grad_() for s in ((T, B, d), (B, h), (B, h)))
    w_ih, w_hh, b_ih, b_hh = draw(4 * h, d), draw(4 * h, h), draw(4 * h), draw(4 * h)
    steps = []
    state = (h0, c0)
    for row in x.flip(0) if reverse else x:
        state = torch.lstm_cell(row, state, w_ih, w_hh, b_ih, b_hh)
        steps.append(state[0])
    output = torch.stack(steps[::-1] if reverse else steps)
    layer = LstmLayer(x.detach(), h0.detach(), c0.detach(), w_ih, w_hh, (b_ih, b_hh), output.detach(), reverse)
    return layer, [draw(*s) for s in ((T, B, h), (B, h), (B, h))], [x, h0, c0], [output, *state]


def example(
    reverse: bool, dtype: torch.dtype, scale: float = 1.0
) -> tuple[LstmLayer, tuple[Tensor, ...], dict[str, Tensor]]:
    """One direction with T = 7, B = 5 in a dtype, cotangents of its outputs, and the float64 gradients."""
    torch.manual_seed(4)
    wide = torch.float64
    x, h0, c0 = (torch.randn(*s).to(dtype) for s in ((7, 5, d), (5, h), (5, h)))
    cotangents = tuple(torch.randn(*s).to(dtype) for s in ((7, 5, h), (5, h), (5, h)))
    model = nn.LSTM(d, h, bidirectional=reverse, dtype=wide)
    weights = [p for name, p in model.named_parameters() if name.endswith("reverse") == reverse]
    with torch.no_grad():
        for p in weights:
            p.copy_((p * scale).to(dtype))
    states = [s.to(wide).expand(1 + reverse, 5, h) for s in (h0, c0)]
    output, (h_n, c_n) = model(x.to(wide), tuple(states))
    # The reverse direction is the second half of the features and the last of the states.
    ours = (output[..., -h:], h_n[-1], c_n[-1])
    losses = sum((o * g.to(wide)).movedim(-2, 0).flatten(1).sum(1) for o, g in zip(ours, cotangents, strict=True))
    want = definition(losses, weights)
    w_ih, w_hh, b_ih, b_hh = (p.detach().to(dtype) for p in weights)
    layer = LstmLayer(x, h0, c0, w_ih, w_hh, (b_ih, b_hh), ours[0].detach().to(dtype), reverse)
    return layer, cotangents, want
