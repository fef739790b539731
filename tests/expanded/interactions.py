"""Functions by which samples meet or change places, by name: what the gate is attacked with."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[[Tensor], Tensor]


def _set_first(x: Tensor) -> Tensor:
    x = x.clone()
    x[0] = x[1]
    return x


def _in_place(x: Tensor) -> Tensor:
    x = x.clone()
    return x.sub_(x.mean(0))


def _view_in_place(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, :1].sub_(x[:, :1].mean(0))
    return x


def _by_data(x: Tensor) -> Tensor:
    x = x.clone()
    x.data.sub_(x.mean(0))
    return x


def _into(x: Tensor) -> Tensor:
    made = torch.empty_like(x)
    with torch.no_grad():
        torch.sub(x, x.mean(0), out=made)
    return made


def _filled(x: Tensor) -> Tensor:
    made = torch.zeros(x.shape, dtype=x.dtype)
    made[1:] = x[:-1]
    made[:1] = x[-1:]
    return made


def _order(x: Tensor) -> Tensor:
    return torch.arange(len(x)).roll(1)


# Samples meet: what it is, and the functions one of which must be named.
MEETINGS: dict[str, tuple[Function, str]] = {
    "centred": (lambda x: x - x.mean(0), "mean"),
    "centred-keyword": (lambda x: torch.sub(x, other=torch.mean(x, dim=0, keepdim=True)), "mean"),
    "whitened": (lambda x: (x - x.mean(0)) / x.std(0), "mean|std"),
    "std_mean": (lambda x: x / (1 + torch.std_mean(x, 0)[0]), "std_mean"),
    "largest": (lambda x: x - x.amax(0), "amax"),
    "largest-of-all": (lambda x: x / x.abs().max(), "max|div"),
    "median": (lambda x: x - x.median(0).values, "median"),
    "cumsum": (lambda x: x.cumsum(0), "cumsum"),
    "cumprod": (lambda x: x.cumprod(0), "cumprod"),
    "cummax": (lambda x: x.cummax(0)[0], "cummax"),
    "sort": (lambda x: x.sort(0).values, "sort"),
    "sort-keyword": (lambda x: torch.sort(input=x, dim=0)[0], "sort"),
    "topk": (lambda x: x.topk(len(x), 0)[0], "topk"),
    "softmax": (lambda x: x.softmax(0), "softmax"),
    "normalised": (lambda x: F.normalize(x, dim=0), "normalize"),
    "gram": (lambda x: (x.flatten(1) @ x.flatten(1).T @ x.flatten(1)).reshape(x.shape), "matmul"),
    "gram-einsum": (lambda x: torch.einsum("bi,ci->bc", x.flatten(1), x.flatten(1)) @ x.flatten(1), "einsum"),
    "distances": (lambda x: torch.cdist(x.flatten(1), x.flatten(1)) @ x.flatten(1), "cdist"),
    "neighbours": (lambda x: x + x.roll(1, 0), "add"),
    "difference": (lambda x: torch.diff(x, dim=0, prepend=x[:1]), "diff"),
    "where": (lambda x: torch.where(x > x.mean(0), x, -x), "mean"),
    "clamped": (lambda x: x.clamp(max=x.mean(0)), "mean"),
    "lerp": (lambda x: torch.lerp(x, end=x.flip(0), weight=0.5), "lerp"),
    "fourier": (lambda x: torch.fft.fft(x, dim=0).real, "fft_fft|fft"),
    "smoothed": (lambda x: F.avg_pool1d(F.pad(x.flatten(1).t(), (1, 1)), 3, 1).t().reshape(x.shape), "avg_pool1d"),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), "batch_norm"),
    "in-place": (_in_place, "mean"),
    "view-in-place": (_view_in_place, "mean"),
    "by-data": (_by_data, "mean"),
    "several": (lambda x: ((x * 2).tanh() - x.mean(0)).exp().sqrt(), "mean"),
}
# Samples change places.
MOVES: dict[str, tuple[Function, str]] = {
    "roll": (lambda x: x.roll(1, 0), "roll"),
    "roll-keyword": (lambda x: torch.roll(input=x, shifts=1, dims=0), "roll"),
    "flip": (lambda x: x.flip(0), "flip"),
    "permuted": (lambda x: x[_order(x)], "__getitem__"),
    "index_select": (lambda x: x.index_select(0, _order(x)), "index_select"),
    "gather": (lambda x: x.gather(0, _order(x).reshape(-1, *[1] * (x.ndim - 1)).expand_as(x)), "gather"),
    "cat": (lambda x: torch.cat([x[1:], x[:1]]), "cat|__getitem__"),
    "stack": (lambda x: torch.stack(list(x.unbind(0))[::-1]), "unbind|stack"),
    "chunks": (lambda x: torch.cat(x.split(1)[::-1]), "split|cat"),
    "sorted-by-norm": (lambda x: x[x.flatten(1).norm(dim=1).argsort(descending=True)], ".*"),
    "first-replaced": (_set_first, "__setitem__|__getitem__|linear"),
    "filled": (_filled, "__setitem__|__getitem__"),
    "several": (lambda x: (x * 2).flip(0).exp().sqrt(), "flip"),
    "rolled-in-part": (lambda x: torch.cat([x[:, :1], x[:, 1:].roll(1, 0)], 1), "roll"),
}
WRITES: dict[str, tuple[Function, str]] = {
    "out": (_into, "mean")
}  # which functions of tensors that want gradients cannot
ALL = {**MEETINGS, **{f"moved-{name}": f for name, f in MOVES.items()}}

# Samples stay apart, whatever else happens.
APART: dict[str, Function] = {
    "itself": lambda x: x,
    "normalised": lambda x: (x - x.mean(1, keepdim=True)) / (1 + x.std(1, keepdim=True)),
    "cast": lambda x: x.float().double(),
    "views": lambda x: x.flatten(1).reshape(x.shape).unsqueeze(0).squeeze(0),
    "transposed-twice": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "table": lambda x: x + torch.arange(x.shape[1]).to(x).reshape(-1, *[1] * (x.ndim - 2)),
    "softmax": lambda x: x.softmax(-1),
    "sorted": lambda x: x.sort(1).values,
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, 1),
    "indexed": lambda x: x[:, torch.arange(x.shape[1]).flip(0)],
    "cumsum": lambda x: x.cumsum(1),
    "gram": lambda x: (x.unsqueeze(-1) @ x.unsqueeze(-2) @ x.unsqueeze(-1)).reshape(x.shape),
    "moved-and-back": lambda x: x.flip(0).mul(2).flip(0),
    "where": lambda x: torch.where(x > 0, x, -x),
    "mask": lambda x: x.masked_fill(x > 1, 0.0),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "dropout": lambda x: F.dropout(x, 0.3, training=True),
    "noise": lambda x: x + torch.randn_like(x) * 0,
    "half-and-half": lambda x: torch.cat(x.chunk(2)),
    "each-by-itself": lambda x: torch.stack([row.tanh() for row in x]),
    "in-place": lambda x: x.clone().mul_(2).add_(1),
    "filled": lambda x: torch.zeros_like(x).copy_(x),
    "logarithm": lambda x: x.square().add(1).log(),
    "mean-unused": lambda x: x + 0 * x.shape[0] * float(x.mean(0).shape[0]),
}
