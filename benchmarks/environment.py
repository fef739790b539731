"""Where a benchmark was run."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
STAT = Path("/proc/stat")


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


class Others:
    """How many cores other programs kept busy since this was made: what they take makes a figure doubtful."""

    def __init__(self) -> None:
        self._start = self._now()

    def cores(self) -> float | None:
        """None where the system does not say."""
        now = self._now()
        if now is None or self._start is None:
            return None
        wall, mine, all_of_us = (after - before for after, before in zip(now, self._start, strict=True))
        return max(0.0, all_of_us - mine) / max(wall, 1e-9)

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Seconds on the wall, of this process and of all of them."""
        if not STAT.exists():
            return None
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, STAT.read_text().split()[1:9])
        ticks = user + nice + system + irq + softirq + steal
        return time.perf_counter(), time.process_time(), ticks / os.sysconf("SC_CLK_TCK")


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
