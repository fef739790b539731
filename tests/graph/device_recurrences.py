"""Kernels of other devices' recurrences, in plain ops and for CPU tensors: with them, a CPU makes and runs their nodes.

`on_cpu` registers them under the names of PyTorch's own, so that nodes, edges and saved tensors are the real ones. What
the devices' libraries keep to themselves (``reserve``) has here the masks of dropout. A backward may overwrite it, and
is refused in evaluation, as it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.library import Library
from torch.nn.utils.rnn import PackedSequence

KINDS = {("RNN", "relu"): 0, ("RNN", "tanh"): 1, ("LSTM", ""): 2, ("GRU", ""): 3}
Weights = Sequence[Tensor]


class Spec(NamedTuple):
    """The options of a module."""

    mode: int
    layers: int
    batch_first: bool
    dropout: float
    train: bool
    both: bool
    batch_sizes: Sequence[int]
    each: int  # weights of one direction of one layer


def _cell(spec: Spec, x: Tensor, h: Tensor, c: Tensor | None, weights: Weights) -> tuple[Tensor, Tensor | None]:
    """One step, as PyTorch's documentation has it."""
    w_ih, w_hh, *rest = weights
    biases = rest[:2] if len(rest) > 1 else [0, 0]
    p, q = x @ w_ih.t() + biases[0], h @ w_hh.t() + biases[1]
    if spec.mode == 2:
        assert c is not None
        i, f, g, o = (p + q).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return (h @ rest[-1].t() if len(rest) % 2 else h), c
    if spec.mode == 3:
        (p_r, p_z, p_n), (q_r, q_z, q_n) = p.chunk(3, 1), q.chunk(3, 1)
        z, n = (p_z + q_z).sigmoid(), (p_n + (p_r + q_r).sigmoid() * q_n).tanh()
        return (1 - z) * n + z * h, None
    return ((p + q).tanh() if spec.mode == 1 else (p + q).relu()), None


def _direction(
    spec: Spec, steps: Sequence[Tensor], h: Tensor, c: Tensor | None, weights: Weights, reverse: bool
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Outputs of all steps, and the last states; at every step there are the first so many sequences."""
    outputs: list[Tensor] = [steps[0]] * len(steps)
    for t in reversed(range(len(steps))) if reverse else range(len(steps)):
        n = len(steps[t])
        new, cell = _cell(spec, steps[t], h[:n], None if c is None else c[:n], weights)
        outputs[t] = new
        h = torch.cat([new, h[n:]])
        c = None if c is None or cell is None else torch.cat([cell, c[n:]])
    return outputs, h, c


def run(
    spec: Spec, x: Tensor, weights: Weights, hx: Tensor, cx: Tensor | None, masks: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The whole module: output, h_n, c_n."""
    packed = bool(len(spec.batch_sizes))
    if spec.batch_first and not packed:
        x = x.transpose(0, 1)
    steps = list(x.split(list(spec.batch_sizes))) if packed else list(x.unbind())
    directions, hs, cs = 1 + spec.both, [], []
    for layer in range(spec.layers):
        outs = []
        for d in range(directions):
            place = layer * directions + d
            own = weights[place * spec.each : (place + 1) * spec.each]
            out, h, c = _direction(spec, steps, hx[place], None if cx is None else cx[place], own, bool(d))
            outs.append(out)
            hs.append(h)
            cs += [] if c is None else [c]
        steps = [torch.cat(several, 1) for several in zip(*outs, strict=True)]
        if layer < spec.layers - 1 and masks:
            steps = list((torch.cat(steps) * masks[layer]).split([len(s) for s in steps]))
    y = torch.cat(steps) if packed else torch.stack(steps)
    return (
        y.transpose(0, 1) if spec.batch_first and not packed else y,
        torch.stack(hs),
        torch.stack(cs) if cs else hx.new_empty(0),
    )


def _masks(spec: Spec, x: Tensor, width: int) -> list[Tensor]:
    """For every layer but the last, what dropout leaves."""
    if not (spec.dropout and spec.train):
        return []
    rows = x.shape[0] if len(spec.batch_sizes) else x.shape[0] * x.shape[1]
    kept = torch.full((spec.layers - 1, rows, width), 1 - spec.dropout, dtype=x.dtype)
    return list(torch.bernoulli(kept) / (1 - spec.dropout))


def _elsewhere(fn: Callable[[], Any]) -> Any:
    """In a thread of its own: kernels are called below autograd, and this one wants a graph."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(fn).result()


def _gradients(
    spec: Spec, x: Tensor, weights: Weights, hx: Tensor, cx: Tensor | None, masks: Sequence[Tensor], grads: Any
) -> list[Tensor | None]:
    """Of the input, the states and the weights."""

    def compute() -> Any:
        leaves = [None if t is None else t.detach().requires_grad_() for t in (x, hx, cx, *weights)]
        outputs = run(spec, leaves[0], leaves[3:], leaves[1], leaves[2], masks)  # type: ignore[arg-type]
        pairs = [(y, g) for y, g in zip(outputs, grads, strict=True) if g is not None and y.requires_grad]
        wanted = [t for t in leaves if t is not None]
        found = torch.autograd.grad([y for y, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        remaining = iter([torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)])
        return [None if t is None else next(remaining) for t in leaves]

    result: list[Tensor | None] = _elsewhere(compute)
    return result


class Calls:
    """How often weights' gradients were summed over samples."""

    def __init__(self) -> None:
        self.sums = 0


def _kernels(calls: Calls) -> dict[str, Callable[..., Any]]:
    def forward(spec: Spec, x: Tensor, weights: Weights, hx: Tensor, cx: Tensor | None) -> tuple[Tensor, ...]:
        width = (weights[-1].shape[0] if spec.each % 2 else hx.shape[2]) * (1 + spec.both)
        masks = _masks(spec, x, width)
        y, h, c = run(spec, x, weights, hx, cx, masks)
        return y.clone(), h.clone(), c.clone(), torch.stack(masks) if masks else x.new_empty(0), x.new_empty(2)

    def backward(
        spec: Spec, x: Tensor, weights: Weights, hx: Tensor, cx: Tensor | None, grads: Any, reserve: Tensor, wanted: Any
    ) -> Any:
        if not spec.train:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")
        masks = list(reserve.clone()) if reserve.numel() else []
        reserve.fill_(torch.nan)
        calls.sums += bool(wanted[3])
        dx, dh, dc, *dw = _gradients(spec, x, weights, hx, cx, masks, grads)
        return *[g if w else None for g, w in zip((dx, dh, dc), wanted[:3], strict=True)], dw if wanted[3] else []

    def cudnn(x, w, each, buf, hx, cx, mode, h, proj, layers, first, p, train, both, sizes, state):  # type: ignore[no-untyped-def]
        return forward(Spec(mode, layers, first, p, train, both, sizes, each), x, w, hx, cx)

    def cudnn_backward(  # type: ignore[no-untyped-def]
        x, w, each, buf, hx, cx, y, gy, gh, gc, mode, h, proj, layers, first, p, train, both, sizes, _, reserve, mask
    ):
        spec = Spec(mode, layers, first, p, train, both, sizes, each)
        return backward(spec, x, w, hx, cx, (gy, gh, gc), reserve, mask)

    def miopen(x, w, each, hx, cx, mode, h, layers, first, p, train, both, sizes, state):  # type: ignore[no-untyped-def]
        return forward(Spec(mode, layers, first, p, train, both, sizes, each), x, w, hx, cx)

    def miopen_backward(  # type: ignore[no-untyped-def]
        x, w, each, buf, hx, cx, y, gy, gh, gc, mode, h, layers, first, p, train, both, sizes, state, reserve, mask
    ):
        spec = Spec(mode, layers, first, p, train, both, sizes, each)
        return backward(spec, x, w, hx, cx, (gy, gh, gc), reserve, mask)

    def mps(x, hx, w, biases, layers, p, train, both, first):  # type: ignore[no-untyped-def]
        y, h, c, reserve, buf = forward(Spec(2, layers, first, p, train, both, (), 4 if biases else 2), x, w, *hx)
        return y, h, c, reserve, buf, buf.clone()

    def mps_backward(gy, gh, gc, z, cell, x, outs, hx, w, biases, layers, p, train, both, first):  # type: ignore[no-untyped-def]
        spec = Spec(2, layers, first, p, train, both, (), 4 if biases else 2)
        dx, dh, dc, *dw = _gradients(spec, x, w, *hx, list(z) if z.numel() else [], (gy, gh, gc))
        calls.sums += 1
        return dx, [dh, dc], dw

    return {
        "_cudnn_rnn": cudnn,
        "_cudnn_rnn_backward": cudnn_backward,
        "miopen_rnn": miopen,
        "miopen_rnn_backward": miopen_backward,
        "_lstm_mps": mps,
        "lstm_mps_backward": mps_backward,
        "_thnn_fused_lstm_cell": _lstm_cell,
        "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
        "_thnn_fused_gru_cell": _gru_cell,
        "_thnn_fused_gru_cell_backward": _gru_cell_backward,
    }


def _lstm_cell(p, q, cx, b_ih=None, b_hh=None):  # type: ignore[no-untyped-def]
    a = (p + q if b_ih is None else p + q + b_ih + b_hh).unflatten(1, (4, -1))
    gates = torch.stack([a[:, 0].sigmoid(), a[:, 1].sigmoid(), a[:, 2].tanh(), a[:, 3].sigmoid()], 1)
    cy = gates[:, 1] * cx + gates[:, 0] * gates[:, 2]
    return gates[:, 3] * cy.tanh(), cy, gates.flatten(1)


def _lstm_cell_backward(gh, gc, cx, cy, workspace, has_bias):  # type: ignore[no-untyped-def]
    i, f, g, o = workspace.chunk(4, 1)
    t = cy.tanh()
    gh = torch.zeros_like(cx) if gh is None else gh
    dc = gh * o * (1 - t * t) + (0 if gc is None else gc)
    gates = torch.cat([dc * g * i * (1 - i), dc * cx * f * (1 - f), dc * i * (1 - g * g), gh * t * o * (1 - o)], 1)
    return gates, dc * f, gates.sum(0) if has_bias else None


def _gru_cell(p, q, hx, b_ih=None, b_hh=None):  # type: ignore[no-untyped-def]
    if b_ih is not None:
        p, q = p + b_ih, q + b_hh
    (p_r, p_z, p_n), (q_r, q_z, q_n) = p.chunk(3, 1), q.chunk(3, 1)
    r, z = (p_r + q_r).sigmoid(), (p_z + q_z).sigmoid()
    n = (p_n + r * q_n).tanh()
    return (1 - z) * n + z * hx, torch.cat([r, z, n, hx, q_n], 1)


def _gru_cell_backward(gh, workspace, has_bias):  # type: ignore[no-untyped-def]
    r, z, n, hx, q_n = workspace.chunk(5, 1)
    d_n = gh * (1 - z) * (1 - n * n)
    d_r, d_z = d_n * q_n * r * (1 - r), gh * (hx - n) * z * (1 - z)
    p, q = torch.cat([d_r, d_z, d_n], 1), torch.cat([d_r, d_z, d_n * r], 1)
    return p, q, gh * z, p.sum(0) if has_bias else None, q.sum(0) if has_bias else None


@contextmanager
def on_cpu() -> Iterator[Calls]:
    """Let CPU tensors be given to other devices' recurrences."""
    library, calls = Library("aten", "IMPL"), Calls()
    try:
        for name, kernel in _kernels(calls).items():
            library.impl(name, kernel, "CPU")
        yield calls
    finally:
        library._destroy()


def device_run(
    kind: str, net: nn.RNNBase, x: Tensor | PackedSequence, states: Any = None
) -> tuple[Any, tuple[Tensor, ...]]:
    """What ``net(x, states)`` calls with "cudnn", "miopen" or "mps": the output, and the last states in a tuple."""
    data, sizes = (x.data, x.batch_sizes.tolist()) if isinstance(x, PackedSequence) else (x, [])
    B = sizes[0] if sizes else data.shape[0 if net.batch_first else 1]
    places, width = net.num_layers * (1 + net.bidirectional), net.proj_size or net.hidden_size
    lstm = isinstance(net, nn.LSTM)
    if states is None:
        h, c = data.new_zeros(places, B, width), data.new_zeros(places, B, net.hidden_size)
    else:
        h, c = states if lstm else (states, states)
        if isinstance(x, PackedSequence) and x.sorted_indices is not None:
            h, c = h.index_select(1, x.sorted_indices), c.index_select(1, x.sorted_indices)
    flat = net._flat_weights
    mode = KINDS[type(net).__name__, getattr(net, "nonlinearity", "") if type(net) is nn.RNN else ""]
    each = (4 if net.bias else 2) + (net.proj_size > 0)
    options = (net.num_layers, net.batch_first and not sizes, net.dropout, net.training, net.bidirectional)
    cx = c if lstm else None
    if kind == "mps":
        out = torch._lstm_mps(data, [h, c], flat, net.bias, *_moved(options))
    elif kind == "miopen":
        out = torch.miopen_rnn(data, flat, each, h, cx, mode, net.hidden_size, *options, sizes, None)
    else:
        out = torch._cudnn_rnn(
            data, flat, each, None, h, cx, mode, net.hidden_size, net.proj_size, *options, sizes, None
        )
    y, last = out[0], out[1:3] if lstm else out[1:2]
    if not isinstance(x, PackedSequence):
        return y, last
    if x.unsorted_indices is not None:
        last = tuple(s.index_select(1, x.unsorted_indices) for s in last)
    return PackedSequence(y, x.batch_sizes, x.sorted_indices, x.unsorted_indices), last


def _moved(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Layers, batch first, dropout, train, both directions in the order of mps, where batch first is the last."""
    layers, first, p, train, both = options
    return layers, p, train, both, first


def device_cell(net: nn.RNNCellBase, x: Tensor, state: Any) -> Any:
    """What ``net(x, state)`` calls on a GPU: products, and a fused cell."""
    h = state[0] if isinstance(net, nn.LSTMCell) else state
    gates = x @ net.weight_ih.t(), h @ net.weight_hh.t()
    biases = net.bias_ih, net.bias_hh
    if isinstance(net, nn.LSTMCell):
        return torch.ops.aten._thnn_fused_lstm_cell(*gates, state[1], *biases)[:2]
    return torch.ops.aten._thnn_fused_gru_cell(*gates, h, *biases)[0]
