"""Surroundings that several tests run in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PEAK = """
import re
def peak():  # in MB; getrusage would count the process that started this one
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
"""


def megabytes(script: str, *args: str) -> float:
    """The number that a script prints, in a process of its own where freed memory goes back at once.

    It can ask for its `peak()`, on Linux.
    """
    own = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PEAK + script, *args]
    return float(subprocess.run(command, env=os.environ | own, capture_output=True, check=True).stdout)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Tensors and modules are made in this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
