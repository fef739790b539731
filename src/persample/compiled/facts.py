"""What a build depends on, as far as it can be seen from outside, and how to say what has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..params import Params, named
from ..trees import leaves

Facts = Mapping[str, str]


def facts_of(args: Sequence[Any], kwargs: Mapping[str, Any], params: Params) -> Facts:
    """The arguments of a call by kind and shape, modes of the model and of PyTorch, and the parameters."""
    facts: dict[str, str] = {}
    for name, value in [*((f"argument {i}", a) for i, a in enumerate(args)), *kwargs.items()]:
        held = [leaf for leaf in leaves(value) if not isinstance(leaf, nn.Module)]
        facts[name] = ", ".join(_shown(leaf) for leaf in held) or type(value).__name__
    if isinstance(params, nn.Module):
        training = sum(module.training for module in params.modules())
        facts["modules in training mode"] = str(training)
    facts["autocast"] = (
        ", ".join(
            f"{kind} {torch.get_autocast_dtype(kind)}" for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
        )
        or "off"
    )
    trained = list(named(params))
    facts["trained parameters"] = f"{len(trained)}: {', '.join(trained[:3])}" + ("..." if len(trained) > 3 else "")
    return facts


def _shown(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
    return repr(leaf) if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf).__name__


def changes(before: Facts, now: Facts) -> str:
    """What is different, in words."""
    different = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if not different:
        return "something else that the losses depend on has changed"
    return "; ".join(f"{key} was {before.get(key, 'missing')}, is {now.get(key, 'missing')}" for key in different)
