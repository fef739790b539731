"""Recurrent layers on other devices: replayed as one LSTM layer is on a CPU, several layers and directions at once.

cuDNN and MIOpen have one node for all layers and directions of a module, of any kind, padded or packed; mps has one for
LSTMs. They save what they were given. The outputs of all layers but the last lie in memory that only the device's
library can read, and are computed again. Dropout between layers lies there too, and a projected LSTM has one more
product: both are left to the slow path. The gradients of data and states come from the nodes' own backwards; those of
cuDNN and MIOpen leave out the weights' sums, which nobody asks for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...factors import Factor, View
from ...factors.rearrange import Cast
from ...kernels.stacked_recurrences import Kind, Replay, Stack, replay
from ..layout import NOBODY, Flow, Layout, Outcome, Shape, carry, join, labels, sample_dims, simplify
from ..read.saved import unpacked_often
from ..read.site import Site
from ..sample_rows import SampleRows
from .recurrence import bias_of_steps, weight_of_steps
from .table import EVERY, Layouts, always, op
from .use import Use

# Where the samples lie among the sequences.


def _counts(site: Site) -> tuple[int, ...]:
    """Of packed sequences, how many there are at each step; none if they are padded."""
    return site.numbers("batch_sizes") if site.has("batch_sizes") else ()


def _dim(site: Site, is_state: bool) -> int:
    """The dim of the sequences in padded data (T, B, d) or (B, T, d), or in states (L, B, h)."""
    return 0 if site.value("batch_first") and not is_state else 1


def _sequences(site: Site, nr: int, layout: Layout) -> Layout | None:
    """Whose the B sequences are, by one cotangent; None if some are not one sample's."""
    shape, is_state = site.shapes[nr], nr > 0
    counts = _counts(site)
    if counts and not is_state:
        return _sequences_of_rows(layout, shape, counts)
    dim = _dim(site, is_state)
    return carry(layout, shape, (shape[dim],), [0 if d == dim else None for d in range(3)])


def _sequences_of_rows(layout: Layout, shape: Shape, counts: Sequence[int]) -> Layout | None:
    if any(d > 0 for d in sample_dims(layout, shape)):
        return None
    rows, places = labels(layout, shape).reshape(-1).expand(shape[0]), _places(counts)
    found = torch.full((counts[0],), NOBODY, device="cpu").scatter_reduce_(0, places, rows, "amax")
    if bool(((rows != NOBODY) & (rows != found[places])).any()):
        return None
    return simplify(found, (counts[0],), layout.batch)


def _places(counts: Sequence[int]) -> Tensor:
    """The sequence of every row of packed data: at each step there are the first so many of them."""
    return torch.cat([torch.arange(n, device="cpu") for n in counts])


def _agreed(site: Site, layouts: Layouts) -> Layout | None:
    """Whose the sequences are, by all cotangents; None if some are not one sample's."""
    agreed: Layout | None = None
    for nr, layout in enumerate(layouts):
        if layout is None or 0 in site.shapes[nr]:  # only an LSTM has a c_n
            continue
        one = _sequences(site, nr, layout)
        agreed = one if agreed is None or one is None else join(agreed, one, (_batch(site),))
        if agreed is None:
            return None
    return agreed


def _batch(site: Site) -> int:
    """B."""
    return site.shapes[1][1]


def _weights(site: Site) -> range:
    """The outputs that are gradients of weights: after the input, before the states or after them."""
    last = len(site.edges)
    return range(3, last) if site.has("params") else range(1, last - 2)


def sequences(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Every sequence stays one sample's, in data (T, B, d), (B, T, d) or packed (N, d), and in states (L, B, h)."""
    if k in _weights(site):
        return Flow.SHARED
    agreed = _agreed(site, layouts)
    if agreed is None:
        return Flow.PROBE
    target, counts = site.target(k), _counts(site)
    if k == 0 and counts:
        index = labels(agreed, (counts[0],)).expand(counts[0])[_places(counts)]
        return simplify(index.unsqueeze(1), target, agreed.batch)
    moved = carry(agreed, (_batch(site),), target, [_dim(site, k > 0)])
    return Flow.PROBE if moved is None else moved


def mixes(site: Site, layout: Layout) -> bool:
    """Is a sequence read by several samples?"""
    return _sequences(site, 0, layout) is None


# Gradients of the weights.


def layers(use: Use) -> Factor | None:
    """All layers and directions: w_ih, w_hh, b_ih and b_hh of each; not with dropout between layers, or projections."""
    site, weights = use.site, _weights(use.site)
    agreed = _agreed(site, use.layouts)
    if use.k not in weights or agreed is None or not _can_be_replayed(site):
        return None
    samples = SampleRows.of(agreed, (_batch(site),), 1)
    if samples is None:
        return None
    of_each = _weights_of_each(site)
    place, which = divmod(use.k - weights[0], of_each)
    if "replay" not in site.memo:  # all weights share it
        wanted = [(k - weights[0]) // of_each for k, _ in site.outputs if k in weights]
        site.memo["replay"] = _replayed(use, min(wanted))
    return _factor(use, site.memo["replay"][place], samples, which)


def _factor(use: Use, one: Replay, samples: SampleRows, which: int) -> Factor:
    """Of w_ih (0), w_hh (1), b_ih (2) or b_hh (3)."""
    d_gates = one.d_hidden_side if which % 2 else one.d_input_side
    shared = use.site.memo.setdefault("steps", {}).setdefault(id(d_gates), {})
    dtype = use.site.metadata(use.k).dtype
    if which >= 2:
        return bias_of_steps(samples, d_gates, shared, dtype)
    factor = weight_of_steps(samples, d_gates, one.h_previous if which else one.input, shared)
    return factor if factor.dtype == dtype else View(factor, factor.shape, Cast(factor.dtype, dtype))


def _can_be_replayed(site: Site) -> bool:
    drops = site.value("dropout") > 0 and site.value("train") and site.number("num_layers") > 1
    projects = site.has("proj_size") and site.number("proj_size") > 0
    # In evaluation, the backwards of cuDNN and MIOpen are refused by PyTorch, in words of its own.
    refused = not site.value("train") and not site.has("params")
    return not (drops or projects or refused)


def _weights_of_each(site: Site) -> int:
    """How many weights each direction of each layer has."""
    if site.has("weight_stride0"):
        return site.number("weight_stride0")
    return 4 if site.value("has_biases") else 2


def _replayed(use: Use, lowest: int) -> dict[int, Replay]:
    """The backward of every place, from that of the ``lowest`` weight on."""
    site = use.site
    with unpacked_often(site.node):
        stack = _stack(site)
    d_output, d_hn, d_cn = (g if g is not None and g.numel() else None for g in use.cotangents)
    if d_output is not None:
        d_output = _padded(site, d_output)
    return replay(stack, d_output, d_hn, d_cn, lowest // stack.directions)


def _stack(site: Site) -> Stack:
    """What the node has saved."""
    x, D = _padded(site, site.tensor("input")), 2 if site.value("bidirectional") else 1
    if site.has("params"):  # mps, which does not save its output
        h0, c0 = site.tensors("hx")
        return Stack(Kind.LSTM, x, h0, c0, _by_place(site, site.tensors("params")), D)
    counts, output = _counts(site), _padded(site, site.tensor("result0"))
    ragged = bool(counts) and min(counts) < counts[0]
    absent = _present(counts, x.device).logical_not().unsqueeze(2) if ragged else None
    states = site.tensor("hx"), site.optional("cx")
    weights = _by_place(site, site.tensors("weight"))
    return Stack(Kind(site.number("mode")), x, *states, weights, D, output, absent)


def _by_place(site: Site, flat: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    n = _weights_of_each(site)
    return [flat[start : start + n] for start in range(0, len(flat), n)]


def _padded(site: Site, t: Tensor) -> Tensor:
    """Data (T, B, n), with zeros after the end of a sequence."""
    counts = _counts(site)
    if not counts:
        return t.transpose(0, 1) if site.value("batch_first") else t
    padded = t.new_zeros(len(counts), counts[0], t.shape[1])
    padded[_present(counts, t.device)] = t
    return padded


def _present(counts: Sequence[int], device: torch.device) -> Tensor:
    """(T, B): which sequences have which steps. Packed data are its rows, one step after another."""
    return torch.arange(counts[0], device=device) < torch.tensor(counts, device=device).unsqueeze(1)


op(
    "CudnnRnn MiopenRnn LstmMps",
    flow={EVERY: sequences},
    rule=layers,
    all_cotangents=True,
    mixes=mixes,
    once=always("run the layer inside torch.backends.cudnn.flags(enabled=False)"),
)
