"""Fitted curvatures beside an index on disk, which are replaced as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .curvature.base import Fitted, load
from .store import DamagedError, Folder
from .store.files import forget, safetensors, write_tensors
from .store.fingerprints import of_tensors


def write(folder: Folder, every: Sequence[Fitted]) -> None:
    """Write one for each checkpoint under names of their own, then say which count: those before do until then."""
    told = [_write(folder, number, fitted) for number, fitted in enumerate(every)]
    folder.note(curvature=told or None)
    kept = {one["file"] for one in told}
    for path in folder.path.glob("curvature-*.safetensors"):
        if path.name not in kept:
            forget(path)


def _write(folder: Folder, number: int, fitted: Fitted) -> dict[str, Any]:
    tensors = {name: t.detach().cpu().clone() for name, t in fitted.tensors().items()}
    file = f"curvature-{number:02d}-{of_tensors(tensors)[:12]}.safetensors"
    write_tensors(folder.path / file, tensors, folder.plan.name)
    return {"file": file, **fitted.settings()}


def read(folder: Folder) -> list[Fitted] | None:
    """The curvature of every checkpoint; None without one."""
    settings = folder.noted("curvature")
    if settings is None:
        return None
    try:
        return [load(safetensors().load_file(folder.path / told["file"]), told) for told in settings]
    except (safetensors("safetensors").SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
        raise DamagedError(f"the curvature of {folder.path} cannot be read ({error}): call index.fit again") from error
