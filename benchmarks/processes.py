"""Processes of their own for all that is measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

ROOT = Path(__file__).resolve().parent.parent

P = ParamSpec("P")
R = TypeVar("R")


def run_worker(method: str, workloads: Sequence[str], options: Sequence[str] = (), timeout: float = 600) -> list[Any]:
    """One row per workload; a worker that takes too long is stopped, and only its finished rows are there."""
    command = [sys.executable, "-m", "benchmarks.worker", method, *workloads, *options]
    # The child finds what this process finds, however this one was started.
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), *filter(None, sys.path)]))
    pipe = subprocess.PIPE
    worker = subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, start_new_session=True)
    try:
        printed, errors = worker.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _end(worker)
        return rows(worker.communicate()[0])
    except KeyboardInterrupt:
        _end(worker)
        raise
    if worker.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{errors.decode()}")
    return rows(printed)


def _end(worker: subprocess.Popen[bytes]) -> None:
    """And with it what it has forked."""
    os.killpg(worker.pid, signal.SIGKILL)


def rows(printed: bytes) -> list[Any]:
    """A line of JSON each; the last one may have been cut off."""
    lines = printed.decode().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")]


def forked(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """The result from a fresh copy of this process, which must not have used torch's threads itself."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(function, *args, **kwargs).result()
