"""Normal numbers in tensor ops: the words of ChaCha to the bit, and normal as far as can be told."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from persample.dp.on_device import _from_words, keystream, normals
from persample.dp.sources import Secure, Seeded
from tests.dp.test_normals import Tally

CPU = torch.device("cpu")


@pytest.mark.parametrize("blocks", [0, 1, 5, 1000])
def test_words_are_those_of_chacha20(blocks: int) -> None:
    """The rounds that are used are the same rounds, fewer of them."""
    key = os.urandom(32)
    want = Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor().update(bytes(64 * blocks))
    assert keystream(key, blocks, CPU, rounds=20).numpy().tobytes() == want


def test_words_of_twelve_rounds() -> None:
    """The first words of a key of zeros, as published for ChaCha12 (draft-strombergson-chacha-test-vectors, TC1)."""
    words = keystream(bytes(32), 1, CPU).numpy().tobytes()
    assert words[:16].hex() == "9bf49a6a0755f953811fce125f2683d5"


@pytest.mark.parametrize("size", [0, 1, 2, 7, 4099])
def test_as_many_as_are_asked_for(size: int) -> None:
    z = normals(size, CPU)
    assert (z.shape, z.dtype) == ((size,), torch.float64)
    key = bytes(range(32))
    assert torch.equal(normals(size, CPU, key), normals(5000, CPU, key)[:size])  # words in order, none twice


def test_a_few_million() -> None:
    tally = Tally()
    for _ in range(20):
        tally.add(normals(2**17, CPU).numpy())
    tally.check()


@pytest.mark.slow
def test_a_thousand_million() -> None:
    tally = Tally()
    while tally.count < 10**9:
        tally.add(normals(2**17, CPU).numpy())
    tally.check()


def test_extreme_words() -> None:
    """All bits zero or one: the longest and the shortest radius, and nothing that is not finite."""
    zeros, ones = torch.zeros(1, 4, dtype=torch.int32), torch.full((1, 4), -1, dtype=torch.int32)
    far = _from_words(zeros)
    assert far[0].tolist() == pytest.approx([math.sqrt(2 * 77 * math.log(2)), 0])
    assert _from_words(ones).abs().max() < 1e-7


def test_every_bit_counts() -> None:
    """Of a radius near the end of the tail, and of an angle."""
    words = torch.zeros(64, 4, dtype=torch.int64)
    for bit in range(32):
        words[bit, 1], words[32 + bit, 2] = 1 << bit, 1 << bit
    words = torch.where(words < 2**31, words, words - 2**32).to(torch.int32)
    z = _from_words(words)
    radii, angles = z.norm(dim=1)[:32], np.arctan2(*z[32:].flip(1).numpy().T) % (2 * math.pi)
    bits = np.arange(32)
    assert np.allclose(radii.numpy(), np.sqrt(-2 * np.log(2.0 ** (bits - 64) + 2.0**-77)), rtol=1e-12)
    assert np.allclose(angles, 2 * math.pi * 2.0 ** (bits - 32), rtol=1e-6)


def test_keys_are_never_used_twice() -> None:
    source = Secure()
    assert not torch.equal(source.normals_on(CPU, 100), source.normals_on(CPU, 100))


def test_a_seed_fixes_numbers_for_all_devices() -> None:
    accelerator = torch.device("cuda")
    assert not Seeded(0).draws_on(accelerator)
    assert Secure().draws_on(accelerator)
    assert not Secure().draws_on(CPU)
    with pytest.raises(NotImplementedError, match="Seeded draws on the host alone"):
        Seeded(0).normals_on(accelerator, 3)
