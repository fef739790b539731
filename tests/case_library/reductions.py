"""Reductions, scans, sorts and shape changes between a layer and the losses."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import Program, case, param, score

# Every operation takes (B, 3, 4) and keeps the sample in front.
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda h: h.sum(1),
    "sum-last-kept": lambda h: h - h.sum(-1, keepdim=True),
    "sum-all-but-first": lambda h: h.sum((1, 2)),
    "sum-negative-dims": lambda h: h.sum((-1, -2)),
    "mean": lambda h: h.mean(1).tanh(),
    "mean-two": lambda h: h - h.mean((1, 2), keepdim=True),
    "amax": lambda h: h.amax(1),
    "amin": lambda h: h.amin((1, 2)),
    "aminmax": lambda h: torch.stack(torch.aminmax(h, dim=1), 1),
    "max": lambda h: h.max(-1).values,
    "min": lambda h: h.min(1).values,
    "median": lambda h: h.median(1).values,
    "mode": lambda h: h.mode(-1).values,
    "kthvalue": lambda h: h.kthvalue(2, -1).values,
    "prod": lambda h: h.prod(1),
    "prod-with-zero": lambda h: (h * torch.tensor([0.0, 1.0, 1.0])[:, None]).prod(1) + h.prod(2)[:, :1],
    "norm": lambda h: h.norm(dim=1),
    "norm-one": lambda h: h.norm(p=1, dim=-1),
    "norm-inf": lambda h: torch.linalg.vector_norm(h, float("inf"), dim=(1, 2)),
    "norm-three": lambda h: torch.linalg.vector_norm(h, 3, dim=1),
    "var": lambda h: h.var(1),
    "std": lambda h: h.std((1, 2)),
    "std-biased": lambda h: h.std(-1, correction=0),
    "var-mean": lambda h: torch.cat(torch.var_mean(h, dim=1), 1),
    "logsumexp": lambda h: h.logsumexp(1),
    "logsumexp-two": lambda h: h.logsumexp((1, 2)),
    "cumsum": lambda h: h.cumsum(1).tanh(),
    "cumprod": lambda h: h.cumprod(-1),
    "logcumsumexp": lambda h: h.logcumsumexp(1),
    "cummax": lambda h: h.cummax(1).values,
    "cummin": lambda h: h.cummin(-1).values,
    "diff": lambda h: h.diff(dim=1).sin(),
    "sort": lambda h: h.sort(1).values,
    "sort-descending": lambda h: h.sort(-1, descending=True).values,
    "topk": lambda h: h.topk(2, 1).values,
    "topk-last": lambda h: h.topk(2, -1, largest=False).values,
    "nansum": lambda h: h.nansum(1).tanh(),
    "trapezoid": lambda h: torch.trapezoid(h, dx=0.5, dim=1).tanh(),
    "renorm": lambda h: h.renorm(2, 0, 0.8),
    "argmax-gathered": lambda h: h.gather(1, h.argmax(1, keepdim=True)),
    "count-scaled": lambda h: h.sum(1) / (h > 0).sum(1).clamp(min=1),
    "trace": lambda h: (h @ h.mT).diagonal(dim1=1, dim2=2).sum(-1),
}
SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda h: h.view(h.shape[0], 2, 6).tanh().sum(1),
    "flatten": lambda h: h.flatten(1).tanh(),
    "unflatten": lambda h: h.unflatten(2, (2, 2)).sin(),
    "permute": lambda h: h.permute(2, 0, 1).tanh().permute(1, 2, 0),
    "movedim": lambda h: h.movedim(0, -1).exp().movedim(-1, 0),
    "swapaxes": lambda h: h.swapaxes(0, 2).sin().swapaxes(2, 0),
    "squeeze": lambda h: h[:, None, :, :, None].tanh().squeeze((1, 4)),
    "narrow": lambda h: h.narrow(1, 1, 2).tanh(),
    "slice": lambda h: h[:, ::2, 1:].exp(),
    "select": lambda h: h[:, 1].tanh(),
    "ellipsis": lambda h: h[..., None, 2].sin(),
    "index": lambda h: h[:, torch.tensor([2, 0, 0])].tanh(),
    "index-two": lambda h: h[:, torch.tensor([2, 0, 0]), torch.tensor([1, 3, 3])].tanh(),
    "mask": lambda h: h[:, torch.tensor([True, False, True])].tanh(),
    "chunk": lambda h: h.chunk(2, -1)[0] * h.chunk(2, -1)[1],
    "split": lambda h: h.split([1, 2], 1)[1].tanh(),
    "unbind": lambda h: h.unbind(1)[0] * h.unbind(1)[2],
    "tensor-split": lambda h: h.tensor_split(3, 2)[0].sin(),
    "cat": lambda h: torch.cat([h, h.sin()], 1),
    "stack": lambda h: torch.stack([h, h.sin()], 1).prod(1),
    "stack-first": lambda h: torch.stack([h, h.sin()]).sum(0),
    "cat-time-first": lambda h: torch.cat([h.mT, h.mT.exp()], 2).cumsum(2),
    "flip": lambda h: h.flip((1, 2)) * h,
    "roll": lambda h: h.roll((1, 2), (1, 2)) * h,
    "rot90": lambda h: torch.rot90(h, 1, (1, 2)).tanh(),
    "repeat": lambda h: h.repeat(1, 2, 1).cumsum(1).tanh(),
    "tile": lambda h: h.tile((2,)).sin(),
    "repeat-interleave": lambda h: h.repeat_interleave(2, 1).cumsum(1).tanh(),
    "repeat-interleave-ragged": lambda h: h.repeat_interleave(torch.tensor([1, 0, 3]), 1).cumsum(1).tanh(),
    "expand": lambda h: h[:, None].expand(-1, 3, -1, -1).tanh(),
    "tril": lambda h: h.tril().tanh(),
    "triu": lambda h: h.triu(1).exp(),
    "diagonal": lambda h: h.diagonal(dim1=1, dim2=2).exp(),
    "diagonal-scatter": lambda h: h.diagonal_scatter(h[:, :, 0].sin(), dim1=1, dim2=2),
    "diag-embed": lambda h: torch.diag_embed(h).sin(),
    "pad": lambda h: F.pad(h, (1, 2), value=0.5).tanh(),
    "pad-reflect": lambda h: F.pad(h, (1, 2), mode="reflect").tanh(),
    "pad-circular": lambda h: F.pad(h, (1, 2), mode="circular").tanh(),
    "pad-replicate": lambda h: F.pad(h, (1, 2), mode="replicate").tanh(),
    "unfold": lambda h: h.unfold(2, 2, 1).prod(-1),
    "as-strided": lambda h: h.contiguous().as_strided((h.shape[0], 3, 2), (12, 4, 2)).tanh(),
    "gather": lambda h: h.gather(2, torch.tensor([3, 0, 0]).expand(h.shape[0], 3, 3)).sin(),
    "take-along": lambda h: torch.take_along_dim(h, h.argsort(1), 1).cumsum(1).sin(),
    "scatter": lambda h: torch.zeros_like(h).scatter(2, h.detach().argsort(2), h).cumsum(2).sin(),
    "scatter-add": lambda h: (
        torch.zeros_like(h)[:, :2].scatter_add(1, torch.tensor([0, 1, 0])[:, None].expand_as(h), h).sin()
    ),
    "scatter-amax": lambda h: torch.zeros_like(h)[:, :2].scatter_reduce(
        1, torch.tensor([0, 1, 0])[:, None].expand_as(h), h, "amax"
    ),
    "index-add": lambda h: torch.zeros_like(h)[:, :2].index_add(1, torch.tensor([0, 1, 0]), h).sin(),
    "index-fill": lambda h: h.index_fill(1, torch.tensor([1]), 0.3).sin(),
    "slice-scatter": lambda h: h.slice_scatter(h[:, :2].sin(), 1, 1),
    "select-scatter": lambda h: h.select_scatter(h[:, 0].sin(), 1, 2),
    "masked-select": lambda h: h.masked_select(torch.tensor([True, False, True, True])).view(h.shape[0], 9).sin(),
    "meshgrid": lambda h: torch.einsum("bi,bj->bij", h[:, 0], h[:, 1]).sin(),
    "channel-shuffle": lambda h: F.channel_shuffle(h.mT, 2).cumsum(1).sin(),
}


@case({name: {"op": op} for name, op in REDUCTIONS.items()})
def reduction(B: int, op: Callable[[Tensor], Tensor]) -> Program:
    net, x = nn.Linear(5, 4), torch.randn(B, 3, 5)
    return net, lambda: score(op(net(x)))


@case({name: {"op": op} for name, op in SHAPES.items()})
def reshaping(B: int, op: Callable[[Tensor], Tensor]) -> Program:
    net, x = nn.Linear(5, 4), torch.randn(B, 3, 5)
    return net, lambda: score(op(net(x)))


TIME_FIRST = ("sum", "amax", "var", "logsumexp", "cumsum", "sort", "prod", "norm")


@case({name: {"op": REDUCTIONS[name]} for name in TIME_FIRST}, batches=(4, 3))
def reduction_time_first_as_long_as_the_batch(B: int, op: Callable[[Tensor], Tensor]) -> Program:
    net, x = nn.Linear(4, 4), torch.randn(B, B, 4)
    return net, lambda: score(op(net(x).transpose(0, 1)))


@case({name: {"op": REDUCTIONS[name]} for name in ("prod", "logsumexp", "norm", "var", "mean", "amax", "cumsum")})
def reduction_of_parameters(B: int, op: Callable[[Tensor], Tensor]) -> Program:
    w, x = param(4, 4, 3), torch.randn(B, 4)
    return [w], lambda: score((x @ op(w).flatten(1)).tanh())


@case(batches=(4, 1))
def quantile(B: int) -> Program:
    net, x = nn.Linear(5, 4), torch.randn(B, 3, 5)
    return net, lambda: score(net(x).quantile(0.3, dim=1))


@case(batches=(4, 2))
def squeezed_everywhere(B: int) -> Program:
    net, x = nn.Linear(5, 4), torch.randn(1, B, 1, 5)
    return net, lambda: score(net(x).squeeze())


@case()
def sorted_parameter(B: int) -> Program:
    w, x = param(4), torch.randn(B, 4)
    return [w], lambda: score(x * w.sort().values + w.softmax(0).cumsum(0))


@case()
def attention_pooling(B: int) -> Program:
    query, net, x = param(4), nn.Linear(5, 4), torch.randn(B, 6, 5)

    def losses() -> Tensor:
        h = net(x)
        return score(((h @ query).softmax(1)[..., None] * h).sum(1).tanh())

    return {"query": query, **dict(net.named_parameters())}, losses


@case()
def masked_mean(B: int) -> Program:
    net, x, mask = nn.Linear(5, 4), torch.randn(B, 6, 5), torch.rand(B, 6, 1) < 0.7
    return net, lambda: score(((net(x).tanh() * mask).sum(1) / mask.sum(1).clamp(min=1)).sin())
