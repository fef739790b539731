"""How the code reads, in numbers: `python -m benchmarks.structure [--src PATH] [--json FILE]`.

Lines of code by folder, the longest and the most complex function, how deep imports go, how many functions and files a
reader passes who follows one loss through a verb, and in how many places an op of PyTorch is named. ``--src`` is the
``src`` folder of another checkout, to compare with; each is imported in a process of its own.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1] / "src"
OPS = "Clone Addmm Mm Convolution NativeLayerNorm Embedding Add T".split()


def code_lines(path: Path) -> int:
    """Lines that are not blank, comments or docstrings."""
    text = path.read_text()
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - prose)


def functions(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, length and complexity (decisions and one) of every function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, (node.end_lineno or 0) - node.lineno + 1, 1 + sum(map(_decisions, ast.walk(node)))


def _decisions(node: ast.AST) -> int:
    if isinstance(node, (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.Assert)):
        return 1
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    return 1 + len(node.ifs) if isinstance(node, ast.comprehension) else 0


def import_depth(root: Path) -> int:
    """The longest chain of modules of which each imports the next."""
    modules = {_dotted(path, root): path for path in root.rglob("*.py")}

    @cache
    def below(module: str) -> frozenset[str]:
        return frozenset(_imports(modules[module], module, modules) - {module})

    @cache
    def depth(module: str) -> int:
        return 1 + max([depth(other) for other in below(module)], default=0)

    return max(map(depth, modules))


def _dotted(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")


def _imports(path: Path, module: str, modules: dict[str, Path]) -> set[str]:
    """Modules that are imported when this one is: not those inside functions, or for type checkers alone."""
    found: set[str] = set()
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - (node.level - 1)] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                imported = f"{name}.{alias.name}" if f"{name}.{alias.name}" in modules else name
                found |= {imported} & modules.keys() if not f"{module}.".startswith(f"{imported}.") else set()
    return found


def naming(root: Path) -> dict[str, int]:
    """In how many statements each of some ops is named as a string."""
    places: Counter[str] = Counter()
    for path in root.rglob("*.py"):
        for statement in ast.parse(path.read_text()).body:
            words = {
                word
                for node in ast.walk(statement)
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
                for word in node.value.split()
            }
            docstring = ast.get_docstring(statement) if isinstance(statement, (ast.FunctionDef, ast.ClassDef)) else ""
            places.update(op for op in OPS if op in words and op not in (docstring or "").split())
    return {op: places[op] for op in OPS}


WAYS = {
    "norms, cold": ("ps.norms(losses(), model)", 0),
    "norms, warm": ("ps.norms(losses(), model)", 2),
    "clipped_sum, warm": ("ps.clipped_sum(losses(), model, 1.0)", 2),
    "grad, warm": ("ps.grad(losses(), model)", 2),
    "call_for_per_sample_grads, cold": ("ps.call_for_per_sample_grads(model)(x).square().sum().backward()", 0),
}

FOLLOW = """
import json, sys, torch, persample as ps
from torch import nn
torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(5, 4)
losses = lambda: model(x).square().sum(1)
root = ps.__file__.removesuffix("__init__.py")
def run():
    {statement}
for _ in range({before}):
    run()
calls, seen, depth, deepest, files = 0, set(), 0, 0, []
def follow(frame, event, argument):
    global calls, depth, deepest
    code = frame.f_code
    if code.co_filename.startswith(root) and not code.co_name.startswith("<"):
        if event == "call":
            calls, depth = calls + 1, depth + 1
            deepest = max(depth, deepest)
            seen.add((code.co_filename, code.co_qualname))
            files.append(code.co_filename)
        elif event == "return":
            depth -= 1
sys.setprofile(follow)
run()
sys.setprofile(None)
switches = sum(a != b for a, b in zip(files, files[1:]))
print(json.dumps(dict(calls=calls, functions=len(seen), files=len(set(files)), depth=deepest, switches=switches)))
"""


def way(src: Path, statement: str, before: int) -> dict[str, int]:
    """What a reader passes who follows one call."""
    script = FOLLOW.format(statement=statement, before=before)
    done = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": str(src)}, capture_output=True, text=True, check=True
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found


def measure(src: Path) -> dict[str, Any]:
    """All figures of one checkout."""
    root = src / "persample"
    files = sorted(root.rglob("*.py"))
    folders: Counter[str] = Counter()
    for path in files:
        inside = path.relative_to(root).parts
        folders[inside[0] if len(inside) > 1 else "top level"] += code_lines(path)
    every = [(*function, path.relative_to(root).as_posix()) for path in files for function in functions(path)]
    lengths = sorted(length for _, length, _, _ in every)
    longest, hardest = max(every, key=lambda f: f[1]), max(every, key=lambda f: f[2])
    return {
        "code": {"all": sum(folders.values()), **dict(folders.most_common())},
        "functions": {
            "median": statistics.median(lengths),
            "p90": lengths[int(0.9 * len(lengths))],
            "longest": f"{longest[1]} ({longest[3]}: {longest[0]})",
            "most complex": f"{hardest[2]} ({hardest[3]}: {hardest[0]})",
            "more complex than 12": sum(f[2] > 12 for f in every),
        },
        "largest file": max(path.read_text().count("\n") for path in files),
        "import depth": import_depth(root),
        "statements that name an op": naming(root),
        "the way of a 2-layer MLP": {name: way(src, *about) for name, about in WAYS.items()},
    }


def main() -> None:
    """Print the figures, and write them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--src", type=Path, default=HERE, help="the src folder to look at")
    parser.add_argument("--json", type=Path, help="where to write the figures, too")
    options = parser.parse_args()
    figures = measure(options.src.resolve())
    print(json.dumps(figures, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
