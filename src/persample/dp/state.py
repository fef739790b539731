"""Runs on disk: accounts as JSON, tensors as safetensors, nothing that could execute."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from .accounts import Accounts, check_accounts, is_bound, is_count
from .binding import Binding
from .errors import PrivacyError
from .journal import Journal, sync_directory
from .ledger import Ledger

_VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """The accounts of a run, and what they are bound to."""

    version: int
    run: str
    steps: int
    passes: int
    dropped: int
    bound: float | list[float] | None
    plan: dict[str, Any]
    bindings: dict[str, Any]

    @classmethod
    def of(cls, ledger: Ledger, binding: Binding, bound: float | list[float] | None, dropped: int) -> Checkpoint:
        accounts = ledger.accounts
        return cls(
            _VERSION, accounts.run, accounts.steps, accounts.passes, dropped, bound, accounts.plan, binding.describe()
        )

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Checkpoint:
        """Refuses what is no state of this version."""
        if not isinstance(state, dict) or state.get("version") != _VERSION:
            raise ValueError(f"this is no state of private training of version {_VERSION}: {str(state)[:80]}")
        check_accounts(state, [f.name for f in fields(cls)])
        dropped, bound, bindings = state["dropped"], state["bound"], state["bindings"]
        if not is_count(dropped) or not isinstance(bindings, dict) or not (bound is None or is_bound(bound)):
            raise ValueError(
                f"the state of private training is damaged: it says dropped {str(dropped)[:80]!r}, bound "
                f"{str(bound)[:80]!r} and bindings {str(bindings)[:80]}"
            )
        return cls(**state)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def accounts(self) -> Accounts:
        """The part that a journal has, too."""
        return Accounts(self.run, self.plan, self.steps, self.passes)

    def check(self, ledger: Ledger, binding: Binding) -> None:
        """Refuse, by name, if this is the state of another run."""
        wrong = ledger.plan.differences(self.plan)
        for name, now in binding.describe().items():
            if self.bindings.get(name) != now:
                wrong.append(f"{name}: {self.bindings.get(name)} instead of {now}")
        if wrong:
            raise PrivacyError(
                f"this is the state of another run, for which the accounts would not hold: {'; '.join(wrong)}"
            )
        if ledger.steps and ledger.run != self.run:
            raise PrivacyError(
                f"this dp.Private has made {ledger.steps} steps of a run of its own, which the accounts of another do "
                f"not have: load them into a new dp.Private"
            )


def open_journal(ledger: Ledger, path: str | PathLike[str]) -> bool:
    """Go on with a journal, or begin one; whether there was one."""
    path = Path(path)
    if path.exists():
        ledger.follow(path)
        return True
    ledger.begin_journal(path)
    return False


def write(path: str | PathLike[str], ledger: Ledger, state: dict[str, Any], states: dict[str, Any]) -> None:
    """Accounts and the states of model and optimizer in one file, which replaces an earlier one or leaves it whole."""
    path = Path(path)
    beside = path.with_name(path.name + ".journal")
    if ledger.journal is None and beside.exists():
        _take_up_or_remove(beside, path, ledger)
    tensors: dict[str, Tensor] = {}
    tree = _packed(states, "", tensors)
    journal = os.path.relpath(beside if ledger.journal is None else ledger.journal.path, path.parent)
    metadata = {"persample": json.dumps({"state": state, "journal": journal, "tree": tree})}
    scratch = path.with_name(path.name + ".new")
    _safetensors().save_file(tensors, scratch, metadata)
    with scratch.open("rb+") as file:
        os.fsync(file.fileno())
    if ledger.journal is None:
        ledger.begin_journal(beside)  # as late as can be: a journal without its file is in the way of the next save
    scratch.replace(path)
    sync_directory(path.parent)


def _take_up_or_remove(journal: Path, path: Path, ledger: Ledger) -> None:
    """Go on with a journal of this run; remove one of a run that ended before its first step and its first file."""
    earlier = Journal.read(journal)
    if earlier.header.run == ledger.run:
        ledger.follow(journal, ledger.accounts)
        return
    if path.exists() or earlier.steps:
        raise PrivacyError(
            f"{journal} is the journal of another run, which has spent {earlier.steps} steps: go on with it by "
            f"private.resume({str(path)!r}) or dp.Private(..., journal={str(journal)!r}), or save this run elsewhere"
        )
    earlier.claim()
    journal.unlink()


def read(path: str | PathLike[str]) -> tuple[Checkpoint, str, dict[str, Any]]:
    """The accounts, the name of the journal, and the states of model and optimizer."""
    _safetensors()
    safetensors = import_module("safetensors")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            stored = json.loads((file.metadata() or {})["persample"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        journal, states = stored["journal"], _unpacked(stored["tree"], tensors)
        if not isinstance(journal, str) or set(states) != {"model", "optimizer"}:
            raise ValueError(f"journal {str(journal)[:80]!r}, states of {str(list(states))[:80]}")
        return Checkpoint.from_dict(stored["state"]), journal, states
    except (safetensors.SafetensorError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{path} was not written by private.save, or is damaged: {error!r}") from error


def load(path: str | PathLike[str], load_states: Callable[[dict[str, Any]], None], states: dict[str, Any]) -> None:
    """Load what was read, and say where it is from if it does not fit."""
    try:
        load_states(states)
    except PrivacyError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not fit this model and optimizer: {error!r}") from error


def follow_journal(ledger: Ledger, path: str | PathLike[str], journal: str, known: Accounts) -> None:
    """Count what happened after the file was written, too."""
    if ledger.journal is not None:  # the user has said where it is
        ledger.read_again(known)
        return
    named = Path(journal)
    if named.is_absolute() or named.drive or ".." in named.parts or "\0" in journal:
        raise PrivacyError(
            f"{path} names a journal in another folder, {journal!r}, and whoever has written it may have named any: if "
            f"it is the right one, say so by dp.Private(..., journal=...)"
        )
    ledger.follow(Path(path).parent / named, known)


def _packed(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A nested state as JSON; its tensors go into ``tensors``, under the names that stand in their places."""
    if isinstance(tree, Tensor):
        tensors[name] = tree.detach().cpu().clone().contiguous()  # tied weights must not share memory in the file
        return {"tensor": name}
    if isinstance(tree, dict):
        return {"dict": [[key, _packed(value, f"{name}.{key}".lstrip("."), tensors)] for key, value in tree.items()]}
    if isinstance(tree, (list, tuple)):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [_packed(value, f"{name}.{i}", tensors) for i, value in enumerate(tree)]}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return {"value": tree}
    raise TypeError(
        f"{name} is a {type(tree).__name__}, which cannot be saved without pickle: save model and optimizer yourself, "
        f"and private.state_dict() with them"
    )


def _unpacked(tree: Any, tensors: dict[str, Tensor]) -> Any:
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: _unpacked(item, tensors) for key, item in value}
    if kind in ("list", "tuple"):
        items = [_unpacked(item, tensors) for item in value]
        return items if kind == "list" else tuple(items)
    if kind == "value":
        return value
    raise ValueError(f"a file has no {kind!r}")


def _safetensors() -> Any:
    try:
        return import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError(
            "saving needs the package safetensors, which is not installed: pip install 'persample[dp]'"
        ) from error
