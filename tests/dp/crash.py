"""Private runs in processes of their own, which kill themselves where they are told to, and are resumed.

Usage: python -m tests.dp.crash FOLDER; prints JSON: for every place of death what both processes said, and their ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import safetensors.torch

from persample import dp
from persample.dp import mechanism as module
from persample.dp.journal import Journal
from tests.dp.helpers import dataset, losses_of, network, plan, private

WHERE = [
    "nowhere",
    "before account",
    "torn journal",
    "after account",
    "before optimizer",
    "after optimizer",
    "while saving",
]
STEPS = 6


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at(step: int, trained: dp.Private, counted: bool) -> bool:
    return trained.steps == step + counted


def arrange(where: str, step: int, trained: dp.Private) -> None:
    """Put the death where it belongs."""
    add, account = Journal.add, trained._ledger.account
    noise, save_file = module.add_noise, safetensors.torch.save_file

    def torn(self: Journal, opens_pass: bool) -> None:
        if at(step, trained, False):
            with self.path.open("ab") as file:
                file.write(b"st")
                file.flush()
                os.fsync(file.fileno())
            die()
        add(self, opens_pass)

    def before_account(opens_pass: bool) -> None:
        if at(step, trained, False):
            die()
        account(opens_pass)

    def drawing(sums: Any, *rest: Any, **more: Any) -> None:
        if where == "after account" and at(step, trained, True):
            die()
        noise(sums, *rest, **more)
        print(float(sums[0].goal.flatten()[0]), flush=True)

    def half(tensors: Any, path: Path, metadata: Any) -> None:
        if at(step, trained, False):
            path.write_bytes(b"half")
            die()
        save_file(tensors, path, metadata)

    module.add_noise = drawing  # type: ignore[assignment]
    if where == "torn journal":
        Journal.add = torn  # type: ignore[method-assign]
    if where == "before account":
        trained._ledger.account = before_account  # type: ignore[method-assign]
    if where == "while saving":
        safetensors.torch.save_file = half  # type: ignore[assignment]
    optimizer = trained._optimizer
    if where == "before optimizer":
        optimizer.register_step_pre_hook(lambda *_: die() if at(step, trained, True) else None)
    if where == "after optimizer":
        optimizer.register_step_post_hook(lambda *_: die() if at(step, trained, True) else None)


def train(folder: Path, where: str, step: int) -> None:
    """A run that saves every other step, and says what it releases."""
    path = folder / "run.safetensors"
    model = network()
    # All examples are in every batch, and nothing is learnt: what is released differs by noise alone.
    trained = private(model, plan(steps=STEPS, batch_size=60))
    for group in trained._optimizer.param_groups:
        group["lr"] = 0.0
    if path.exists():
        trained.resume(path)
    else:
        trained.save(path)
    arrange(where, step, trained)
    print(f"begins at {trained.steps}", flush=True)
    for batch in trained.batches(dataset()):
        trained.step(losses_of(model, batch))
        if trained.steps % 2 == 0:
            trained.save(path)
    print(f"ends at {trained.steps}", flush=True)


def forked(folder: Path, where: str, step: int) -> tuple[list[str], int]:
    """What a run said, and how it ended; forked, because imports take seconds."""
    said = folder / "said"
    child = os.fork()
    if not child:
        with said.open("w") as sys.stdout:
            train(folder, where, step)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return said.read_text().splitlines(), os.waitstatus_to_exitcode(status)


def main(folder: Path) -> None:
    found = {}
    private(plan_=plan(steps=STEPS, batch_size=60))  # imports and accounts, once for all
    for where in WHERE:
        place = folder / where.replace(" ", "-")
        place.mkdir()
        step = 4 if where == "while saving" else 3
        found[where] = [forked(place, where, step), forked(place, "nowhere", 0)]
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
