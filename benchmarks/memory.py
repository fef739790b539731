"""Peak memory, each method in a process of its own.

``python -m benchmarks.memory gpt norms`` prints two numbers of bytes: what the forward pass leaves behind
(activations), and how far the method rises above that.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import resource
import subprocess
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from .methods import METHODS
from .workloads import WORKLOADS

MEASURED = ("plain", "norms", "clipped_sum", "grad")
ROOT = Path(__file__).resolve().parent.parent
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peaks(workload: str, threads: int, methods: Sequence[str] = MEASURED) -> dict[str, int]:
    """The activations of the forward pass, and how far every method rises above them, two processes at a time."""
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda method: _in_process(workload, method, threads), methods))
    peaks = dict(zip(methods, (extra for _, extra in found), strict=True))
    return {"activations": max(held for held, _ in found), **peaks}


def _in_process(workload: str, method: str, threads: int) -> tuple[int, int]:
    command = [sys.executable, "-m", "benchmarks.memory", workload, method, "--threads", str(threads)]
    # The child finds what this process finds, however this one was started.
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), *filter(None, sys.path)]))
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    held, extra = map(int, done.stdout.split())
    return held, extra


def extra_bytes(workload: str, method: str) -> tuple[int, int]:
    """How far resident memory rises in the forward pass, and at most above that level afterwards."""
    _return_freed_memory()
    small = WORKLOADS[workload].build(batch=2)  # loads the code of every kernel, which is not what is asked
    METHODS[method].prepare(small)(small.losses())
    task = WORKLOADS[workload].build()
    after = METHODS[method].prepare(task)
    gc.collect()
    before = _resident()
    losses = task.losses()
    gc.collect()
    _forget_peak()
    held = _resident()
    kept = after(losses)
    peak = _peak()
    del kept
    return max(0, held - before), max(0, peak - held)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    print(*extra_bytes(args.workload, args.method))


if __name__ == "__main__":
    main()
