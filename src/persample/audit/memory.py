"""Peak memory of every kind of step, from what Linux says about a process that does nothing else.

The process builds the problem from its SPEC again and takes the steps one after the other. Freed memory is given back
to the system in between, so that what is resident is what is in use.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from .._errors import PerformanceWarning
from ..kernels.pages import empty_cache
from .costs import STEPS, Step
from .errors import AuditError
from .problem import Problem
from .spec import load

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_CHILD = "from persample.audit.memory import child; child()"


def peaks(spec: str, *, batch_size: int | None, seed: int) -> dict[str, int]:
    """Bytes above what the forward pass holds, by step; and what it holds, as ``forward``. Needs Linux, on the CPU."""
    if not _CLEAR_REFS.exists():
        raise AuditError("memory can be measured on Linux only")
    options = {"spec": spec, "batch_size": batch_size, "seed": seed, "threads": torch.get_num_threads()}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "peaks.json"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        command = [sys.executable, "-c", _CHILD, json.dumps(options), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if done.returncode or not out.exists():
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise AuditError(f"memory could not be measured in a process of its own: {last}")
        bytes_by_step: dict[str, int] = json.loads(out.read_text())
    return bytes_by_step


def child() -> None:
    """Measure in a process of its own, and write the result to a file."""
    options, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(options.pop("threads"))
    out.write_text(json.dumps(_measured(load(options.pop("spec"), **options))))


def _measured(problem: Problem) -> dict[str, int]:
    _return_freed_memory()
    bytes_by_step: dict[str, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        for name, step in STEPS.items():
            step(problem.once(), problem.model)  # loads the code of every kernel, which is not what is asked
            held, bytes_by_step[name] = _step(problem, step)
            bytes_by_step["forward"] = max(bytes_by_step.get("forward", 0), held)
    return bytes_by_step


def _step(problem: Problem, step: Step) -> tuple[int, int]:
    """How far memory rises in the forward pass, and at most above that level afterwards."""
    empty_cache()
    gc.collect()
    before = _status("VmRSS")
    losses = problem.once()
    gc.collect()
    _CLEAR_REFS.write_text("5")  # forgets the peak
    held = _status("VmRSS")
    kept = step(losses, problem.model)
    peak = _status("VmHWM")
    del kept
    return max(0, held - before), max(0, peak - held)


def _return_freed_memory() -> None:
    """Have glibc give back every large block as soon as it is freed."""
    mmap_threshold, system = -3, ctypes.CDLL(None)
    if hasattr(system, "mallopt"):
        system.mallopt(mmap_threshold, 64 * 1024)


def _status(key: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"{_STATUS} has no {key}")
