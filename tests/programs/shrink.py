"""Makes a failing program small: fewer statements, simpler expressions, smaller numbers, the same failure."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import monotonic
from typing import Any

from .script import Finding, Script, evaluate, maker, only

PLAIN = frozenset(
    "weight data ids draw samples resized fresh sum range Linear parameters tuple batch= high= dim=".split()
)


def shrink(script: Script, finding: Finding, seconds: float = 30.0) -> Script:
    """The smallest program found in that time with the same finding."""
    deadline = monotonic() + seconds

    def fails(candidate: Script) -> bool:
        return monotonic() < deadline and same_finding(candidate, finding)

    script = only(script, finding)
    size = -1
    while size != len(script.text) and monotonic() < deadline:
        size = len(script.text)
        for better in (_fewer_runs, _fewer_lines, _fewer_params, _simpler):
            script = better(script, fails)
    return _settled(script, fails)


def same_finding(script: Script, finding: Finding) -> bool:
    """Whether this program fails in the same way."""
    try:
        evaluate(script)
    except Finding as found:
        return (found.check, found.kind) == (finding.check, finding.kind)
    except Exception:
        return False
    return False


def signature(script: Script, finding: Finding) -> tuple[str, ...]:
    """What a shrunk program is about: the check, the kind, and the functions that it calls."""
    return (finding.check, finding.kind, *sorted(calls(script) - PLAIN))


def calls(script: Script) -> set[str]:
    """The functions and methods that a program calls, with keywords, and whether weights are left out."""
    made = {name for line in script.lines for name in [line.split(" = ")[0]] if re.fullmatch(r"[wm]\d+", name)}
    found = {"subset"} if made - set(script.params) else set[str]()
    for node in ast.walk(ast.parse("\n".join(script.lines))):
        if isinstance(node, ast.Call):
            found.add(node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func))
            found |= {f"{k.arg}=" for k in node.keywords if k.arg}
            if isinstance(node.func, ast.Attribute) and node.func.attr == "apply":
                found.add(ast.unparse(node.func.value))
        elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)):
            found.add("setitem")
    return found


Fails = Callable[[Script], bool]


def _fewer_runs(script: Script, fails: Fails) -> Script:
    for k in reversed(range(len(script.runs))):
        candidate = replace(script, runs=script.runs[:k] + script.runs[k + 1 :])
        if len(script.runs) > 1 and fails(candidate):
            script = candidate
    for k, run in enumerate(script.runs):
        wider = replace(script, runs=(*script.runs[:k], replace(run, dtype="float64"), *script.runs[k + 1 :]))
        if run.dtype != "float64" and fails(wider):
            script = wider
    return script


def _fewer_params(script: Script, fails: Fails) -> Script:
    for p in reversed(script.params):
        candidate = replace(script, params=tuple(q for q in script.params if q != p))
        if candidate.params and fails(candidate):
            script = candidate
    return script


def _fewer_lines(script: Script, fails: Fails) -> Script:
    """Statements go, one at a time; what used their result uses one of their operands."""
    k = len(script.lines) - 1
    while k >= 0:
        for candidate in _without(script, k):
            if fails(candidate):
                script = candidate
                break
        k -= 1
    return script


def _without(script: Script, k: int) -> Iterator[Script]:
    (statement,) = ast.parse(script.lines[k]).body
    rest = (*script.lines[:k], *script.lines[k + 1 :])
    name = target(statement)
    params = tuple(p for p in script.params if p != name)
    if name is None or not any(name in names(line) for line in rest[k:]):
        yield replace(script, lines=rest, params=params)
        return
    for other in [n for n in dict.fromkeys(names(script.lines[k])) if n != name and n[1:].isdigit()]:
        renamed = (*rest[:k], *(_renamed(line, name, other) for line in rest[k:]))
        yield replace(script, lines=renamed, params=params)


def target(statement: ast.stmt) -> str | None:
    """The name that a statement gives something."""
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return None


def names(line: str) -> list[str]:
    """The names that a statement reads or writes."""
    return [node.id for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Name)]


def _renamed(line: str, old: str, new: str) -> str:
    tree = ast.parse(line)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == old:
            node.id = new
    return ast.unparse(tree)


def _simpler(script: Script, fails: Fails) -> Script:
    """An expression becomes one of its own parts, an option its default, a number a smaller one."""
    for k in reversed(range(len(script.lines))):
        again = True
        while again:
            again = False
            for text in variants(script.lines[k]):
                candidate = replace(script, lines=(*script.lines[:k], text, *script.lines[k + 1 :]))
                if fails(candidate):
                    script, again = candidate, True
                    break
    return script


def variants(line: str) -> Iterator[str]:
    """The same statement with one thing simpler."""
    for place, (_, _, _, node) in enumerate(_slots(ast.parse(line))):
        for choice in range(len(_parts(node))):
            tree = ast.parse(line)
            parent, field, index, found = _slots(tree)[place]
            _put(parent, field, index, _parts(found)[choice])
            try:
                yield ast.unparse(ast.fix_missing_locations(tree))
            except Exception:
                continue
        if isinstance(node, ast.Call):
            for k in range(len(node.keywords)):
                tree = ast.parse(line)
                call: Any = _slots(tree)[place][3]
                del call.keywords[k]
                yield ast.unparse(tree)


def _slots(tree: ast.AST) -> list[tuple[ast.AST, str, int | None, ast.expr]]:
    """Where expressions stand that something else can be put in for."""
    found: list[tuple[ast.AST, str, int | None, ast.expr]] = []
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if field in ("targets", "target", "func"):
                continue
            for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(node, ast.expr):
                    found.append((parent, field, index, node))
    return found


def _put(parent: ast.AST, field: str, index: int | None, node: ast.expr) -> None:
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def _parts(node: ast.expr) -> list[ast.expr]:
    """What an expression can be replaced by."""
    if isinstance(node, ast.Constant):
        if type(node.value) is int and node.value > 1:
            return [ast.Constant(n) for n in dict.fromkeys([1, 2, node.value - 1]) if n < node.value]
        return []
    if isinstance(node, ast.Call):
        own = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        return [*own, *(a.value if isinstance(a, ast.Starred) else a for a in node.args)]
    if isinstance(node, ast.Subscript):
        return [node.value]
    if isinstance(node, ast.Attribute):
        return [node.value] if node.attr not in ("float64", "float32", "long", "shape") else []
    return [
        child
        for child in ast.iter_child_nodes(node)
        if isinstance(child, ast.expr) and not isinstance(node, ast.Lambda)
    ]


def _settled(script: Script, fails: Fails) -> Script:
    """Sizes as numbers, and no name that is only another one's."""
    try:
        written = _numbers(script)
    except Exception:
        written = script
    if written != script and fails(written):
        script = written
    last = script.lines[-1]
    if last.startswith("losses = ") and len(script.lines) > 1 and script.lines[-2].startswith(f"{last[9:]} = "):
        shorter = replace(script, lines=(*script.lines[:-2], "losses" + script.lines[-2][len(last) - 9 :]))
        script = shorter if fails(shorter) else script
    return script


def _numbers(script: Script) -> Script:
    """Every `h.shape[k]` as the number it is."""
    env: dict[str, Any] = dict(maker(script, script.runs[0]).__globals__["NAMES"], flag=script.runs[0].flag)
    lines = []
    for line in script.lines:
        tree = ast.parse(line)
        for parent, field, index, node in _slots(tree):
            if isinstance(node, ast.Subscript) and ast.unparse(node).split("[")[0].endswith(".shape"):
                try:
                    _put(parent, field, index, ast.Constant(int(eval(ast.unparse(node), env))))
                except Exception:
                    continue
        lines.append(ast.unparse(tree))
        exec(line, env)
    return replace(script, lines=tuple(lines))
