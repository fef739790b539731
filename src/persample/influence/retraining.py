"""Training again without some examples, many times: in processes of their own, with results kept in a folder."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .time_left import counted

Retrain = Callable[[Tensor, int], Any]  # from the ids to train on and a seed to the queries' losses


def outcomes(
    retrain: Retrain,
    subsets: Sequence[Tensor],
    seeds: Sequence[int],
    *,
    queries: int,
    workers: int,
    folder: str | Path | None,
    progress: bool | None,
) -> Tensor:
    """(subsets, queries): the queries' losses after training on each subset, means over seeds."""
    if workers < 0:
        raise ValueError(f"workers must be 0 (this process) or more, not {workers}")
    if not len(seeds):
        raise ValueError("seeds are empty: give at least one")
    jobs = [(i, seed) for i in range(len(subsets)) for seed in seeds]
    kept = None if folder is None else _Kept(Path(folder), subsets)
    found = {} if kept is None else kept.read(jobs, queries)
    todo = [job for job in jobs if job not in found]
    with counted("retraining", len(jobs), done=len(found), show=progress) as advance:

        def take(job: tuple[int, int], result: Any) -> None:
            found[job] = _losses(result, queries)
            if kept is not None:
                kept.write(job, found[job])
            advance()

        if workers:
            _in_processes(retrain, subsets, todo, workers, take)
        else:
            for i, seed in todo:
                take((i, seed), retrain(subsets[i], seed))
    means = [torch.tensor([found[i, seed] for seed in seeds], dtype=torch.float64).mean(0) for i in range(len(subsets))]
    return torch.stack(means) if means else torch.zeros(0, queries, dtype=torch.float64)


def _in_processes(
    retrain: Retrain,
    subsets: Sequence[Tensor],
    todo: Sequence[tuple[int, int]],
    workers: int,
    take: Callable[[tuple[int, int], Any], None],
) -> None:
    """Results are taken as they come; an error ends it, and what has come until then is kept."""
    _check_can_be_sent(retrain)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        running: dict[Future[list[float]], tuple[int, int]] = {}
        waiting = list(reversed(todo))
        try:
            while waiting or running:
                while waiting and len(running) < 2 * workers:
                    i, seed = job = waiting.pop()
                    running[pool.submit(_called, retrain, subsets[i].tolist(), seed)] = job
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    take(running.pop(future), future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _check_can_be_sent(retrain: Retrain) -> None:
    try:
        pickle.dumps(retrain)
    except Exception as error:
        raise TypeError(
            f"retrain cannot be sent to other processes ({error}): with workers it must be a function of a module, not "
            f"one that is defined in another, nor a lambda; or train in this process, with workers=0"
        ) from error


def _called(retrain: Retrain, ids: list[int], seed: int) -> list[float]:
    """In another process: plain numbers go there and back."""
    losses: list[float] = torch.as_tensor(retrain(torch.tensor(ids, dtype=torch.int64), seed)).double().tolist()
    return losses


def _losses(result: Any, queries: int) -> list[float]:
    losses = torch.as_tensor(result).detach().double()
    if losses.shape != (queries,):
        raise ValueError(
            f"retrain must return one loss for each of {queries} queries; it returned {tuple(losses.shape)}"
        )
    if not losses.isfinite().all():
        raise ValueError("retrain returned losses that are NaN or infinite: training diverged")
    found: list[float] = losses.tolist()
    return found


class _Kept:
    """One small file for each retraining, under a name that says what was trained on."""

    def __init__(self, folder: Path, subsets: Sequence[Tensor]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.names = [hashlib.sha256(json.dumps(ids.tolist()).encode()).hexdigest()[:16] for ids in subsets]

    def _path(self, job: tuple[int, int]) -> Path:
        return self.folder / f"{self.names[job[0]]}-{job[1]}.json"

    def read(self, jobs: Sequence[tuple[int, int]], queries: int) -> dict[tuple[int, int], list[float]]:
        found = {}
        for job in jobs:
            path = self._path(job)
            if path.exists():
                try:
                    found[job] = _losses(json.loads(path.read_text()), queries)
                except ValueError as error:
                    raise ValueError(
                        f"{path} is not a result of this retrain ({error}): choose another folder"
                    ) from error
        return found

    def write(self, job: tuple[int, int], losses: list[float]) -> None:
        path = self._path(job)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(losses))
        os.replace(part, path)
