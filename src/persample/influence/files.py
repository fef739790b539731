"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def save_whole(value: Any, path: Path) -> None:
    """``torch.save``, by way of another name, so that a kill leaves the old file or the new one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        torch.save(value, part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def load_plain(path: Path) -> Any:
    """What `save_whole` wrote: tensors and plain values, never code."""
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read ({error}): it is damaged, or was not written by this library"
        ) from error
