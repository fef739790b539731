"""Private runs that are killed, interrupted, or find the disk full at any call that `persample.dp` makes.

Usage: python -m tests.dp.anywhere FOLDER TRIES [SEED]; says nothing if no noise is drawn twice and nothing is lost.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from persample import dp
from tests.dp.helpers import dataset, losses_of
from tests.dp.noises import drawn, noisy_run

STEPS = 4
_OURS = os.path.dirname(dp.__file__)


@contextmanager
def at(number: int, do: Callable[[], None]) -> Iterator[list[int]]:
    """Does something at the n-th call of, or return from, a function, C functions of the system's among them."""
    count = [0]

    def event(frame: FrameType, *_: object) -> None:
        if frame.f_code.co_filename.startswith(_OURS):
            count[0] += 1
            if count[0] == number:
                sys.setprofile(None)
                do()

    sys.setprofile(event)
    try:
        yield count
    finally:
        sys.setprofile(None)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    raise KeyboardInterrupt


def fill_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def counted(path: Path) -> int:
    """Lines of the journal, torn ones included."""
    journal = path.with_name(path.name + ".journal")
    return len([line for line in journal.read_bytes().split(b"\n")[1:] if line]) if journal.exists() else 0


def train(trained: dp.Private, path: Path) -> None:
    """To the end, with a file every other step."""
    if not path.exists():
        trained.save(path)
    for batch in trained.batches(dataset()):
        trained.step(losses_of(trained._model, batch))
        if trained.steps % 2 == 0:
            trained.save(path)


def one_life(path: Path, number: int) -> int:
    """From the last file to the end, or to death; how many calls there were."""
    with drawn(lambda noise: tell(path, noise)), at(number, kill) as count:
        trained = noisy_run(STEPS)
        if path.exists():
            trained.resume(path)
        train(trained, path)
    assert trained.steps == STEPS
    return count[0]


def tell(path: Path, noise: float) -> None:
    """Log what is drawn, which the journal must know of already."""
    with path.with_name("log").open("a") as file:
        file.write(f"{noise}\n")
    assert len(path.with_name("log").read_text().split()) <= counted(path)


def lives(path: Path, numbers: list[int]) -> None:
    """One forked process after the other, each killed where it is told to be; the last one lives."""
    for number in [*numbers, 0]:
        child = os.fork()
        if not child:
            one_life(path, number)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) in ((0, -signal.SIGKILL) if number else (0,)), (numbers, number)
    noises = path.with_name("log").read_text().split()
    assert len(set(noises)) == len(noises) <= STEPS == counted(path), (numbers, noises, counted(path))


def stubborn(path: Path, numbers: list[int]) -> None:
    """A loop that catches what it can, and tries again until all steps are made."""
    trained, errors = noisy_run(STEPS), itertools.cycle([interrupt, fill_disk])
    pending = iter([*numbers, 0])
    with drawn(lambda noise: tell(path, noise)) as found:
        for _ in range(4 * len(numbers) + 4):
            try:
                with at(next(pending, 0), next(errors)):
                    train(trained, path)
            except dp.PrivacyError:
                trained.load_state_dict(trained.state_dict())
            except (KeyboardInterrupt, OSError):
                continue
            if trained.steps == STEPS:
                break
    assert len(set(found)) == len(found) <= trained.steps == STEPS == counted(path), (numbers, found, counted(path))


def main(folder: Path, tries: int, seed: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", dp.PrivacyWarning)  # what was released and not applied is told, rightly
    chance = random.Random(seed)
    (folder / "whole").mkdir()
    calls = one_life(folder / "whole" / "run", 0)
    for number in range(tries):
        for do in (lives, stubborn):
            place = folder / f"{do.__name__}-{number}"
            place.mkdir()
            do(place / "run", [chance.randrange(1, calls) for _ in range(2)])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
