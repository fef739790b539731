"""Linear algebra, transforms and complex paths, per sample and on parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import Program, case, param, score


def _spd(h: Tensor) -> Tensor:
    """Well-conditioned symmetric matrices from any square ones."""
    return h @ h.mT + torch.eye(h.shape[-1])


# Every operation takes (B, 3, 3) and keeps the sample in front.
MATRICES: dict[str, Callable[[Tensor], Tensor]] = {
    "inverse": lambda h: torch.linalg.inv(_spd(h)),
    "solve": lambda h: torch.linalg.solve(_spd(h), h),
    "solve-shared-right": lambda h: torch.linalg.solve(_spd(h), torch.eye(3)[:, :2]),
    "solve-triangular": lambda h: torch.linalg.solve_triangular(h.tril(-1) + torch.eye(3), h, upper=False),
    "cholesky": lambda h: torch.linalg.cholesky(_spd(h)),
    "cholesky-solve": lambda h: torch.cholesky_solve(h, torch.linalg.cholesky(_spd(h))),
    "det": lambda h: torch.linalg.det(_spd(h)),
    "slogdet": lambda h: torch.linalg.slogdet(_spd(h)).logabsdet,
    "qr": lambda h: torch.linalg.qr(_spd(h)).Q,
    "eigvalsh": lambda h: torch.linalg.eigvalsh(_spd(h)),
    "eigh": lambda h: torch.linalg.eigh(_spd(h)).eigenvectors.square(),
    "svdvals": lambda h: torch.linalg.svdvals(h),
    "pinv": lambda h: torch.linalg.pinv(_spd(h)),
    "matrix-exp": lambda h: torch.linalg.matrix_exp(h * 0.3),
    "matrix-power": lambda h: torch.linalg.matrix_power(h * 0.5, 3),
    "matrix-norm": lambda h: torch.linalg.matrix_norm(h),
    "bmm-own": lambda h: torch.bmm(h, h.mT).sin(),
    "baddbmm-own": lambda h: torch.baddbmm(h, h, h.mT, beta=0.3, alpha=0.7).sin(),
    "chain": lambda h: (h @ h @ h).sin(),
    "matvec": lambda h: (h @ h[:, 0, :, None]).squeeze(-1).sin(),
    "outer": lambda h: torch.einsum("bi,bj->bij", h[:, 0], h[:, 1]).sin(),
    "cross": lambda h: torch.linalg.cross(h[:, 0], h[:, 1]).sin(),
    "kron": lambda h: torch.einsum("bij,bkl->bikjl", h, h.mT).flatten(3).flatten(1, 2).sin(),
    "cdist": lambda h: torch.cdist(h, h.flip(1) + 1),
    "cdist-one": lambda h: torch.cdist(h, h.flip(1) + 1, p=1),
    "cdist-constant": lambda h: torch.cdist(h, torch.arange(12.0).view(4, 3)),
    "pairwise": lambda h: F.pairwise_distance(h, h.roll(1, 1)),
    "cosine": lambda h: F.cosine_similarity(h, h.roll(1, 1), dim=-1),
    "vecdot": lambda h: torch.linalg.vecdot(h, h.roll(1, 1)).sin(),
    "fft": lambda h: torch.fft.fft(h, dim=1).abs(),
    "fft-real": lambda h: torch.view_as_real(torch.fft.rfft(h, dim=-1)).sin(),
    "fft-two": lambda h: torch.fft.fft2(h).real.sin() + torch.fft.ifft2(h).imag,
    "fft-and-back": lambda h: torch.fft.irfft(torch.fft.rfft(h, n=6) * torch.fft.rfft(h.flip(1), n=6), n=6),
    "fft-shift": lambda h: torch.fft.fftshift(torch.fft.hfft(h, dim=-1), dim=-1).sin(),
    "complex": lambda h: torch.complex(h, h.flip(1)).pow(2).angle(),
    "polar": lambda h: torch.polar(h.abs() + 0.1, h).prod(1).real,
    "conjugate": lambda h: (torch.complex(h, h.sin()).conj() @ torch.complex(h.cos(), h)).abs(),
    "view-as-complex": lambda h: torch.view_as_complex(h[..., :2].contiguous()).exp().imag,
    "stft": lambda h: torch.stft(h.flatten(1), 4, 2, window=torch.ones(4), return_complex=True).abs(),
}
# PyTorch has no Fourier transform of an empty batch on the CPU.
NOT_EMPTY = ("view-as-complex", "fft", "fft-real", "fft-two", "fft-and-back", "fft-shift", "stft")


@case({name: {"op": op} for name, op in MATRICES.items() if name not in NOT_EMPTY})
def matrices(B: int, op: Callable[[Tensor], Tensor]) -> Program:
    net, x = nn.Linear(4, 9), torch.randn(B, 4)
    return net, lambda: score(op(net(x).view(B, 3, 3)))


@case({name: {"op": MATRICES[name]} for name in NOT_EMPTY}, batches=(4, 1))
def matrices_not_empty(B: int, op: Callable[[Tensor], Tensor]) -> Program:
    net, x = nn.Linear(4, 9), torch.randn(B, 4)
    return net, lambda: score(op(net(x).view(B, 3, 3)))


ON_PARAMETERS = (
    "inverse",
    "solve",
    "cholesky",
    "matrix-exp",
    "qr",
    "slogdet",
    "chain",
    "fft-and-back",
)


@case({name: {"op": MATRICES[name]} for name in ON_PARAMETERS})
def matrices_of_parameters(B: int, op: Callable[[Tensor], Tensor]) -> Program:
    w, x = param(2, 3, 3), torch.randn(B, 4)
    return [w], lambda: score((x * op(w).sum().sin() + x[:, :1] * op(w).flatten()[0]).tanh())


@case({name: {"op": MATRICES[name]} for name in ("svdvals", "eigvalsh")}, slow_path=True)
def decompositions_of_parameters(B: int, op: Callable[[Tensor], Tensor]) -> Program:
    w, x = param(2, 3, 3), torch.randn(B, 4)
    return [w], lambda: score((x * op(w).sum().sin() + x[:, :1] * op(w).flatten()[0]).tanh())


@case(slow_path=True)
def solve_with_parameter(B: int) -> Program:
    w, x = param(3, 3), torch.randn(B, 3)
    return [w], lambda: score(torch.linalg.solve(w @ w.t() + torch.eye(3), x.unsqueeze(-1)).squeeze(-1))


@case(slow_path=True)
def solve_with_parameter_sample_last(B: int) -> Program:
    w, x = param(3, 3), torch.randn(3, B)
    return [w], lambda: score(torch.linalg.solve(w @ w.t() + torch.eye(3), x).t())


@case()
def inverse_parameter_times_data(B: int) -> Program:
    w, x = param(3, 3), torch.randn(B, 3)
    return [w], lambda: score(x @ torch.linalg.inv(w @ w.t() + torch.eye(3)))


@case(slow_path=True, batches=(4, 1))
def cdist_to_parameters(B: int) -> Program:
    w, x = param(5, 3), torch.randn(B, 3)
    return [w], lambda: score(torch.cdist(x, w))


@case(slow_path=True, batches=(4, 1))
def cdist_to_parameters_over_time(B: int) -> Program:
    w, x = param(5, 3), torch.randn(B, 4, 3)
    return [w], lambda: score(torch.cdist(x, w.expand(B, 5, 3)))


@case()
def distances_by_hand_to_parameters(B: int) -> Program:
    w, x = param(5, 3), torch.randn(B, 3)
    return [w], lambda: score(x.square().sum(1, True) - 2 * x @ w.t() + w.square().sum(1))


@case()
def cosine_classifier(B: int) -> Program:
    w, x = param(5, 3), torch.randn(B, 3)
    return [w], lambda: score(F.normalize(x, dim=1) @ F.normalize(w, dim=1).t())


@case()
def outer_product_with_parameter(B: int) -> Program:
    w, x = param(3), torch.randn(B)
    return [w], lambda: score(torch.outer(x, w).tanh())


@case(batches=(4, 1))
def spectral_filter(B: int) -> Program:
    re, im, x = param(4), param(4), torch.randn(B, 2, 6)
    return [re, im], lambda: score(torch.fft.irfft(torch.fft.rfft(x) * torch.complex(re, im), n=6))


@case(batches=(4, 1))
def fourier_neural_operator(B: int) -> Program:
    re, im, net, x = param(2, 3, 4), param(2, 3, 4), nn.Linear(1, 2), torch.randn(B, 6, 1)

    def losses() -> Tensor:
        modes = torch.fft.rfft(net(x).mT)
        mixed = torch.einsum("bit,iot->bot", modes, torch.complex(re, im))
        return score(torch.fft.irfft(mixed, n=6))

    return {"re": re, "im": im, **dict(net.named_parameters())}, losses


@case(batches=(4, 1))
def long_convolution_by_fft(B: int) -> Program:
    kernel, x = param(3, 6), torch.randn(B, 3, 6)
    return [kernel], lambda: score(torch.fft.irfft(torch.fft.rfft(x, n=12) * torch.fft.rfft(kernel, n=12), n=12))


@case()
def complex_rotation_by_parameter(B: int) -> Program:
    angle, x = param(4), torch.randn(B, 4)
    return [angle], lambda: score((torch.complex(x, x.sin()) * torch.polar(torch.ones(4), angle)).real)


@case(batches=(4, 1))
def diagonal_state_space(B: int) -> Program:
    log_a, freq, c, x = param(3), param(3), param(3), torch.randn(B, 6)

    def losses() -> Tensor:
        a = torch.complex(-log_a.exp(), freq)
        kernel = (torch.exp(a[:, None] * torch.arange(6)) * c[:, None]).sum(0).real
        return score(torch.fft.irfft(torch.fft.rfft(x, n=12) * torch.fft.rfft(kernel, n=12), n=12)[:, :6])

    return [log_a, freq, c], losses


@case(slow_path=True)
def gaussian_with_learned_covariance(B: int) -> Program:
    mean, low, x = param(3), param(3, 3), torch.randn(B, 3)

    def losses() -> Tensor:
        scale = low.tril(-1) + torch.diag(low.diagonal().exp())
        return -torch.distributions.MultivariateNormal(mean, scale_tril=scale, validate_args=False).log_prob(x)

    return [mean, low], losses


@case()
def gaussian_mixture(B: int) -> Program:
    mean, log_std, logit, x = param(4, 3), param(4, 3), param(4), torch.randn(B, 3)

    def losses() -> Tensor:
        each = torch.distributions.Normal(mean, log_std.exp(), validate_args=False).log_prob(x[:, None]).sum(2)
        return -(each + logit.log_softmax(0)).logsumexp(1)

    return [mean, log_std, logit], losses


@case()
def coupling_flow(B: int) -> Program:
    net, mix, x = nn.Linear(2, 4), param(4, 4), torch.randn(B, 4)

    def losses() -> Tensor:
        z = x @ (mix + 2 * torch.eye(4))
        log_det = torch.linalg.slogdet(mix + 2 * torch.eye(4)).logabsdet
        scale, shift = net(z[:, :2]).chunk(2, 1)
        rest = z[:, 2:] * scale.tanh().exp() + shift
        return 0.5 * (z[:, :2].square().sum(1) + rest.square().sum(1)) - scale.tanh().sum(1) - log_det

    return {"mix": mix, **dict(net.named_parameters())}, losses


@case()
def conditional_random_field(B: int) -> Program:
    net, moves, x = nn.Linear(4, 3), param(3, 3), torch.randn(B, 5, 4)
    tags = torch.randint(3, (B, 5))

    def losses() -> Tensor:
        unary = net(x)
        alpha = unary[:, 0]
        for t in range(1, 5):
            alpha = (alpha[:, :, None] + moves).logsumexp(1) + unary[:, t]
        path = unary.gather(2, tags[..., None]).sum((1, 2)) + moves[tags[:, :-1], tags[:, 1:]].sum(1)
        return alpha.logsumexp(1) - path

    return {"moves": moves, **dict(net.named_parameters())}, losses
