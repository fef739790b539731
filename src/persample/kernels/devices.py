"""What devices are good at: which can be asked for a number, and which compute in float64.

On the CPU, looking at a number costs nothing, and rare cases are found by looking. On an accelerator the host would
wait for all work that is under way: there, what is computed never depends on numbers that were computed before. The
same holds wherever there are no numbers to look at.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

import torch

from .certificates import is_traced

__all__ = ["can_look", "full_precision", "has_fast_float64", "has_float64", "launches_cost", "looking"]

_looking: ContextVar[bool | None] = ContextVar("looking", default=None)


def can_look(device: torch.device) -> bool:
    """May a computation on this device go on in another way, depending on the numbers that it has found?

    >>> can_look(torch.device("cpu")), can_look(torch.device("cuda"))
    (True, False)
    """
    forced = _looking.get()
    return device.type == "cpu" if forced is None else forced


def launches_cost(device: torch.device) -> bool:
    """Is it by launches rather than by arithmetic and memory that work on this device is to be counted?

    A graph that is traced for the CPU cannot look, but costs what the CPU takes.
    """
    return not can_look(device) and not (device.type == "cpu" and is_traced())


@contextmanager
def looking(allowed: bool) -> Iterator[None]:
    """Inside, in this thread, look at numbers on every device, whatever it costs, or on none."""
    token = _looking.set(allowed)
    try:
        yield
    finally:
        _looking.reset(token)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Inside, products of float32 are float32's: CUDA's convolutions round their operands to TF32 by default."""
    if device.type != "cuda":
        yield
        return
    places = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "ieee"
    try:
        yield
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision


def has_float64(device: torch.device) -> bool:
    """Does the device have float64 at all?"""
    return device.type not in _WITHOUT_FLOAT64


def has_fast_float64(device: torch.device) -> bool:
    """Are products in float64 at most a few times slower than in float32? On most consumer GPUs, they are 32 or 64."""
    return _has_fast_float64(device) if device.type == "cuda" else has_float64(device)


@lru_cache(maxsize=64)
def _has_fast_float64(device: torch.device) -> bool:
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) in _FAST_FLOAT64


_WITHOUT_FLOAT64 = {"mps"}
_FAST_FLOAT64 = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}  # P100, V100, A100, H100, B200
