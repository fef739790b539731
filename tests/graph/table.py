"""The table of ops, as tests see it: who has what, and entries that are changed for one test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from persample.graph import ops
from persample.graph.ops.table import UNKNOWN, Op, entries, named

FOLDER = Path(ops.__file__).parent
NO_FAMILIES = set("__init__ answers broadcast custom dims fused table use".split())  # files without entries
FIELDS = tuple(field.name for field in fields(Op) if field.name != "name")


def having(field: str) -> frozenset[str]:
    """The names of all entries that say something under this field."""
    nothing = getattr(UNKNOWN, field)
    return frozenset(op.name for op in entries() if getattr(op, field) != nothing)


def plant(monkeypatch: pytest.MonkeyPatch, name: str, **known: Any) -> None:
    """Change what one entry says, wherever it has been looked up already."""
    monkeypatch.setattr(Op, "__setattr__", object.__setattr__)  # entries are frozen
    monkeypatch.setattr(Op, "__delattr__", object.__delattr__)
    for field, value in known.items():
        monkeypatch.setattr(named(name), field, value)


@lru_cache
def families() -> dict[str, list[str]]:
    """The names that each file of the table has entries for."""
    files = [path for path in sorted(FOLDER.glob("*.py")) if path.stem not in NO_FAMILIES]
    texts = {path.stem: [str(first.value) for first in entered(ast.parse(path.read_text()))] for path in files}
    return {family: " ".join(listed).split() for family, listed in texts.items()}


def entered(tree: ast.Module) -> Iterator[ast.Constant]:
    """The first arguments of all calls that stand by themselves in a module, if written out: the names of entries."""
    for statement in tree.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and statement.value.args:
            first = statement.value.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first
