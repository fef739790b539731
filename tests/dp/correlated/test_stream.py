"""Streamed noise: what a dense matrix would give, on the grid, and moved by one example as far as is accounted for."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from persample.dp.correlated.encoders import Banded, Buffered, Encoder, banded, buffered
from persample.dp.correlated.memory import Memory
from persample.dp.correlated.stream import Stream, When
from persample.dp.noise import BLOCK, Noise, Scale, Sum, _add_elsewhere, add_noise
from persample.dp.sources import Seeded
from tests.dp.correlated import dense
from tests.dp.correlated.dense import Matrix

STEPS = 12
ENCODERS: list[Encoder] = [
    banded(1, STEPS, 0.0),
    banded(2, STEPS, 0.0),
    banded(5, STEPS, 0.0),
    banded(STEPS, STEPS, 0.9),
    buffered(1, STEPS, 0.0, 4),
    buffered(3, STEPS, 0.0, STEPS),
]


def name_of(encoder: Encoder) -> str:
    return f"{type(encoder).__name__} {encoder.reach} {encoder.momentum}"


def scale_of(encoder: Encoder, size: int, noise: float = 1.3) -> Scale:
    return Scale(0.7, noise, size, encoder.factor(noise, size))


def released(encoder: Encoder, size: int, sums: Matrix | None = None, seed: int = 0) -> Matrix:
    """(steps, size): sums with noise, in steps of the grid."""
    scale, memory, found = scale_of(encoder, size), encoder.memory(size), []
    for step in range(encoder.steps):
        total = torch.zeros(size, dtype=torch.float64) if sums is None else torch.tensor(sums[step]) * scale.grid
        add_noise([total], scale, Seeded(seed), step, 0, memory)
        found.append(total.numpy() / scale.grid)
    return np.stack(found)


def independent(encoder: Encoder, size: int, seed: int = 0) -> Matrix:
    """The same draws, before they are correlated, in steps of the grid but not rounded."""
    scale, found = scale_of(encoder, size), np.empty((encoder.steps, size))
    for step in range(encoder.steps):
        for block, start in enumerate(range(0, size, BLOCK)):
            Seeded(seed).normals(step, block, found[step, start : start + BLOCK])
    return found * (scale.std / scale.grid)


@pytest.mark.parametrize("size", [1, 20, BLOCK + 3])
@pytest.mark.parametrize("encoder", ENCODERS, ids=name_of)
def test_noise_is_what_a_dense_matrix_gives(encoder: Encoder, size: int) -> None:
    """Every step's noise is rounded once, to the grid; encoded again, it is its independent noise but for that."""
    noise, z = released(encoder, size), independent(encoder, size)
    assert np.array_equal(noise, np.rint(noise))
    encoder_matrix = dense.matrix(encoder.column)
    assert np.abs(encoder_matrix @ noise - z).max() <= 0.5 + 1e-6
    straight = np.linalg.inv(encoder_matrix) @ z
    assert np.abs(noise - straight).max() <= 0.5 * np.abs(np.linalg.inv(encoder_matrix)).sum(1).max() + 1e-6


@pytest.mark.parametrize("encoder", ENCODERS, ids=name_of)
def test_the_covariance_of_what_is_released(encoder: Encoder) -> None:
    """(CᵀC)⁻¹ between steps, estimated from 40,000 coordinates: within 7 standard deviations, false alarms < 1e-9."""
    size = 40_000
    scale, noise = scale_of(encoder, size), released(encoder, size)
    found = noise @ noise.T / size * (scale.grid / scale.std) ** 2
    c = dense.matrix(encoder.column)
    want = np.linalg.inv(c.T @ c)
    deviation = np.sqrt((np.outer(want.diagonal(), want.diagonal()) + want**2) / size)
    assert np.abs((found - want) / deviation).max() < 7


@pytest.mark.parametrize("encoder", ENCODERS[1::3], ids=name_of)
def test_threads_and_accelerators_get_the_same_noise(encoder: Encoder) -> None:
    """Noise for accelerators is drawn many blocks at a time, and copied to them."""
    size, before, found = 9 * BLOCK, torch.get_num_threads(), []
    try:
        for threads, elsewhere in ((1, False), (2, False), (2, True)):
            torch.set_num_threads(threads)
            scale, memory = scale_of(encoder, size), encoder.memory(size)
            sums = torch.zeros(3, size, dtype=torch.float64)
            for step, row in enumerate(sums):
                if elsewhere:
                    _add_elsewhere([Sum(row)], Noise(scale, Seeded(0), step, 0, memory))
                    memory.advance()
                else:
                    add_noise([row], scale, Seeded(0), step, 0, memory)
            found.append(sums)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("encoder", ENCODERS, ids=name_of)
def test_sums_do_not_change_the_noise(encoder: Encoder) -> None:
    sums = np.random.default_rng(0).integers(-(2**30), 2**30, (STEPS, 20)).astype(np.float64)
    assert np.array_equal(released(encoder, 20, sums), released(encoder, 20) + sums)


def due(memory: Memory, noise: Matrix) -> Matrix:
    """What is taken from the independent noise of every step, for a given sequence of noise."""
    found = []
    for row in noise:
        found.append(memory.due(0, len(row)))
        memory.keep(0, row)
        memory.advance()
    return np.stack(found)


@pytest.mark.parametrize("encoder", ENCODERS, ids=name_of)
def test_one_example_moves_the_independent_noise_by_the_encoder_times_its_contribution(encoder: Encoder) -> None:
    """The argument for the guarantee: the same releases, with and without an example, need noise that far apart.

    Releases are ``R``; noise is ``R - X``, and the independent noise behind it lies within half a step of
    ``R - X + due(R - X)``.
    """
    generator = np.random.default_rng(1)
    size, scale = 20, scale_of(encoder, 20)
    sums = generator.integers(-(2**20), 2**20, (STEPS, size)).astype(np.float64)
    neighbour = sums.copy()
    neighbour[[1, 5, 9]] += generator.integers(-1000, 1000, (3, size))
    releases = released(encoder, size, sums)
    behind = [releases - x + due(encoder.memory(size), releases - x) for x in (sums, neighbour)]
    moved = dense.matrix(encoder.column) @ (neighbour - sums)
    rounding = 2 * encoder.rounding * 14 * scale.std / scale.grid
    assert np.abs((behind[0] - behind[1]) - moved).max() <= rounding + 1e-9


LONG: list[Encoder] = [banded(7, 200, 0.9), buffered(3, 200, 0.0, 200), Buffered(200, 0.0, (0.3, 0.6), (0.1, 0.9999))]


@pytest.mark.parametrize("encoder", LONG, ids=name_of)
def test_rounding_errors_are_within_the_bound(encoder: Encoder) -> None:
    """Against exact fractions, for noise that is as large as it can be."""
    inputs = np.sign(np.random.default_rng(0).standard_normal((encoder.steps, 3))) * 2.0**45
    memory, noise, found = encoder.memory(3), [], []
    for row in inputs:
        found.append(memory.due(0, 3))
        noise.append(np.rint(row - found[-1]))
        memory.keep(0, noise[-1])
        memory.advance()
    exact = exact_due(encoder, noise)
    worst = max(
        abs(Fraction(float(a)) - b)
        for row, rational in zip(found, exact, strict=True)
        for a, b in zip(row, rational, strict=True)
    )
    assert 0 < worst <= encoder.rounding * (2.0**45 + 1)


def exact_due(encoder: Encoder, noise: list[Matrix]) -> list[list[Fraction]]:
    whole = [[Fraction(float(x)) for x in row] for row in noise]
    if isinstance(encoder, Banded):
        c = [Fraction(x) for x in encoder.coefficients]
        return [
            [sum((c[k] * whole[t - k][i] for k in range(1, min(t, len(c) - 1) + 1)), Fraction(0)) for i in range(3)]
            for t in range(len(whole))
        ]
    assert isinstance(encoder, Buffered)
    scales, decays = ([Fraction(x) for x in given] for given in (encoder.scales, encoder.decays))
    buffers, found = [[Fraction(0)] * 3 for _ in scales], []
    for row in whole:
        found.append([sum((s * b[i] for s, b in zip(scales, buffers, strict=True)), Fraction(0)) for i in range(3)])
        buffers = [[d * b[i] + row[i] for i in range(3)] for d, b in zip(decays, buffers, strict=True)]
    return found


@pytest.mark.parametrize("encoder", ENCODERS[1:], ids=name_of)
def test_correlating_anew_moves_nothing_further(encoder: Encoder) -> None:
    """A block for the steps before and one for those after, whose columns are no longer anywhere."""
    c = dense.matrix(encoder.column)
    for separation in (encoder.reach, STEPS // 2):
        among = list(dense.patterns(STEPS, separation))
        whole = dense.squared_sensitivity(c, among)
        for cut in range(1, STEPS):
            anew = c.copy()
            anew[cut:, :cut] = 0
            assert dense.squared_sensitivity(anew, among) <= whole * (1 + 1e-12)


def test_going_on_from_an_older_step_would_move_more() -> None:
    """Why it is refused: rows of the steps after it are there twice."""
    c = dense.matrix(banded(3, STEPS, 0.0).column)
    twice = np.concatenate([c[:6], c[4:]])  # steps 4 and 5 were made, lost, and made again
    assert np.linalg.norm(twice, axis=0).max() > np.linalg.norm(c, axis=0).max() * 1.05


def kept(encoder: Encoder, steps: int = 4, size: int = 5) -> Stream:
    stream = Stream(encoder, size, 0.5, 1.0)
    for step in range(steps):
        stream.memory.keep(0, np.arange(size, dtype=np.float64) + step)
        stream.memory.advance()
    return stream


@pytest.mark.parametrize("encoder", ENCODERS[1:], ids=name_of)
def test_a_memory_goes_on_from_its_file(encoder: Encoder, tmp_path: Path) -> None:
    stream, again = kept(encoder), Stream(encoder, 5, 0.5, 1.0)
    path, when = tmp_path / "run.noise", When("a" * 16, 4)
    stream.save(path, when, finished=False)
    assert path.stat().st_mode & 0o077 == 0
    assert os.listdir(tmp_path) == ["run.noise"]
    assert again.load(path, when) is None
    assert np.array_equal(stream.memory.due(0, 5), again.memory.due(0, 5))
    for one in (stream, again):
        one.memory.keep(0, np.ones(5))
        one.memory.advance()
    assert np.array_equal(stream.memory.due(0, 5), again.memory.due(0, 5))
    stream.save(path, When("a" * 16, 5), finished=False)
    assert path.exists()
    stream.save(path, When("a" * 16, 6), finished=False)  # a step more than is remembered
    assert not path.exists()
    stream.save(path, When("a" * 16, 5), finished=True)
    assert not path.exists()


def test_what_does_not_fit_is_not_gone_on_with(tmp_path: Path) -> None:
    encoder, path, when = ENCODERS[1], tmp_path / "run.noise", When("a" * 16, 4)
    kept(encoder).save(path, when, finished=False)
    fresh = Stream(encoder, 5, 0.5, 1.0)
    for other in (When("b" * 16, 4), When("a" * 16, 3)):
        assert "is of another step or run" in str(fresh.load(path, other))
    assert "of another plan" in str(Stream(ENCODERS[2], 5, 0.5, 1.0).load(path, when))
    assert "of another plan" in str(Stream(encoder, 5, 0.25, 1.0).load(path, when))
    assert "or of another number of processes" in str(Stream(encoder, 5, 0.5, 1.0, "1 of 3").load(path, when))
    assert "numbers of shape (1, 5) instead of (1, 6)" in str(Stream(encoder, 6, 0.5, 1.0).load(path, when))
    path.write_bytes(b"nonsense")
    assert "is damaged" in str(fresh.load(path, when))
    path.unlink()
    assert f"there is no {path}" in str(fresh.load(path, when))
    assert fresh.memory.steps == 0


def test_a_memory_that_cannot_be_is_refused() -> None:
    memory = ENCODERS[1].memory(2)
    with pytest.raises(ValueError, match="not finite"):
        memory.restore(torch.tensor([[1.0, torch.inf]], dtype=torch.float64), 1)
    with pytest.raises(ValueError, match="a number of steps cannot be -1"):
        memory.restore(torch.ones(1, 2, dtype=torch.float64), -1)
