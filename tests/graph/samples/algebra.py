"""Matrix products, matrix functions, Fourier transforms."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .leaves import Samples, c, spd, w, z

_PRODUCTS: Samples = {
    "Addbmm": [lambda: torch.addbmm(w(2, 4), w(5, 2, 3), w(5, 3, 4), beta=0.5, alpha=2.5)],
    "Addmm": [
        lambda: torch.addmm(w(4), w(2, 3), w(3, 4), beta=0.5, alpha=2.5),
        lambda: torch.addmm(w(2, 1), c(2, 3), w(3, 4)),
        lambda: F.linear(w(2, 3), w(4, 3), w(4)),
        lambda: torch.addmm(z(4), z(2, 3), z(3, 4), alpha=2.5j),
    ],
    "Addmv": [lambda: torch.addmv(w(2), w(2, 3), w(3), beta=0.5, alpha=2.5), lambda: torch.addmv(w(), c(2, 3), w(3))],
    "Addr": [lambda: torch.addr(w(2, 3), w(2), w(3), beta=0.5, alpha=2.5), lambda: torch.addr(w(3), w(2), c(3))],
    "Baddbmm": [
        lambda: torch.baddbmm(w(5, 2, 4), w(5, 2, 3), w(5, 3, 4), beta=0.5, alpha=2.5),
        lambda: torch.baddbmm(w(4), w(5, 2, 3), c(5, 3, 4)),
    ],
    "Bmm": [lambda: w(5, 2, 3).bmm(w(5, 3, 4)), lambda: c(5, 2, 3).bmm(w(5, 3, 4)), lambda: z(5, 2, 3).bmm(z(5, 3, 4))],
    "Dot": [lambda: w(3).dot(w(3)), lambda: c(3).dot(w(3)), lambda: z(3).dot(z(3))],
    "EuclideanDist": [lambda: torch.cdist(w(4, 3), w(5, 3), compute_mode="use_mm_for_euclid_dist")],
    "LinalgCross": [lambda: torch.linalg.cross(w(2, 3), w(1, 3)), lambda: torch.linalg.cross(w(3, 2), c(3, 2), dim=0)],
    "Mm": [
        lambda: w(2, 3).mm(w(3, 4)),
        lambda: c(2, 3).mm(w(3, 4)),
        lambda: w(2, 3).mm(c(3, 4)),
        lambda: z(2, 3).mm(z(4, 3).mH),
    ],
    "Mv": [lambda: w(2, 3).mv(w(3)), lambda: c(2, 3).mv(w(3)), lambda: w(2, 3).mv(c(3)), lambda: z(2, 3).mv(z(3))],
    "Vdot": [lambda: w(3).vdot(w(3)), lambda: z(3).vdot(z(3))],
}

_MATRICES: Samples = {
    "CholeskyInverse": [lambda: torch.cholesky_inverse(torch.linalg.cholesky(spd(3)))],
    "CholeskySolve": [
        lambda: torch.cholesky_solve(w(3, 2), torch.linalg.cholesky(spd(3))),
        lambda: torch.cholesky_solve(w(2, 3, 1), torch.linalg.cholesky(spd(3, 2)).mT, upper=True),
    ],
    "LinalgCholeskyEx": [
        lambda: torch.linalg.cholesky(spd(3)),
        lambda: torch.linalg.cholesky(spd(3, 2), upper=True),
    ],
    "LinalgDet": [
        lambda: torch.linalg.det(w(3, 3)),
        lambda: torch.linalg.det(w(2, 3, 3)),
        lambda: torch.linalg.det(torch.zeros(2, 2).requires_grad_()),
    ],
    "LinalgInvEx": [
        lambda: torch.linalg.inv(w(3, 3)),
        lambda: torch.linalg.inv(w(2, 3, 3)),
        lambda: torch.linalg.inv(z(3, 3)),
    ],
    "LinalgLu": [
        lambda: torch.linalg.lu(w(3, 3))[1],
        lambda: torch.linalg.lu(w(3, 2))[2],
        lambda: torch.linalg.lu(w(2, 3))[1],
    ],
    "LinalgLuFactorEx": [lambda: torch.linalg.lu_factor(w(3, 3))[0], lambda: torch.linalg.lu_factor(w(2, 3, 3))[0]],
    "LinalgLuSolve": [lambda: torch.linalg.lu_solve(*torch.linalg.lu_factor(w(3, 3)), w(3, 2))],
    "LinalgMatrixExp": [
        lambda: torch.linalg.matrix_exp(w(3, 3)),
        lambda: torch.linalg.matrix_exp(w(2, 3, 3)),
        lambda: torch.linalg.matrix_exp(z(3, 3)),
    ],
    "LinalgPinv": [lambda: torch.linalg.pinv(w(3, 2)), lambda: torch.linalg.pinv(w(2, 2, 3))],
    "LinalgQr": [
        lambda: torch.linalg.qr(w(4, 3))[0],
        lambda: torch.linalg.qr(w(3, 3), mode="complete")[1],
        lambda: torch.linalg.qr(w(2, 4, 3))[0],
        lambda: torch.linalg.qr(w(3, 4))[1],
    ],
    "LinalgSlogdet": [
        lambda: torch.linalg.slogdet(w(3, 3))[1],
        lambda: torch.linalg.slogdet(w(2, 3, 3))[1],
        lambda: torch.linalg.slogdet(z(3, 3))[1],
    ],
    "LinalgSolveEx": [
        lambda: torch.linalg.solve(w(3, 3), w(3, 2)),
        lambda: torch.linalg.solve(w(3, 3), w(3)),
        lambda: torch.linalg.solve(w(2, 3, 3), w(3, 4)),
        lambda: torch.linalg.solve(w(3, 3), w(2, 3), left=False),
        lambda: torch.linalg.solve(c(3, 3), w(3, 2)),
    ],
    "LinalgSolveTriangular": [
        lambda: torch.linalg.solve_triangular(w(3, 3), w(3, 2), upper=True),
        lambda: torch.linalg.solve_triangular(w(3, 3), w(2, 3), upper=False, left=False),
        lambda: torch.linalg.solve_triangular(w(2, 3, 3), w(3, 2), upper=False, unitriangular=True),
        lambda: torch.linalg.solve_triangular(c(3, 3), w(3, 2), upper=True),
    ],
    "LuUnpack": [
        lambda: torch.lu_unpack(*torch.linalg.lu_factor(w(3, 3)))[1],
        lambda: torch.lu_unpack(*torch.linalg.lu_factor(w(3, 2)))[2],
    ],
}

_FOURIER: Samples = {
    "FftC2C": [lambda: torch.fft.fft(z(2, 5)), lambda: torch.fft.ifft2(z(3, 4), norm="ortho")],
    "FftC2R": [lambda: torch.fft.irfft(z(2, 4), n=7), lambda: torch.fft.irfft2(z(3, 4))],
    "FftR2C": [
        lambda: torch.fft.rfft(w(2, 5)),
        lambda: torch.fft.rfft2(w(3, 4), norm="ortho"),
        lambda: torch.fft.fft(w(2, 5)),
    ],
}

ALGEBRA: Samples = {**_PRODUCTS, **_MATRICES, **_FOURIER}
