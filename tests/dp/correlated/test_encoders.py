"""Encoders: their errors and sensitivities against dense matrices, and that no other is better."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from persample.dp.correlated.choose import best_bands
from persample.dp.correlated.encoders import Banded, Buffered, Encoder, banded, buffered
from persample.dp.correlated.toeplitz import prefix_sums
from tests.dp.correlated import dense

ENCODERS: list[Encoder] = [
    banded(1, 1, 0.0),
    banded(1, 12, 0.0),
    banded(2, 12, 0.0),
    banded(5, 40, 0.0),
    banded(40, 40, 0.0),
    banded(6, 40, 0.9),
    buffered(1, 1, 0.0, 1),
    buffered(2, 12, 0.0, 4),
    buffered(3, 40, 0.0, 40),
    buffered(3, 40, 0.9, 10),
]


def name_of(encoder: Encoder) -> str:
    return f"{type(encoder).__name__} {encoder.reach} of {encoder.steps} {encoder.momentum}"


@pytest.mark.parametrize("encoder", ENCODERS, ids=name_of)
def test_error_and_norm(encoder: Encoder) -> None:
    c = dense.matrix(encoder.column)
    decoder = dense.matrix(prefix_sums(encoder.steps, encoder.momentum)) @ np.linalg.inv(c)
    norm = np.linalg.norm(c, axis=0).max()
    assert encoder.column[0] == 1
    assert encoder.norm == pytest.approx(norm, rel=1e-12)
    assert encoder.error == pytest.approx(norm * math.sqrt(np.square(decoder).sum() / encoder.steps), rel=1e-9)


def test_one_band_is_independent_noise() -> None:
    encoder = banded(1, 9, 0.0)
    assert encoder.norm == 1
    assert encoder.error == pytest.approx(math.sqrt(5))  # sums of 1 to 9 numbers of variance 1
    assert encoder.factor(3.0, 10**9) == 1


@pytest.mark.parametrize("steps", [1, 5, 12, 17])
@pytest.mark.parametrize("separation", [2, 4])
def test_bands_that_do_not_meet_are_orthogonal(steps: int, separation: int) -> None:
    """As many participations as there are, less what the end of the run cuts off."""
    encoder = Banded(17, 0.0, (1.0, 0.5))
    c = dense.matrix(encoder.column[:steps])
    among = [list(range(first, steps, separation)) for first in range(min(steps, separation))]
    often = encoder.participations(steps, separation)
    assert often == pytest.approx(dense.squared_sensitivity(c, among) / 1.25, rel=1e-12)
    assert often <= math.ceil(steps / separation) + 1e-12


@pytest.mark.parametrize("encoder", [e for e in ENCODERS if isinstance(e, Banded) and e.reach > 1], ids=name_of)
def test_no_other_banded_encoder_has_less_error(encoder: Banded) -> None:
    generator = np.random.default_rng(0)
    for size in (1e-1, 1e-2, 1e-3):
        for _ in range(20):
            moved = [c + size * generator.standard_normal() for c in encoder.coefficients[1:]]
            assert replace(encoder, coefficients=(1.0, *moved)).error >= encoder.error * (1 - 1e-9)


@pytest.mark.parametrize("bands", [2, 4])
def test_encoders_are_found_for_long_runs(bands: int) -> None:
    """The best ones come close to where their inverse grows without end: beyond, errors are no numbers at all."""
    encoder = banded(bands, 30_000, 0.0)
    assert math.isfinite(encoder.error)
    assert encoder.error < 1.01 * banded(1, 30_000, 0.0).error / math.sqrt(bands)
    for moved in (-0.01, 0.01):
        others = (1.0, *(c + moved for c in encoder.coefficients[1:]))
        assert replace(encoder, coefficients=others).error > encoder.error


def test_errors_fall_with_bands_down_to_the_best_of_all_matrices() -> None:
    """No factorisation has less error than the sum of the workload's singular values over n (Li et al., 2015)."""
    n = 64
    least = np.linalg.norm(dense.matrix(np.ones(n)), "nuc") / n
    errors = [banded(bands, n, 0.0).error for bands in (1, 2, 4, 8, 16, 32, 64)]
    assert errors == sorted(errors, reverse=True)
    assert least < errors[-1] < 1.08 * least  # which Toeplitz matrices do not reach


def test_buffers_come_close_to_all_bands() -> None:
    errors = [buffered(buffers, 100, 0.0, 100).error for buffers in (1, 2, 3)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1.01 * banded(100, 100, 0.0).error


@pytest.mark.parametrize("encoder", [e for e in ENCODERS if isinstance(e, Buffered)], ids=name_of)
def test_buffered_coefficients_are_positive_and_do_not_rise(encoder: Buffered) -> None:
    """Which the closed form of the sensitivity asks for."""
    assert bool((encoder.column >= 0).all())
    assert bool((encoder.column.diff() <= 0).all())
    assert all(0 <= decay < 1 for decay in encoder.decays)


def test_encoders_are_found_where_gradients_are_off() -> None:
    banded.cache_clear()
    with torch.no_grad():
        found = banded(3, 31, 0.0)
    banded.cache_clear()
    with torch.inference_mode():
        assert banded(3, 31, 0.0) == found
    assert found.error < banded(1, 31, 0.0).error


@pytest.mark.parametrize(("noise_for", "best"), [(lambda bands: 1.0, 32), (lambda bands: float(bands), 1)])
def test_bands_are_chosen_by_error(noise_for: object, best: int) -> None:
    assert best_bands(40, 40, 0.0, noise_for) == best  # type: ignore[arg-type]
    assert best_bands(40, 40, 0.0, lambda bands: None) == 1
    assert best_bands(40, 3, 0.0, lambda bands: 1.0) == 2
    assert best_bands(1, 40, 0.0, lambda bands: 1.0) == 1


def test_rounding_that_matters_is_refused() -> None:
    slow = Buffered(10**6, 0.0, (0.5,), (0.999999,))
    with pytest.raises(ValueError, match=r"rounding errors of correlated noise would add .*use less noise"):
        slow.factor(1e4, 10**9)
    assert 1 < slow.factor(1.0, 1000) / slow.norm < 1.001


def test_rounding_adds_next_to_nothing() -> None:
    """As docs/correlated-noise.md says."""
    for encoder in (banded(16, 1000, 0.0), buffered(3, 1000, 0.0, 100)):
        assert encoder.factor(1.0, 10**6) / encoder.norm - 1 < 1e-6
    long = Buffered(10**5, 0.0, (0.3, 0.1, 0.02), (0.7, 0.97, 0.9999))
    assert long.factor(1.0, 10**9) / long.norm - 1 < 1e-3
