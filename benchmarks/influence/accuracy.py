"""How well scores predict retraining: linear datamodelling scores of this library and of others, side by side.

240 retrainings of every task on random halves of 1000 digits (60 halves, 4 seeds each). The score of a method is the
Spearman correlation over halves between the sum of the scores of a half's samples and the loss of a model trained on
it, the mean over queries. All methods see the same checkpoint.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from . import ours, peers
from .retrained import HALVES, SEEDS, Retrained, retrain
from .tasks import TASKS

WORKERS = 2
PACKAGES = {"dattri": "dattri", "kronfluence": "kronfluence", "trak": "traker"}  # by module


def all_measured(names: Sequence[str]) -> list[dict[str, Any]]:
    """The tasks in two processes of one thread each, the last ones first, as they take longest."""
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        return list(pool.map(measured, reversed(names)))[::-1]


def measured(name: str, halves: int = HALVES, seeds: int = SEEDS) -> dict[str, Any]:
    """One task: its retrainings, then every method."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    run = retrain(name, halves, seeds)
    size = sum(p.numel() for p in run.model.parameters())
    print(f"{name}: {halves * seeds} retrainings, {time.perf_counter() - start:.0f} s", flush=True)
    rows = [row("persample", title, [("", method)], run) for title, method in ours.methods_of(name).items()]
    if importlib.util.find_spec("dattri") is not None:
        for title, (peer, dampings) in peers.peers_of(size).items():
            ways = [(_written(d), _with(peer, d)) for d in dampings]
            rows.append(row(title.split(",")[0], title, ways, run))
    return {"task": name, "title": TASKS[name].title, "parameters": size, "retrainings": halves * seeds, "rows": rows}


def _with(peer: peers.Peer, damping: float | None) -> Callable[[Retrained], Tensor]:
    def scores(run: Retrained) -> Tensor:
        with peers.quiet():
            return peer(run, damping)

    return scores


def _written(damping: float | None) -> str:
    return "their rule" if damping is None else f"{damping:g}"


def row(
    library: str, title: str, ways: list[tuple[str, Callable[[Retrained], Tensor]]], run: Retrained
) -> dict[str, Any]:
    """The best of several dampings, or the one there is; with the CPU time of one."""
    tried: dict[str, float] = {}
    found: dict[str, Any] = {"library": library, "method": title, "lds": None}
    for damping, scores in ways:
        start = time.process_time()
        try:
            score, interval = run.lds(scores(run))
        except Exception as error:  # of another library: a row that says so, and the rest is measured
            if library == "persample":
                raise
            found["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
            break
        tried[damping] = score
        if found["lds"] is None or score > found["lds"]:
            found |= {"lds": score, "interval": interval, "damping": damping}
        found["seconds"] = min(found.get("seconds", float("inf")), time.process_time() - start)
    said = f"{found['lds']:.3f}" if found["lds"] is not None else found.get("failed", "")
    print(f"  {title:42} {said}", flush=True)
    return found | ({"tried": tried} if len(tried) > 1 else {})


def versions() -> dict[str, str]:
    """Of the libraries that were run."""
    return {
        package: importlib.metadata.version(package)
        for module, package in PACKAGES.items()
        if importlib.util.find_spec(module) is not None
    }
