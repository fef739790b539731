"""The journal: kept by one run at a time, compared before every line, and read with suspicion."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from persample import dp
from persample.dp import journal as module
from tests.dp.helpers import plan
from tests.dp.noises import advance, distinct, drawn, noisy_run, said_by_child

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # of Python 3.12


@contextmanager
def forked(do: Callable[[Callable[[], object]], None]) -> Iterator[int]:
    """A process that has come as far as its word, and is killed in the end."""
    mine, theirs = os.pipe()
    child = os.fork()
    if not child:
        torch.set_num_threads(1)  # OpenMP's threads are not there after a fork
        try:
            do(lambda: os.write(theirs, b"there"))
        finally:
            os._exit(1)
    os.close(theirs)
    with os.fdopen(mine, "rb") as end:
        assert end.read(5) == b"there"
        try:
            yield child
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_one_process_at_a_time_and_a_killed_one_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    def keep(say: Callable[[], object]) -> None:
        kept = noisy_run(journal=path)
        say()
        signal.pause()
        del kept

    with forked(keep):
        before = path.read_bytes()
        for _ in range(2):  # reading it has not ended the lock
            with pytest.raises(dp.PrivacyError, match="journal is kept by another process"):
                noisy_run(journal=path)
        assert path.read_bytes() == before
    advance(noisy_run(journal=path))


def test_children_of_a_killed_run_do_not_keep_its_journal(tmp_path: Path) -> None:
    """Such as the workers of its DataLoader."""
    path = tmp_path / "journal"

    def keep(say: Callable[[], object]) -> None:
        kept = noisy_run(journal=path)
        if not os.fork():
            os.setsid()
            (tmp_path / "grandchild").write_text(str(os.getpid()))
            say()
            signal.pause()
        signal.pause()
        del kept

    try:
        with forked(keep):
            pass
        advance(noisy_run(journal=path))
    finally:
        os.kill(int((tmp_path / "grandchild").read_text()), signal.SIGKILL)


def test_in_one_process_the_latest_run_has_the_journal(tmp_path: Path) -> None:
    """As when a cell of a notebook is run again."""
    earlier = noisy_run(journal=tmp_path / "journal")
    with drawn() as found:
        advance(earlier)
        with pytest.raises(dp.PrivacyError, match="another plan"):
            dp.Private(earlier._model, earlier._optimizer, plan(steps=9), journal=tmp_path / "journal")
        advance(earlier)  # a refused run takes nothing over
        later = noisy_run(journal=tmp_path / "journal")
        assert later.steps == 2
        for message in ("taken it over", "last step of this run failed"):
            with pytest.raises(dp.PrivacyError, match=message):
                advance(earlier)
        advance(later, 4)
    assert distinct(found)
    assert len(found) == 6


def test_without_locks_a_second_writer_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fcntl", None)
    trained = noisy_run(journal=tmp_path / "journal")

    def follow(say: Callable[[], object]) -> None:
        other = module.Journal.read(tmp_path / "journal")
        other.claim()
        other.add(False)
        say()
        signal.pause()

    with forked(follow), pytest.raises(dp.PrivacyError, match=r"another run writes to it"):
        advance(trained)
    trained.load_state_dict(trained.state_dict())
    assert trained.steps == 1


def test_two_lines_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, fsync = noisy_run(journal=tmp_path / "journal"), os.fsync

    def meanwhile(handle: int) -> None:
        with (tmp_path / "journal").open("ab") as file:
            file.write(b"step\n")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", meanwhile)
    with drawn() as found, pytest.raises(dp.PrivacyError, match=r"another run writes to it"):
        advance(trained)
    assert not found


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """Three bytes more are all that it takes."""
    path = tmp_path / "journal"

    def fill() -> None:
        trained = noisy_run(journal=path)
        advance(trained)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 3,) * 2)
        with drawn() as found, pytest.raises(OSError, match="only 3 of 5 bytes of the journal"):
            advance(trained)
        assert not found
        trained.load_state_dict(trained.state_dict())
        with pytest.raises(OSError, match="too large"):
            advance(trained)

    assert said_by_child(fill) == "None"
    assert path.read_bytes().endswith(b"\nstep\nste")
    trained = noisy_run(journal=path)
    assert trained.steps == 2
    advance(trained)
    assert path.read_bytes().endswith(b"\nstep\nste\nstep\n")


def test_a_journal_that_may_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opened = tmp_path / "journal", os.open
    advance(noisy_run(journal=path))

    def refuse(path: Any, flags: int, *more: Any, **options: Any) -> int:  # root may do anything
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError, match="journal"):
        noisy_run(journal=path)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - len(b"step\nstep\n"))


def replace(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.with_name("new").write_bytes(data)  # the same bytes: by another file, which may be an older copy
    path.with_name("new").rename(path)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (cut, "was cut, or another run writes"),
    "emptied": (lambda path: path.write_bytes(b""), "was cut, or another run writes"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"step\n"), "was cut, or another run writes"),
    "replaced": (replace, "was replaced by another file"),
    "gone": (lambda path: path.unlink(), "is gone"),
    "moved": (lambda path: path.rename(path.with_name("moved")), "is gone"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_journal_that_is_changed_while_the_run_goes_on(change: str, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    trained = noisy_run(journal=path)
    do, message = CHANGES[change]
    with drawn() as found:
        advance(trained, 3)
        do(path)
        with pytest.raises(dp.PrivacyError, match=message):
            advance(trained)
        with pytest.raises(dp.PrivacyError, match="last step of this run failed"):
            advance(trained)
        assert len(found) == 3  # none for what could not be written down
        state = trained.state_dict()
        assert state["steps"] == 3
        if change in ("longer", "replaced"):  # nothing is missing
            trained.load_state_dict(state)
            assert trained.steps == (4 if change == "longer" else 3)
            advance(trained)
        else:
            with pytest.raises(dp.PrivacyError, match=r"3 were made: it was cut|is missing|not the journal"):
                trained.load_state_dict(state)
    assert distinct(found)


def test_the_folder_of_the_process_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trained = noisy_run(journal="journal")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    advance(trained, 2)
    assert noisy_run(journal=tmp_path / "journal").steps == 2


@pytest.mark.parametrize("torn", [b"s", b"ste", b"step", b"p", b"\0\0\0"])
def test_reading_writes_nothing_and_a_torn_line_counts(torn: bytes, tmp_path: Path) -> None:
    trained = noisy_run()
    trained.save(tmp_path / "run")
    path = tmp_path / "run.journal"
    advance(trained, 2)
    del trained
    path.write_bytes(path.read_bytes() + torn)
    before = path.read_bytes()
    with pytest.raises(dp.PrivacyError, match="another run"):
        noisy_run(steps=9).resume(tmp_path / "run")
    resumed = noisy_run()
    resumed.resume(tmp_path / "run")
    assert resumed.steps == 3
    assert path.read_bytes() == before
    advance(resumed)
    again = noisy_run(journal=path)
    assert again.steps == 4
    assert again._ledger.passes == (torn != b"step")  # it may have been one
    advance(again, 2)
    assert list(again.batches(range(60))) == []


HEADER: dict[str, Any] = {"run": "0123456789abcdef", "plan": plan().as_dict(), "steps": 0, "passes": 0}
DAMAGED: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"nonsense\n",
    "no object": b"[]\n",
    "deep": b"[" * 100_000 + b"\n",
    "no text": b"\xff\xfe\n",
    "a huge number": b'{"steps": ' + b"9" * 5000 + b"}\n",
    "a line that is none": json.dumps(HEADER).encode() + b"\nstep\nstap\nstep\n",
    "a long line": json.dumps(HEADER).encode() + b"\n" + b"step" * 1000 + b"\n",
    "more lines than steps": json.dumps(HEADER).encode() + b"\n" + b"step\n" * 7,
    **{
        f"{name}={value!r}": json.dumps({**HEADER, name: value}).encode() + b"\n"
        for name, values in {
            "run": [None, "", "../../run", 7, ["0123456789abcdef"]],
            "plan": [None, {}, [], {**plan().as_dict(), "steps": True}, {**plan().as_dict(), "steps": -1}],
            "steps": [-1, True, 1.0, "1", None, 7, 10**30],
            "passes": [-1, False, 0.0, "0", None, 1],
            "more": [0],
        }.items()
        for value in values
    },
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_journals(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "odd"
    path.write_bytes(DAMAGED[damage])
    with pytest.raises(dp.PrivacyError, match=r"/odd (is not the journal of a private run|is damaged)"):
        noisy_run(journal=path)
    assert path.read_bytes() == DAMAGED[damage]


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(dp.PrivacyError, match="is not the journal of a private run, but no file"):
        noisy_run(journal=tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(dp.PrivacyError, match="is not the journal of a private run, but no file"):
        noisy_run(journal=tmp_path / "pipe")


def test_a_journal_comes_into_being_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            noisy_run(journal=tmp_path / "journal")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "no hard links here")))
    advance(noisy_run(journal=tmp_path / "journal"))
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]
    with pytest.raises(dp.PrivacyError, match="exists already"):
        module.Journal.begin(tmp_path / "journal", module.Accounts(**HEADER))
    assert noisy_run(journal=tmp_path / "journal").steps == 1
