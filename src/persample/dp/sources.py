"""Where random numbers come from: a seed, or the operating system."""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels.devices import has_float64
from . import on_device
from .normals import Numbers, Stream, Words, fill

_SAMPLING, _NOISE = 1, 2  # what a draw is for is part of its key
_UNIT = 2.0**-53


class Source(ABC):
    """Draws that are named by what they are for, and the number of the step or release, which the caller gives once.

    Draws of the same name are the same in every process that shares `secret`; a fresh ``nonce`` makes all of them new.
    """

    nonce: bytes = b""

    @property
    @abstractmethod
    def secret(self) -> bytes:
        """What processes have to share to draw the same samples."""

    @abstractmethod
    def uniforms(self, step: int, count: int) -> Numbers:
        """(count,) uniform in [0, 1), which decide who is in the batch of a step."""

    @abstractmethod
    def normals(self, number: int, block: int, out: Numbers) -> None:
        """Fill with a block of the standard normal noise of a release."""

    def draws_on(self, device: torch.device) -> bool:
        """Is noise for this device made there, by `normals_on`? It is not where a seed fixes it for all devices."""
        return False

    def normals_on(self, device: torch.device, size: int) -> Tensor:
        """(size,) standard normal numbers in float64 that no other call returns, made on a device."""
        raise NotImplementedError(f"{type(self).__name__} draws on the host alone")

    def begin(self, number: int, size: int) -> None:  # noqa: B027 (for most, there is nothing to do)
        """Know ahead that so many numbers will be drawn for a release."""

    def renew(self) -> None:
        """Make everything that is drawn from now on new, whatever was drawn by an earlier process."""
        self.nonce = secrets.token_bytes(16)


class Seeded(Source):
    """Fast, and the same for the same seed: for trials, and where nobody can learn the seed or guess its stream.

    ``run`` describes what is drawn for: runs that are set up in different ways share nothing, whatever their seed.
    """

    def __init__(self, seed: int | None, run: str = "") -> None:
        self._key = secrets.token_bytes(32) if seed is None else hashlib.sha256(f"{seed} {run}".encode()).digest()

    @classmethod
    def keyed(cls, key: bytes) -> Seeded:
        """A source with the secret of another one."""
        source = cls(None)
        source._key = key
        return source

    @property
    def secret(self) -> bytes:
        return self._key

    def _generator(self, purpose: int, number: int, block: int = 0) -> np.random.Generator:
        # 128-bit keys: torch.Generator would keep 32 bits of them, and steps would share streams sooner or later.
        words = [self._key, self.nonce, purpose, number, block]
        digest = hashlib.sha256(repr(words).encode()).digest()
        return np.random.Generator(np.random.SFC64(np.random.SeedSequence(np.frombuffer(digest, "<u4"))))

    def uniforms(self, step: int, count: int) -> Numbers:
        return self._generator(_SAMPLING, step).random(count)

    def normals(self, number: int, block: int, out: Numbers) -> None:
        self._generator(_NOISE, number, block).standard_normal(out=out)


class Secure(Source):
    """Cryptographically secure: noise from keys of the operating system, samples from SHAKE-256 with such a key.

    Every block of noise has a key of its own, which is drawn when the block is, used once and kept nowhere: no noise
    can come twice, whatever is forked, copied or resumed, and none can be drawn again.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._key = secrets.token_bytes(32) if key is None else key

    @property
    def secret(self) -> bytes:
        return self._key

    def uniforms(self, step: int, count: int) -> Numbers:
        stream = hashlib.shake_256(self._key + self.nonce + step.to_bytes(8, "little"))
        return _integers(stream.digest(8 * count)) * _UNIT

    def normals(self, number: int, block: int, out: Numbers) -> None:
        fill(out, secret_words())

    def draws_on(self, device: torch.device) -> bool:
        return device.type != "cpu" and has_float64(device)

    def normals_on(self, device: torch.device, size: int) -> Tensor:
        return on_device.normals(size, device)


def secret_words() -> Stream:
    """Words that nobody can foretell: AES-256 in counter mode with a new key, or the operating system's own.

    Both are secure; without the package ``cryptography`` it takes several times as long.
    """
    return _from_system if _AES is None else _by_aes(os.urandom(32))


def _find_aes() -> Callable[[bytes], Any] | None:
    """AES in Galois/counter mode, from the release of ``cryptography`` on that writes into given memory."""
    try:
        found = import_module("cryptography.hazmat.primitives.ciphers.aead").AESGCM
    except ImportError:
        return None
    return found if hasattr(found, "encrypt_into") else None


_AES = _find_aes()
_TAG = 16  # bytes that follow what was encrypted
_ZEROS = memoryview(bytes(2**21))  # to be encrypted


def _by_aes(key: bytes) -> Stream:
    """Zeros encrypted in Galois/counter mode: the counter mode that libraries have the fastest code for, and a tag."""
    assert _AES is not None
    cipher, requests = _AES(key), count()

    def words(size: int) -> Words:
        zeros, room = (_ZEROS[: 8 * size], _room()) if 8 * size <= len(_ZEROS) else (bytes(8 * size), bytearray())
        room = room or bytearray(8 * size + _TAG)
        cipher.encrypt_into(next(requests).to_bytes(12, "little"), zeros, None, memoryview(room)[: 8 * size + _TAG])
        return np.frombuffer(room, dtype=np.int64, count=size)

    return words


_kept = threading.local()


def _room() -> bytearray:
    """Memory that a thread uses again and again."""
    if not hasattr(_kept, "room"):
        _kept.room = bytearray(len(_ZEROS) + _TAG)
    room: bytearray = _kept.room
    return room


def _from_system(size: int) -> Words:
    return np.frombuffer(os.urandom(8 * size), dtype=np.int64)


def _integers(data: bytes) -> Numbers:
    """Whole numbers of 53 bits, eight bytes each."""
    return (np.frombuffer(data, dtype="<u8") >> np.uint64(11)).astype(np.float64)


def make_source(secure: bool | None, seed: int | None, agree: Callable[[bytes], bytes], run: str = "") -> Source:
    """The source that was asked for, or a secure one if there is no seed; all processes agree on its secret."""
    secure = seed is None if secure is None else secure
    if secure and seed is not None:
        raise ValueError("secure=True has no seed: noise that can be drawn again can be taken away again")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**128):
        raise ValueError(f"seed must be an integer from 0 to 2**128 - 1, not {seed!r}")
    if secure:
        return Secure(agree(Secure().secret))
    return Seeded.keyed(agree(Seeded(seed, run).secret))
