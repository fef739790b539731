"""Short texts that differ when models or batches do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from os import urandom
from typing import Any

import torch
from torch import Tensor

_BYTES = 16
_WORDS = 128  # of four bytes, of which a short form has one sum of eight bytes
_AT_ONCE = 2**11  # sums that are made at a time: their words stay in caches


def of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Of the names, dtypes, shapes and every bit of some tensors."""
    digest = blake2b(digest_size=_BYTES)
    for name, t in tensors.items():
        digest.update(name.encode())
        _add_tensor(digest, t)
    return digest.hexdigest()


class Known:
    """`of_tensors` of a model that is asked for again and again, and differs seldom.

    Hashing every bit takes longer than many a question. What is hashed each time is a short form: sums of a few words,
    each times a random number of its own, which are made as fast as memory is read. Two states, whatever they are, have
    the same with a chance of at most one in 2**33, as nothing but this object knows its random numbers.
    """

    def __init__(self) -> None:
        self._by_short_form: dict[str, str] = {}
        self._factors = torch.frombuffer(bytearray(urandom(8 * _WORDS)), dtype=torch.int64)

    def of(self, tensors: Mapping[str, Tensor]) -> str:
        """`of_tensors`; where a short form is the same as before, so is the text."""
        digest: Any = blake2b(digest_size=_BYTES)
        for name, t in tensors.items():
            digest.update(f"{name} {t.dtype} {tuple(t.shape)}\n".encode())
            digest.update(_short_form(_bytes_of(t), self._factors).cpu().numpy())
        short = digest.hexdigest()
        if short not in self._by_short_form:
            self._by_short_form[short] = of_tensors(tensors)
        return self._by_short_form[short]


def of_batch(batch: Any) -> str:
    """Of a batch's tensors, arrays, texts and numbers; of other objects in it, the type alone."""
    digest = blake2b(digest_size=_BYTES)
    _add(digest, batch)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        _add_tensor(digest, value)
    elif isinstance(value, (bytes, str, int, float, complex, bool, type(None))):
        digest.update(f"{type(value).__name__} {value!r}\n".encode())
    elif isinstance(value, Mapping):
        for key in value:
            digest.update(f"key {key!r}\n".encode())
            _add(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(f"{len(value)} items\n".encode())
        for item in value:
            _add(digest, item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            digest.update(f"field {field.name}\n".encode())
            _add(digest, getattr(value, field.name))
    elif type(value).__module__ == "numpy":
        _add_tensor(digest, torch.as_tensor(value)) if value.dtype.kind in "biufc" else digest.update(value.tobytes())
    else:
        digest.update(f"type {type(value).__qualname__}\n".encode())


def _add_tensor(digest: Any, t: Tensor) -> None:
    digest.update(f"{t.dtype} {tuple(t.shape)}\n".encode())
    digest.update(_bytes_of(t).cpu().numpy())


def _bytes_of(t: Tensor) -> Tensor:
    """All bytes of a tensor's numbers, in order."""
    if hasattr(t, "full_tensor"):
        t = t.full_tensor()
    if t.layout != torch.strided:
        t = t.to_dense()
    flat = t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def _short_form(flat: Tensor, factors: Tensor) -> Tensor:
    """Of many bytes, fewer: Σ factors[i] · word[i] modulo 2**64 of every so many words of four bytes.

    Two words differ by a number that 2**32 does not divide, so that one of 2**33 random factors hides it at most.
    """
    whole = flat.numel() // (4 * _WORDS) * 4 * _WORDS
    if not whole or flat.storage_offset() % 4:
        return flat
    words, factors = flat[:whole].view(torch.int32).view(-1, _WORDS), factors.to(flat.device)
    sums = [some.to(torch.int64).mul_(factors).sum(1) for some in words.split(_AT_ONCE)]
    return torch.cat([torch.cat(sums).view(torch.uint8), flat[whole:]])
