"""Fused recurrent cells: rows are samples', and biases are added inside.

They are the steps of recurrent layers on a GPU without cuDNN, and of `nn.LSTMCell` and `nn.GRUCell`. The products with
the weights are nodes of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...factors import Dense, Factor
from ...kernels.library import gru_cell_gradient, lstm_cell_gradient
from ..read.site import Site
from .recurrence import columns, mixed_dims, sequences, shared_by_columns
from .table import op
from .use import Use


def cell(use: Use) -> Factor | None:
    """The biases of one step, 3 and 4: rows of the gates' cotangents."""
    samples = sequences(use)
    if samples is None or use.k < 3:
        return None
    memo, site = use.site.memo, use.site
    if "gates" not in memo:
        memo["gates"] = _cell_gradients(site, use.cotangents)
    d_input, d_hidden = memo["gates"]
    rows: Tensor = d_input if use.k == 3 else d_hidden
    return Dense(samples.sum(rows).to(site.metadata(use.k).dtype))


def _cell_gradients(site: Site, cotangents: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """The cotangents of both products, which are the same in an LSTM."""
    gates = site.tensor("input_gates"), site.tensor("hidden_gates")
    biases = site.tensor("input_bias"), site.tensor("hidden_bias")
    if site.has("cx"):
        d_hy, d_cy = cotangents
        d_gates = lstm_cell_gradient(d_hy, d_cy, gates, biases, site.tensor("cx"), site.tensor("result1"))
        return d_gates, d_gates
    (d_hy,) = cotangents
    assert d_hy is not None
    return gru_cell_gradient(d_hy, gates, biases, site.tensor("hx"))


op(
    "ThnnFusedLstmCell ThnnFusedGruCell",
    flow={0: columns, 1: columns, 2: columns, 3: shared_by_columns, 4: shared_by_columns},
    rule=cell,
    all_cotangents=True,
    mixed_dims=mixed_dims,
)
