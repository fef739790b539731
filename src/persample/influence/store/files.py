"""Files that are there as a whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from .errors import StorageError

fcntl: Any = None
with suppress(ImportError):  # on Windows
    fcntl = import_module("fcntl")

SCRATCH = ".writing"  # how files end that a process was writing when it was ended

_REMEDIES = {
    errno.ENOSPC: "the disk is full: make room",
    errno.EDQUOT: "the disk quota is used up: make room",
    errno.EROFS: "the file system is read-only: choose another folder, or mount it writable",
    errno.EACCES: "permission is denied: choose another folder, or make it writable",
    errno.EPERM: "permission is denied: choose another folder, or make it writable",
    errno.ENOTDIR: "a file is in its way: choose another folder",
    errno.EEXIST: "a file is in its way: choose another folder",
}


def safetensors(module: str = "safetensors.torch") -> Any:
    """The package, which is an extra."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(
            "an index on disk needs the package safetensors, which is not installed: pip install 'persample[influence]'"
        ) from error


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, which replaces an earlier one or leaves it whole."""

    def write(scratch: Path) -> None:
        with scratch.open("wb") as file:
            file.write(content)

    replace_whole(path, write)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: str) -> None:
    """Write a safetensors file with one text beside its tensors; equal content gives equal bytes."""
    save = safetensors().save_file

    def write(scratch: Path) -> None:
        save({name: t.contiguous() for name, t in tensors.items()}, scratch, {"persample": metadata})

    replace_whole(path, write)


def make_folder(path: Path) -> None:
    """Make a folder and those above it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _explained(path, error) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Refuse if another process works in the folder; made if need be. Without flock (Windows), nothing is locked."""
    made = not folder.exists()
    make_folder(folder)
    if fcntl is None:
        yield
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StorageError(
                errno.EAGAIN,
                "another process is building this index: wait for it, then make the same call",
                str(folder),
            ) from error
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(number)
        if made:
            with suppress(OSError):  # unless something has been put there
                folder.rmdir()


def replace_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Have ``write`` make a file under another name, and then give it its own."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}{SCRATCH}")
    try:
        write(scratch)
        with scratch.open("rb+") as file:
            os.fsync(file.fileno())
        scratch.replace(path)
        _sync_folder(path.parent)
    except StorageError:  # of another file that was to be replaced with this one
        forget(scratch)
        raise
    except BaseException as error:
        forget(scratch)
        cause = _os_error(error)
        if cause is None:
            raise
        raise _explained(path, cause) from error


def replace_together(files: Sequence[tuple[Path, Callable[[Path], None]]]) -> None:
    """`replace_whole` of several files: none gets its name before all are written, one after another."""
    if not files:
        return
    (path, write), *others = files

    def write_all(scratch: Path) -> None:
        write(scratch)
        replace_together(others)

    replace_whole(path, write_all)


def _os_error(error: BaseException) -> OSError | None:
    """The system's own error; safetensors wraps it in one that has its text alone."""
    if isinstance(error, OSError):
        return error
    if type(error).__name__ == "SafetensorError":
        text = str(error)
        for number in _REMEDIES:
            if f"os error {number}" in text:
                return OSError(number, os.strerror(number))
        if "I/O error" in text:
            return OSError(errno.EIO, text)
    return None


def _explained(path: Path, error: OSError) -> StorageError:
    remedy = _REMEDIES.get(error.errno or 0, "see to the disk")
    number = error.errno if error.errno is not None else errno.EIO
    return StorageError(
        number,
        f"{path.name} could not be written ({error.strerror or error}); {remedy}, then make the same call again: all "
        f"that was finished is kept, and the rest goes on from there",
        str(path),
    )


def forget(scratch: Path) -> None:
    """Remove a file that was not finished."""
    with suppress(OSError):  # on a file system that has become read-only; it is in nobody's way
        scratch.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make a rename last, where folders can be synced."""
    try:
        number = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    with suppress(OSError):
        os.fsync(number)
    os.close(number)
