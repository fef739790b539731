"""Noise that is drawn ahead is what would be drawn later, and is used once."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch

from persample.dp.early import Early
from persample.dp.noise import BLOCK, Scale, add_noise
from persample.dp.normals import Numbers
from persample.dp.sources import Secure, Seeded

CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


@pytest.fixture(autouse=True)
def an_idle_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persample.dp.early._has_idle_core", lambda: True)


SIZES = [1, 7, BLOCK - 1, BLOCK, 3 * BLOCK + 5]


def _noisy(source: Seeded | Early, number: int, size: int, stream: int = 0) -> torch.Tensor:
    sums = torch.zeros(size, dtype=torch.float64)
    add_noise([sums], Scale(1.0, 1.0, size), source, number, stream)
    return sums


@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_source_s_own(size: int) -> None:
    early = Early(Seeded(3))
    for number in range(3):
        early.begin(number, size)
        early.begin(number, size)
        assert torch.equal(_noisy(early, number, size), _noisy(Seeded(3), number, size))


@pytest.mark.parametrize("size", SIZES)
def test_other_releases_and_other_streams_have_their_own(size: int) -> None:
    early = Early(Seeded(3))
    early.begin(5, size)
    assert torch.equal(_noisy(early, 6, size), _noisy(Seeded(3), 6, size))
    assert torch.equal(_noisy(early, 5, size, stream=1), _noisy(Seeded(3), 5, size, stream=1))
    assert torch.equal(_noisy(early, 5, size + 3), _noisy(Seeded(3), 5, size + 3))


def test_a_renewed_source_draws_anew() -> None:
    early = Early(Seeded(3))
    early.begin(0, 100)
    old = _noisy(early, 0, 100)
    early.renew()
    assert not torch.equal(_noisy(early, 0, 100), old)
    early.begin(0, 100)
    early.nonce = b"agreed"
    same = Seeded(3)
    same.nonce = b"agreed"
    assert torch.equal(_noisy(early, 0, 100), _noisy(same, 0, 100))


def test_secure_noise_is_new_for_every_release() -> None:
    early, drawn = Early(Secure()), []
    for number in range(3):
        early.begin(number, 50)
        drawn.append(_noisy(early, number, 50))
    assert len({tuple(t.tolist()) for t in drawn}) == 3


def test_what_the_other_thread_raises_is_raised() -> None:
    class Broken(Seeded):
        def normals(self, number: int, block: int, out: Numbers) -> None:
            raise OSError("no entropy")

    early = Early(Broken(0))
    early.begin(0, 10)
    with pytest.raises(OSError, match="no entropy"):
        early.normals(0, 0, np.empty(10))
    early.begin(1, 10)  # and the next one can be begun
    with pytest.raises(OSError, match="no entropy"):
        early.normals(1, 0, np.empty(10))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_waits_for_no_thread_of_its_parent() -> None:
    early = Early(Seeded(3))
    early.begin(0, 10)
    early.normals(0, 0, np.empty(10))
    early.begin(1, 3 * BLOCK)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        early.renew()
        early.begin(2, 10)
        early.normals(2, 0, np.empty(10))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_nothing_is_drawn_ahead_where_all_cores_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    before = torch.get_num_threads()
    try:
        for threads, is_drawn in ((1, len(CORES) > 1), (len(CORES), False)):
            torch.set_num_threads(threads)
            early = Early(Seeded(3))
            early.begin(0, 10)
            assert (early._drawing is not None) == is_drawn
            assert torch.equal(_noisy(early, 0, 10), _noisy(Seeded(3), 0, 10))
    finally:
        torch.set_num_threads(before)
