"""The package's shape: imports point one way, and files stay small."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import persample

ROOT = Path(persample.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
LAYERS = [
    "kernels",
    "distributed",
    "nn",
    "factors",
    "reductions",
    "graph",
    "expanded",
    "rerun",
    "top",
    "compiled",
    "testing",
    "audit",
    "dp",
    "influence",
    "demo",
    "cli",
]  # each may import itself and those before it
APART = {"graph": "reductions", "expanded": "reductions"}  # but neither way in knows what is asked of it
EVERYWHERE = {
    "_errors",
    "_releases",
    "_version",
    "numberless",
    "python_nodes",
    "refusal",
    "traverse",
    "trees",
}  # which import nothing of this package: anybody may use them
TOP_MODULES = {
    "call",
    "checks",
    "explain",
    "fused",
    "modules",
    "monitor",
    "shortcuts",
    "params",
    "several",
    "verbs",
    "_factories",
    "_html",
    "_table",
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def layer_of(module: str) -> str:
    """The layer of a dotted name below `persample`."""
    first = module.split(".")[0]
    return first if first in LAYERS else "top"


def imports(path: Path) -> Iterator[str]:
    """Every module of this package that a file imports, as a dotted name below `persample`."""
    package = list(path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name.removeprefix("persample.") for a in node.names if a.name.startswith("persample."))
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                base = package[: len(package) - (node.level - 1)]
                for alias in node.names:
                    yield ".".join([*base, *([module] if module else [alias.name])])
            elif module.split(".")[0] == "persample":
                for alias in node.names:
                    yield module.removeprefix("persample").lstrip(".") or alias.name


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    relative = path.relative_to(ROOT)
    of_files = {"__main__": "cli", "__init__": "testing"}
    own = layer_of(relative.parts[0]) if len(relative.parts) > 1 else of_files.get(path.stem, "top")
    allowed = [layer for layer in LAYERS[: LAYERS.index(own) + 1] if layer != APART.get(own)]
    wrong = [m for m in imports(path) if m.split(".")[0] not in EVERYWHERE and layer_of(m) not in allowed]
    assert not wrong, f"{name_of(path)} must not import {wrong}"


ROOMS = [
    "layout",
    "sample_rows",
    "read",
    "ops",
    "compiled",
    "locate",
    "execute",
    "remember",
    "entry",
    "several",
    "describe",
]  # of graph/
IN_GRAPH = [path for path in FILES if path.relative_to(ROOT).parts[0] == "graph" and path.parent.name != "graph"]
TABLE = "graph.ops.table"  # plain records, which reading a graph looks up


@pytest.mark.parametrize("path", IN_GRAPH, ids=name_of)
def test_rooms_of_the_graph_know_those_before_them(path: Path) -> None:
    known = ROOMS[: ROOMS.index(path.parent.name) + 1]
    rooms = {module: module.split(".")[1] for module in imports(path) if module.startswith("graph.")}
    wrong = [module for module, room in rooms.items() if room not in known and module != TABLE]
    assert not wrong, f"{name_of(path)} must not import {wrong}"


def test_every_module_of_the_graph_has_a_room() -> None:
    assert {path.stem for path in (ROOT / "graph").glob("*.py")} | {path.parent.name for path in IN_GRAPH} == {
        *ROOMS,
        "__init__",
    }


def test_the_walk_sees_imports() -> None:
    """A guard for the test above: known imports are found."""
    assert "factors" in set(imports(ROOT / "graph" / "execute" / "capture.py"))
    assert "kernels.convolution" in set(imports(ROOT / "factors" / "convolution.py"))
    assert {layer_of(m) for m in imports(ROOT / "verbs.py")} >= {"graph", "top"}
    assert {p.parts[len(ROOT.parts)] for p in FILES if p.parent != ROOT} == set(LAYERS) - {"top"}
    assert {p.stem for p in FILES if p.parent == ROOT} - EVERYWHERE - {"__init__", "__main__"} == TOP_MODULES


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_file_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree) or path.name == "_version.py"
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "tests"]
