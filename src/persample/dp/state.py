"""Runs on disk: accounts as JSON, tensors as safetensors, nothing that could execute."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from .binding import Binding
from .errors import PrivacyError
from .ledger import Journal, Ledger, sync_directory

_VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """The accounts of a run, and what they are bound to."""

    version: int
    run: str
    steps: int
    passes: int
    dropped: int
    bound: float | None
    plan: dict[str, Any]
    bindings: dict[str, Any]

    @classmethod
    def of(cls, ledger: Ledger, binding: Binding, bound: float | None, dropped: int) -> Checkpoint:
        plan, bindings = ledger.plan.as_dict(), binding.describe()
        return cls(_VERSION, ledger.run, ledger.steps, ledger.passes, dropped, bound, plan, bindings)

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Checkpoint:
        """Refuses what is no state of this version."""
        if not isinstance(state, dict) or state.get("version") != _VERSION:
            raise ValueError(f"this is no state of private training of version {_VERSION}: {str(state)[:80]}")
        return cls(**state)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

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
        if ledger.journal is not None and ledger.journal.header["run"] != self.run:
            raise PrivacyError(f"the journal {ledger.journal.path} is not that of the run {self.run} in this state")


def open_journal(ledger: Ledger, path: str | PathLike[str]) -> bool:
    """Go on with a journal, or begin one; whether there was one."""
    path = Path(path)
    if path.exists():
        ledger.follow(Journal.read(path))
        return True
    ledger.begin_journal(path)
    return False


def write(path: str | PathLike[str], ledger: Ledger, state: dict[str, Any], states: dict[str, Any]) -> None:
    """Accounts and the states of model and optimizer in one file, which replaces an earlier one or leaves it whole."""
    path = Path(path)
    if ledger.journal is None:
        beside = path.with_name(path.name + ".journal")
        if beside.exists():
            raise PrivacyError(
                f"{beside} is the journal of another run: resume that run from {path}, or save this one elsewhere"
            )
        ledger.begin_journal(beside)
    assert ledger.journal is not None
    tensors: dict[str, Tensor] = {}
    tree = _packed(states, "", tensors)
    journal = os.path.relpath(ledger.journal.path, path.parent)
    metadata = {"persample": json.dumps({"state": state, "journal": journal, "tree": tree})}
    scratch = path.with_name(path.name + ".new")
    _safetensors().save_file(tensors, scratch, metadata)
    with scratch.open("rb+") as file:
        os.fsync(file.fileno())
    scratch.replace(path)
    sync_directory(path.parent)


def read(path: str | PathLike[str]) -> tuple[Checkpoint, Path, dict[str, Any]]:
    """The accounts, where the journal is, and the states of model and optimizer."""
    path = Path(path)
    _safetensors()
    with import_module("safetensors").safe_open(path, framework="pt") as file:
        metadata = (file.metadata() or {}).get("persample")
        if metadata is None:
            raise ValueError(f"{path} was not written by private.save")
        found = json.loads(metadata)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    return Checkpoint.from_dict(found["state"]), path.parent / found["journal"], _unpacked(found["tree"], tensors)


def follow_journal(ledger: Ledger, path: Path, run: str) -> None:
    """Count what happened after the file was written, too."""
    if ledger.journal is None:
        if not path.exists():
            raise PrivacyError(
                f"the journal {path} is missing, and with it what was spent after the file was written: put it back, "
                f"or say where it is by dp.Private(..., journal=...)"
            )
        ledger.follow(Journal.read(path))
    assert ledger.journal is not None
    if ledger.journal.header["run"] != run:
        raise PrivacyError(f"the journal {ledger.journal.path} is not that of the run {run} in this file")


def _packed(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """As JSON, with tensors taken out."""
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
    return value


def _safetensors() -> Any:
    try:
        return import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError(
            "saving needs the package safetensors, which is not installed: pip install 'persample[dp]'"
        ) from error
