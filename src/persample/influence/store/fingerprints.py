"""Short texts that differ when models or batches do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

_BYTES = 16


def of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Of the names, dtypes, shapes and every bit of some tensors."""
    digest = blake2b(digest_size=_BYTES)
    for name, t in tensors.items():
        digest.update(name.encode())
        _add_tensor(digest, t)
    return digest.hexdigest()


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
    if hasattr(t, "full_tensor"):
        t = t.full_tensor()
    digest.update(f"{t.dtype} {tuple(t.shape)}\n".encode())
    if t.layout != torch.strided:
        t = t.to_dense()
    flat = t.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    if flat.numel():
        digest.update(flat.view(torch.uint8).numpy())
