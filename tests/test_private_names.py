"""PyTorch's private names: each stands in the one module that keeps its subject, and a test looks it up.

A private name is one that begins with an underscore and is not defined in this package: an attribute of anything, the
name in a string (``getattr``, tables of names), an imported module or name. Names that both have, as ``_version``, are
ours only on ``self`` and ``cls``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import persample
from persample._releases import OLDEST, TESTED

ROOT = Path(persample.__file__).parent
TESTS = Path(__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


class Keeper(NamedTuple):
    """The module that may know the private names of a subject, and the test that holds them against this torch."""

    module: str
    test: str


KEEPERS = {
    "what nodes and leaves hold, other checkpoints": Keeper("graph/read/saved.py", "graph/test_saved.py"),
    "nodes written in Python": Keeper("python_nodes.py", "graph/test_saved.py"),
    "what torch.compile makes": Keeper("graph/read/compiled.py", "graph/test_saved.py"),
    "answers in place of a fused backward": Keeper("graph/ops/answers.py", "graph/test_saved.py"),
    "reentrant checkpoints": Keeper("graph/read/reentrant.py", "graph/test_reentrant.py"),
    "ops of torch.library": Keeper("graph/read/library.py", "graph/test_library_ops.py"),
    "DDP, and the nodes of wrappers": Keeper("distributed/wrappers.py", "distributed/test_names.py"),
    "DTensors in the graph": Keeper("distributed/tensor_parallel.py", "distributed/test_names.py"),
    "FSDP2 and sharded tensors": Keeper("distributed/shards.py", "distributed/test_names.py"),
    "tensors without numbers": Keeper("numberless.py", "test_numberless.py"),
    "what a hidden op does": Keeper("graph/read/slices.py", "graph/test_slices.py"),
    "ops as they are dispatched": Keeper("testing/counting.py", "device/test_counting.py"),
    "Dynamo, compilers and open sizes": Keeper("compiled/compilers.py", "compiled/test_compilers.py"),
    "what modules hold": Keeper("modules.py", "test_modules.py"),
    "kernels below autograd": Keeper("kernels/library.py", "kernels/test_library.py"),
}
MODULES = {keeper.module for keeper in KEEPERS.values()}
KERNELS = KEEPERS["kernels below autograd"].module  # which gives them no strides or signs that autograd would not

OPS_OF_OTHERS = re.compile(r"torch\.ops(?!\.persample\b)")

PRIVATE = re.compile(r"_[^\W_]\w*")
PRIVATE_PATH = re.compile(r"torch\.(\w+\.)*_[^\W_][\w.]*")
PYTHONS = {"_asdict", "_fields", "_make", "_replace"}  # of named tuples, documented
OURS_ELSEWHERE = "_persample_"  # what we put on objects of others begins so
# Which hold names of many subjects, or are what things of many subjects are made of.
NAMESPACES = {"_C", "_autograd", "_functorch", "torch.utils._python_dispatch.TorchDispatchMode"}
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "attrgetter"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def defined(tree: ast.AST) -> Iterator[str]:
    """Functions, classes, variables, and attributes of ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            yield node.attr


def is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


@cache
def our_names() -> frozenset[str]:
    return frozenset(n for path in FILES for n in defined(ast.parse(path.read_text())) if PRIVATE.fullmatch(n))


@cache
def torch_names() -> frozenset[str]:
    """Private names of what is most often met: tensors, modules, nodes, and torch itself."""
    leaf = torch.ones(2, requires_grad=True)
    node = leaf.exp().grad_fn
    things = [leaf, nn.Linear(1, 1), nn.ReLU(), node, torch, torch._C, torch.autograd.Function]
    return frozenset(name for thing in things for name in dir(thing) if PRIVATE.fullmatch(name))


def is_ours(name: str, *, on_self: bool = False) -> bool:
    if name in PYTHONS or name.startswith(OURS_ELSEWHERE):
        return True
    return name in our_names() and (on_self or name not in torch_names())


def private_names(source: str) -> Iterator[tuple[int, str]]:
    """Lines and names of the uses of PyTorch's private names."""
    tree = ast.parse(source)
    prose = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    pieces = {id(piece) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for piece in n.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            if not is_ours(node.attr, on_self=is_own(node.value)):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in prose | pieces and is_private_string(node.value):
                yield node.lineno, node.value
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, name) for name in prefixes(node))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((node.lineno, name) for name in imported(node))


def is_private_string(text: str) -> bool:
    return bool(PRIVATE_PATH.fullmatch(text) or (PRIVATE.fullmatch(text) and not is_ours(text)))


def prefixes(call: ast.Call) -> Iterator[str]:
    """What f-strings begin with by which attributes are looked up."""
    if getattr(call.func, "id", None) in BY_NAME:
        beginnings = [argument.values[0] for argument in call.args if isinstance(argument, ast.JoinedStr)]
        for text in [str(piece.value) for piece in beginnings if isinstance(piece, ast.Constant)]:
            if PRIVATE.match(text) and not any(name.startswith(text) for name in our_names()):
                yield text


def imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        paths = [alias.name for alias in node.names]
    elif node.level:
        return
    else:
        paths = [f"{node.module}.{alias.name}" for alias in node.names]
    yield from (path for path in paths if any(PRIVATE.fullmatch(part) for part in path.split(".")))


@pytest.mark.parametrize("path", [p for p in FILES if name_of(p) not in MODULES], ids=name_of)
def test_private_names_of_torch_stay_with_their_keepers(path: Path) -> None:
    uses = [f"line {line}: {name}" for line, name in private_names(path.read_text())]
    assert not uses, f"{name_of(path)}: move what reads these behind a function of one of {sorted(MODULES)}"


def test_every_name_has_one_keeper() -> None:
    keepers: dict[str, set[str]] = {}
    for module in MODULES:
        for _, name in private_names((ROOT / module).read_text()):
            keepers.setdefault(name, set()).add(module)
    assert {name: found for name, found in keepers.items() if len(found) > 1 and name not in NAMESPACES} == {}


@pytest.mark.parametrize("keeper", KEEPERS.values(), ids=KEEPERS)
def test_keepers_say_for_which_releases_they_hold_and_are_tested(keeper: Keeper) -> None:
    text = " ".join((ast.get_docstring(ast.parse((ROOT / keeper.module).read_text())) or "").split())
    oldest, newest = (".".join(map(str, release)) for release in (OLDEST, TESTED[-1]))
    assert f"old for torch {oldest} to {newest}" in text
    assert f"tests/{keeper.test}" in text
    assert (TESTS / keeper.test).exists()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("t._version", "_version"),
        ("self.module._unheard_of", "_unheard_of"),
        ("model._buffers", "_buffers"),
        ("self._backward_hooks", "_backward_hooks"),
        ("getattr(p, '_local_tensor', None)", "_local_tensor"),
        ("hasattr(p, '_local_tensor')", "_local_tensor"),
        ("setattr(p, '_training_state', 1)", "_training_state"),
        ("NAMES = ('_training_state',)", "_training_state"),
        ("getattr(node, f'_saved_{name}')", "_saved_"),
        ("torch._C", "_C"),
        ("sys.modules['torch.distributed._composable_state']", "torch.distributed._composable_state"),
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch._ops import OpOverload", "torch._ops.OpOverload"),
        ("from torch.utils.checkpoint import _Holder", "torch.utils.checkpoint._Holder"),
    ],
)
def test_the_search_sees(source: str, name: str) -> None:
    assert name in [found for _, found in private_names(source)]


@pytest.mark.parametrize(
    "source",
    [
        "self._buffers",  # a name of ours, too
        "run._written_out_if_it_pays(factor)",
        "Evidence._fields",
        "node._persample_dim",
        "from .._errors import UnsupportedError",
        "getattr(self, f'_solve_{name}')()",
        "'''prose about _saved_self'''",
        "raise ValueError('set torch._functorch.config.donated_buffer = False')",
    ],
)
def test_the_search_passes_over(source: str) -> None:
    assert list(private_names(source)) == []


@pytest.mark.parametrize("path", [p for p in FILES if name_of(p) not in MODULES], ids=name_of)
def test_kernels_of_torch_are_called_from_one_file(path: Path) -> None:
    assert not OPS_OF_OTHERS.search(path.read_text()), f"{name_of(path)}: call it in {KERNELS}"


def test_the_one_file_calls_them() -> None:
    callers = [m for m in MODULES if "torch.ops.aten" in (ROOT / m).read_text()]
    assert callers == [KERNELS]
