"""Views, permutations, reductions, reads and writes by index, ops along one dim."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .leaves import Sample, Samples, c, f, ids, mask, w, z


def reduced(fn: Callable[..., Tensor], *, several: bool = True, whole: bool = True) -> list[Sample]:
    """All dims, one, the last by a negative number, several; dims kept or not; a number."""
    found: list[Sample] = [
        lambda: fn(w(2, 3), dim=0),
        lambda: fn(w(2, 3, 4), dim=-2, keepdim=True),
        lambda: fn(w(3), dim=0),
        lambda: fn(w(), dim=0),
    ]
    if several:
        found += [lambda: fn(w(2, 3, 4), dim=(0, 2)), lambda: fn(w(2, 3, 4), dim=(-1, 1), keepdim=True)]
    return [*found, lambda: fn(w(2, 3))] if whole else found


def values(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The first result of an op with several."""
    return lambda *args, **options: next(iter(fn(*args, **options)))


def _deviates(fn: Callable[..., Tensor]) -> list[Sample]:
    """Variances and standard deviations."""
    return [
        lambda: fn(w(4, 3), dim=0),
        lambda: fn(w(2, 3, 4), dim=(0, -1), keepdim=True),
        lambda: fn(w(4, 3), dim=1, correction=0),
        lambda: fn(w(4, 3)),
        lambda: fn(z(4, 3), dim=0),
    ]


_VIEWS: Samples = {
    "ConstantPadNd": [
        lambda: F.pad(w(2, 3), (1, 2)),
        lambda: F.pad(w(2, 3), (1, 0, 2, 1), value=2.5),
        lambda: F.pad(w(2, 5), (-1, -2)),
    ],
    "DiagEmbed": [lambda: torch.diag_embed(w(2, 3)), lambda: torch.diag_embed(w(2, 3), 1, 0, 2), lambda: w(3).diag()],
    "Diagonal": [
        lambda: w(3, 3).diagonal(),
        lambda: w(2, 3, 4).diagonal(1, 0, 2),
        lambda: w(3, 2, 3).diagonal(-1, -1, 0),
    ],
    "Expand": [
        lambda: w(3).expand(2, 3),
        lambda: w(2, 1, 3).expand(4, 2, 5, -1),
        lambda: w().expand(2, 3),
        lambda: z(1).expand(3),
    ],
    "Permute": [
        lambda: w(2, 3, 4).permute(2, 0, 1),
        lambda: w(2, 3, 4).permute(0, -1, 1),
        lambda: w().permute(()),
    ],
    "Repeat": [
        lambda: w(2, 3).repeat(2, 1),
        lambda: w(3).repeat(2, 4, 2),
        lambda: w().repeat(3),
        lambda: w(2, 3).repeat(1, 1),
    ],
    "ReshapeAlias": [lambda: torch.ops.aten._reshape_alias(w(4), [2, 2], [2, 1])],
    "Select": [lambda: w(2, 3)[1], lambda: w(2, 3, 4).select(-1, -2), lambda: z(3)[0]],
    "Slice": [
        lambda: w(5, 3)[1:4],
        lambda: w(2, 6)[:, ::2],
        lambda: w(2, 6)[:, -3:],
        lambda: w(2, 6)[:, 4:2],
        lambda: torch.ops.aten.slice(w(4)),
    ],
    "Split": [lambda: w(5, 2).split(2)[1], lambda: w(2, 5).split(2, -1)[2], lambda: w(6).chunk(3)[0]],
    "SplitWithSizes": [lambda: w(5, 2).split([2, 0, 3])[2], lambda: w(2, 5).split([1, 4], -1)[0]],
    "Squeeze": [
        lambda: w(2, 1, 3, 1).squeeze(),
        lambda: w(2, 1, 3).squeeze(-2),
        lambda: w(1, 2, 1).squeeze((0, 2)),
        lambda: w(2, 3).squeeze(0),
        lambda: w().squeeze(0),
    ],
    "T": [lambda: w(2, 3).t(), lambda: w(3).t(), lambda: z(2, 3).t()],
    "Trace": [lambda: w(3, 3).trace(), lambda: w(2, 3).trace(), lambda: z(3, 2).trace()],
    "Transpose": [lambda: w(2, 3).transpose(0, 1), lambda: w(2, 3, 4).transpose(0, -1), lambda: w().transpose(0, -1)],
    "Tril": [lambda: w(3, 3).tril(), lambda: w(2, 3, 4).tril(-1)],
    "Triu": [lambda: w(3, 3).triu(), lambda: w(2, 3, 4).triu(1)],
    "Unbind": [lambda: w(2, 3).unbind()[1], lambda: w(2, 3, 4).unbind(-1)[2], lambda: w(3).unbind()[0]],
    "UnsafeSplit": [lambda: torch.unsafe_split(w(5, 2), 2)[1]],
    "UnsafeView": [lambda: torch.ops.aten._unsafe_view(w(2, 6), [3, 4]), lambda: w(2, 3).T.reshape(-1)],
    "Unsqueeze": [lambda: w(3).unsqueeze(0), lambda: w(2, 3).unsqueeze(-1), lambda: w().unsqueeze(0)],
    "View": [
        lambda: w(2, 6).view(3, 4),
        lambda: w(1).view(()),
        lambda: w(2, 3).flatten(),
    ],
    "ViewAsComplex": [lambda: torch.view_as_complex(w(3, 2))],
}

_JOINS: Samples = {
    "Cat": [
        lambda: torch.cat([w(2, 3), w(1, 3)]),
        lambda: torch.cat([w(2, 3), c(2, 1), w(2, 2)], -1),
        lambda: torch.cat([w(0, 3), w(2, 3)]),
        lambda: torch.cat([f(2), w(3)]),
    ],
    "Stack": [lambda: torch.stack([w(2, 3), w(2, 3)]), lambda: torch.stack([w(3), c(3), w(3)], -1)],
}

_REDUCTIONS: Samples = {
    "Amax": [*reduced(torch.amax), lambda: torch.ones(2, 3).requires_grad_().amax(1)],
    "Amin": reduced(torch.amin),
    "Aminmax": [lambda: torch.aminmax(w(2, 3), dim=1)[0], lambda: torch.aminmax(w(2, 3))[1]],
    "Kthvalue": reduced(
        values(lambda x, dim, keepdim=False: torch.kthvalue(x, 1, dim, keepdim)), several=False, whole=False
    ),
    "LinalgVectorNorm": [
        *reduced(torch.linalg.vector_norm),
        *[lambda q=q: torch.linalg.vector_norm(w(2, 3), q, 1) for q in (0, 0.5, 1, 3, float("inf"), -float("inf"))],
        lambda: torch.linalg.vector_norm(torch.zeros(2, 3).double().requires_grad_(), 2, 1),
        lambda: torch.linalg.vector_norm(z(2, 3), 2, 0),
        lambda: torch.linalg.vector_norm(f(2, 3), dtype=torch.float64),
    ],
    "Logsumexp": reduced(torch.logsumexp, whole=False),
    "Max": [
        *reduced(values(torch.max), several=False, whole=False),
        lambda: w(2, 3).max(),
        lambda: torch.ones(3).requires_grad_().max(),
    ],
    "Mean": [*reduced(torch.mean), lambda: z(2, 3).mean(0), lambda: f(2, 3).mean(1, dtype=torch.float64)],
    "Median": [*reduced(values(torch.median), several=False, whole=False), lambda: w(2, 3).median()],
    "Min": [*reduced(values(torch.min), several=False, whole=False), lambda: w(2, 3).min()],
    "Mode": reduced(values(torch.mode), several=False, whole=False),
    "Nanmedian": [*reduced(values(torch.nanmedian), several=False, whole=False), lambda: w(2, 3).nanmedian()],
    "Nansum": reduced(torch.nansum),
    "Norm": [
        lambda: torch.ops.aten.norm(w(2, 3), 2),
        lambda: torch.ops.aten.norm(z(2, 3), 3),
        *[lambda q=q: torch.ops.aten.norm(w(2, 3), q, [1]) for q in (0, 0.5, 1, 2, 3, float("inf"))],
        lambda: torch.ops.aten.norm(w(2, 3, 4), 2, [0, 2], True),
        lambda: torch.ops.aten.norm(f(2, 3), 2, [0], False, dtype=torch.float64),
        lambda: torch.ops.aten.norm(f(2, 3), 2, dtype=torch.float64),
    ],
    "Prod": [
        *reduced(torch.prod, several=False),
        lambda: torch.tensor([0.0, 2.0, 3.0]).requires_grad_().prod(),
        lambda: torch.tensor([[0.0, 2.0], [0.0, 0.0]]).requires_grad_().prod(1),
        lambda: z(2, 3).prod(0),
    ],
    "Std": _deviates(torch.std),
    "StdMean": [*_deviates(values(torch.std_mean)), lambda: torch.std_mean(w(4, 3), 0)[1]],
    "Sum": [
        *reduced(torch.sum),
        lambda: z(2, 3).sum(1),
        lambda: w().sum(),
        lambda: f(2, 3).sum(0, dtype=torch.float64),
    ],
    "Var": _deviates(torch.var),
    "VarMean": [*_deviates(values(torch.var_mean)), lambda: torch.var_mean(w(4, 3), 0)[1]],
}


def along(fn: Callable[..., Tensor]) -> list[Sample]:
    """The first dim, the last one by a negative number, a vector, a number."""
    return [lambda: fn(w(2, 3), 0), lambda: fn(w(2, 3, 4), -1), lambda: fn(w(3), 0), lambda: fn(w(), 0)]


_FIBRES: Samples = {
    "Cumprod": [*along(torch.cumprod), lambda: torch.tensor([2.0, 0.0, 3.0, 0.0]).requires_grad_().cumprod(0)],
    "Cumsum": [*along(torch.cumsum), lambda: f(3).cumsum(0, dtype=torch.float64), lambda: z(2, 3).cumsum(0)],
    "Glu": [lambda: F.glu(w(2, 4)), lambda: F.glu(w(4, 3), 0)],
    "LogSoftmax": [
        *along(F.log_softmax),
        lambda: F.log_softmax(f(2, 3), 1, dtype=torch.float64),
        lambda: w().log_softmax(0),
    ],
    "Logcumsumexp": along(torch.logcumsumexp),
    "Renorm": [lambda q=q, d=d: torch.renorm(w(2, 3), q, d, 0.5) for q in (1, 2) for d in (0, -1)],
    "SafeSoftmax": along(torch.ops.aten._safe_softmax),
    "Softmax": [*along(F.softmax), lambda: F.softmax(f(2, 3), 1, dtype=torch.float64), lambda: w().softmax(0)],
    "Sort": [
        *along(lambda x, d: torch.sort(x, d, descending=True)[0]),
        *along(lambda x, d: torch.sort(x, dim=d, stable=True)[0]),
    ],
    "Topk": along(lambda x, d: torch.topk(x, 1, d)[0]),
}

_INDICES: Samples = {
    "Index": [
        lambda: w(5, 3)[ids(5, 4)],
        lambda: w(2, 5, 3)[:, ids(5, 2, 2)],
        lambda: w(4, 5, 3)[ids(4, 2, 1), :, ids(3, 6)],
        lambda: w(4, 3)[mask(4, 3)],
        lambda: w(4, 3)[torch.tensor([True, False, True, True])],
        lambda: z(5)[ids(5, 4)],
    ],
    "IndexAdd": [
        lambda: w(4, 3).index_add(0, ids(4, 5), w(5, 3), alpha=2.5),
        lambda: c(2, 4).index_add(-1, ids(4, 3), w(2, 3)),
        lambda: w().index_add(0, ids(1, 1), w()),
    ],
    "IndexCopy": [lambda: w(4, 3).index_copy(0, torch.tensor([2, 0]), w(2, 3))],
    "IndexFill": [lambda: w(4, 3).index_fill(0, torch.tensor([2, 0]), 2.5), lambda: w(4).index_fill(0, ids(4, 2), w())],
    "IndexPut": [
        lambda: w(4, 3).index_put((torch.tensor([2, 0]),), w(2, 3)),
        lambda: w(4, 3).index_put((ids(4, 5),), w(3), accumulate=True),
        lambda: c(4, 3).index_put((torch.tensor([2, 0]), torch.tensor([1, 1])), w(2)),
    ],
    "IndexSelect": [
        lambda: w(4, 3).index_select(0, ids(4, 5)),
        lambda: w(2, 4).index_select(-1, ids(4, 3)),
        lambda: w().index_select(0, ids(1, 1)),
    ],
    "Scatter": [
        lambda: w(4, 3).scatter(0, torch.tensor([[2, 0, 1]]), w(1, 3)),
        lambda: w(2, 3).scatter(-1, torch.tensor([[1], [0]]), 2.5),
    ],
    "ScatterAdd": [
        lambda: w(4, 3).scatter_add(0, ids(4, 5, 3), w(5, 3)),
        lambda: c(2, 4).scatter_add(1, ids(4, 2, 3), w(2, 3)),
    ],
}

SHAPES: Samples = {**_VIEWS, **_JOINS, **_REDUCTIONS, **_FIBRES, **_INDICES}
