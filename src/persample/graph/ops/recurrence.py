"""Fused recurrent layers: the recurrence is replayed once for all samples.

The fused backward computes all of its outputs or none. Its sums over samples of the weights' gradients are not wanted,
and the replay has what is: so the engine gets the replay's answer in its place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...factors import Dense, Factor, Outer
from ...kernels.differentiable import is_differentiable
from ...kernels.recurrence import LstmLayer, LstmReplay, differentiable_replay
from ...kernels.recurrence_ops import replay_in_graphs
from ...traverse import leading_to
from ..layout import Flow, Layout, Outcome, Shape, carry, join, same
from ..read.nodes import NodeSlot, children
from ..read.saved import metadata
from ..read.site import Site
from ..sample_rows import SampleRows
from .answers import LstmAnswer, Outputs
from .dims import follow
from .table import Layouts, op
from .use import Use


def columns(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Output (T, B, h) and states (B, h): the last dim but one counts the sequences."""
    target = site.target(k)
    agreed: Layout | None = None
    for shape, layout in zip(site.shapes, layouts, strict=True):
        if layout is not None:
            to_dims = [len(target) - 2 if d == len(shape) - 2 else None for d in range(len(shape))]
            moved = follow(layout, shape, target, to_dims, len(target))
            if moved is None or (agreed is not None and not same(agreed, moved)):
                return Flow.PROBE
            agreed = moved
    return agreed


def shared_by_columns(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Weights and biases are shared."""
    return Flow.SHARED


def mixed_dims(site: Site) -> tuple[Shape, Shape]:
    """Time and features."""
    shape = site.shapes[0]
    return shape, tuple(d for d in range(len(shape)) if d != len(shape) - 2)


def lstm(use: Use) -> Factor | None:
    """One direction of one layer of the CPU's LSTM: outputs 1 to 4 are w_ih, w_hh, b_ih, b_hh."""
    samples = sequences(use)
    if samples is None or not 1 <= use.k <= 4:
        return None
    memo = use.site.memo
    if "replay" not in memo:  # all weights of the layer share it
        memo["replay"], memo["steps"] = _replayed(use), {}
    replay: LstmReplay = memo["replay"]
    if use.k >= 3:
        if "bias" not in memo:
            memo["bias"] = bias_of_steps(samples, replay.d_gates, memo["steps"], use.site.metadata(use.k).dtype)
        bias: Dense = memo["bias"]
        return bias
    x = use.site.tensor("input").to(replay.d_gates.dtype) if use.k == 1 else replay.h_previous
    return weight_of_steps(samples, replay.d_gates, x, memo["steps"])


def weight_of_steps(samples: SampleRows, d_gates: Tensor, x: Tensor, shared: dict[str, Tensor]) -> Factor:
    """Σ_t d_gates[t] ⊗ x[t] over steps (T, ·) of sequences; what factors of the same gates share is in ``shared``."""
    if samples.is_ragged:
        sides = [d_gates.transpose(0, 1), x.transpose(0, 1)]
        return samples.factor(sides, lambda ts: Outer(ts[0].flatten(1, 2), ts[1].flatten(1, 2)))
    return Outer(_grouped_once(samples, d_gates, shared), _grouped(samples, x), memo=shared)


def bias_of_steps(samples: SampleRows, d_gates: Tensor, shared: dict[str, Tensor], dtype: torch.dtype) -> Dense:
    """Σ_t d_gates[t]."""
    if samples.is_ragged:
        return samples.written_out([d_gates.transpose(0, 1)], lambda ts: ts[0].flatten(1, 2).sum(1).to(dtype))
    return Dense(_grouped_once(samples, d_gates, shared).sum(1).to(dtype))


def _grouped_once(samples: SampleRows, d_gates: Tensor, shared: dict[str, Tensor]) -> Tensor:
    if "grouped" not in shared:
        shared["grouped"] = _grouped(samples, d_gates)
    return shared["grouped"]


def _grouped(samples: SampleRows, t: Tensor) -> Tensor:
    """(T, B, n) as rows of samples."""
    return samples.group(t.transpose(0, 1)).flatten(1, 2)


def sequences(use: Use) -> SampleRows | None:
    """Columns (T, ·) of the layer as rows that belong to samples; None if the cotangents disagree on whose they are."""
    agreed: Layout | None = None
    for shape, layout in zip(use.site.shapes, use.layouts, strict=True):
        if layout is None:
            continue
        columns = shape[-2]
        to_dims = [0 if d == len(shape) - 2 else None for d in range(len(shape))]
        one = carry(layout, shape, (columns,), to_dims)
        agreed = one if agreed is None or one is None else join(agreed, one, (columns,))
        if agreed is None:
            return None
    return None if agreed is None else SampleRows.of(agreed, (columns,), 1)


def _replayed(use: Use) -> LstmReplay:
    """Every cotangent of the layer's backward."""
    site = use.site
    biases = (site.tensor("weight2"), site.tensor("weight3")) if site.value("has_biases") else None
    layer = LstmLayer(
        site.tensor("input"),
        site.tensor("hx_"),
        site.tensor("cx_"),
        site.tensor("weight0"),
        site.tensor("weight1"),
        biases,
        site.tensor("result0"),
        bool(site.value("reverse")),
    )
    if is_differentiable():
        return differentiable_replay(layer, *use.cotangents)
    return replay_in_graphs(layer, *use.cotangents)


def without_weight_sums(
    site: Site, cotangents: Sequence[Tensor | None], ordinary: Sequence[NodeSlot]
) -> Outputs | None:
    """A fused node's cotangents, such that its own backward need not be computed.

    None if it was not replayed, if ordinary gradients are wanted at ``ordinary`` that its weights lead to, or if
    PyTorch's own answer is to be differentiated.
    """
    replay: LstmReplay | None = site.memo.get("replay")
    if replay is None or is_differentiable() or _weights_lead_to(site, ordinary):
        return None
    edges = site.node.next_functions

    def answer() -> Outputs:
        outputs: list[Tensor | None] = [None] * len(edges)
        for k, make in (0, replay.d_input), (5, replay.d_h0), (6, lambda: replay.d_c0):
            child, nr = edges[k]
            if child is not None:
                outputs[k] = make().to(metadata(child)[nr].dtype)
        return tuple(outputs)

    return tuple(None if g is None else LstmAnswer(g, answer) for g in cotangents)


def _weights_lead_to(site: Site, ordinary: Sequence[NodeSlot]) -> bool:
    weights = [child for child, _ in site.node.next_functions[1:5] if child is not None]
    goals = {node for node, _ in ordinary}
    return not goals.isdisjoint(weights) or bool(leading_to(weights, goals, children))


op(
    "MkldnnRnnLayer",
    flow={0: columns, **dict.fromkeys(range(1, 5), shared_by_columns), 5: columns, 6: columns},
    rule=lstm,
    all_cotangents=True,
    instead=without_weight_sums,
    mixed_dims=mixed_dims,
)
