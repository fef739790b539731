"""Normal numbers from random words: their distribution to the last of a thousand million, and what they depend on.

Words come from the operating system: bounds are those of a false alarm of 1e-9.
"""

from __future__ import annotations

import math
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import binom, chi2, kstest, norm

from persample.dp import sources
from persample.dp.noise import BLOCK
from persample.dp.normals import Numbers, Stream, _uniforms, fill, layers
from persample.dp.sources import Secure, Seeded, secret_words

ALARM = 1e-9
BINS = np.linspace(-7, 7, 7 * 2 * 64 + 1)


def drawn(count: int, stream: Stream | None = None) -> Numbers:
    out = np.empty(count)
    fill(out, stream or secret_words())
    return out


def words_of(seed: int) -> Stream:
    """Words that come again."""
    generator = np.random.Generator(np.random.SFC64(seed))

    return lambda size: generator.integers(-(2**63), 2**63, size, dtype=np.int64)


class Tally:
    """Counts and sums over blocks of numbers that should be normal."""

    def __init__(self) -> None:
        self.count, self.bins = 0, np.zeros(len(BINS) + 1, dtype=np.int64)
        self.beyond = dict.fromkeys([(side, k) for side in (-1, 1) for k in (3, 4, 5, 6)], 0)
        self.powers, self.beside, self.between = np.zeros(4), 0.0, 0.0
        self._last: Numbers | None = None

    def add(self, z: Numbers) -> None:
        self.count += len(z)
        places = np.clip(np.floor((z + 7) * 64), -1, len(BINS) - 1).astype(np.int64) + 1
        self.bins += np.bincount(places, minlength=len(self.bins))
        for side, k in self.beyond:
            self.beyond[side, k] += int(np.count_nonzero(z * side > k))
        square = z * z
        self.powers += [z.sum(), square.sum(), (square * z).sum(), (square * square).sum()]
        self.beside += float(z[1:] @ z[:-1])
        self.between += 0.0 if self._last is None else float(z @ self._last)
        self._last = z.copy()

    def check(self) -> None:
        far, n = norm.isf(ALARM / 2), self.count
        for (side, k), found in self.beyond.items():
            probability = norm.sf(k)
            assert binom.cdf(found, n, probability) > ALARM, (side, k, found)
            assert binom.sf(found - 1, n, probability) > ALARM, (side, k, found)
        for power, (mean, variance) in enumerate([(0, 1), (1, 2), (0, 15), (3, 96)], start=1):
            assert abs(self.powers[power - 1] / n - mean) < far * math.sqrt(variance / n), power
        assert abs(self.beside) < far * math.sqrt(n)
        assert abs(self.between) < far * math.sqrt(n)
        expected = n * np.diff(np.concatenate([[0], norm.cdf(BINS[BINS <= 0]), 1 - norm.sf(BINS[BINS > 0]), [1]]))
        often = expected > 50
        distance = ((self.bins - expected)[often] ** 2 / expected[often]).sum()
        assert distance < chi2.isf(ALARM, often.sum() - 1)


def test_layers_are_of_one_size_and_end_at_the_top() -> None:
    table = layers()
    areas = table.widths[1:] * 2.0**63 * (table.high - table.low)[1:]
    tail = math.sqrt(math.pi / 2) * math.erfc(table.end / math.sqrt(2))
    assert np.abs(areas / (table.end * table.high[0] + tail) - 1).max() < 1e-9
    assert table.widths[0] * 2.0**63 * table.high[0] == pytest.approx(areas[0], rel=1e-12)
    assert table.within[-1] == 0
    assert table.high[-1] == 1


def test_a_few_million() -> None:
    tally = Tally()
    for _ in range(40):
        tally.add(drawn(BLOCK))
    tally.check()


@pytest.mark.slow
def test_a_thousand_million() -> None:
    tally, source, z = Tally(), Secure(), np.empty(BLOCK)
    while tally.count < 10**9:
        source.normals(0, 0, z)
        tally.add(z)
    tally.check()


def test_a_tally_finds_what_is_wrong() -> None:
    """Each of these would go unnoticed if its part of the check did nothing."""
    good = np.random.default_rng(0).standard_normal((4, 2**20))
    wrong = {
        "wide": good * 1.01,
        "moved": good + 0.01,
        "cut": np.clip(good, -4, 4),
        "repeated": np.stack([good[0]] * 4),
        "even": np.round(good * 64) / 64,
        "slow": np.repeat(good[:, ::2], 2, axis=1),
    }
    for blocks in wrong.values():
        tally = Tally()
        for block in blocks:
            tally.add(block)
        with pytest.raises(AssertionError):
            tally.check()
    tally = Tally()
    for block in good:
        tally.add(block)
    tally.check()


def test_all_words_of_the_lowest_layer_and_the_tail() -> None:
    """Words of one layer alone: the tail is that of a normal number of which it is known that it lies there."""
    some = words_of(0)

    z, end = drawn(400_000, lambda size: some(size) & ~np.int64(1023)), layers().end
    tail = np.abs(z[np.abs(z) > end])
    area = math.sqrt(math.pi / 2) * math.erfc(end / math.sqrt(2))
    share = area / (area + end * layers().high[0])
    assert binom.cdf(len(tail), len(z), share) > ALARM  # none is lost, as trying again in other layers would do
    assert binom.sf(len(tail) - 1, len(z), share) > ALARM
    assert kstest(norm.sf(tail) / norm.sf(end), "uniform").pvalue > ALARM
    assert tail.max() > 5


@pytest.mark.parametrize("count", [0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1])
def test_numbers_follow_from_words_alone(count: int) -> None:
    assert np.array_equal(drawn(count, words_of(3)), drawn(count, words_of(3)))
    if count > 1:
        assert not np.array_equal(drawn(count, words_of(3)), drawn(count, words_of(4)))


def test_numbers_lie_closer_than_any_grid() -> None:
    """No two are the same, and their last bits are as often set as not, in the centre and outside."""
    z = drawn(2**18)
    assert len(np.unique(z)) == len(z)
    for low, high in ((0, 0.5), (0.5, 2), (2, 9)):
        some = np.abs(z)[(np.abs(z) >= low) & (np.abs(z) < high)]
        odd = np.count_nonzero(np.floor(some * 2.0**40) % 2)
        assert abs(odd - len(some) / 2) < norm.isf(ALARM / 2) * math.sqrt(len(some)) / 2


@pytest.mark.parametrize("size", [1, 2, 2**14, 2**14 + 1, 2**16, 2**18 + 3])
@pytest.mark.parametrize("with_package", [True, False])
def test_streams_of_words_never_come_again(size: int, with_package: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if with_package:
        pytest.importorskip("cryptography")
    else:
        monkeypatch.setattr(sources, "_AES", None)
    here, there = secret_words(), secret_words()
    every = np.concatenate([stream(size).copy() for stream in (here, here, there, there)])
    assert len(every) == 4 * size
    assert len(np.unique(every)) == len(every)
    ones = np.unpackbits(every.view(np.uint8)).sum()
    assert abs(int(ones) - 32 * len(every)) < norm.isf(ALARM / 2) * math.sqrt(64 * len(every)) / 2 + 1


def test_aes_is_aes() -> None:
    """The first block under a key of zeros is known (test case 14 of McGrew and Viega's "The Galois/Counter Mode")."""
    pytest.importorskip("cryptography")
    stream = sources._by_aes(bytes(32))
    assert stream(4).tobytes()[:16].hex() == "cea7403d4d606b6e074ec5d3baf39d18"
    assert stream(4).tobytes()[:16].hex() != "cea7403d4d606b6e074ec5d3baf39d18"


def test_without_a_package_that_writes_into_given_memory_the_system_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setattr(sources, "import_module", lambda name: SimpleNamespace(AESGCM=object))
    assert sources._find_aes() is None
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    assert sources._find_aes() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_draws_other_noise() -> None:
    """Even from the same object, for the same release and block, as does whoever copied or resumed it."""
    source, here = Secure(), np.empty(8)
    mine, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        there = np.empty(8)
        source.normals(0, 0, there)
        os.write(theirs, there.tobytes())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(mine, "rb") as end:
        there = np.frombuffer(end.read())
    assert os.waitpid(child, 0)[1] == 0
    source.normals(0, 0, here)
    again = np.empty(8)
    source.normals(0, 0, again)
    copied = Secure(source.secret)
    copied.nonce = source.nonce
    more = np.empty(8)
    copied.normals(0, 0, more)
    assert len(np.unique(np.concatenate([here, there, again, more]))) == 32


def test_noise_is_secure_unless_there_is_a_seed() -> None:
    assert isinstance(sources.make_source(None, None, lambda key: key), Secure)
    assert isinstance(sources.make_source(None, 3, lambda key: key), Seeded)
    assert isinstance(sources.make_source(False, None, lambda key: key), Seeded)


@pytest.mark.parametrize("word", [-(2**63), -1, 0, 1, 2**63 - 1])
def test_uniforms_are_never_zero_nor_one(word: int) -> None:
    assert 0 < _uniforms(1, lambda size: np.full(size, word))[0] < 1
