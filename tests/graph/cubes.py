"""Ops on cubes: every dim has the same size, so that nothing can be told from sizes."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.reference import definition

N = 4
GENERATOR = torch.Generator().manual_seed(0)


def data(*shape: int) -> Tensor:
    """A constant."""
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


def ints(*shape: int) -> Tensor:
    """Constant indices below N."""
    return torch.randint(N, shape, generator=GENERATOR)


ROWS, PLACES, ORDER = ints(N), ints(N, N, N), torch.randperm(N, generator=GENERATOR)
MASK = data(N, N, N) > 0
MATRIX, CUBE, KERNEL, SPD = data(N, N), data(N, N, N), data(N, N, 3), torch.eye(N, dtype=torch.float64) * 3
COMPLEX = torch.complex(CUBE, data(N, N, N))
Op = Callable[[Tensor], Tensor]


def on_no_rows(state: Tensor, op: Op, params: list[Tensor]) -> tuple[Tensor, list[Tensor]] | None:
    """An expert without tokens: losses to which ``op`` adds what it makes of no rows. None where PyTorch cannot."""
    nobody = torch.tensor([], dtype=torch.int64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            result = op(state[nobody])
        losses = state.sum((1, 2)) + state.new_zeros(N).index_add(0, nobody, result.flatten())
        definition(losses, params)
    except (IndexError, RuntimeError, ValueError):
        return None
    return losses, params


def regular(h: Tensor) -> Tensor:
    """Matrices that can be inverted."""
    return 0.1 * h + SPD


def definite(h: Tensor) -> Tensor:
    """Symmetric positive definite matrices."""
    return 0.1 * h @ h.mT + SPD


ARRANGING: dict[str, Op] = {
    "permute": lambda h: h.permute(2, 0, 1),
    "transpose": lambda h: h.transpose(0, 2),
    "matrix transpose": lambda h: h.mT,
    "flip": lambda h: h.flip(0, 2),
    "roll": lambda h: h.roll((1, 2), (0, 1)),
    "roll flat": lambda h: h.roll(5),
    "rot90": lambda h: torch.rot90(h, 1, (0, 2)),
    "view across": lambda h: h.reshape(2, 8, 4).transpose(0, 1).reshape(N, N, N),
    "flatten": lambda h: h.flatten(0, 1)[3 : 3 + N],
    "windows": lambda h: h.reshape(2, 2, N, N).permute(0, 2, 1, 3).reshape(N, N, N),
    "unbind": lambda h: torch.stack(h.unbind(1)[::-1]),
    "unbind in part": lambda h: torch.stack([h.unbind(0)[1], h.unbind(1)[2]] * 2, 1),
    "split": lambda h: torch.cat(h.split([1, 3], 1)[::-1], 1),
    "split rows": lambda h: torch.cat(h.split(3)[::-1]),
    "chunk rows": lambda h: torch.cat(h.chunk(3)[::-1]),
    "split vectors": lambda h: torch.cat([p for row in h.split(1) for p in row.reshape(-1, N).split(2)]),
    "split in part": lambda h: h + h.split(2, 1)[1].repeat(1, 2, 1),
    "chunk other dims": lambda h: torch.cat([h.chunk(2, 0)[0], h.chunk(2, 1)[1].transpose(0, 1)]),
    "cat": lambda h: torch.cat([h[:1], h[1:] * 2]),
    "cat with constant": lambda h: torch.cat([CUBE[:, :2], h, h.sin()], 1)[:, :N],
    "cat with empty": lambda h: torch.cat([torch.zeros(0, dtype=h.dtype), h.narrow(0, 0, 0), h], 0),
    "stack of two": lambda h: torch.stack([h[0], h[:, 1], h[..., 2], CUBE[0]]),
    "hstack": lambda h: torch.hstack([h[:, :3], h[:, 3:]]),
    "select": lambda h: h.select(1, 2),
    "slice with step": lambda h: torch.cat([h[1::2], h[::2]]),
    "negative slice": lambda h: torch.cat([h[-1:], h[:-1]]),
    "diagonal": lambda h: h.diagonal(0, 0, 2),
    "diagonal of one": lambda h: torch.diag_embed(h.diagonal(0, 1, 2)),
    "tril": lambda h: h.tril() + h.triu(1).mT,
    "expand": lambda h: h[:, :1].expand(N, N, N),
    "expand new": lambda h: h[1].expand(N, N, N),
    "repeat": lambda h: h[:2].repeat(2, 1, 1),
    "repeat new": lambda h: h[0, :1].repeat(N, N, 1),
    "repeat_interleave": lambda h: h[:, :2].repeat_interleave(2, 1),
    "repeat by counts": lambda h: h.repeat_interleave(torch.tensor([0, 2, 1, 1]), 0),
    "tile": lambda h: h[..., :1].tile(1, 1, N),
    "unfold": lambda h: h.unfold(1, 2, 1).flatten(2)[:, :, :N],
    "unfold images": lambda h: F.unfold(h.unsqueeze(0), 2)[0][:N, :N].unsqueeze(0) * h,
    "fold": lambda h: F.fold(h.reshape(1, N * N, N), (3, 3), 2).sum(0)[:, :, :],
    "as_strided": lambda h: h.contiguous().as_strided((N, N, N), (1, 4, 16)),
    "pixel shuffle": lambda h: F.pixel_shuffle(h.unsqueeze(0), 2)[0].reshape(N, N, N),
    "channel shuffle": lambda h: F.channel_shuffle(h.unsqueeze(0), 2)[0],
    "movedim": lambda h: h.movedim(0, 2),
    "complex view": lambda h: torch.view_as_real(torch.view_as_complex(h.reshape(N, N, 2, 2).contiguous())).reshape(
        N, N, N
    ),
    "block_diag": lambda h: torch.block_diag(h[0], h[1])[2:6, 2:6],
    "kron": lambda h: torch.kron(h[0], h[:, 1])[3:7, 5:9],
    "cartesian": lambda h: torch.cartesian_prod(h[0, 0], h[0, :, 1])[:N],
    "squeeze": lambda h: h[:, :1].squeeze() * h,
    "swap halves": lambda h: torch.fft.fftshift(h, (0, 1)),
    "tensor_split": lambda h: torch.cat(h.tensor_split(3, 2)[::-1], 2),
    "meshgrid": lambda h: torch.meshgrid(h[0, 0], h[:, 1, 1], indexing="ij")[0] * h,
    "dstack": lambda h: torch.dstack([h[..., :2], h[..., 2:]]),
    "complex pair": lambda h: torch.view_as_real(torch.complex(h, h.transpose(0, 2))).reshape(N, N, 2 * N)[..., 2:6],
    "pixel unshuffle": lambda h: F.pixel_unshuffle(h.unsqueeze(0), 2)[0].reshape(N, N, N),
    "combinations": lambda h: torch.combinations(h[0, 0], 2)[:N],
    "constant pad": lambda h: F.pad(h, (1, -1, 0, 0, -1, 1), value=2.0),
}

READING: dict[str, Op] = {
    "index": lambda h: h[ROWS],
    "index inner": lambda h: h[:, ROWS],
    "index order": lambda h: h[:, :, ORDER],
    "index two": lambda h: h[ROWS, ORDER],
    "index apart": lambda h: h[ROWS, :, ORDER],
    "index square": lambda h: h[ROWS.unsqueeze(1), ORDER],
    "index apart square": lambda h: h[ORDER.unsqueeze(1), :, ROWS][..., 0],
    "index by matrix": lambda h: h[PLACES[0]][:, :, 0],
    "index with none": lambda h: h[None, ORDER][0],
    "index negative": lambda h: h[ROWS - N],
    "index one": lambda h: h[torch.tensor(2)] * h,
    "index mask": lambda h: h[MASK[0, 0] | True],
    "index mask of two": lambda h: h[torch.eye(N, dtype=torch.bool)],
    "index_select": lambda h: h.index_select(1, ROWS),
    "gather": lambda h: h.gather(1, PLACES),
    "gather rows": lambda h: h.gather(0, ORDER.reshape(N, 1, 1).expand(N, N, N)),
    "gather few": lambda h: h.gather(1, PLACES[:, :1]).expand(N, N, N),
    "take": lambda h: h.take(PLACES * 5),
    "take_along_dim": lambda h: h.take_along_dim(PLACES, 2),
    "masked_select": lambda h: h.masked_select(torch.ones_like(MASK)).reshape(N, N, N),
    "embedding of the state": lambda h: F.embedding(PLACES[0], h[1]),
    "embedding_bag of the state": lambda h: F.embedding_bag(PLACES[0], h[1], mode="sum"),
    "where": lambda h: torch.where(MASK, h, h.transpose(0, 1)),
    "masked_fill": lambda h: h.masked_fill(MASK[0], 0.5),
    "masked_scatter": lambda h: CUBE.masked_scatter(MASK, h),
    "index_add": lambda h: CUBE.index_add(0, ROWS, h),
    "index_add inner": lambda h: CUBE.index_add(1, ROWS, h, alpha=2),
    "index_add both": lambda h: h.index_add(2, ROWS, h.sin()),
    "index_copy": lambda h: CUBE.index_copy(1, ORDER, h),
    "index_put": lambda h: CUBE.index_put((ROWS, ORDER), h[0]),
    "index_put added": lambda h: h.index_put((ROWS,), h.sin(), accumulate=True),
    "index_fill": lambda h: h.index_fill(1, ROWS[:2], 1.0),
    "index_reduce": lambda h: CUBE.index_reduce(0, ROWS, h, "mean"),
    "scatter": lambda h: CUBE.scatter(2, ORDER.expand(N, N, N), h),
    "scatter few": lambda h: h.scatter(0, PLACES[:1, :2], h.sin()[:1, :2]),
    "scatter_add": lambda h: CUBE.scatter_add(0, PLACES, h),
    "scatter_reduce": lambda h: CUBE.scatter_reduce(1, PLACES, h, "amax"),
    "put": lambda h: CUBE.put(torch.randperm(64, generator=torch.Generator().manual_seed(0)).reshape(N, N, N), h),
    "select_scatter": lambda h: h.select_scatter(h[:, 1] * 2, 0, 2),
    "slice_scatter": lambda h: h.slice_scatter(h[:, :2] * 2, 1, 1, 3),
    "diagonal_scatter": lambda h: h.diagonal_scatter(h[0] * 2, 0, 1, 2),
    "written": lambda h: _written(h),
    "written by index": lambda h: _written_by_index(h),
}


def _written(h: Tensor) -> Tensor:
    out = h.clone()
    out[:, 1] = h[2] * 3
    out[0].mul_(h[:, 0])
    return out


def _written_by_index(h: Tensor) -> Tensor:
    out = CUBE.clone()
    out[ORDER] = h
    out[:, ROWS[:1]] += h[:, :1]
    return out


MIXING: dict[str, Op] = {
    "sum": lambda h: h.sum(1),
    "sum two": lambda h: h.sum((0, 2)),
    "mean kept": lambda h: h - h.mean(0, keepdim=True),
    "amax": lambda h: h.amax((1, 2)),
    "max": lambda h: h.max(1).values,
    "median": lambda h: h.median(2).values,
    "kthvalue": lambda h: h.kthvalue(2, 0).values,
    "logsumexp": lambda h: h.logsumexp(1),
    "prod": lambda h: h.prod(1),
    "var_mean": lambda h: torch.stack([*torch.var_mean(h, 1), *torch.std_mean(h, 2)]),
    "var_mean apart": lambda h: torch.var_mean(h, 0)[0] * h,
    "aminmax": lambda h: torch.aminmax(h, dim=1).max - torch.aminmax(h, dim=0).min,
    "norm": lambda h: h.norm(dim=1),
    "vector_norm": lambda h: torch.linalg.vector_norm(h, 3, (0, 1)),
    "matrix_norm": lambda h: torch.linalg.matrix_norm(h),
    "normalize": lambda h: F.normalize(h, dim=1),
    "renorm": lambda h: h.renorm(2, 1, 0.5),
    "softmax": lambda h: h.softmax(1),
    "log_softmax": lambda h: h.log_softmax(0),
    "cumsum": lambda h: h.cumsum(1),
    "cumprod": lambda h: h.cumprod(2),
    "cummax": lambda h: h.cummax(0).values,
    "logcumsumexp": lambda h: h.logcumsumexp(1),
    "sort": lambda h: h.sort(1).values,
    "topk": lambda h: h.topk(2, 0).values.repeat(2, 1, 1),
    "glu": lambda h: F.glu(torch.cat([h, h.sin()], 1), 1),
    "diff": lambda h: h.diff(dim=1, prepend=h[:, :1]),
    "trapezoid": lambda h: torch.trapezoid(h, dim=1),
    "fft": lambda h: torch.fft.fft(h, dim=1).abs(),
    "rfft2": lambda h: torch.fft.irfft2(torch.fft.rfft2(h, dim=(0, 2)).square(), (N, N), dim=(0, 2)),
    "layer_norm": lambda h: F.layer_norm(h, (N,)),
    "layer_norm two": lambda h: F.layer_norm(h, (N, N)),
    "rms_norm": lambda h: F.rms_norm(h, (N,)),
    "group_norm": lambda h: F.group_norm(h, 2),
    "instance_norm": lambda h: F.instance_norm(h),
    "batch_norm": lambda h: F.batch_norm(h, None, None, training=True),
    "batch_norm frozen": lambda h: F.batch_norm(h, torch.zeros(N).double(), torch.ones(N).double()),
    "local_response": lambda h: F.local_response_norm(h, 2),
    "conv1d": lambda h: F.conv1d(h, KERNEL, padding=1),
    "conv1d depthwise": lambda h: F.conv1d(h, KERNEL[:, :1], padding=1, groups=N),
    "conv1d circular": lambda h: F.conv1d(F.pad(h, (1, 1), mode="circular"), KERNEL),
    "conv2d": lambda h: F.conv2d(h.unsqueeze(1), KERNEL[:1, :1].unsqueeze(2))[:, 0].repeat(1, 1, 2),
    "conv2d unbatched": lambda h: F.conv2d(h, KERNEL.unsqueeze(2), padding=(0, 1)),
    "conv_transpose": lambda h: F.conv_transpose1d(h, KERNEL, padding=1),
    "conv by state": lambda h: F.conv1d(CUBE, h[..., :3], padding=1),
    "max_pool": lambda h: F.max_pool1d(h, 2, 1, 0).repeat(1, 1, 2)[..., :N],
    "max_pool2d": lambda h: F.max_pool2d(h, 3, 1, 1),
    "avg_pool": lambda h: F.avg_pool1d(h, 3, 1, 1),
    "adaptive": lambda h: F.adaptive_avg_pool1d(h, 2).repeat(1, 1, 2),
    "interpolate": lambda h: F.interpolate(h, N, mode="linear"),
    "bilinear resize": lambda h: F.interpolate(h.unsqueeze(0), (N, N), mode="bilinear", align_corners=True)[0],
    "reflect": lambda h: F.pad(h, (2, 0), mode="reflect")[..., :N],
    "grid_sample": lambda h: F.grid_sample(h.unsqueeze(0), CUBE[None, ..., :2].tanh(), align_corners=False)[0],
    "grid of state": lambda h: F.grid_sample(CUBE.unsqueeze(0), h[None, ..., :2].tanh(), align_corners=False)[0],
    "embedding_bag weights": lambda h: F.embedding_bag(PLACES[0], MATRIX, mode="sum", per_sample_weights=h[0]),
    "cross_entropy": lambda h: F.cross_entropy(h, PLACES[0], reduction="none"),
    "mse": lambda h: F.mse_loss(h, CUBE, reduction="none"),
    "cosine": lambda h: F.cosine_similarity(h, CUBE, 1),
    "pairwise": lambda h: F.pairwise_distance(h, CUBE),
    "cdist": lambda h: torch.cdist(h, CUBE),
    "nanmedian": lambda h: h.nanmedian(0).values,
    "nansum": lambda h: h.nansum(1),
    "mode": lambda h: h.mode(1).values,
    "quantile": lambda h: torch.quantile(h, 0.3, dim=1),
    "cov": lambda h: torch.cov(h[0]) + torch.corrcoef(h[:, 1]),
    "std": lambda h: h.std((0, 1)),
    "dist": lambda h: torch.dist(h, CUBE) * h,
    "gradient": lambda h: torch.gradient(h, dim=1)[0],
    "cumulative_trapezoid": lambda h: torch.cumulative_trapezoid(h, dim=0).repeat(2, 1, 1)[:N],
    "stft": lambda h: torch.stft(h[0], 4, 1, window=torch.ones(4).double(), return_complex=True).abs()[:, :, :N],
    "lp_pool": lambda h: F.lp_pool1d(h.abs() + 0.1, 2, 2).repeat(1, 1, 2),
    "max_unpool": lambda h: F.max_unpool1d(*F.max_pool1d(h, 2, return_indices=True), 2),
    "fractional": lambda h: F.fractional_max_pool2d(
        h, 2, output_size=2, _random_samples=CUBE[None, :, 0, :2].sigmoid()
    ),
    "affine_grid": lambda h: F.affine_grid(h[:, :2, :3], [N, 1, 2, 2], align_corners=False).reshape(N, N, 2),
    "trilinear resize": lambda h: F.interpolate(h[None, None], (N, N, N), mode="trilinear", align_corners=True)[0, 0],
    "bicubic": lambda h: F.interpolate(h.unsqueeze(0), (N, N), mode="bicubic", align_corners=True)[0],
    "nll spatial": lambda h: F.nll_loss(h, PLACES[1], reduction="none"),
    "margin": lambda h: F.multi_margin_loss(h[0], ROWS, reduction="none"),
    "multilabel": lambda h: F.multilabel_margin_loss(h[0], PLACES[0], reduction="none"),
    "soft margin": lambda h: F.multilabel_soft_margin_loss(h, (CUBE > 0).double(), reduction="none"),
    "triplet": lambda h: F.triplet_margin_loss(h, CUBE, h.transpose(0, 1), reduction="none"),
    "cosine loss": lambda h: F.cosine_embedding_loss(h[0], MATRIX, torch.ones(N).double(), reduction="none"),
    "kl_div": lambda h: F.kl_div(h.log_softmax(0), CUBE.softmax(1), reduction="none"),
    "mean loss": lambda h: F.mse_loss(h, CUBE) * h + F.smooth_l1_loss(h.mT, CUBE, reduction="sum"),
    "ctc": lambda h: F.ctc_loss(h.log_softmax(2), PLACES[0, :, :2] % 3 + 1, (N,) * N, (1, 2, 1, 1), reduction="none"),
    "prelu": lambda h: F.prelu(h, h[0, 0]),
    "dropout": lambda h: F.dropout(h, 0.5),
    "embedding_bag max": lambda h: F.embedding_bag(PLACES[0], h[1], mode="max"),
    "embedding_bag mean": lambda h: F.embedding_bag(PLACES[0], h[:, 2], mode="mean"),
    "segments": lambda h: torch.segment_reduce(h, "mean", lengths=torch.tensor([1, 2, 0, 1]), axis=0, initial=0),
    "local max": lambda h: F.max_pool3d(h[None], 2, 1)[0].repeat(2, 2, 2)[:N, :N, :N],
    "bucket": lambda h: h * torch.bucketize(h.detach(), torch.linspace(-1, 1, 5).double()),
}

PRODUCTS: dict[str, Op] = {
    "matrix right": lambda h: h @ MATRIX,
    "matrix left": lambda h: MATRIX @ h,
    "vector": lambda h: h @ MATRIX[0],
    "matrix of state": lambda h: h[0] @ h[:, 1],
    "bmm": lambda h: torch.bmm(h, CUBE),
    "bmm left": lambda h: torch.bmm(CUBE, h),
    "bmm of state": lambda h: torch.bmm(h, h.transpose(0, 1)),
    "baddbmm": lambda h: torch.baddbmm(h, CUBE, h.sin(), beta=0.5, alpha=2),
    "addbmm": lambda h: torch.addbmm(h[0], h, CUBE),
    "addmm": lambda h: torch.addmm(h[0, 0], h[1], MATRIX, beta=2),
    "addmv": lambda h: torch.addmv(h[0, 0], h[1], h[:, 2, 1]),
    "addr": lambda h: torch.addr(h[0], h[1, 0], h[:, 2, 1]),
    "outer": lambda h: torch.outer(h[0, 0], h[:, 1, 1]),
    "dot": lambda h: torch.dot(h[0, 0], h[:, 1, 1]) * h,
    "einsum": lambda h: torch.einsum("abc,cde->bade", h, CUBE)[0],
    "einsum diagonal": lambda h: torch.einsum("aba->ab", h),
    "einsum of state": lambda h: torch.einsum("abc,cbd->abd", h, h),
    "tensordot": lambda h: torch.tensordot(h, CUBE, ([0, 2], [1, 0])),
    "linear": lambda h: F.linear(h, MATRIX, MATRIX[0]),
    "linear by state": lambda h: F.linear(CUBE, h[0], h[0, 1]),
    "bilinear": lambda h: F.bilinear(h, CUBE, CUBE),
    "bilinear by state": lambda h: F.bilinear(CUBE, CUBE, h),
    "attention": lambda h: F.scaled_dot_product_attention(h, CUBE, h.sin()),
    "attention four": lambda h: F.scaled_dot_product_attention(*(h.unsqueeze(d) for d in (0, 0, 0)))[0],
    "attention masked": lambda h: F.scaled_dot_product_attention(CUBE[None], h[None], CUBE[None], attn_mask=h[:1])[0],
    "attention grouped": lambda h: F.scaled_dot_product_attention(h[None], h[None, :2], h[None, 2:], enable_gqa=True)[
        0
    ],
    "matrix_power": lambda h: torch.linalg.matrix_power(regular(h), 2),
    "chain": lambda h: torch.linalg.multi_dot([h[0], h[1], h[2]]),
    "cross": lambda h: torch.linalg.cross(h[:, :, :3], CUBE[:, :, 1:]).repeat(1, 1, 2)[..., :N],
    "inverse": lambda h: torch.linalg.inv(regular(h)),
    "solve": lambda h: torch.linalg.solve(regular(h), CUBE),
    "solve for state": lambda h: torch.linalg.solve(regular(MATRIX), h),
    "solve broadcast": lambda h: torch.linalg.solve(regular(h.expand(N, N, N, N)), h)[0],
    "solve broadcast other": lambda h: torch.linalg.solve(regular(CUBE.unsqueeze(1).expand(N, N, N, N)), h)[:, 1],
    "solve vectors": lambda h: torch.linalg.solve(regular(h), MATRIX),
    "triangular": lambda h: torch.linalg.solve_triangular(regular(MATRIX).tril(), h, upper=False),
    "triangular broadcast": lambda h: torch.linalg.solve_triangular(
        regular(CUBE.unsqueeze(1).expand(N, N, N, N)).tril(), h, upper=False
    )[:, 2],
    "cholesky": lambda h: torch.linalg.cholesky(definite(h)),
    "cholesky_solve": lambda h: torch.cholesky_solve(h, torch.linalg.cholesky(definite(CUBE))),
    "cholesky_solve broadcast": lambda h: torch.cholesky_solve(h, torch.linalg.cholesky(definite(MATRIX))),
    "cholesky_solve other": lambda h: torch.cholesky_solve(
        h, torch.linalg.cholesky(definite(CUBE.unsqueeze(1).expand(N, N, N, N)))
    )[:, 2],
    "lu_solve": lambda h: torch.linalg.lu_solve(*torch.linalg.lu_factor(regular(CUBE)), h),
    "lu_solve by state": lambda h: torch.linalg.lu_solve(*torch.linalg.lu_factor(regular(h)), CUBE),
    "householder": lambda h: torch.linalg.householder_product(h, MATRIX),
    "ldl": lambda h: torch.linalg.inv_ex(definite(h)).inverse,
    "det": lambda h: torch.linalg.det(regular(h)),
    "slogdet": lambda h: torch.linalg.slogdet(regular(h)).logabsdet,
    "eigh": lambda h: torch.linalg.eigvalsh(definite(h)),
    "svd": lambda h: torch.linalg.svdvals(regular(h)),
    "qr": lambda h: torch.linalg.qr(regular(h)).R,
    "qr both": lambda h: (lambda q, r: q @ r.sin())(*torch.linalg.qr(regular(h))),
    "matrix_exp": lambda h: torch.linalg.matrix_exp(0.1 * h),
    "pinv": lambda h: torch.linalg.pinv(regular(h)),
    "lu": lambda h: torch.linalg.lu(regular(h)).U,
    "lstsq": lambda h: torch.linalg.lstsq(regular(h), CUBE).solution,
    "complex": lambda h: torch.view_as_real((torch.complex(h, h.mT) @ COMPLEX).conj() * COMPLEX).sum(-1),
    "complex matrix": lambda h: (COMPLEX[0] @ (h + 0j)).imag + (COMPLEX[1] @ torch.complex(h, h.sin())).real,
}

EVERY = {**ARRANGING, **READING, **MIXING, **PRODUCTS}
