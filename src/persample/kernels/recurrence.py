"""One LSTM layer in one direction, replayed once for all samples to get every cotangent of its backward.

    a_t = W_ih x_t + W_hh h_{t-1} + b_ih + b_hh     (i, f, g, o) = (sigmoid, sigmoid, tanh, sigmoid)(a_t)
    c_t = f_t c_{t-1} + i_t g_t                     h_t = o_t tanh(c_t)

With da_t the cotangent of a_t, every sample has
dW_ih = sum_t da_t ⊗ x_t, dW_hh = sum_t da_t ⊗ h_{t-1}, db_ih = db_hh = sum_t da_t, and
dx_t = da_t W_ih, dh_0 = da_1 W_hh, dc_0 = f_1 dc_1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LstmLayer:
    """What one direction was given and returned; row t of the output belongs to row t of the input."""

    input: Tensor  # (T, B, d)
    h0: Tensor  # (B, h)
    c0: Tensor  # (B, h)
    w_ih: Tensor  # (4h, d), gates in the order i, f, g, o
    w_hh: Tensor  # (4h, h)
    biases: tuple[Tensor, Tensor] | None  # b_ih and b_hh, (4h,) each
    output: Tensor  # (T, B, h)
    reverse: bool = False
    absent: Tensor | None = None  # (T, B, 1): steps that shorter sequences do not have, at which nothing changes


@dataclass(frozen=True, slots=True)
class LstmReplay:
    """A layer's backward, in float32 or wider; row t belongs to row t of the input, also when it was reversed."""

    layer: LstmLayer
    d_gates: Tensor  # da_t, (T, B, 4h)
    h_previous: Tensor  # h_{t-1}, which W_hh multiplied, (T, B, h)
    d_c0: Tensor  # (B, h)

    @torch.no_grad()
    def d_input(self) -> Tensor:
        """(T, B, d)."""
        return self.d_gates @ self.layer.w_ih.to(self.d_gates.dtype)

    @torch.no_grad()
    def d_h0(self) -> Tensor:
        """(B, h)."""
        return self.d_gates[-1 if self.layer.reverse else 0] @ self.layer.w_hh.to(self.d_gates.dtype)


@torch.no_grad()
def replay_lstm(layer: LstmLayer, d_output: Tensor | None, d_hn: Tensor | None, d_cn: Tensor | None) -> LstmReplay:
    """The backward of one direction for the cotangents of its outputs; None counts as zero.

    Half precisions are computed in float32: the fused backward does so too. At steps that a sequence does not have, its
    ``d_output`` must be zero; if it has not the last step, ``d_hn`` comes too early, and is to be added to
    ``d_output`` where the sequence ends.
    """
    dtype = torch.promote_types(layer.input.dtype, torch.float32)
    T, B, h = layer.output.shape
    steps = range(T - 1, -1, -1) if layer.reverse else range(T)
    h_previous = previous_states(layer.output, layer.h0, layer.reverse, layer.absent, dtype)
    gates = _pre_activations(layer, h_previous).view(T, B, 4, h)
    forget, to_cell = _to_local_derivatives(gates, layer, steps)

    if d_output is None:
        d_output = gates.new_zeros(()).expand(T, B, h)
    dh, dc = gates.new_zeros(2, B, h).unbind(0)
    for state, cotangent in ((dh, d_hn), (dc, d_cn)):
        if cotangent is not None:
            state.copy_(cotangent)
    _scan_back(gates, forget, to_cell, layer.w_hh.to(dtype), d_output.to(dtype), dh, dc, steps)
    return LstmReplay(layer, gates.view(T, B, 4 * h), h_previous, dc)


def differentiable_replay(
    layer: LstmLayer, d_output: Tensor | None, d_hn: Tensor | None, d_cn: Tensor | None
) -> LstmReplay:
    """`replay_lstm` of whole sequences, with a graph: every step is new tensors."""
    dtype = torch.promote_types(layer.input.dtype, torch.float32)
    T, B, h = layer.output.shape
    steps = range(T - 1, -1, -1) if layer.reverse else range(T)
    before = [layer.output[1:], layer.h0[None]] if layer.reverse else [layer.h0[None], layer.output[:-1]]
    h_previous = torch.cat([t.to(dtype) for t in before])
    gates = _pre_activations(layer, h_previous).view(T, B, 4, h)
    i, f, o = (gates[:, :, k].sigmoid() for k in (0, 1, 3))
    g = gates[:, :, 2].tanh()
    c, after = layer.c0.to(dtype), [layer.c0] * T
    c_previous = [c] * T
    for t in steps:
        c_previous[t], c = c, f[t] * c + i[t] * g[t]
        after[t] = c
    tanh_c = torch.stack(after).tanh()
    # dc/da for i, f and g, and dh/da for o.
    slopes = [g * i * (1 - i), torch.stack(c_previous) * f * (1 - f), i * (1 - g * g)]
    through_c, through_h, to_cell = torch.stack(slopes, 2), tanh_c * o * (1 - o), o * (1 - tanh_c * tanh_c)

    zeros, w_hh = gates.new_zeros(B, h), layer.w_hh.to(dtype)
    dh, dc = (zeros if d is None else d.to(dtype) for d in (d_hn, d_cn))
    d_gates = [zeros] * T
    for t in reversed(steps):
        dh = dh if d_output is None else dh + d_output[t]
        dc = dc + dh * to_cell[t]
        d_gates[t] = torch.cat([(through_c[t] * dc.unsqueeze(1)).flatten(1), through_h[t] * dh], 1)
        dh, dc = d_gates[t] @ w_hh, dc * f[t]
    return LstmReplay(layer, torch.stack(d_gates), h_previous, dc)


def previous_states(output: Tensor, h0: Tensor, reverse: bool, absent: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(T, B, h): the state before each step."""
    previous, current = _around(h0, len(output), reverse, dtype)
    # In reverse, a shorter sequence begins at its own end, up to which its state is the initial one.
    current.copy_(output if absent is None else torch.where(absent, h0.to(output.dtype), output))
    return previous


def _around(initial: Tensor, T: int, reverse: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Room for the states before and after each step: two views of one buffer, the initial state set."""
    states = torch.empty((T + 1, *initial.shape), dtype=dtype, device=initial.device)
    states[-1 if reverse else 0] = initial
    return (states[1:], states[:-1]) if reverse else (states[:-1], states[1:])


def _pre_activations(layer: LstmLayer, h_previous: Tensor) -> Tensor:
    """All a_t at once, (T·B, 4h): the saved outputs make every step independent of the others."""
    x, w_ih, w_hh = (t.to(h_previous.dtype) for t in (layer.input, layer.w_ih, layer.w_hh))
    x = x.flatten(0, 1)
    if layer.biases is None:
        a = x @ w_ih.t()
    else:
        b_ih, b_hh = layer.biases
        a = torch.addmm((b_ih + b_hh).to(x.dtype), x, w_ih.t())
    return a.addmm_(h_previous.flatten(0, 1), w_hh.t())


def _to_local_derivatives(gates: Tensor, layer: LstmLayer, steps: range) -> tuple[Tensor, Tensor]:
    """Turn a_t in place into dc_t/da_t for i, f, g and dh_t/da_t for o; return f_t and dh_t/dc_t."""
    gates[:, :, :2].sigmoid_()
    i, f, g, o = gates.unbind(2)
    g.tanh_()
    o.sigmoid_()
    if layer.absent is not None:  # nothing is written, kept whole, and nothing read
        for gate, value in (i, 0), (f, 1), (o, 0):
            gate.masked_fill_(layer.absent, value)
    written = i * g
    c_previous, c = _around(layer.c0, len(steps), layer.reverse, gates.dtype)
    written_, f_, before_, after_ = (s.unbind(0) for s in (written, f, c_previous, c))
    for t in steps:
        torch.addcmul(written_[t], f_[t], before_[t], out=after_[t])

    # Slopes s(1 - s) and 1 - g², multiplied out so that each is one pass with no temporary.
    torch.addcmul(i, written, g, value=-1, out=g)
    torch.addcmul(written, written, i, value=-1, out=i)
    forget = f.clone()
    kept = torch.mul(c_previous, forget, out=written)
    torch.addcmul(kept, kept, forget, value=-1, out=f)
    tanh_c = c.tanh()
    hidden = o * tanh_c
    to_cell = torch.addcmul(o, hidden, tanh_c, value=-1, out=tanh_c)
    torch.addcmul(hidden, hidden, o, value=-1, out=o)
    return forget, to_cell


def _scan_back(
    gates: Tensor,
    forget: Tensor,
    to_cell: Tensor,
    w_hh: Tensor,
    d_output: Tensor,
    dh: Tensor,
    dc: Tensor,
    steps: range,
) -> None:
    """Multiply the local derivatives by the cotangents, last step first; overwrites gates and dh, leaves dc_0 in dc."""
    through_c, through_h = gates[:, :, :3].unbind(0), gates[:, :, 3].unbind(0)
    rows, outer = gates.flatten(2).unbind(0), d_output.unbind(0)
    forgets, to_cells = forget.unbind(0), to_cell.unbind(0)
    dc_rows = dc.unsqueeze(1)
    later = None
    for t in reversed(steps):
        if later is None:
            dh += outer[t]
        else:
            torch.addmm(outer[t], rows[later], w_hh, out=dh)
        dc.addcmul_(dh, to_cells[t])
        through_c[t].mul_(dc_rows)
        through_h[t].mul_(dh)
        dc.mul_(forgets[t])
        later = t
