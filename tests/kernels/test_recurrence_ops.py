"""The replay of an LSTM layer as an op of graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import persample as ps
from persample.kernels.recurrence import LstmLayer, replay_lstm
from tests.reference import assert_same, definition


def _layer(T: int, B: int, d: int, h: int, *, bias: bool, reverse: bool, dtype: torch.dtype) -> LstmLayer:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype)

    biases = (draw(4 * h), draw(4 * h)) if bias else None
    return LstmLayer(
        draw(T, B, d), draw(B, h), draw(B, h), draw(4 * h, d), draw(4 * h, h), biases, draw(T, B, h), reverse
    )


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("given", ["all", "outputs", "states", "expanded"])
def test_it_is_the_replay(given: str, dtype: torch.dtype, bias: bool, reverse: bool) -> None:
    torch.manual_seed(0)
    T, B, d, h = 4, 3, 2, 5
    layer = _layer(T, B, d, h, bias=bias, reverse=reverse, dtype=dtype)
    d_output, d_hn, d_cn = torch.randn(T, B, h).to(dtype), torch.randn(B, h).to(dtype), torch.randn(B, h).to(dtype)
    cotangents = {
        "all": (d_output, d_hn, d_cn),
        "outputs": (d_output, None, None),
        "states": (None, d_hn, d_cn),
        "expanded": (d_output[:1, :, :1].expand(T, B, h), d_hn.t().contiguous().t(), None),
    }[given]
    tensors = layer.input, layer.h0, layer.c0, layer.w_ih, layer.w_hh
    args = (*tensors, list(layer.biases or ()), layer.output, reverse, *cotangents)
    got = torch.ops.persample.lstm_replay(*args)
    want = replay_lstm(layer, *cotangents)
    for mine, theirs in zip(got, (want.d_gates, want.h_previous, want.d_c0), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    torch.library.opcheck(torch.ops.persample.lstm_replay.default, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}])
def test_a_compiled_step_holds_it_once_per_layer(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    layer, held = nn.LSTM(3, 4, batch_first=True, **options), []  # type: ignore[arg-type]

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        held.append(len([n for n in graph.graph.nodes if "lstm_replay" in str(n.target)]))
        return graph

    def losses(x: torch.Tensor) -> torch.Tensor:
        return layer(x)[0].square().sum((1, 2))

    step = ps.compile(losses, layer, ps.Stack(), backend=backend, verbose=False)
    for T in (6, 6):
        x = torch.randn(5, T, 3)
        (got,) = step(x)
        assert_same(got, definition(losses(x), layer), 1e-4)
    assert step.refused is None
    directions = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))  # type: ignore[operator]
    assert held[-1] == directions
    torch.compiler.reset()
