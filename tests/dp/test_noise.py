"""The noise: its size on every coordinate, its independence, its grid. False alarms have probability below 1e-6.

All seeds are fixed, but for the secure source, which has none: there, bounds are those of a false alarm of 1e-9.
"""

from __future__ import annotations

import math
import os
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.stats import chi2, kstest, norm
from torch import Tensor

from persample.dp.noise import BLOCK, Scale, Sum, add_noise, blocks_before, shares
from persample.dp.normals import Numbers
from persample.dp.sources import Secure, Seeded, Source, make_source

SOURCES = [Seeded(0), Secure()]
ALARM = 1e-9


def draws(source: Source, scale: Scale, steps: int, shapes: list[tuple[int, ...]]) -> Tensor:
    """(steps, size): the noise of every step, all tensors put end to end."""
    found = []
    for step in range(steps):
        sums = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
        add_noise(sums, scale, source, step)
        found.append(torch.cat([t.flatten() for t in sums]))
    return torch.stack(found)


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: type(s).__name__)
def test_the_standard_deviation_of_every_coordinate(source: Source) -> None:
    steps, shapes = 2000, [(3, 4), (1,), (0,), (7,)]
    scale = Scale(sensitivity=0.7, noise_multiplier=1.3, size=20)
    assert scale.std == pytest.approx(0.7 * 1.3, rel=4e-4)
    assert scale.std > 0.7 * 1.3
    sums = (draws(source, scale, steps, shapes) / scale.std).square().sum(0)
    low, high = chi2.ppf(ALARM / 20, steps), chi2.isf(ALARM / 20, steps)
    assert bool(((low < sums) & (sums < high)).all())


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: type(s).__name__)
def test_the_distribution_is_normal(source: Source) -> None:
    z = draws(source, Scale(1.0, 1.0, 200_000), 1, [(200_000,)])[0] / Scale(1.0, 1.0, 200_000).std
    assert kstest(z.numpy(), "norm").pvalue > ALARM
    beyond = int((z.abs() > 3).sum())
    expected = 200_000 * 2 * norm.sf(3)
    assert abs(beyond - expected) < 6.2 * math.sqrt(expected)  # normal approximation of a binomial, 1e-9


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: type(s).__name__)
def test_steps_and_coordinates_are_independent(source: Source) -> None:
    """Correlations of n pairs have variance 1 / n: none of the 4950 and 190 is beyond 7 standard deviations."""
    z = draws(source, Scale(1.0, 1.0, 4000), 100, [(4000,)])
    z = (z - z.mean()) / z.std()
    between_steps = (z @ z.t() / z.shape[1]).fill_diagonal_(0)
    assert float(between_steps.abs().max()) < 7 / math.sqrt(z.shape[1])
    columns = z.reshape(-1, 20)
    between_coordinates = (columns.t() @ columns / len(columns)).fill_diagonal_(0)
    assert float(between_coordinates.abs().max()) < 7 / math.sqrt(len(columns))


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: type(s).__name__)
def test_no_draw_is_made_twice(source: Source) -> None:
    shapes = [(70_000,), (70_000,)]  # several blocks
    z = draws(source, Scale(1.0, 1.0, 140_000), 2, shapes).flatten()
    # Two of 280,000 draws on a grid of about 2**21 values per standard deviation do coincide: not whole runs of them.
    runs = np.unique(np.lib.stride_tricks.sliding_window_view(z.numpy(), 4), axis=0)
    assert len(runs) == len(z) - 3


def test_seeded_noise_is_reproducible_and_new_for_every_key() -> None:
    scale = Scale(1.0, 1.0, 5)
    first = draws(Seeded(3), scale, 2, [(5,)])
    assert torch.equal(first, draws(Seeded(3), scale, 2, [(5,)]))
    assert not torch.equal(first, draws(Seeded(4), scale, 2, [(5,)]))
    renewed = Seeded(3)
    renewed.renew()
    assert not torch.equal(first, draws(renewed, scale, 2, [(5,)]))


def test_noise_does_not_depend_on_threads() -> None:
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(draws(Seeded(0), Scale(1.0, 1.0, 600_000), 1, [(600_000,)]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("source", SOURCES, ids=lambda s: type(s).__name__)
def test_results_lie_on_the_grid_whatever_the_data(source: Source, dtype: torch.dtype) -> None:
    """The set of possible results must not tell of the sums: all of them are multiples of the same power of two."""
    scale = Scale(sensitivity=1.0, noise_multiplier=1.0, size=1000)
    assert math.frexp(scale.grid)[0] == 0.5  # a power of two
    assert scale.grid * math.sqrt(scale.size) <= scale.sensitivity * 2.0**-12
    for sums in (torch.zeros(1000), torch.randn(1000) * 1e-3, torch.randn(1000) * 50, torch.full((1000,), 1 / 3)):
        noisy = sums.to(dtype)
        add_noise([noisy], scale, source, 0)
        steps = noisy.double() / scale.grid
        assert torch.equal(steps, steps.round())
        assert bool((steps % 2 != 0).any())  # and not of a coarser one


def test_rounding_moves_neighbouring_sums_apart_by_no_more_than_is_accounted() -> None:
    scale = Scale(sensitivity=1.0, noise_multiplier=1.0, size=10_000)
    torch.manual_seed(0)
    for _ in range(20):
        here = torch.randn(10_000, dtype=torch.float64) * 5
        move = torch.randn(10_000, dtype=torch.float64)
        there = here + move / move.norm()
        rounded = [torch.round(t / scale.grid) * scale.grid for t in (here, there)]
        apart = float((rounded[0] - rounded[1]).norm())
        assert apart <= scale.std / scale.noise_multiplier


def test_noise_adds_to_the_sums() -> None:
    shapes, scale = [(3, 4), (5,)], Scale(1.0, 1.0, 17)
    sums = [torch.randn(shape) * 10 for shape in shapes]
    noisy = [t.clone() for t in sums]
    add_noise(noisy, scale, Seeded(0), 3)
    alone = [torch.zeros(shape) for shape in shapes]
    add_noise(alone, scale, Seeded(0), 3)
    for a, b, c in zip(noisy, sums, alone, strict=True):
        torch.testing.assert_close(a, b + c, atol=1e-3, rtol=0)


def test_complex_sums_get_noise_on_both_parts() -> None:
    total = torch.zeros(1000, dtype=torch.complex128)
    add_noise([total], Scale(1.0, 1.0, 2000), Seeded(0), 0)
    for part in (total.real, total.imag):
        assert abs(float(part.square().mean()) - 1) < 0.3
    assert abs(float((total.real * total.imag).mean())) < 0.2


def test_no_noise_changes_nothing() -> None:
    total = torch.tensor([1 / 3])
    add_noise([total], Scale(1.0, 0.0, 1), Seeded(0), 0)
    assert total.item() == torch.tensor(1 / 3).item()
    add_noise([], Scale(1.0, 1.0, 0), Seeded(0), 0)


def test_what_cannot_be_done_in_place_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        add_noise([torch.zeros(3, 4).t()], Scale(1.0, 1.0, 12), Seeded(0), 0)


def test_secure_uniforms_come_from_the_key_alone() -> None:
    here, there = Secure(), Secure()
    there = Secure(here.secret)
    assert np.array_equal(here.uniforms(5, 100), there.uniforms(5, 100))
    assert not np.array_equal(here.uniforms(5, 100), here.uniforms(6, 100))
    assert not np.array_equal(here.uniforms(5, 100), Secure().uniforms(5, 100))
    assert not np.array_equal(Secure().secret, Secure().secret)


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: type(s).__name__)
def test_uniforms_are_uniform(source: Source) -> None:
    u = source.uniforms(0, 100_000)
    assert u.min() >= 0
    assert u.max() < 1
    assert kstest(u, "uniform").pvalue > ALARM


def test_sources_are_chosen() -> None:
    def same(value: bytes) -> bytes:
        return value

    assert isinstance(make_source(True, None, same), Secure)
    assert make_source(False, 7, same).secret == Seeded(7).secret
    assert make_source(False, None, same).secret != make_source(False, None, same).secret
    with pytest.raises(ValueError, match="secure=True has no seed"):
        make_source(True, 1, same)
    with pytest.raises(ValueError, match="seed must be an integer from 0"):
        make_source(False, -1, same)
    agreed = make_source(False, 1, lambda _: Seeded(9).secret)
    assert agreed.secret == Seeded(9).secret


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [0, 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3])
def test_shares_are_whole_blocks_of_all_numbers(size: int, processes: int) -> None:
    found = shares(size, processes)
    assert all(one.stop == other.start for one, other in pairwise(found) if other)
    assert sum(len(share) for share in found) == size
    assert all(share.start == blocks_before(share.start) * BLOCK for share in found if share)
    assert max(map(len, found)) <= BLOCK * -(-size // (BLOCK * processes))


def test_shares_have_the_noise_of_one_process() -> None:
    size, scale = 3 * BLOCK + 5, Scale(1.0, 1.0, 3 * BLOCK + 5)
    whole, parts = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    add_noise([whole], scale, Seeded(0), 3)
    for share in shares(size, 2):
        add_noise([parts[share.start : share.stop]], scale, Seeded(0), 3, first_block=blocks_before(share.start))
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("divisor", [1.0, 3.0, 25.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noisy_sums_go_elsewhere_over_a_divisor_as_if_it_were_done_later(dtype: torch.dtype, divisor: float) -> None:
    """Bit by bit, whatever the unit: of several sums in one block, and of one in several."""
    sizes, units = [3, 0, BLOCK + 5, 7], [2.0**-9, 1.0, 2.0**-30, 4.0]
    whole = [torch.randint(-(2**30), 2**30, (size,)).double() for size in sizes]
    scale = Scale(0.3, 1.1, sum(sizes))
    later = [numbers * unit for numbers, unit in zip(whole, units, strict=True)]
    add_noise(later, scale, Seeded(0), 3)
    sums = [
        Sum(numbers.clone(), unit, torch.full_like(numbers, torch.nan, dtype=dtype), divisor)
        for numbers, unit in zip(whole, units, strict=True)
    ]
    add_noise(sums, scale, Seeded(0), 3)
    for each, want in zip(sums, later, strict=True):
        assert each.goal.dtype == dtype
        assert torch.equal(each.goal, (want / divisor).to(dtype))


def test_what_fails_in_one_thread_fails() -> None:
    class Failing(Seeded):
        def normals(self, number: int, block: int, out: Numbers) -> None:
            if block == 1:
                raise MemoryError("block 1")
            super().normals(number, block, out)

    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with pytest.raises(MemoryError, match="block 1"):
                add_noise([torch.zeros(5 * BLOCK)], Scale(1.0, 1.0, 5 * BLOCK), Failing(0), 0)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_has_threads_of_its_own() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        scale, (here, there) = Scale(1.0, 1.0, 3 * BLOCK), torch.zeros(2, 3 * BLOCK)
        add_noise([here], scale, Seeded(0), 0)
        child = os.fork()
        if child == 0:  # in which PyTorch's own threads are not there, either
            add_noise([there], scale, Seeded(0), 0)
            os._exit(0 if np.array_equal(there.numpy(), here.numpy()) else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(before)
