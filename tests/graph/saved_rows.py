"""What nodes save, row by row: the op that makes a node, and what its ``_saved_*`` attributes must hold.

An expected int is read as ``saved.number``, a tuple of them as ``saved.numbers``, a tensor as ``saved.tensor``;
anything else (flags, floats, None, tuples of tensors) is compared with the attribute as it is. ``Tensor`` asks for any
tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.graph.samples.leaves import c, f, w, z


class Row(NamedTuple):
    """One node, and what it must have saved."""

    node: str
    build: Callable[[], Tensor]
    saved: dict[str, Any]


MEAN = c(3)
M, N, V, U, X = w(2, 3), w(3, 4), w(4), w(3), w(2, 3, 4)
M3, N3, C1, C2 = w(5, 2, 3), w(5, 3, 4), c(2, 3), c(3, 4)
ENDS = torch.tensor([1, 4], dtype=torch.int32)  # of the groups' rows
IDS, ROWS, TABLE = torch.tensor([0, 2, 2, 1, 3]), torch.tensor([2, 0]), w(4, 3)

PRODUCTS = [
    Row("Mm", lambda: M.mm(N), {"self": M, "mat2": N}),
    Row("Mm", lambda: C1.mm(N), {"self": C1, "mat2": None}),  # only the constant's gradient would need it
    Row("Addmm", lambda: torch.addmm(V, M, N, beta=3, alpha=2), {"mat1": M, "mat2": N, "beta": 3, "alpha": 2}),
    Row("Addmm", lambda: F.linear(C1, N.t(), V), {"mat1": C1, "mat2": None, "alpha": 1, "beta": 1}),
    Row("Addmm", lambda: F.linear(M, C2.t(), V), {"mat1": None, "mat2": C2}),  # a frozen weight
    Row("Addmm", lambda: torch.addmm(z(4), z(2, 3), z(3, 4), alpha=2j), {"alpha": 2j, "beta": 1}),
    Row("Bmm", lambda: M3.bmm(N3), {"self": M3, "mat2": N3}),
    Row("Baddbmm", lambda: torch.baddbmm(V, M3, N3, alpha=2), {"batch1": M3, "batch2": N3, "alpha": 2, "beta": 1}),
    Row("Addbmm", lambda: torch.addbmm(V, M3, N3, beta=2), {"batch1": M3, "batch2": N3, "alpha": 1, "beta": 2}),
    Row("Mv", lambda: M.mv(U), {"self": M, "vec": U}),
    Row("Addmv", lambda: torch.addmv(w(2), M, U, alpha=2), {"mat": M, "vec": U, "alpha": 2, "beta": 1}),
    Row(  # the operands are expanded to (n, o, i, j), of which i and j are summed
        "Trilinear",
        lambda: F.bilinear(M, C2[:2], w(5, 3, 4)),
        {"i1": M, "i3": C2[:2], "expand1": (1, 3), "expand2": (0,), "expand3": (1, 2), "sumdim": (2, 3)},
    ),
    Row(
        "GroupedMm",
        lambda: torch._grouped_mm(*[f(*s).to(torch.bfloat16) for s in ((4, 16), (2, 16, 16))], offs=ENDS),
        {"self": Tensor, "mat2": Tensor, "offs": ENDS},
    ),
    Row("Cdist", lambda: torch.cdist(M, TABLE, p=1.5), {"x1": M, "x2": TABLE, "p": 1.5, "result": Tensor}),
]

POINTWISE = [
    Row("Add", lambda: torch.add(M, U, alpha=2), {"alpha": 2}),
    Row("Add", lambda: M + U, {"alpha": 1}),
    Row("Sub", lambda: torch.sub(M, U, alpha=2.5), {"alpha": 2.5}),
    Row("Mul", lambda: M * U, {"self": M, "other": U}),
    Row("Div", lambda: torch.div(M, U, rounding_mode="floor"), {"rounding_mode": "floor"}),
    Row("Mul", lambda: C1 * U, {"self": C1, "other": None}),
]

LAYERS = [
    Row(
        "Convolution",
        lambda: F.conv2d(c(2, 4, 5, 5), w(6, 2, 3, 3), w(6), stride=2, padding=(1, 0), dilation=(1, 2), groups=2),
        {
            "input": Tensor,
            "stride": (2, 2),
            "padding": (1, 0),
            "dilation": (1, 2),
            "groups": 2,
            "transposed": False,
            "output_padding": (0, 0),
        },
    ),
    Row(
        "Convolution",
        lambda: F.conv2d(c(1, 1, 4, 4), w(1, 1, 2, 2), padding="valid"),
        {"padding": (0,), "stride": (1, 1)},
    ),
    Row(
        "Convolution",
        lambda: F.conv_transpose1d(c(2, 4, 5), w(4, 2, 3), stride=2, output_padding=1),
        {"transposed": True, "output_padding": (1,), "stride": (2,), "padding": (0,)},
    ),
    Row("ConvTbc", lambda: torch.conv_tbc(M3, w(2, 3, 4), V, 1), {"self": M3, "pad": 1}),
    Row("ConvTbc", lambda: torch.conv_tbc(c(5, 2, 3), w(2, 3, 4), c(4)), {"self": Tensor, "pad": 0}),
    Row(
        "NativeLayerNorm",
        lambda: F.layer_norm(M, (3,), w(3), w(3), eps=0),
        {
            "input": M,
            "normalized_shape": (3,),
            "result1": M.mean(1, keepdim=True),
            "result2": M.var(1, correction=0, keepdim=True).rsqrt(),
        },
    ),
    Row(
        "NativeGroupNorm",
        lambda: F.group_norm(X, 3, w(3), w(3), eps=0),
        {"input": X, "group": 3, "result1": X.mean(2), "result2": X.var(2, correction=0).rsqrt()},
    ),
    Row(
        "NativeBatchNorm",
        lambda: F.batch_norm(M, c(3), torch.ones(3).double(), w(3), w(3), training=True, eps=0.5),
        {
            "input": M,
            "training": True,
            "result1": M.mean(0),
            "result2": (M.var(0, correction=0) + 0.5).rsqrt(),
            "eps": 0.5,
        },
    ),
    Row(
        "NativeBatchNorm",
        lambda: F.batch_norm(M, MEAN, C2[:, 1] + 9, w(3), w(3), eps=0.5),
        {"input": M, "training": False, "running_mean": MEAN, "running_var": C2[:, 1] + 9, "eps": 0.5},
    ),
]


def _lstm(reverse: bool = False, **options: Any) -> Tensor:
    """The last result of one fused layer: (T, B, h) of 5, 2 and 4, from 3 numbers at each step."""
    output, _ = nn.LSTM(3, 4, bidirectional=reverse, **options)(torch.randn(5, 2, 3))
    return output[..., 4:] if reverse else output


_SAVED_BY_LSTM = dict.fromkeys(("input", "hx_", "cx_", "weight0", "weight1", "weight2", "weight3", "result0"), Tensor)

RECURRENT = [
    Row("MkldnnRnnLayer", _lstm, {**_SAVED_BY_LSTM, "has_biases": True, "reverse": False}),
    Row("MkldnnRnnLayer", lambda: _lstm(bias=False), {**_SAVED_BY_LSTM, "has_biases": False, "reverse": False}),
]

TABLES = [
    Row("Embedding", lambda: F.embedding(IDS, TABLE), {"indices": IDS, "padding_idx": -1, "scale_grad_by_freq": False}),
    Row("Embedding", lambda: F.embedding(IDS, TABLE, padding_idx=-2), {"padding_idx": 2}),
    Row("Embedding", lambda: F.embedding(IDS, TABLE, scale_grad_by_freq=True), {"scale_grad_by_freq": True}),
    Row(
        "EmbeddingBag",
        lambda: F.embedding_bag(IDS, TABLE, torch.tensor([0, 2]), mode="sum", per_sample_weights=C1.reshape(-1)[:5]),
        {
            "indices": IDS,
            "mode": 0,
            "padding_idx": -1,
            "per_sample_weights": C1.reshape(-1)[:5],
            "scale_grad_by_freq": False,
            "offsets": torch.tensor([0, 2]),
            "result1": torch.tensor([0, 0, 1, 1, 1]),  # each entry's bag
        },
    ),
    Row(
        "EmbeddingBag",
        lambda: F.embedding_bag(IDS, TABLE, torch.tensor([0, 2]), mode="mean", padding_idx=2),
        {"mode": 1, "padding_idx": 2, "per_sample_weights": None, "result1": torch.tensor([0, 0, 1, 1, 1])},
    ),
    Row(
        "EmbeddingBag",
        lambda: F.embedding_bag(IDS, TABLE, torch.tensor([0, 2, 5]), mode="max"),
        {
            "mode": 2,
            "result2": torch.tensor([2, 3, 0]),  # the bags' sizes
            "result3": torch.stack(
                [TABLE[[0, 2]].argmax(0) * 2, IDS[2:][TABLE[[2, 1, 3]].argmax(0)], torch.zeros(3).long()]
            ),
        },
    ),
    Row("EmbeddingBag", lambda: F.embedding_bag(IDS, f(4, 3), torch.tensor([0, 2]), mode="sum"), {"result1": IDS[:0]}),
    Row("Index", lambda: TABLE[IDS], {"indices": (IDS,)}),
    Row("Index", lambda: TABLE[:, ROWS], {"indices": (None, ROWS)}),
    Row("UnsafeIndex", lambda: torch.ops.aten._unsafe_index(TABLE, [IDS]), {"indices": (IDS,)}),
    Row("IndexSelect", lambda: TABLE.index_select(-1, ROWS), {"dim": -1, "index": ROWS}),
    Row("Take", lambda: TABLE.take(IDS), {"index": IDS}),
    Row(
        "Gather",
        lambda: TABLE.gather(-1, IDS[:4, None] % 3),
        {"dim": -1, "index": IDS[:4, None] % 3, "sparse_grad": False},
    ),
    Row("IndexAdd", lambda: TABLE.index_add(-2, ROWS, M), {"dim": -2, "index": ROWS}),
    Row("IndexCopy", lambda: TABLE.index_copy(0, ROWS, M), {"dim": 0, "index": ROWS}),
]

VIEWS = [
    Row("Transpose", lambda: X.transpose(0, -1), {"dim0": 0, "dim1": -1}),
    Row("Permute", lambda: X.permute(-1, 0, 1), {"dims": (-1, 0, 1)}),
    Row("Slice", lambda: X[:, 1:], {"dim": 1, "start": 1, "end": 2**63 - 1, "step": 1}),
    Row("Slice", lambda: X[:, :, -3:-1:2], {"dim": 2, "start": -3, "end": -1, "step": 2}),
    Row("Slice", lambda: torch.ops.aten.slice(V), {"dim": 0, "start": None, "end": None, "step": 1}),
    Row("Select", lambda: X.select(-1, -2), {"dim": -1, "index": -2}),
    Row("Split", lambda: X.split(2, -1)[0], {"dim": -1}),
    Row("UnsafeSplit", lambda: torch.unsafe_split(X, 2, -1)[0], {"dim": -1}),
    Row("SplitWithSizes", lambda: X.split([1, 3], -1)[0], {"dim": -1}),
    Row("UnsafeSplitWithSizes", lambda: torch.unsafe_split_with_sizes(X, [1, 3], -1)[0], {"dim": -1}),
    Row("Unbind", lambda: X.unbind(-1)[0], {"dim": -1}),
    Row("Stack", lambda: torch.stack([M, M], -1), {"dim": -1}),
    Row("Cat", lambda: torch.cat([M, M], -1), {"dim": -1}),
    Row("Flip", lambda: X.flip(-1, 0), {"dims": (-1, 0)}),
    Row("Roll", lambda: X.roll(1, -1), {"dims": (-1,), "shifts": (1,)}),
    Row("Roll", lambda: X.roll(1), {"dims": (), "shifts": (1,)}),
    Row("WeightNormInterface", lambda: torch._weight_norm(M, w(2, 1), 0), {"v": M, "g": Tensor, "dim": 0}),
    Row("Unfold", lambda: X.unfold(-1, 3, 1), {"dimension": -1}),
    Row("ConstantPadNd", lambda: F.pad(X, (1, 2, 0, 3)), {"pad": (1, 2, 0, 3)}),
    Row("Repeat", lambda: M.repeat(4, 1, 2), {"repeats": (4, 1, 2)}),
]

# One number for ops that reduce one dim, a list for those that reduce several; None or none at all for all dims.
_ONE: dict[str, Callable[..., Any]] = {
    "Prod": torch.prod, "Max": torch.max, "Min": torch.min, "Median": torch.median, "Nanmedian": torch.nanmedian,
    "Mode": torch.mode, "Kthvalue": lambda x, d: torch.kthvalue(x, 1, d), "Softmax": torch.softmax,
    "LogSoftmax": torch.log_softmax, "SafeSoftmax": torch.ops.aten._safe_softmax, "Cumsum": torch.cumsum,
    "Cumprod": torch.cumprod, "Logcumsumexp": torch.logcumsumexp, "Cummax": torch.cummax, "Cummin": torch.cummin,
    "Sort": torch.sort, "Topk": lambda x, d: torch.topk(x, 1, d), "Glu": F.glu,
    "Renorm": lambda x, d: torch.renorm(x, 2, d, 1.0),
    "Scatter": lambda x, d: x.scatter(d, torch.zeros(1, 1, 1).long(), 1.0),
    "ScatterAdd": lambda x, d: x.scatter_add(d, torch.zeros(1, 1, 1).long(), X),
    "ScatterReduce": lambda x, d: x.scatter_reduce(d, torch.zeros(1, 1, 1).long(), X, "prod"),
    "Aminmax": lambda x, d: torch.aminmax(x, dim=d),
}  # fmt: skip
_SEVERAL: dict[str, Callable[..., Any]] = {
    "Sum": torch.sum, "Mean": torch.mean, "Nansum": torch.nansum, "Amax": torch.amax, "Amin": torch.amin,
    "Logsumexp": torch.logsumexp, "LinalgVectorNorm": lambda x, d: torch.linalg.vector_norm(x, 2, d),
    "Norm": lambda x, d: torch.ops.aten.norm(x, 2, d), "Var": torch.var, "Std": torch.std, "VarMean": torch.var_mean,
    "StdMean": torch.std_mean, "FftR2C": lambda x, d: torch.fft.rfftn(x, dim=d),
    "FftC2C": lambda x, d: torch.fft.fftn(torch.complex(x, x), dim=d),
    "FftC2R": lambda x, d: torch.fft.irfftn(torch.complex(x, x), dim=d),
}  # fmt: skip
_FOURIER = {"FftR2C": (0, 2), "FftC2C": (0, 2), "FftC2R": (0, 2)}  # dims are counted from the front here


def _first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


DIMS = [
    *[Row(name, lambda fn=fn: _first(fn(X, -1)), {"dim": -1}) for name, fn in _ONE.items()],
    *[
        Row(name, lambda fn=fn: _first(fn(X, (0, -1))), {"dim": _FOURIER.get(name, (0, -1))})
        for name, fn in _SEVERAL.items()
    ],
    Row("Var", lambda: X.var(), {"dim": None}),
    Row("LinalgVectorNorm", lambda: X.norm(), {"dim": None, "ord": 2}),
    Row("Amax", lambda: X.amax(), {"dim": ()}),
    Row("Sum", lambda: X.sum(()), {"dim": ()}),
]

SAVED = [*PRODUCTS, *POINTWISE, *LAYERS, *RECURRENT, *TABLES, *VIEWS, *DIMS]

_ANY_LAYERS = {"dropout", "train", "bidirectional"}
_SAVED_BY_LAYERS = {
    *("input", "weight", "weight_stride0", "hx", "cx", "result0", "mode", "num_layers", "batch_first", "batch_sizes"),
    *_ANY_LAYERS,
}
_GATES = {"input_gates", "hidden_gates", "input_bias", "hidden_bias"}

# Nodes that no CPU op makes: the attributes that their type has.
ELSEWHERE = {
    "FusedRmsNormBackward0": {"input", "result1", "normalized_shape"},
    "NativeBatchNormLegitBackward0": {"input", "training", "running_mean", "running_var", "eps", "result1", "result2"},
    "NativeBatchNormLegitBackward1": {"input", "training", "eps", "result1", "result2"},
    "NativeBatchNormLegitNoTrainingBackward0": {"input", "running_mean", "running_var", "eps"},
    "BatchNormWithUpdateBackward0": {"input", "result1", "result2"},
    "BatchNormNoUpdateBackward0": {"input", "running_mean", "running_var", "eps"},
    "CudnnBatchNormBackward0": {"input", "training", "result1", "result2"},
    "MiopenBatchNormBackward0": {"input", "training", "result1", "result2"},
    "CudnnRnnBackward0": {*_SAVED_BY_LAYERS, "proj_size"},
    "MiopenRnnBackward0": _SAVED_BY_LAYERS,
    "LstmMpsBackward0": {"input", "hx", "params", "has_biases", "num_layers", "batch_first", *_ANY_LAYERS},
    "ThnnFusedLstmCellBackward0": {*_GATES, "cx", "result1"},
    "ThnnFusedGruCellBackward0": {*_GATES, "hx"},
}
