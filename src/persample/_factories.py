"""From SPEC, the name of a factory as commands take it, to what the factory returns."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_DEFAULT = "factory"
_DOTTED = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
_OTHERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<frozen")


class FactoryError(Exception):
    """SPEC names nothing that can be used; the message says what is wrong and what to do."""


@dataclass(frozen=True)
class Factories:
    """What a command expects of its SPEC, for finding it and for messages."""

    returns: str  # what a factory must return, in words
    at_top: tuple[tuple[str, ...], ...]  # a module without a factory must have one name of each of these
    optional: tuple[str, ...] = ()  # and may have these
    arguments: tuple[str, ...] = ()  # that a factory may take

    def made(self, spec: str, **given: Any) -> tuple[Any, str]:
        """What the factory returns (or a mapping of the names at a module's top), and what to call it in messages."""
        target = self._find(spec)
        if not isinstance(target, ModuleType):
            return self._call(target, spec, given), f"{spec}()"
        for name, value in given.items():
            words = name.replace("_", " ")
            raise FactoryError(f"{spec} has no factory to be told a {words} of {value}: write one, or change it there")
        names = [name for some in self.at_top for name in some] + list(self.optional)
        return {name: getattr(target, name) for name in names if hasattr(target, name)}, spec

    def _find(self, spec: str) -> Any:
        """The factory, or the module if it has what is needed at its top."""
        head, name = _split(spec)
        is_file = head.endswith(".py") or os.sep in head or "/" in head or Path(head).is_file()
        module = _from_file(head) if is_file else _from_module(head)
        if name:
            return _attribute(module, name, head)
        if hasattr(module, _DEFAULT):
            return getattr(module, _DEFAULT)
        if all(any(hasattr(module, name) for name in some) for some in self.at_top):
            return module
        names = " and ".join(repr(some[0]) for some in self.at_top)
        raise FactoryError(
            f"{head} has neither a function {_DEFAULT!r} nor names {names}: say which function to call, as in "
            f"{head}:name.{_candidates(module, '')}"
        )

    def _call(self, factory: Any, spec: str, given: Mapping[str, Any]) -> Any:
        if not callable(factory):
            raise FactoryError(
                f"{spec} is a {type(factory).__name__}, which cannot be called: name a function that returns "
                f"{self.returns}"
            )
        takes = _parameters(factory)
        for name, value in given.items():
            if takes is not None and name not in takes:
                raise FactoryError(f"{spec} takes no argument {name}, so it cannot be told {value}: give it one")
        needed = [name for name in _required(takes or {}) if name not in given]
        if needed:
            raise FactoryError(f"{spec} needs arguments {', '.join(needed)}: {self._ever_given(needed)}")
        try:
            return factory(**given)
        except (Exception, SystemExit) as error:
            raise FactoryError(f"{spec}() raised {in_words(error)}") from error

    def _ever_given(self, needed: list[str]) -> str:
        if set(needed) <= set(self.arguments):
            return f"{', '.join('--' + name.replace('_', '-') for name in needed)}, so give them defaults"
        only = f"nothing but {', '.join(self.arguments)}" if self.arguments else "nothing"
        return f"{only} is ever given, so give them defaults"


def device_of(name: str | None) -> torch.device | None:
    """A device that can be used here."""
    if name is None:
        return None
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise FactoryError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return torch.device(name)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A context with random numbers from a seed, after which generators are restored."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def in_words(error: BaseException) -> str:
    """Type, message and the innermost line of the user's own code."""
    text, at = str(error).strip(), users_line(error)
    return f"{type(error).__name__}{': ' + text if text else ''}{'' if at is None else f' ({at})'}"


def users_line(error: BaseException) -> str | None:
    """The innermost line of the user's own code that an error has come through."""
    lines = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OTHERS)]
    return f"{Path(lines[-1].filename).name}, line {lines[-1].lineno}" if lines else None


def _split(spec: str) -> tuple[str, str]:
    head, colon, name = spec.strip().rpartition(":")
    if colon and head and re.fullmatch(_DOTTED, name):
        return head, name
    whole = spec.strip()
    if not whole or whole.endswith(":") or whole.startswith(":"):
        raise FactoryError(f"SPEC {spec!r} names nothing: write package.module:factory or file.py:factory")
    return whole, ""


def _from_file(head: str) -> ModuleType:
    path = Path(head)
    if not path.exists():
        raise FactoryError(f"there is no file {head} (looked in {Path.cwd()})")
    if path.is_dir() or path.suffix != ".py":
        raise FactoryError(f"{head} is {'a directory' if path.is_dir() else 'no Python file'}: give a .py file")
    name = f"_spec_{re.sub(r'[^0-9a-zA-Z_]', '_', path.stem)}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    _search(path.resolve().parent)
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise FactoryError(f"running {head} raised {in_words(error)}") from error
    return module


def _from_module(head: str) -> ModuleType:
    if not re.fullmatch(_DOTTED, head):
        raise FactoryError(f"{head!r} is no name of a module: write package.module:factory or file.py:factory")
    _search(Path.cwd())
    try:
        return importlib.import_module(head)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{head}.".startswith(f"{error.name}."):
            raise FactoryError(
                f"there is no module {error.name!r}, searched for from {Path.cwd()}: is it installed, or is SPEC a "
                f"file (file.py:factory)?"
            ) from error
        raise FactoryError(f"importing {head} raised {in_words(error)}") from error


def _search(folder: Path) -> None:
    """Let modules in a folder be imported, as `python file.py` does for those beside the file."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _attribute(module: ModuleType, name: str, head: str) -> Any:
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise FactoryError(f"{head} has no {name!r}.{_candidates(module, name)}")
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


def _required(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """The names of arguments that have no default."""
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters.values() if p.default is p.empty and p.kind not in optional]


def _parameters(factory: Any) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return None
