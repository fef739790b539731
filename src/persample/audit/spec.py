"""From SPEC, the name of a factory, to what it makes."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from .errors import AuditError, in_words
from .problem import Problem, seeded

FORMS = "(model, inputs), (model, inputs, loss), (model, inputs, targets, loss) or a mapping with these names"
_KEYS = ("model", "inputs", "targets", "loss")
_DEFAULT = "factory"
_DOTTED = r"[^\W\d]\w*(\.[^\W\d]\w*)*"


def load(spec: str, *, batch_size: int | None = None, seed: int = 0, device: str | None = None) -> Problem:
    """The problem that SPEC names: ``package.module:factory`` or ``file.py:factory``.

    Without ``:factory`` the function is called ``factory``, or the module or file has ``model`` and ``inputs`` (and
    ``targets`` and ``loss``) at its top.
    """
    place = _device(device)
    with seeded(seed):
        problem = _made(spec, batch_size, seed)
    return problem if place is None else problem.moved(place)


def _made(spec: str, batch_size: int | None, seed: int) -> Problem:
    target = _find(spec)
    if not isinstance(target, ModuleType):
        return _read(_call(target, spec, batch_size), f"{spec}()", seed)
    if batch_size is not None:
        raise AuditError(
            f"{spec} has no factory to be told a batch size of {batch_size}: write one, or change it there"
        )
    return _read({key: getattr(target, key) for key in (*_KEYS, "batch") if hasattr(target, key)}, spec, seed)


def _device(name: str | None) -> torch.device | None:
    if name is None:
        return None
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise AuditError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return torch.device(name)


def _find(spec: str) -> Any:
    """The factory, or the module if it has its model and inputs at the top."""
    head, name = _split(spec)
    is_file = head.endswith(".py") or os.sep in head or "/" in head or Path(head).is_file()
    module = _from_file(head) if is_file else _from_module(head)
    if name:
        return _attribute(module, name, head)
    if hasattr(module, _DEFAULT):
        return getattr(module, _DEFAULT)
    if hasattr(module, "model") and (hasattr(module, "inputs") or hasattr(module, "batch")):
        return module
    raise AuditError(
        f"{head} has neither a function {_DEFAULT!r} nor names 'model' and 'inputs': say which function to call, as in "
        f"{head}:name.{_candidates(module, '')}"
    )


def _split(spec: str) -> tuple[str, str]:
    head, colon, name = spec.strip().rpartition(":")
    if colon and head and re.fullmatch(_DOTTED, name):
        return head, name
    whole = spec.strip()
    if not whole or whole.endswith(":") or whole.startswith(":"):
        raise AuditError(f"SPEC {spec!r} names nothing: write package.module:factory or file.py:factory")
    return whole, ""


def _from_file(head: str) -> ModuleType:
    path = Path(head)
    if not path.exists():
        raise AuditError(f"there is no file {head} (looked in {Path.cwd()})")
    if path.is_dir() or path.suffix != ".py":
        raise AuditError(f"{head} is {'a directory' if path.is_dir() else 'no Python file'}: give a .py file")
    name = f"_audited_{re.sub(r'[^0-9a-zA-Z_]', '_', path.stem)}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    _search(path.resolve().parent)
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise AuditError(f"running {head} raised {in_words(error)}") from error
    return module


def _from_module(head: str) -> ModuleType:
    if not re.fullmatch(_DOTTED, head):
        raise AuditError(f"{head!r} is no name of a module: write package.module:factory or file.py:factory")
    _search(Path.cwd())
    try:
        return importlib.import_module(head)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{head}.".startswith(f"{error.name}."):
            raise AuditError(
                f"there is no module {error.name!r}, searched for from {Path.cwd()}: is it installed, or is SPEC a "
                f"file (file.py:factory)?"
            ) from error
        raise AuditError(f"importing {head} raised {in_words(error)}") from error


def _search(folder: Path) -> None:
    """Let modules in a folder be imported, as `python file.py` does for those beside the file."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _attribute(module: ModuleType, name: str, head: str) -> Any:
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise AuditError(f"{head} has no {name!r}.{_candidates(module, name)}")
        value = getattr(value, part)
    return value


def _candidates(module: ModuleType, name: str) -> str:
    own = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
    ]
    close = difflib.get_close_matches(name, own, n=1)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" It has the functions {', '.join(own[:10])}" if own else " It has no functions"


def _call(factory: Any, spec: str, batch_size: int | None) -> Any:
    if not callable(factory):
        raise AuditError(
            f"{spec} is a {type(factory).__name__}, which cannot be called: name a function that returns {FORMS}"
        )
    takes = _parameters(factory)
    if batch_size is not None and takes is not None and "batch_size" not in takes:
        raise AuditError(f"{spec} takes no argument batch_size, so it cannot be told {batch_size}: give it one")
    given = {} if batch_size is None else {"batch_size": batch_size}
    needed = [name for name in _required(takes or {}) if name not in given]
    if needed:
        what = "--batch-size" if needed == ["batch_size"] else "nothing but batch_size is ever given"
        raise AuditError(f"{spec} needs arguments {', '.join(needed)}: {what}, so give them defaults")
    try:
        return factory(**given)
    except (Exception, SystemExit) as error:
        raise AuditError(f"{spec}() raised {in_words(error)}") from error


def _required(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """The names of arguments that have no default."""
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters.values() if p.default is p.empty and p.kind not in optional]


def _parameters(factory: Any) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return None


def _read(made: Any, what: str, seed: int) -> Problem:
    """A problem from what a factory has returned, in any of the accepted forms."""
    if isinstance(made, Mapping):
        parts = dict(made)
        if "batch" in parts and "inputs" not in parts:
            parts["inputs"] = parts.pop("batch")
        if not {"model", "inputs"} <= set(parts) or set(parts) - set(_KEYS):
            raise AuditError(f"{what} gave a mapping with the names {', '.join(map(str, made))}: it must give {FORMS}")
    elif isinstance(made, (tuple, list)) and len(made) in (2, 3, 4):
        names = {2: ("model", "inputs"), 3: ("model", "inputs", "loss"), 4: _KEYS}[len(made)]
        parts = dict(zip(names, made, strict=True))
    elif isinstance(made, (tuple, list)):
        raise AuditError(f"{what} gave {len(made)} values: it must give {FORMS}")
    else:
        kind = "a model without a batch" if isinstance(made, nn.Module) else f"a {type(made).__name__}"
        raise AuditError(f"{what} gave {kind}: it must give {FORMS}")
    try:
        return Problem(parts["model"], parts["inputs"], parts.get("targets"), parts.get("loss"), seed=seed)
    except AuditError as error:
        raise AuditError(f"{what}: {error}") from error
