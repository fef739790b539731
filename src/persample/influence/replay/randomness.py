"""Random states, as plain values."""

from __future__ import annotations

from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """The state of PyTorch's generators: of the CPU, and of CUDA devices if any is in use."""
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if used else []}


def set_random_state(state: dict[str, Any]) -> None:
    """Go on from a `random_state`."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


def same_randomness(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Has nothing been drawn between two states?"""
    cuda = zip(one["cuda"], other["cuda"], strict=False)
    same_count = len(one["cuda"]) == len(other["cuda"])
    return same_count and torch.equal(one["cpu"], other["cpu"]) and all(torch.equal(a, b) for a, b in cuda)
