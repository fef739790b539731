"""Programs that PyTorch's call_for_per_sample_grads is known to get wrong, and their neighbours."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.expanded.helpers import Run, ids
from tests.expanded.peer import AGREES, FAILS, WRONG, Case, Program, ends_second, on, second
from tests.expanded.peer_modules import (
    Own,
    attention,
    away_from_zero,
    bf16,
    body,
    flat,
    fold,
    fold_and_back,
    frozen,
    last,
    penalised,
    positions,
    raw,
    recomputed,
    relative_gate,
    relative_keys,
    routed,
    scaled,
    state,
    state_turned,
    then,
    tie,
    turn,
    turned,
    turned_flat,
    unfolded,
    unfolded_turned,
    with_token,
)
from tests.models import mlp

BATCH = "batch size matching input"
NO_RULE = "cannot handle function"
NO_VIEW = "view size is not compatible"
NONE = "0 is not a valid batch size"
MIXED = "mixture of ExpandedWeight parameters and normal Parameters"
FUSED = NO_RULE + " mkldnn_rnn_layer"
HEADS = NO_RULE + " multi_head_attention_forward"

some = (4, 1)  # samples, for programs that are not defined without any
square = (5, 1)  # the same, for programs with as many positions as samples
f32 = torch.float32
r, L = torch.randn, nn.Linear  # in the dtype of the case


CASES: list[Case] = []


def case(
    name: str,
    peer: str,
    message: str,
    make: Callable[[int], Program],
    *,
    batches: tuple[int, ...] = (4, 1, 0),
    dtype: torch.dtype = torch.float64,
    rtol: float = 1e-8,
    slow: bool = False,
    refused: tuple[int, ...] = (),
) -> None:
    """Register a program; the peer is run at the first of `batches`, ours at each."""
    CASES.append(Case(name, make, peer, message, batches, dtype, rtol, slow, refused))


# batch_first=False: the peer reads the size there, and takes the samples from dim 0 of every op all the same.
case("second-linear", FAILS, BATCH, lambda B: second(L(3, 2), r(7, B, 3)))
case("second-linear-T_equals_B", WRONG, "", lambda B: second(L(3, 2), r(B, B, 3)), batches=square)
case("second-embedding-T_equals_B", WRONG, "", lambda B: second(nn.Embedding(6, 3), ids(B, B)), batches=square)
case("second-norm-T_equals_B", WRONG, "", lambda B: second(nn.LayerNorm(3), r(B, B, 3)), batches=square)
case("second-gru", AGREES, "", lambda B: second(body(nn.GRU(3, 4)), r(7, B, 3)), batches=some)
case("second-gru-head", FAILS, BATCH, lambda B: second(nn.Sequential(body(nn.GRU(3, 4)), L(4, 2)), r(7, B, 3)))
case(
    "second-gru-head-T_equals_B",
    WRONG,
    "",
    lambda B: second(nn.Sequential(body(nn.GRU(3, 4)), L(4, 2)), r(B, B, 3)),
    batches=square,
)
case("turned_inside", FAILS, BATCH, lambda B: on(turned(L(3, 2)), r(B, 7, 3)))
case("turned_inside-T_equals_B", WRONG, "", lambda B: on(turned(L(3, 2)), r(B, B, 3)), batches=square)

# Embeddings.
row = torch.tensor([0, 1, 1, 2, 5])
case("padding_idx", WRONG, "", lambda B: on(nn.Embedding(6, 3, 1), row.expand(B, 5), losses=away_from_zero))
case("padding_idx-last", WRONG, "", lambda B: on(nn.Embedding(6, 3, -1), row.expand(B, 5), losses=away_from_zero))
BY_FREQUENCY = (4,)  # counts are over the batch
case(
    "by_freq",
    WRONG,
    "",
    lambda B: on(nn.Embedding(6, 3, scale_grad_by_freq=True), row.expand(B, 5)),
    refused=BY_FREQUENCY,
)
case(
    "by_freq-padding_idx",
    WRONG,
    "",
    lambda B: on(nn.Embedding(6, 3, 1, scale_grad_by_freq=True), ids(B, 9)),
    refused=BY_FREQUENCY,
)
case("one_id_per_sample", FAILS, "1D tensor", lambda B: on(nn.Embedding(6, 3), ids(B)))
case("positions_once", FAILS, BATCH, lambda B: on(positions(4), ids(B, 4)), batches=(5, 1, 0))
case("positions_once-T_equals_B", FAILS, BATCH, lambda B: on(positions(B), ids(B, B)), batches=square)
case("bag-sum", FAILS, NO_RULE, lambda B: on(nn.EmbeddingBag(6, 3, mode="sum"), ids(B, 4)))
case("bag-mean", FAILS, NO_RULE, lambda B: on(nn.EmbeddingBag(6, 3), ids(B, 4)))
case("bag-max", FAILS, NO_RULE, lambda B: on(nn.EmbeddingBag(6, 3, mode="max"), ids(B, 4)))

# Convolutions and norms.
case(
    "conv3d-dilation", FAILS, "dilation=", lambda B: on(nn.Conv3d(2, 3, 2, 1, 0, 2), r(B, 2, 4, 4, 4)), batches=(32, 33)
)
case("channels_last", FAILS, NO_VIEW, lambda B: on(nn.Conv2d(4, 3, 3), last(r(B, 4, 5, 6))))
case("channels_last-many", AGREES, "", lambda B: on(nn.Conv2d(4, 3, 3), last(r(B, 4, 5, 6))), batches=(32,))
case("channels_last-same", FAILS, NO_VIEW, lambda B: on(nn.Conv2d(4, 3, 3, padding="same"), last(r(B, 4, 5, 6))))
case("channels_last-weight", FAILS, NO_VIEW, lambda B: on(last(nn.Conv2d(4, 3, 3)), r(B, 4, 5, 6)))
case("conv_transpose1d", FAILS, NO_RULE, lambda B: on(nn.ConvTranspose1d(2, 4, 3, 2, 0, 1), r(B, 2, 5)))
case("conv_transpose2d", FAILS, NO_RULE, lambda B: on(nn.ConvTranspose2d(2, 4, 3, 2), r(B, 2, 4, 5)))
case("conv_transpose3d", FAILS, NO_RULE, lambda B: on(nn.ConvTranspose3d(2, 3, 2), r(B, 2, 3, 3, 3)))
case("rms_norm", FAILS, NO_RULE, lambda B: on(nn.RMSNorm(3), r(B, 4, 3)))
case("batch_norm-eval", FAILS, NO_RULE, lambda B: on(nn.BatchNorm2d(3).eval(), r(B, 3, 4, 4)))

# No samples at all.
case("empty-linear", FAILS, NONE, lambda B: on(L(3, 2), r(B, 3)), batches=(0,))
case("empty-conv2d", FAILS, NONE, lambda B: on(nn.Conv2d(2, 3, 2), r(B, 2, 4, 4)), batches=(0,))
case("empty-embedding", FAILS, NONE, lambda B: on(nn.Embedding(6, 3), ids(B, 4)), batches=(0,))
case("empty-layer_norm", FAILS, NONE, lambda B: on(nn.LayerNorm(3), r(B, 4, 3)), batches=(0,))

# Recurrent layers and attention. PyTorch's LSTM is fused in float32 where the input needs no gradient, and only there.
single = {"dtype": f32, "rtol": 2e-5, "batches": some}
case("lstm", FAILS, FUSED, lambda B: on(body(nn.LSTM(3, 4, batch_first=True)), r(B, 5, 3)), **single)
case("lstm-both_ways", FAILS, FUSED, lambda B: second(body(nn.LSTM(3, 4, 2, bidirectional=True)), r(5, B, 3)), **single)
case("lstm-float64", AGREES, "", lambda B: on(body(nn.LSTM(3, 4, batch_first=True)), r(B, 5, 3)), batches=some)
case("attention", FAILS, HEADS, lambda B: on(attention(batch_first=True), r(B, 5, 4)))
case("attention-second", FAILS, HEADS, lambda B: second(attention(), r(5, B, 4)))
case("attention-second-T_equals_B", FAILS, HEADS, lambda B: second(attention(), r(B, B, 4)), batches=square)
case("attention-cross", FAILS, HEADS, lambda B: second(attention(kdim=3, vdim=2), r(5, B, 4), r(6, B, 3), r(6, B, 2)))
case("encoder", FAILS, HEADS, lambda B: on(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), r(B, 5, 4)))

# Parameters that are not a layer's, and layers used as one pleases.
case("folded", FAILS, BATCH, lambda B: on(Run(fold_and_back, a=L(3, 2)), r(B, 5, 3)))
case("folded-output", FAILS, BATCH, lambda B: on(Run(fold, a=L(3, 2)), r(B, 5, 3), losses=unfolded))
case("scale", FAILS, NO_RULE, lambda B: on(Run(lambda m, x: x * m.s, s=r(3)), r(B, 3)))
case("shift", FAILS, NO_RULE, lambda B: on(Run(lambda m, x: m.s + x, s=r(4, 3)), r(B, 4, 3)))
case("matmul", FAILS, NO_RULE, lambda B: on(Run(lambda m, x: x @ m.w, w=r(3, 2)), r(B, 3)))
case("W.t()", FAILS, NO_RULE, lambda B: on(Run(lambda m, x: x @ m.w.t(), w=r(2, 3)), r(B, 3)))
case("slice", FAILS, NO_RULE, lambda B: on(Run(lambda m, x: F.linear(x, m.w[:2]), w=r(4, 3)), r(B, 3)))
case(
    "einsum", FAILS, NO_RULE, lambda B: on(Run(lambda m, x: torch.einsum("btd,dp->btp", x, m.w), w=r(3, 2)), r(B, 5, 3))
)
case("bilinear", FAILS, NO_RULE, lambda B: on(nn.Bilinear(3, 2, 4), r(B, 3), r(B, 2)))
case("prelu", FAILS, NO_RULE, lambda B: on(nn.PReLU(3), r(B, 3, 4)))
case("weight_norm", FAILS, NO_RULE, lambda B: on(nn.utils.parametrizations.weight_norm(L(3, 2)), r(B, 3)))
case("cls_token", FAILS, NO_RULE, lambda B: on(Run(with_token, token=r(1, 1, 3), a=L(3, 3)), r(B, 4, 3)))
case("penalty_inside", FAILS, NO_RULE, lambda B: on(Run(penalised, a=L(3, 2), s=r(2)), r(B, 3)))
case("experts", FAILS, BATCH, lambda B: on(Run(routed, a=L(3, 2), b=L(3, 2)), r(B, 3)), batches=some)
case("tied", AGREES, "", lambda B: on(Run(tie, e=nn.Embedding(6, 3)), ids(B, 4)), batches=some)
case("relu_", AGREES, "", lambda B: on(nn.Sequential(L(3, 2), nn.ReLU(inplace=True), L(2, 2)), r(B, 3)), batches=some)

# Raw parameters w (3, 3), s (3,) and t (4, 3) beside data (B, 4, 3), with as many positions as samples, in the ways
# people write them. The peer knows none of these functions.
WAYS: dict[str, Callable[[Run, Tensor], Tensor]] = {
    "addmm": lambda m, x: torch.addmm(m.s, x[:, 0], m.w),
    "add_": lambda m, x: (2 * x).add_(m.s),
    "where": lambda m, x: torch.where(x > 0, x, m.s * x),
    "maximum": lambda m, x: torch.maximum(x, m.t),
    "reads_size": lambda m, x: x @ m.w.view(m.w.size(0), -1) + m.s.new_ones(m.s.shape),
    "zeros_like": lambda m, x: F.linear(x, m.w, torch.zeros_like(m.s)),
    "to_like": lambda m, x: x.to(m.w) @ m.w,
    "stack": lambda m, x: x @ torch.stack([m.s, m.s * 2], 1),
    "cat": lambda m, x: F.linear(x, torch.cat([m.w, m.t])),
    "index": lambda m, x: m.t[x.argmax(1)],
    "gather": lambda m, x: m.t.gather(0, x.argmax(1)).sin(),
    "index_select": lambda m, x: m.t.index_select(0, x[:, 0].argmax(1)),
    "repeat": lambda m, x: x + m.t.repeat(len(x), 1, 1),
    "new_dim": lambda m, x: x * m.t[None].sigmoid(),
    "detached": lambda m, x: x @ (m.w / m.w.detach().norm()),
    "norm": lambda m, x: x @ F.normalize(m.w, dim=1),
    "norm_without_gradient": scaled,
    "branch": lambda m, x: x * m.s if m.w.sum() > -1e9 else x,
    "item": lambda m, x: x @ m.w * float(m.s.detach().abs().max()),
    "softmax": lambda m, x: x * m.s.softmax(0),
    "cdist": lambda m, x: torch.cdist(x, m.t),
    "outer": lambda m, x: x[:, 0, 0, None] * m.s,
    "low_rank": lambda m, x: x + x @ m.w @ m.t.T @ m.t,
    "bmm": lambda m, x: torch.bmm(x, m.w.expand(len(x), 3, 3)),
    "tensordot": lambda m, x: torch.tensordot(x, m.w, 1),
    "attention": lambda m, x: F.scaled_dot_product_attention(x @ m.w, x, x + m.s),
    "state": lambda m, x: m.gru(x, m.t[:1].expand(1, len(x), 3).contiguous())[0],
}
for name, way in WAYS.items():
    case(f"way-{name}", FAILS, NO_RULE, lambda B, way=way: on(raw(way), r(B, 4, 3)))

# Samples that end elsewhere than they began, with sizes that coincide: the peer asks every op, and is right.
deep = {"batch_first": True, "num_layers": 5}
case("out-turned", AGREES, "", lambda B: ends_second(then(mlp(), turn), r(B, B, 3)), batches=square)
case("out-T", AGREES, "", lambda B: ends_second(then(L(3, 5), turn), r(B, 3)), batches=square)
case("out-conv", AGREES, "", lambda B: ends_second(then(nn.Conv1d(2, 5, 2), turn), r(B, 2, 4)), batches=square)
case("out-embedding", AGREES, "", lambda B: ends_second(then(nn.Embedding(6, 3), turn), ids(B, B)), batches=square)
case("out-state", AGREES, "", lambda B: ends_second(then(nn.GRU(3, 4, **deep), state), r(B, 2, 3)), batches=square)
case("out-state_turned", AGREES, "", lambda B: on(then(nn.GRU(3, 4, **deep), state_turned), r(B, 2, 3)), batches=square)
case("out-folded", AGREES, "", lambda B: on(then(mlp(), flat), r(B, 5, 3), losses=unfolded), batches=square)
case(
    "out-folded_turned",
    AGREES,
    "",
    lambda B: on(then(mlp(), turned_flat), r(B, 5, 3), losses=unfolded_turned),
    batches=square,
)
case(
    "custom_function", FAILS, NO_RULE, lambda B: on(Run(lambda m, x: Own.apply(x, m.w), w=r(2, 3)), r(B, 3)), slow=True
)
case(
    "data-mixed",
    AGREES,
    "",
    lambda B: on(Run(lambda m, x: m.a(x - x.mean(0)), a=mlp()), r(B, 3)),
    batches=some,
    refused=tuple(n for n in some if n > 1),
)

# Attention with relative positions, as people write it: no sample sees another. The peer takes a table (T, T) of
# distances for T samples.
case("relative-gate-5", FAILS, BATCH, lambda B: on(relative_gate(), r(B, 5, 4)))
case("relative-gate-T_equals_B", WRONG, "", lambda B: on(relative_gate(), r(B, B, 4)), batches=square)
case("relative-keys-5", FAILS, BATCH, lambda B: on(relative_keys(), r(B, 5, 4)))
case("relative-keys-12", FAILS, BATCH, lambda B: on(relative_keys(), r(B, 12, 4)))
case("relative-keys-T_equals_B", WRONG, "", lambda B: on(relative_keys(), r(B, B, 4)), batches=square)

# Expanded and plain parameters in one op.
outside = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
case("frozen-group_norm", FAILS, "'bias'", lambda B: on(frozen(nn.GroupNorm(2, 4), "bias"), r(B, 4, 3)))
case(
    "frozen-attention",
    FAILS,
    HEADS,
    lambda B: on(frozen(attention(batch_first=True), "layer.in_proj_weight"), r(B, 5, 4)),
)
case("frozen-linear", AGREES, "", lambda B: on(frozen(L(3, 2), "weight"), r(B, 3)), batches=some)
case("frozen-conv", AGREES, "", lambda B: on(frozen(nn.Conv2d(2, 3, 2), "weight"), r(B, 2, 4, 4)), batches=some)
case("plain-weight", FAILS, MIXED, lambda B: on(Run(lambda m, x: F.linear(x, outside, m.b), b=r(3)), r(B, 3)))
case("plain-bias", FAILS, MIXED, lambda B: on(Run(lambda m, x: F.linear(x, m.w, outside[0]), w=r(3, 3)), r(B, 3)))

# Modes.
half = {"dtype": f32, "rtol": 2e-2, "batches": some}
case("autocast-linear", FAILS, "same dtype", lambda B: on(mlp(dtype=f32), r(B, 3), around=bf16), **half)
case("autocast-conv", FAILS, "should be the same", lambda B: on(nn.Conv2d(2, 3, 2), r(B, 2, 4, 4), around=bf16), **half)
case(
    "autocast-norm",
    FAILS,
    "BFloat16",
    lambda B: on(nn.Sequential(L(3, 2), nn.LayerNorm(2)), r(B, 4, 3), around=bf16),
    **half,
)
case("checkpoint", FAILS, "ecomputed values", lambda B: on(recomputed(mlp()), r(B, 3)))
case("checkpoint-one_layer", AGREES, "", lambda B: on(recomputed(L(3, 2)), r(B, 3)), batches=some)
