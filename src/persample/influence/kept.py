"""Fitted curvatures beside an index on disk, which are replaced as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

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
    file = f"curvature-{number:02d}-{_content(tensors)}.safetensors"
    write_tensors(folder.path / file, tensors, folder.plan.name)
    return {"file": file, **fitted.settings()}


def _content(tensors: Mapping[str, Tensor]) -> str:
    """In an order that files do not have to keep."""
    return of_tensors({name: tensors[name] for name in sorted(tensors)})[:12]


def verify(folder: Folder) -> None:
    """Compare every bit with what was written, which the names of files say."""
    read(folder)
    for told in folder.noted("curvature") or ():
        path = folder.path / told["file"]
        if _content(safetensors().load_file(path)) not in path.name:
            raise DamagedError(f"the curvature {path} has changed since it was written: call index.fit again")


def read(folder: Folder) -> list[Fitted] | None:
    """The curvature of every checkpoint; None without one."""
    settings = folder.noted("curvature")
    if settings is None:
        return None
    try:
        return [load(safetensors().load_file(folder.path / told["file"]), told) for told in settings]
    except (safetensors("safetensors").SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
        raise DamagedError(f"the curvature of {folder.path} cannot be read ({error}): call index.fit again") from error
