"""Every way to use a parameter, with the samples in every dim of the result, all dims of one size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import persample as ps
from persample.graph.execute.plan import plan
from persample.graph.read.roots import Roots
from tests.graph.claims import refuted_cotangents
from tests.graph.cubes import on_no_rows
from tests.reference import assert_same, definition

N = 4
_GENERATOR = torch.Generator().manual_seed(0)
Shapes = tuple[tuple[int, ...], ...]
M, V, C = (N, N), (N,), (N, N, N)


def data(*shape: int) -> Tensor:
    """A constant."""
    return torch.randn(shape, generator=_GENERATOR, dtype=torch.float64)


IDS, PLACES = torch.randint(N, (N, N), generator=_GENERATOR), torch.randint(N, C, generator=_GENERATOR)
ROWS, KEEP = IDS[0], data(N, N, N) > 0

# name -> the parameters' shapes, and what is done with a state x (N, N, N) and them
USES: dict[str, tuple[Shapes, Callable[..., Tensor]]] = {
    "linear": ((M, V), lambda x, w, b: F.linear(x, w, b)),
    "linear without bias": ((M,), lambda x, w: F.linear(x, w)),
    "linear over dim 0": ((M, V), lambda x, w, b: F.linear(x.movedim(0, -1), w, b)),
    "addmm": ((M, V), lambda x, w, b: torch.addmm(b, x[0], w, beta=0.5, alpha=2)),
    "addmm from the left": ((M, M), lambda x, w, b: torch.addmm(b, w, x[0], beta=0.5, alpha=2)),
    "mm": ((M,), lambda x, w: x[1] @ w),
    "mm from the left": ((M,), lambda x, w: w @ x[1]),
    "matmul": ((M,), lambda x, w: x @ w),
    "matmul from the left": ((M,), lambda x, w: w @ x),
    "matmul vector": ((V,), lambda x, w: x @ w),
    "matmul vector from the left": ((V,), lambda x, w: w @ x),
    "bmm": ((C,), lambda x, w: torch.bmm(x, w)),
    "bmm from the left": ((C,), lambda x, w: torch.bmm(w, x)),
    "bmm expanded": ((M,), lambda x, w: torch.bmm(x, w.expand(C))),
    "baddbmm": (((N, 1, N), C), lambda x, b, w: torch.baddbmm(b, x, w, beta=0.5, alpha=2)),
    "baddbmm from the left": ((C, C), lambda x, b, w: torch.baddbmm(b, w, x, alpha=2)),
    "addbmm": ((M, C), lambda x, b, w: torch.addbmm(b, x, w, beta=2, alpha=0.5)),
    "addbmm from the left": ((V, C), lambda x, b, w: torch.addbmm(b, w, x)),
    "mv": ((V,), lambda x, w: torch.mv(x[0], w)),
    "mv matrix": ((M,), lambda x, w: torch.mv(w, x[0, 1])),
    "addmv": ((V, V), lambda x, b, w: torch.addmv(b, x[0], w, alpha=2)),
    "addmv matrix": ((V, M), lambda x, b, w: torch.addmv(b, w, x[0, 2], beta=2)),
    "addr": ((M, V, V), lambda x, b, v, w: torch.addr(b, v, w) * x),
    "outer": ((V,), lambda x, w: torch.outer(x[0, 1], w)),
    "dot": ((V,), lambda x, w: torch.stack([torch.dot(r, w) for r in x[0]])),
    "einsum mixing": ((C,), lambda x, w: torch.einsum("abc,cbd->abd", x, w)),
    "einsum all": ((C,), lambda x, w: torch.einsum("abc,bcd->ad", x, w)),
    "einsum apart": ((C,), lambda x, w: torch.einsum("abc,bac->abc", x, w)),
    "einsum outer": ((V,), lambda x, w: torch.einsum("abc,d->abd", x, w)),
    "tensordot": ((C,), lambda x, w: torch.tensordot(x, w, ([1, 2], [2, 0]))),
    "bilinear": ((C, V), lambda x, w, b: F.bilinear(x, x.sin(), w, b)),
    "conv1d": (((N, N, 2), V), lambda x, w, b: F.conv1d(x, w, b, padding=1)),
    "conv1d groups": (((N, 2, 3),), lambda x, w: F.conv1d(x, w, padding=1, groups=2)),
    "conv1d depthwise": (((N, 1, 3), V), lambda x, w, b: F.conv1d(x, w, b, padding=1, groups=N)),
    "conv1d strided": (((N, N, 2),), lambda x, w: F.conv1d(x, w, stride=2, dilation=2)),
    "conv1d unbatched": (((N, N, 3),), lambda x, w: F.conv1d(x[0], w, padding=1)),
    "conv1d folded": (
        ((N, N, 3), V),
        lambda x, w, b: F.conv1d(x.reshape(2, 8, N).reshape(N, N, N).transpose(0, 1), w, b),
    ),
    "conv2d": (((N, 1, 2, 2), V), lambda x, w, b: F.conv2d(x.unsqueeze(1), w, b, padding=1)),
    "conv2d one image": (((N, N, 3, 3), V), lambda x, w, b: F.conv2d(x.unsqueeze(0), w, b, padding=1)),
    "conv3d": (((2, 1, 2, 2, 2),), lambda x, w: F.conv3d(x[None, None], w)[0]),
    "conv_transpose1d": (((N, N, 2), V), lambda x, w, b: F.conv_transpose1d(x, w, b)),
    "conv_transpose2d": (((1, 2, 2, 2),), lambda x, w: F.conv_transpose2d(x.unsqueeze(1), w, stride=2)),
    "layer_norm": ((V, V), lambda x, w, b: F.layer_norm(x, (N,), w, b)),
    "layer_norm two": ((M, M), lambda x, w, b: F.layer_norm(x, M, w, b)),
    "layer_norm over dim 0": ((V, V), lambda x, w, b: F.layer_norm(x.transpose(0, 2), (N,), w, b)),
    "rms_norm": ((V,), lambda x, w: F.rms_norm(x, (N,), w)),
    "group_norm": ((V, V), lambda x, w, b: F.group_norm(x, 2, w, b)),
    "group_norm one image": ((V, V), lambda x, w, b: F.group_norm(x.unsqueeze(0), N, w, b)[0]),
    "instance_norm": ((V, V), lambda x, w, b: F.instance_norm(x, weight=w, bias=b)),
    "batch_norm": ((V, V), lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True)),
    "batch_norm frozen": ((V, V), lambda x, w, b: F.batch_norm(x, data(N), data(N).square() + 1, w, b)),
    "batch_norm of rows": ((V, V), lambda x, w, b: F.batch_norm(x[0], data(N), data(N).square() + 1, w, b)),
    "embedding": ((M,), lambda x, w: F.embedding(IDS, w) * x),
    "embedding of a cube": ((M,), lambda x, w: F.embedding(PLACES, w)[..., 0] * x),
    "embedding padded": ((M,), lambda x, w: F.embedding(IDS, w, padding_idx=1) * x),
    "embedding by frequency": ((M,), lambda x, w: F.embedding(IDS, w, scale_grad_by_freq=True) * x),
    "embedding transposed": ((M,), lambda x, w: F.embedding(IDS, w).transpose(0, 2) * x),
    "embedding_bag": ((M,), lambda x, w: F.embedding_bag(IDS, w, mode="mean") * x),
    "embedding_bag sum": ((M,), lambda x, w: F.embedding_bag(IDS, w, mode="sum", per_sample_weights=x[0]) * x),
    "embedding_bag max": ((M,), lambda x, w: F.embedding_bag(IDS, w, mode="max").t() * x),
    "index": ((M,), lambda x, w: w[IDS] * x),
    "index pairs": ((C,), lambda x, w: w[IDS, ROWS] * x),
    "index apart": ((C,), lambda x, w: w[ROWS, :, ROWS] * x),
    "index inner": ((C,), lambda x, w: w[:, IDS[1], 1:3].repeat(1, 1, 2) * x),
    "index by mask": ((M,), lambda x, w: w[torch.tensor([True, False, True, True])].repeat(2, 1)[:N] * x),
    "index_select": ((M,), lambda x, w: w.index_select(0, ROWS) * x),
    "index_select columns": ((C,), lambda x, w: w.index_select(1, ROWS) * x),
    "gather": ((C,), lambda x, w: w.gather(1, PLACES) * x),
    "gather few": ((C,), lambda x, w: w.gather(0, PLACES[:2, :3]).repeat(2, 2, 1)[:, :N] * x),
    "take": ((M,), lambda x, w: w.take(PLACES * 3) * x),
    "add": ((V,), lambda x, w: x + w),
    "add scaled": ((M,), lambda x, w: torch.add(x, w, alpha=3)),
    "add inner": (((N, 1),), lambda x, w: x + w),
    "add outer": (((N, 1, 1),), lambda x, w: x + w),
    "add whole": ((C,), lambda x, w: x + w),
    "add scalar": (((),), lambda x, w: x + w),
    "add ones": (((1, 1, 1),), lambda x, w: x + w),
    "add to a smaller one": ((C,), lambda x, w: x[0] + w),
    "sub": ((V,), lambda x, w: torch.sub(x, w, alpha=2)),
    "rsub": (((N, 1),), lambda x, w: w - x),
    "mul": (((N, 1),), lambda x, w: x * w),
    "mul outer": (((N, 1, N),), lambda x, w: x * w),
    "div": ((V,), lambda x, w: x / (w.square() + 1)),
    "divided": (((N, 1, 1),), lambda x, w: w / (x.square() + 1)),
    "pow": ((V,), lambda x, w: (x.square() + 1) ** w),
    "atan2": (((N, 1),), lambda x, w: torch.atan2(w, x + 5)),
    "maximum": ((V,), lambda x, w: torch.maximum(x, w)),
    "where": (((N, 1), ()), lambda x, w, v: torch.where(KEEP, w, v) * x),
    "masked_fill": (((),), lambda x, w: x.masked_fill(KEEP, w)),
    "lerp": (((N, 1), V), lambda x, w, v: torch.lerp(x, w, v)),
    "addcmul": ((M, V, (N, 1)), lambda x, a, b, c: x * torch.addcmul(a, b, c, value=2)),
    "addcmul state": ((V, (N, 1, 1)), lambda x, b, c: torch.addcmul(x, b, c, value=2)),
    "addcdiv": ((V, (N, 1)), lambda x, b, c: torch.addcdiv(x, b, c.square() + 1)),
    "prelu": ((V,), lambda x, w: F.prelu(x, w)),
    "prelu one": (((1,),), lambda x, w: F.prelu(x, w)),
    "expand": (((N, 1),), lambda x, w: w.expand(C) * x),
    "repeat": ((M,), lambda x, w: w.repeat(N, 1, 1) * x),
    "repeat one": (((1, N),), lambda x, w: w.repeat(2, N, 1).repeat(2, 1, 1) * x),
    "repeat_interleave": (((2, N),), lambda x, w: w.repeat_interleave(2, 0) * x),
    "cat": (((2, N), (2, N)), lambda x, a, b: torch.cat([a, b]) * x),
    "cat to the state": (((1, N, N),), lambda x, a: torch.cat([x, a])[1:]),
    "tokens": (((1, 1, N),), lambda x, a: torch.cat([a.expand(N, 1, N), x], 1)[:, :N]),
    "stack": ((M, M), lambda x, a, b: torch.stack([x[0], a, x[1], b], 1)),
    "written": ((M,), lambda x, w: _written(x, w)),
    "index_put": ((M,), lambda x, w: x.index_put((ROWS[:1],), w)),
    "index_add": ((C,), lambda x, w: x.index_add(1, ROWS, w)),
    "scatter": ((C,), lambda x, w: x.scatter(0, PLACES, w)),
    "pad": ((M,), lambda x, w: F.pad(w, (1, -1)) * x),
    "transposed": ((M,), lambda x, w: x @ w.t() + x @ w),
    "permuted": ((C,), lambda x, w: x * w.permute(2, 0, 1)),
    "viewed": (((N * N,),), lambda x, w: x @ w.view(M)),
    "part": (((N, 2 * N),), lambda x, w: x @ w[:, 1:5] + w[1:, 6].sum()),
    "cast": ((M,), lambda x, w: x @ w.float().double()),
    "low rank": (((N, 1), (1, N)), lambda x, a, b: x @ (torch.eye(N).double() + a @ b)),
    "weight norm": ((M, V), lambda x, v, g: F.linear(x, v / v.norm(dim=1, keepdim=True) * g.unsqueeze(1))),
    "softmax of weights": ((M,), lambda x, w: w.softmax(1) @ x),
    "attention keys": ((M, M), lambda x, k, v: F.scaled_dot_product_attention(x, k.expand(C), v.expand(C))),
    "attention queries": ((M,), lambda x, q: F.scaled_dot_product_attention(q.expand(C), x, x.sin())),
    "attention bias": ((C,), lambda x, b: F.scaled_dot_product_attention(x, x, x, attn_mask=b)),
    "distances": ((M,), lambda x, w: torch.cdist(x, w)),
    "solve": ((M,), lambda x, w: torch.linalg.solve(0.1 * w + 3 * torch.eye(N).double(), x)),
    "triangular": (
        (M,),
        lambda x, w: torch.linalg.solve_triangular((0.1 * w + 3 * torch.eye(N)).double().tril(), x, upper=False),
    ),
    "fourier": ((M,), lambda x, w: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(w), N)),
    "complex": ((M, M), lambda x, a, b: (torch.complex(x, x.sin()) @ torch.complex(a, b)).abs()),
    "grid": (
        ((1, 2, N, N),),
        lambda x, w: F.grid_sample(w.expand(N, 2, N, N), x[..., :2].unsqueeze(1).tanh(), align_corners=False),
    ),
    "recurrent": ((M, M), lambda x, w, u: _recurrent(x, w, u)),
    "shared term": ((M,), lambda x, w: x + w.square().sum()),
    "hypernetwork": ((C,), lambda x, w: torch.einsum("abc,acd->abd", x, torch.einsum("ab,bcd->acd", x[:, 0], w))),
}


def _written(x: Tensor, w: Tensor) -> Tensor:
    out = x.clone()
    out[:, 1] = w
    out[2] *= w
    return out


def _recurrent(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    states = [torch.zeros_like(x[:, 0])]
    for t in range(N):
        states.append(torch.tanh(x[:, t] @ w + states[-1] @ u))
    return torch.stack(states[1:], 1)


@pytest.mark.parametrize("hidden", [False, True], ids=["data", "hidden"])
@pytest.mark.parametrize("name", USES)
@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
def test_samples_in_every_dim_of_the_result(name: str, hidden: bool) -> None:
    _GENERATOR.manual_seed(1)
    shapes, use = USES[name]
    params = [data(*shape).requires_grad_() for shape in shapes]
    x: Any = data(N, N, N)
    if hidden:
        params.append(data(N, N).requires_grad_())
        x = (x * params[-1]).tanh()
    result = use(x, *params[: len(shapes)])
    value = result * data(*result.shape) + 0.3 * result.square()
    for dim in range(result.ndim):
        losses = value.movedim(dim, 0).flatten(1).sum(1) if result.ndim > 1 else value.clone()
        want = definition(losses, params)
        assert refuted_cotangents(plan(Roots.of_losses(losses), params), losses) == [], f"dim {dim}"
        assert_same(ps.grad(losses, params, retain_graph=True), want)


def without_rows(name: str) -> tuple[Tensor, list[Tensor]] | None:
    """An expert without tokens: the parameters are used on no rows at all. None where PyTorch cannot."""
    _GENERATOR.manual_seed(1)
    shapes, use = USES[name]
    params = [data(*shape).requires_grad_() for shape in (*shapes, (N, N))]
    state = (data(N, N, N) * params[-1]).tanh()
    return on_no_rows(state, lambda rows: use(rows, *params[:-1]), params)


@pytest.mark.parametrize("name", [name for name in USES if without_rows(name)])
@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
def test_rows_that_nobody_sent(name: str) -> None:
    found = without_rows(name)
    assert found is not None
    losses, params = found
    want = definition(losses, params)
    assert_same(ps.grad(losses, params), want)
