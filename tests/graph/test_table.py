"""What is known of an op stands in its entry, and nowhere else."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import persample
from persample.graph import ops
from persample.graph.ops.table import UNKNOWN, entries, lookup, named
from tests.graph.samples.leaves import w
from tests.graph.sites import find
from tests.graph.table import FOLDER, entered, families

ROOT = Path(persample.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
NAMES = {op.name for op in entries()}

# Names that say nothing of an op.
ALLOWED = {
    ROOT / "distributed" / "wrappers.py": {
        "_DDPSink",
        "RegisterPostBackwardFunction",
    },  # PyTorch's own Functions, not users'
    ROOT / "distributed" / "tensor_parallel.py": {"_ToTorchTensor", "_FromTorchTensor", "Redistribute"},
    ROOT / "graph" / "read" / "invoke.py": {"CopySlices"},  # why it cannot be run twice
}


def ops_named(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Strings made of nothing but names of ops, and their lines; not those of public names or of type variables."""
    aside = [node for node in ast.walk(tree) if _is_public_names(node) or _is_type_variable(node)]
    skipped = {id(part) for node in aside for part in ast.walk(node)}
    skipped |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            words = node.value.split()
            if NAMES.issuperset(words):
                yield from ((node.lineno, word) for word in words)


def _is_public_names(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


def _is_type_variable(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "TypeVar"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_ops_are_named_in_their_entries_alone(path: Path) -> None:
    tree = ast.parse(path.read_text())
    entries_here = [first.lineno for first in entered(tree)] if path.parent == FOLDER else []
    stray = [
        (line, name) for line, name in ops_named(tree) if line not in entries_here and name not in ALLOWED.get(path, ())
    ]
    assert not stray, f"{path.name} names ops: say it in their entries, as a field of Op"


@pytest.mark.parametrize("text", ['X = {"Mm": 1}', 'X = "Mm Addmm".split()', 'def f(x): return x.name == "Mm"'])
def test_a_name_elsewhere_would_be_found(text: str) -> None:
    assert list(ops_named(ast.parse(text)))


def test_every_family_is_imported_and_entered() -> None:
    assert sorted(name for listed in families().values() for name in listed) == sorted(NAMES)
    assert all(families().values())
    assert all(f"{ops.__name__}.{family}" in sys.modules for family in families())


def test_the_docs_show_an_entry_as_it_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "teach.md").read_text()
    title, _, shown = page.partition('```py title="src/persample/graph/ops/')[2].partition('"\n')
    shown = shown.partition("```")[0]
    assert shown in (FOLDER / title).read_text()
    assert len([line for line in shown.splitlines() if line]) <= 10


def test_nodes_are_looked_up_by_their_type() -> None:
    node = find(w(2, 3) @ w(3, 4), "Mm")
    assert lookup(node) is lookup(node) is named("Mm")
    assert lookup(find(w(3, 3).diagonal_scatter(w(3)), "DiagonalScatter")) is UNKNOWN
    assert named("Unheard") is UNKNOWN
