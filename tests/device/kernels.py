"""Ops that the strict device has and the CPU has not: fused cells of recurrent layers, and fused attention.

PyTorch takes them on accelerators. What is saved between forward and backward (a workspace) is this module's choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def _lstm_cell(
    from_input: Tensor, from_hidden: Tensor, c: Tensor, b_input: Tensor | None = None, b_hidden: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The next hidden state and cell, and the gates i, f, g, o."""
    gates = from_input + from_hidden
    if b_input is not None and b_hidden is not None:
        gates = gates + b_input + b_hidden
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new = f * c + i * g
    return o * new.tanh(), new, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(
    d_h: Tensor | None, d_c: Tensor | None, c: Tensor, new: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The cotangents of the gates, of the cell, and of a bias, summed over rows."""
    i, f, g, o = gates.chunk(4, 1)
    d_h = torch.zeros_like(c) if d_h is None else d_h
    d_new = d_h * o * (1 - new.tanh() ** 2) + (0 if d_c is None else d_c)
    d_gates = [d_new * g * i * (1 - i), d_new * c * f * (1 - f), d_new * i * (1 - g**2), d_h * new.tanh() * o * (1 - o)]
    d_all = torch.cat(d_gates, 1)
    return d_all, d_new * f, d_all.sum(0) if has_bias else None


def _gru_cell(
    from_input: Tensor, from_hidden: Tensor, h: Tensor, b_input: Tensor | None = None, b_hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The next hidden state; and r, z, n, h and what r is multiplied with."""
    if b_input is not None and b_hidden is not None:
        from_input, from_hidden = from_input + b_input, from_hidden + b_hidden
    (ri, zi, ni), (rh, zh, nh) = from_input.chunk(3, 1), from_hidden.chunk(3, 1)
    r, z = (ri + rh).sigmoid(), (zi + zh).sigmoid()
    n = (ni + r * nh).tanh()
    return (1 - z) * n + z * h, torch.cat([r, z, n, h, nh], 1)


def _gru_cell_backward(d_new: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    """The cotangents of both sides' gates, of the state, and of both biases, summed over rows."""
    r, z, n, h, nh = workspace.chunk(5, 1)
    d_z, d_n = d_new * (h - n) * z * (1 - z), d_new * (1 - z) * (1 - n**2)
    d_r = d_n * nh * r * (1 - r)
    d_input, d_hidden = torch.cat([d_r, d_z, d_n], 1), torch.cat([d_r, d_z, d_n * r], 1)
    biases = (d_input.sum(0), d_hidden.sum(0)) if has_bias else (None, None)
    return d_input, d_hidden, d_new * z, *biases


KERNELS: dict[Any, Callable[..., Any]] = {
    _aten._thnn_fused_lstm_cell.default: _lstm_cell,
    _aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_cell_backward,
    _aten._thnn_fused_gru_cell.default: _gru_cell,
    _aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
}
