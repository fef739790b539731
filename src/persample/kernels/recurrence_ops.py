"""The replay of an LSTM layer as one op of graphs, which would otherwise hold every step of it."""

from __future__ import annotations

import torch
from torch import Tensor

from .graph_ops import asks_ops, define
from .recurrence import LstmLayer, LstmReplay, replay_lstm

__all__ = ["replay_in_graphs"]

_Three = tuple[Tensor, Tensor, Tensor]


def replay_in_graphs(layer: LstmLayer, d_output: Tensor | None, d_hn: Tensor | None, d_cn: Tensor | None) -> LstmReplay:
    """`replay_lstm`, by an op where the call is traced into a graph for the CPU."""
    if not asks_ops(layer.input.device) or layer.absent is not None:
        return replay_lstm(layer, d_output, d_hn, d_cn)
    given = layer.input, layer.h0, layer.c0, layer.w_ih, layer.w_hh
    biases = list(layer.biases or ())
    return LstmReplay(
        layer,
        *torch.ops.persample.lstm_replay(*given, biases, layer.output, layer.reverse, d_output, d_hn, d_cn),
    )


def _replay(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    biases: list[Tensor],
    output: Tensor,
    reverse: bool,
    d_output: Tensor | None,
    d_hn: Tensor | None,
    d_cn: Tensor | None,
) -> _Three:
    """Gates' cotangents (T, B, 4h), states before each step (T, B, h) and d_c0 (B, h), each in memory of its own."""
    layer = LstmLayer(x, h0, c0, w_ih, w_hh, (biases[0], biases[1]) if biases else None, output, reverse)
    found = replay_lstm(layer, d_output, d_hn, d_cn)
    before = found.h_previous.clone() if reverse else found.h_previous  # which begins inside of its memory
    return found.d_gates, before, found.d_c0.clone()


def _fake_replay(x: Tensor, h0: Tensor, *given: object) -> _Three:
    dtype = torch.promote_types(x.dtype, torch.float32)
    (T, B), h = x.shape[:2], h0.shape[-1]
    shapes = (T, B, 4 * h), (T, B, h), (B, h)
    return tuple(x.new_empty(shape, dtype=dtype) for shape in shapes)  # type: ignore[return-value]


define(
    "lstm_replay(Tensor x, Tensor h0, Tensor c0, Tensor w_ih, Tensor w_hh, Tensor[] biases, Tensor output, "
    "bool reverse, Tensor? d_output, Tensor? d_hn, Tensor? d_cn) -> (Tensor, Tensor, Tensor)",
    _replay,
    _fake_replay,
)
