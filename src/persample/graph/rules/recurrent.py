"""Fused recurrent layers: the recurrence is replayed once for all samples."""

from __future__ import annotations

from torch import Tensor

from ...factors import Dense, Factor, Outer
from ...kernels.recurrence import LstmLayer, lstm_gate_cotangents
from ..lanes import Lanes
from ..layout import Layout, carry, join
from .registry import Use, rule


@rule("MkldnnRnnLayer")
def fused_lstm(use: Use) -> Factor | None:
    """One direction of one layer of the CPU's LSTM: outputs 1 to 4 are w_ih, w_hh, b_ih, b_hh."""
    lanes = _columns(use)
    if lanes is None or not 1 <= use.k <= 4:
        return None
    memo = use.site.memo
    if "dy" not in memo:  # all weights of the layer share it
        dgates, memo["previous"] = _replayed(use)
        memo["dy"], memo["shared"] = lanes.group(dgates.transpose(0, 1)).flatten(1, 2), {}
    dy: Tensor = memo["dy"]
    if use.k >= 3:
        if "bias" not in memo:
            memo["bias"] = Dense(dy.sum(1).to(use.site.metadata(use.k).dtype))
        bias: Dense = memo["bias"]
        return bias
    x: Tensor = use.site.tensor("input").to(dy.dtype) if use.k == 1 else memo["previous"]
    return Outer(dy, lanes.group(x.transpose(0, 1)).flatten(1, 2), memo=memo["shared"])


def _columns(use: Use) -> Lanes | None:
    """Columns (T, ·) of the layer as rows that belong to samples; None if the cotangents disagree on whose they are."""
    found: Layout | None = None
    for shape, layout in zip(use.site.shapes, use.layouts, strict=True):
        if layout is None:
            continue
        columns = shape[-2]
        to_dims = [0 if d == len(shape) - 2 else None for d in range(len(shape))]
        one = carry(layout, shape, (columns,), to_dims)
        found = one if found is None or one is None else join(found, one, (columns,))
        if found is None:
            return None
    return None if found is None else Lanes.of(found, (columns,), 1)


def _replayed(use: Use) -> tuple[Tensor, Tensor]:
    """Gate cotangents and previous states of every step."""
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
    return lstm_gate_cotangents(layer, *use.cotangents)
