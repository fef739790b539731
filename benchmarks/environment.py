"""Where a benchmark was run."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def describe() -> dict[str, Any]:
    """What a reader needs to judge the figures."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "platform": platform.platform(),
        "commit": _git("rev-parse", "HEAD"),
        "source_changed": bool(_git("status", "--porcelain", "--", "src")),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _git(*args: str) -> str | None:
    """What git says about the repository; None outside of one."""
    try:
        done = subprocess.run(["git", *args], capture_output=True, text=True, cwd=ROOT, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
