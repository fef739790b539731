"""Ops of ``torch.library`` for what a compiler should leave alone in graphs for the CPU.

What loops over steps or over a few samples at a time, or looks at numbers, is unrolled when it is traced, and slower
than it was. As an op it runs as it is when the graph does: inside, numbers are real.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .certificates import is_traced
from .devices import can_look, looking

__all__ = ["asks_ops", "define"]


def asks_ops(device: torch.device) -> bool:
    """Is a call on this device traced into a graph for the CPU, so that ops are to be asked?"""
    return is_traced() and device.type == "cpu" and not can_look(device)


def define(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an op for as long as the process lives, unless it was defined when its module was loaded before.

    ``function`` may look at numbers, whatever the graph was traced with; ``fake`` makes tensors of the shapes alone.
    """
    name, _, rest = schema.partition("(")
    if hasattr(torch.ops.persample, name):
        return

    def run(*args: Any) -> Any:
        with looking(True):
            return function(*args)

    tags = torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag
    torch.library.define(f"persample::{name}", f"({rest}", tags=tags)
    torch.library.impl(f"persample::{name}", "CPU", run)
    torch.library.register_fake(f"persample::{name}", fake)
