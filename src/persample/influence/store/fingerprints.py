"""Short texts that differ when models or batches do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

_BYTES = 16
_WORDS = 64  # of eight bytes, which become one in a short form


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
    each times an odd number of its own, which are made as fast as memory is read, and where the tensors are.
    """

    def __init__(self) -> None:
        self._by_short_form: dict[str, str] = {}

    def of(self, tensors: Mapping[str, Tensor]) -> str:
        """`of_tensors`; where a short form is the same as before, so is the text."""
        digest: Any = blake2b(digest_size=_BYTES)
        for name, t in tensors.items():
            digest.update(f"{name} {t.dtype} {tuple(t.shape)}\n".encode())
            digest.update(_short_form(_bytes_of(t)).cpu().numpy())
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


def _short_form(flat: Tensor) -> Tensor:
    """Of many bytes, fewer that differ where these do, but for one case in 2**64."""
    whole = flat.numel() // (8 * _WORDS) * 8 * _WORDS
    if not whole or flat.storage_offset() % 8:
        return flat
    words = flat[:whole].view(torch.int64).view(-1, _WORDS)
    odd = torch.arange(1, 2 * _WORDS, 2, device=flat.device)
    sums = [(some * odd).sum(1) for some in words.split(2**14)]
    return torch.cat([torch.cat(sums).view(torch.uint8), flat[whole:]])
