"""Runs whose releases differ by noise alone, and what they release."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from persample import dp
from persample.dp import mechanism as module
from persample.dp.noise import Sum
from tests.dp.helpers import dataset, losses_of, network, plan, private


def noisy_run(steps: int = 6, **more: Any) -> dp.Private:
    """All examples are in every batch, and nothing is learnt."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return private(model, plan(steps=steps, batch_size=60), optimizer=optimizer, **more)


def advance(trained: dp.Private, steps: int = 1) -> None:
    for batch in trained.batches(dataset(), steps=steps):
        trained.step(losses_of(trained._model, batch))


@contextmanager
def drawn(tell: Callable[[float], object] | None = None) -> Iterator[list[float]]:
    """The first noisy number of every release that came as far as that, whatever became of it then."""
    found: list[float] = []
    add_noise = module.add_noise

    def drawing(sums: list[Sum], *rest: Any) -> None:
        add_noise(sums, *rest)
        found.append(float(sums[0].goal.flatten()[0]))
        if tell is not None:
            tell(found[-1])

    module.add_noise = drawing  # type: ignore[assignment]
    try:
        yield found
    finally:
        module.add_noise = add_noise


def distinct(found: list[float]) -> bool:
    return len(set(found)) == len(found)


def said_by_child(do: Callable[[], object]) -> str:
    """What a forked process says of its error, or returns."""
    mine, theirs = os.pipe()
    child = os.fork()
    if not child:
        torch.set_num_threads(1)  # OpenMP's threads are not there after a fork
        try:
            said = str(do())
        except BaseException:
            said = traceback.format_exc()
        os.write(theirs, said.encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(mine) as end:
        said = end.read()
    os.waitpid(child, 0)
    return said
