"""The journal: a file that is ahead of every release, and kept by one run at a time."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
import weakref
from pathlib import Path
from types import ModuleType

from .accounts import Accounts
from .errors import PrivacyError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# A torn line counts: a part of one, or the zeros that some file systems leave after a power failure.
_LINE = re.compile(rb"step|ste|st|s|pass|pas|pa|p|\0{1,6}")
_UNSUPPORTED = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL, errno.EPERM}


class Journal:
    """An append-only file: accounts to begin with, and a line for every step, on disk before its release.

    `read` and `claim` write nothing. Who has claimed it holds a lock that ends with the process, however it ends. Where
    there are no locks, a second writer is found by the file's length, before and after every line.
    """

    def __init__(self, path: Path, header: Accounts, lines: list[bytes], status: os.stat_result, torn: bool) -> None:
        self.path, self.header = path, header
        self.steps = header.steps + len(lines)
        self.passes = header.passes + sum(line != b"step" for line in lines)  # a torn line counts as one
        self._identity, self._size, self._torn = (status.st_dev, status.st_ino), status.st_size, torn
        self._why = "nobody has claimed it"
        self._file: _File | None = None

    @classmethod
    def begin(cls, path: Path, header: Accounts) -> Journal:
        """A new file, claimed; it comes into being with its header, and must not exist."""
        path = path.absolute()
        scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            file = _File(scratch, os.O_CREAT | os.O_EXCL)
            file.lock()
            file.append(json.dumps(header.as_dict()).encode() + b"\n")
            _name(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)
        journal = cls(path, header, [], file.stat(), torn=False)
        journal._keep(file)
        sync_directory(path.parent)
        return journal

    @classmethod
    def read(cls, path: Path) -> Journal:
        """A file of an earlier process, as it is now; not claimed yet."""
        path = path.absolute()
        if not stat.S_ISREG(path.stat().st_mode):
            raise PrivacyError(f"{path} is not the journal of a private run, but no file at all")
        with path.open("rb") as file:
            status, data = os.fstat(file.fileno()), file.read()
        first, *lines = data.split(b"\n")
        try:
            header = Accounts.from_dict(json.loads(first))
        except (ValueError, RecursionError) as error:
            raise PrivacyError(f"{path} is not the journal of a private run, or is damaged: {error}") from error
        lines = [line for line in lines if line]
        for number, line in enumerate(lines):
            if not _LINE.fullmatch(line):
                raise PrivacyError(
                    f"the journal {path} is damaged: {line[:20]!r} in the place of its step {number + 1} is none. What "
                    f"was spent cannot be read off: put back the file as it was"
                )
        journal = cls(path, header, lines, status, torn=bool(data) and not data.endswith(b"\n"))
        if journal.steps > header.plan["steps"]:
            raise PrivacyError(
                f"the journal {path} is damaged: it counts {journal.steps} steps of {header.plan['steps']}. Put back "
                f"the file as it was"
            )
        return journal

    def claim(self) -> None:
        """Keep the file from now on, if it is still what was read; in one process, the latest run to do so has it."""
        file = _File(self.path)
        self._compare(file.stat())
        earlier = _kept.get(self._identity)
        if earlier is not None:
            earlier.let_go("another dp.Private in this process has taken it over")
        file.lock()
        self._compare(file.stat())
        self._keep(file)

    def let_go(self, why: str) -> None:
        """Close the file, and unlock it; a forked process that does so leaves its parent's lock alone."""
        if self._file is not None:
            self._why = why
            self._file.close()

    def add(self, opens_pass: bool) -> None:
        """One more step; returns when it is on disk."""
        if self._file is None or not self._file.close.alive:
            raise PrivacyError(f"this run cannot write to its journal {self.path} any more: {self._why}")
        self._compare(self._named())
        line = (b"\n" if self._torn else b"") + (b"pass\n" if opens_pass else b"step\n")
        self._file.append(line)
        self._size += len(line)
        self._compare(self._file.stat())
        self._torn = False
        self.steps += 1
        self.passes += opens_pass

    def _named(self) -> os.stat_result:
        try:
            return self.path.stat()
        except FileNotFoundError as error:
            raise PrivacyError(
                f"the journal {self.path} is gone: what this run has spent would be forgotten. Put it back"
            ) from error

    def _compare(self, status: os.stat_result) -> None:
        if (status.st_dev, status.st_ino) != self._identity:
            raise PrivacyError(f"the journal {self.path} was replaced by another file: put it back")
        if status.st_size != self._size:
            raise PrivacyError(
                f"the journal {self.path} has {status.st_size} bytes and not {self._size} as this run has left it: it "
                f"was cut, or another run writes to it, and each would count alone: a journal is for one run"
            )

    def _keep(self, file: _File) -> None:
        self._file = file
        _kept[self._identity] = self


class _File:
    """Open for appending, closed with its last user; a lock on it ends then, or with the process."""

    def __init__(self, path: Path, flags: int = 0) -> None:
        self._path, self._handle = path, os.open(path, os.O_RDWR | os.O_APPEND | flags, 0o666)
        self.close = weakref.finalize(self, os.close, self._handle)

    def lock(self) -> None:
        """Lock the file for this process alone, where there are locks."""
        if fcntl is None:
            return
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise PrivacyError(
                    f"the journal {self._path} is kept by another process: two runs on one journal would each count "
                    f"alone. Wait for the other to end, or end it ({error})"
                ) from error

    def append(self, data: bytes) -> None:
        """Write at the end of the file; the data are on disk when this returns."""
        written = os.write(self._handle, data)
        if written != len(data):
            said = f"only {written} of {len(data)} bytes of the journal were written"
            raise OSError(errno.ENOSPC, said, str(self._path))
        os.fsync(self._handle)

    def stat(self) -> os.stat_result:
        return os.fstat(self._handle)


_kept: weakref.WeakValueDictionary[tuple[int, int], Journal] = weakref.WeakValueDictionary()  # by this process


def _let_go_of_all() -> None:
    """A lock lasts while any copy of the handle is open: workers of a DataLoader must not keep that of a dead run."""
    for journal in list(_kept.values()):
        journal.let_go("it is kept by the process that this one was forked from")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_of_all)


def _name(scratch: Path, path: Path) -> None:
    """Give a file its final name, if there is no such file yet."""
    try:
        os.link(scratch, path)
    except OSError as error:
        if error.errno in _UNSUPPORTED and not path.exists():  # a file system without hard links
            scratch.rename(path)
        elif path.exists():
            raise PrivacyError(f"the journal {path} exists already, or another process has just begun it") from error
        else:
            raise


def sync_directory(path: Path) -> None:
    """Wait until the name of a new file is on disk, too."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
