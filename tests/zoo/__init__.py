"""Tiny random models of many architectures, each with per-sample losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from tests.zoo.build import Spec, build
from tests.zoo.names import GROUPS, SQUARE
from tests.zoo.options import OPTIONS


@dataclass(frozen=True)
class Entry:
    """A model of the zoo: eval mode, float64, every parameter trainable."""

    name: str
    family: str
    build: Callable[[], tuple[nn.Module, Callable[[], Tensor]]]
    interacts: bool = False
    rtol: float = 1e-8


def _entries() -> list[Entry]:
    """One entry per name in the table."""
    out = []
    for family, head, feed, names in GROUPS:
        for name in names.split():
            options = ({"B": 4, "T": 4} if name in SQUARE else {}) | OPTIONS.get(name, {})
            interacts = options.pop("interacts", False)
            spec = Spec(**{"model_type": name.split("/")[0], "head": head, "feed": feed} | options)
            out.append(Entry(name, family, partial(build, spec), interacts, 1e-4 if spec.float32 else 1e-8))
    return out


ENTRIES = _entries()
FAST: list[str] = []
