"""Tiny random models of many architectures, each with per-sample losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from tests.zoo.build import build
from tests.zoo.config import Spec
from tests.zoo.names import FAST as _FAST
from tests.zoo.names import GROUPS
from tests.zoo.options import options


@dataclass(frozen=True)
class Entry:
    """A model of the zoo: eval mode, float64 unless rtol says otherwise, every parameter trainable."""

    name: str
    family: str
    build: Callable[[], tuple[nn.Module, Callable[[], Tensor]]]
    interacts: bool = False
    rtol: float = 1e-8


def _entry(name: str, family: str, head: str, feed: str) -> Entry:
    """The entry of one name of the table."""
    changes = options(name)
    interacts = changes.pop("interacts", False)
    spec = Spec(**{"model_type": name.split("/")[0], "head": head, "feed": feed} | changes)
    return Entry(name, family, partial(build, spec), interacts, rtol=1e-4 if spec.float32 else 1e-8)


ENTRIES = [_entry(name, *group) for group, names in GROUPS.items() for name in names.split()]
FAST = _FAST.split()
