"""Peak memory of one step, from what the system says about this process."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .methods import Method
from .processes import run_worker
from .workloads import Workload

MEASURED = ("plain", "norms", "clipped_sum", "grad")
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peaks(workload: str, threads: int, methods: Sequence[str] = MEASURED) -> dict[str, int]:
    """The activations of the forward pass, and how far every method rises above them, two processes at a time."""
    options = ["--threads", str(threads), "--rounds", "0", "--memory"]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda method: run_worker(method, [workload], options)[0]["bytes"], methods))
    above = {method: sizes["above"] for method, sizes in zip(methods, found, strict=True)}
    return {"activations": max(sizes["activations"] for sizes in found), **above}


def step_bytes(method: Method, workload: Workload) -> dict[str, int]:
    """How far resident memory rises in the forward pass, and at most above that level afterwards.

    Where a method has no forward pass of its own, all of it comes afterwards.
    """
    _return_freed_memory()
    method.prepare(workload.build(batch=2)).step()  # loads the code of every kernel, which is not what is asked
    contender = method.prepare(workload.build())
    gc.collect()
    before = _resident()
    losses = contender.forward()
    gc.collect()
    _forget_peak()
    held = _resident()
    kept = contender.after(losses)
    peak = _peak()
    del kept
    contender.clear()
    return {"activations": max(0, held - before), "above": max(0, peak - held)}


def risen(work: Callable[[], object]) -> int:
    """How far resident memory rises at most while something is done."""
    gc.collect()
    _forget_peak()
    before = _resident()
    work()
    return max(0, _peak() - before)


def _return_freed_memory() -> None:
    """Have glibc give back every large block when it is freed, so that resident memory is memory in use."""
    if sys.platform == "linux":
        mmap_threshold = -3
        ctypes.CDLL(None).mallopt(mmap_threshold, 64 * 1024)


def _forget_peak() -> None:
    """Start the high-water mark anew where possible; else a peak in the forward pass hides lower ones."""
    if CLEAR_REFS.exists():
        CLEAR_REFS.write_text("5")


def _resident() -> int:
    return _status("VmRSS") if STATUS.exists() else _peak()


def _peak() -> int:
    if STATUS.exists():
        return _status("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(key: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"{STATUS} has no {key}")
