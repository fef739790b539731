"""Recurrent layers above one another, of any kind and in both directions, replayed once for all samples.

What is known of them is what they were given, and what the last one returned. The others are run again; then all are
replayed, the last one first, each as one LSTM layer is in ``recurrence.py``. With y_t = h_t the output of a step:

    plain   a_t = W_ih x_t + b_ih + W_hh h_{t-1} + b_hh      h_t = tanh(a_t) or relu(a_t)
    GRU     p_t = W_ih x_t + b_ih, q_t = W_hh h_{t-1} + b_hh, both in three parts, for r, z and n
            r, z = sigmoid(p + q)      n = tanh(p + r q)     h_t = n + z (h_{t-1} - n)

A GRU's q has another cotangent than p: dq_n = r dp_n. For the others they are one and the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from .recurrence import LstmLayer, previous_states, replay_lstm


class Kind(IntEnum):
    """Kinds of recurrence, by the numbers that cuDNN has for them, and MIOpen."""

    RELU = 0
    TANH = 1
    LSTM = 2
    GRU = 3


@dataclass(frozen=True, slots=True)
class Stack:
    """What L layers in D directions were given and have returned; place l·D + d is layer l in direction d."""

    kind: Kind
    input: Tensor  # (T, B, d)
    h0: Tensor  # (L·D, B, h)
    c0: Tensor | None  # (L·D, B, h), of an LSTM
    weights: Sequence[Sequence[Tensor]]  # by place: w_ih and w_hh, then b_ih and b_hh if there are any
    directions: int  # D
    output: Tensor | None = None  # (T, B, D·h); None if nobody has kept it
    absent: Tensor | None = None  # (T, B, 1): steps after the end of a sequence; none outlasts the first

    @property
    def dtype(self) -> torch.dtype:
        """That of the replay: half precisions are computed in float32."""
        return torch.promote_types(self.input.dtype, torch.float32)


@dataclass(frozen=True, slots=True)
class Replay:
    """The backward of one place, row t for row t of the input."""

    input: Tensor  # x_t, (T, B, d)
    h_previous: Tensor  # h_{t-1}, (T, B, h)
    d_input_side: Tensor  # the cotangent of W_ih x_t + b_ih, (T, B, G·h) for G gates
    d_hidden_side: Tensor  # that of W_hh h_{t-1} + b_hh


@dataclass(frozen=True, slots=True)
class _Layer:
    """One place, with its input and output."""

    input: Tensor
    h0: Tensor
    c0: Tensor | None
    weights: Sequence[Tensor]
    reverse: bool
    absent: Tensor | None

    @property
    def steps(self) -> range:
        T = len(self.input)
        return range(T - 1, -1, -1) if self.reverse else range(T)

    @property
    def biases(self) -> tuple[Tensor, Tensor] | None:
        return (self.weights[2], self.weights[3]) if len(self.weights) > 2 else None


@torch.no_grad()
def replay(
    stack: Stack, d_output: Tensor | None, d_hn: Tensor | None, d_cn: Tensor | None, lowest: int = 0
) -> dict[int, Replay]:
    """The backward of all places from layer ``lowest`` on, for the cotangents of the outputs; None counts as zero."""
    D, layers = stack.directions, len(stack.weights) // stack.directions
    inputs, output = _run_again(stack, layers)
    found: dict[int, Replay] = {}
    for layer in range(layers - 1, lowest - 1, -1):
        outputs = output.chunk(D, 2)
        above = [None] * D if d_output is None else d_output.to(stack.dtype).chunk(D, 2)
        below: Tensor | None = None
        for direction in range(D):
            place = layer * D + direction
            one = _layer(stack, place, inputs[layer])
            states = [None if d is None else d[place].to(stack.dtype) for d in (d_hn, d_cn)]
            found[place] = _replay_one(stack.kind, one, outputs[direction], above[direction], *states)
            if layer > lowest:
                d_input = found[place].d_input_side @ one.weights[0]
                below = d_input if below is None else below.add_(d_input)
        d_output, output = below, inputs[layer]
    return found


def _layer(stack: Stack, place: int, x: Tensor) -> _Layer:
    c0 = None if stack.c0 is None else stack.c0[place].to(stack.dtype)
    weights = [w.to(stack.dtype) for w in stack.weights[place]]
    reverse = place % stack.directions == 1
    return _Layer(x, stack.h0[place].to(stack.dtype), c0, weights, reverse, stack.absent)


def _run_again(stack: Stack, layers: int) -> tuple[list[Tensor], Tensor]:
    """The inputs of all layers, and the output of the last."""
    D, inputs = stack.directions, [stack.input.to(stack.dtype)]
    for layer in range(layers if stack.output is None else layers - 1):
        places = [_layer(stack, layer * D + direction, inputs[layer]) for direction in range(D)]
        inputs.append(torch.cat([_run(stack.kind, one) for one in places], 2))
    output = inputs.pop() if stack.output is None else stack.output.to(stack.dtype)
    return inputs, output


def _run(kind: Kind, layer: _Layer) -> Tensor:
    """(T, B, h): the outputs of one place, computed step by step."""
    (w_ih, w_hh), (b_ih, b_hh) = layer.weights[:2], layer.biases or (None, None)
    h, c = layer.h0, layer.c0
    outputs = h.new_empty(len(layer.input), *h.shape)
    for t in layer.steps:
        if kind is Kind.LSTM:
            assert c is not None
            new_h, new_c = torch.lstm_cell(layer.input[t], (h, c), w_ih, w_hh, b_ih, b_hh)
            c = new_c if layer.absent is None else torch.where(layer.absent[t], c, new_c)
        else:
            new_h = _CELLS[kind](layer.input[t], h, w_ih, w_hh, b_ih, b_hh)
        h = new_h if layer.absent is None else torch.where(layer.absent[t], h, new_h)
        outputs[t] = h
    return outputs


_CELLS: dict[Kind, Callable[..., Tensor]] = {
    Kind.RELU: torch.rnn_relu_cell,
    Kind.TANH: torch.rnn_tanh_cell,
    Kind.GRU: torch.gru_cell,
}


def _replay_one(
    kind: Kind, layer: _Layer, output: Tensor, d_output: Tensor | None, d_hn: Tensor | None, d_cn: Tensor | None
) -> Replay:
    d_output = _with_last(layer, output, d_output, d_hn)
    if kind is Kind.LSTM:
        assert layer.c0 is not None
        w_ih, w_hh = layer.weights[:2]
        states = layer.h0, layer.c0
        lstm = LstmLayer(layer.input, *states, w_ih, w_hh, layer.biases, output, layer.reverse, layer.absent)
        replayed = replay_lstm(lstm, d_output, None, d_cn)
        return Replay(layer.input, replayed.h_previous, replayed.d_gates, replayed.d_gates)
    h_previous = previous_states(output, layer.h0, layer.reverse, layer.absent, output.dtype)
    if kind is Kind.GRU:
        return Replay(layer.input, h_previous, *_gru(layer, h_previous, d_output))
    d_gates = _plain(layer, output, d_output, kind)
    return Replay(layer.input, h_previous, d_gates, d_gates)


def _with_last(layer: _Layer, output: Tensor, d_output: Tensor | None, d_hn: Tensor | None) -> Tensor:
    """The cotangents of all h_t: the last of a sequence is its last state as well."""
    total = torch.zeros_like(output) if d_output is None else d_output
    if d_hn is None or not len(output):
        return total
    total = total.clone()
    if layer.reverse or layer.absent is None:
        total[layer.steps[-1]] += d_hn
    else:
        last = layer.absent.logical_not().sum(0, keepdim=True) - 1  # (1, B, 1)
        total.scatter_add_(0, last.expand(1, *d_hn.shape), d_hn.unsqueeze(0))
    return total


def _gru(layer: _Layer, h_previous: Tensor, d_output: Tensor) -> tuple[Tensor, Tensor]:
    """The cotangents of p and q, (T, B, 3h) each."""
    w_ih, w_hh = layer.weights[:2]
    b_ih, b_hh = layer.biases or (None, None)
    p, q = (y.unflatten(-1, (3, -1)) for y in (F.linear(layer.input, w_ih, b_ih), F.linear(h_previous, w_hh, b_hh)))
    r, z = (p[:, :, :2] + q[:, :, :2]).sigmoid_().unbind(2)
    q_n = q[:, :, 2]
    n = torch.addcmul(p[:, :, 2], r, q_n).tanh_()
    if layer.absent is not None:  # the state stays as it is
        z = z.masked_fill(layer.absent, 1)

    # How h_t depends on p_n, and on q: overwritten below by cotangents.
    by_n = (1 - z) * (1 - n * n)
    by_q = torch.stack([by_n * q_n * r * (1 - r), (h_previous - n) * z * (1 - z), by_n * r], 2)
    dh, d_n = torch.zeros_like(layer.h0), by_n
    for t in reversed(layer.steps):
        dh = dh + d_output[t]
        d_n[t] *= dh
        by_q[t] *= dh.unsqueeze(1)
        dh = torch.addmm(dh * z[t], by_q[t].flatten(1), w_hh)
    return torch.cat([by_q[:, :, :2].flatten(2), d_n], 2), by_q.flatten(2)


def _plain(layer: _Layer, output: Tensor, d_output: Tensor, kind: Kind) -> Tensor:
    """The cotangents of a, (T, B, h)."""
    d_gates = (output != 0).to(output.dtype) if kind is Kind.RELU else 1 - output * output
    if layer.absent is not None:
        d_gates.masked_fill_(layer.absent, 0)
    later: Tensor | None = None
    for t in reversed(layer.steps):
        d_gates[t] *= d_output[t] if later is None else torch.addmm(d_output[t], later, layer.weights[1])
        later = d_gates[t]
    return d_gates
