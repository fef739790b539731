"""What is installed, and on what machine."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .._version import __version__

_OPTIONAL = ("typer", "rich", "dp-accounting", "safetensors", "scikit-learn", "matplotlib", "numpy")


def facts() -> dict[str, Any]:
    """What a reader of a report or a bug report needs."""
    return {
        "persample": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "devices": ["cpu", *_accelerators()],
        "packages": {name: _version(name) for name in _OPTIONAL},
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _accelerators() -> list[str]:
    gpus = [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    return [*gpus, *(["mps"] if torch.backends.mps.is_available() else [])]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
