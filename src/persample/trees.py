"""Tensors in nested arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        values = [tree_map(fn, value) for value in tree]
        if all(new is old for new, old in zip(values, tree, strict=True)):
            return tree
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    if isinstance(tree, Mapping):
        items = {key: tree_map(fn, value) for key, value in tree.items()}
        if type(tree) is dict:
            return items
        return _changed(tree, {key: value for key, value in items.items() if value is not tree[key]})
    if is_dataclass(tree) and not isinstance(tree, type):
        return _with_fields(tree, {f.name: tree_map(fn, getattr(tree, f.name)) for f in fields(tree)})
    return fn(tree)


def _changed(tree: Any, items: Mapping[Any, Any]) -> Any:
    """A copy of some kind of dict with other values."""
    if not items:
        return tree
    made = copy(tree)
    for key, value in items.items():
        made[key] = value
    return made


def _with_fields(tree: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a dataclass, frozen or not, with other values."""
    if all(value is getattr(tree, name) for name, value in values.items()):
        return tree
    made = copy(tree)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def leaves(tree: Any) -> list[Any]:
    """All leaves, in order."""
    if isinstance(tree, LEAVES):
        return [tree]
    if isinstance(tree, (tuple, list)):
        return [leaf for value in tree for leaf in leaves(value)]
    if isinstance(tree, Mapping):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if is_dataclass(tree) and not isinstance(tree, type):
        return [leaf for f in fields(tree) for leaf in leaves(getattr(tree, f.name))]
    return [tree]
