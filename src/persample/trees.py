"""Tensors in nested arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

LEAVES = (Tensor, PackedSequence, type(None), bool, int, float, str, torch.dtype, torch.device)


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """``fn`` of every leaf: whatever is not a list, tuple, mapping or dataclass; a `PackedSequence` is a leaf, too."""
    if isinstance(tree, LEAVES):
        return fn(tree)
    if isinstance(tree, (tuple, list)):
        return _with_items(tree, [tree_map(fn, value) for value in tree])
    if isinstance(tree, Mapping):
        return _with_values(tree, {key: tree_map(fn, value) for key, value in tree.items()})
    if _is_record(tree):
        return _with_fields(tree, {f.name: tree_map(fn, getattr(tree, f.name)) for f in fields(tree)})
    return fn(tree)


def leaves(tree: Any) -> list[Any]:
    """All leaves, in order."""
    if isinstance(tree, LEAVES):
        return [tree]
    if isinstance(tree, (tuple, list)):
        return _leaves_of_all(tree)
    if isinstance(tree, Mapping):
        return _leaves_of_all(tree.values())
    if _is_record(tree):
        return _leaves_of_all(getattr(tree, f.name) for f in fields(tree))
    return [tree]


def _leaves_of_all(trees: Iterable[Any]) -> list[Any]:
    return [leaf for tree in trees for leaf in leaves(tree)]


def _is_record(tree: Any) -> bool:
    """Is this an object of a dataclass?"""
    return is_dataclass(tree) and not isinstance(tree, type)


def _with_items(tree: Any, items: Sequence[Any]) -> Any:
    """A copy of some kind of tuple or list with other items; itself if they are the same."""
    if all(new is old for new, old in zip(items, tree, strict=True)):
        return tree
    return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)


def _with_values(tree: Any, values: dict[Any, Any]) -> Any:
    """A copy of some kind of dict with other values."""
    if type(tree) is dict:
        return values
    changed = {key: value for key, value in values.items() if value is not tree[key]}
    if not changed:
        return tree
    made = copy(tree)
    for key, value in changed.items():
        made[key] = value
    return made


def _with_fields(tree: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a dataclass, frozen or not, with other values; itself if they are the same."""
    if all(value is getattr(tree, name) for name, value in values.items()):
        return tree
    made = copy(tree)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made
