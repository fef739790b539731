"""No noise is drawn twice: not after an error, not in a fork, not by a copy, not by runs that merely share a seed."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import persample as ps
from persample import dp
from persample.dp import mechanism as module
from persample.dp import sums
from tests.dp.helpers import dataset, flat, losses_of, network, plan, private
from tests.dp.noises import advance, distinct, drawn, noisy_run, said_by_child
from tests.models import mlp

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),  # of Python 3.12
    pytest.mark.filterwarnings("ignore:the gradients of the last:persample.dp.PrivacyWarning"),
]

Patch = Callable[[pytest.MonkeyPatch], None]


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def after_drawing(error: BaseException) -> Callable[..., None]:
    add_noise = module.add_noise

    def fail(*args: Any, **options: Any) -> None:
        add_noise(*args, **options)
        raise error

    return fail


def short_write(write: Callable[[int, bytes], int], handle: int, line: bytes) -> int:
    return write(handle, line[:3])


FULL = OSError(errno.ENOSPC, "No space left on device")
FAILURES: dict[str, Patch] = {
    "the journal cannot be synced": lambda m: m.setattr(os, "fsync", raising(FULL)),
    "the journal cannot be written": lambda m: m.setattr(os, "write", raising(FULL)),
    "a part of a line is written": lambda m: m.setattr(os, "write", partial(short_write, os.write)),
    "noise fails": lambda m: m.setattr(module, "add_noise", raising(MemoryError())),
    "interrupted before noise": lambda m: m.setattr(module, "add_noise", raising(KeyboardInterrupt())),
    "interrupted after noise": lambda m: m.setattr(module, "add_noise", after_drawing(KeyboardInterrupt())),
    "communication fails": lambda m: m.setattr(dp.Team, "release", raising(RuntimeError("gone"))),
    "p.grad cannot be written": lambda m: m.setattr(sums, "_place", raising(RuntimeError("out of memory"))),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("seed", [0, None])
def test_after_a_failed_release_there_is_none_until_the_run_is_resumed(
    failure: str, seed: int | None, tmp_path: Path
) -> None:
    trained = noisy_run(journal=tmp_path / "journal", seed=seed)
    before = flat(trained._model)
    with drawn() as found:
        advance(trained)
        batches = trained.batches(dataset())
        losses = losses_of(trained._model, next(batches))
        with pytest.MonkeyPatch.context() as patch:
            FAILURES[failure](patch)
            with pytest.raises((OSError, MemoryError, RuntimeError, KeyboardInterrupt)):
                trained.step(losses)
        for again in (
            lambda: trained.step(losses),
            lambda: trained.backward(losses),
            lambda: advance(trained),
            lambda: next(batches),
        ):
            with pytest.raises(dp.PrivacyError, match=r"last step of this run failed.*private\.resume\(path\)"):
                again()
        assert len(found) <= 2
        counted = trained.steps
        trained.load_state_dict(trained.state_dict())
        assert counted <= trained.steps <= 2
        advance(trained, 3)
    assert distinct(found)
    assert len(found) >= 4
    assert torch.equal(flat(trained._model), before)
    assert noisy_run(journal=tmp_path / "journal").steps == trained.steps


def test_a_run_that_failed_can_be_saved_and_resumed(tmp_path: Path) -> None:
    trained = noisy_run()
    trained.save(tmp_path / "run")
    with drawn() as found:
        advance(trained, 2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "add_noise", after_drawing(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                advance(trained)
        trained.save(tmp_path / "run")
        trained.resume(tmp_path / "run")
        assert trained.steps == 3
        advance(trained, 3)
    assert distinct(found)
    assert len(found) == 6


def test_an_optimizer_that_fails_is_no_failed_release() -> None:
    """The budget is spent and the weights are as they were; the next step has new noise."""
    trained = noisy_run()
    with drawn() as found:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trained._optimizer, "step", raising(MemoryError()))
            with pytest.raises(MemoryError):
                advance(trained)
        assert trained.steps == 1
        advance(trained, 5)
    assert distinct(found)
    assert len(found) == 6


def test_a_part_that_was_interrupted_is_not_added_again() -> None:
    """Samples that were added twice would move the sum by more than their bound."""
    clean = plan(batch_size=60, steps=1, noise_multiplier=0.0)
    trained, whole = private(plan_=clean), private(plan_=clean)
    whole.backward(losses_of(whole._model, next(whole.batches(dataset()))))
    most = torch.cat([p.grad.flatten() for p in whole._model.parameters() if p.grad is not None])
    add, errors = trained._mechanism.sums.add, iter([KeyboardInterrupt])

    def interrupted_once(*args: Any) -> float:
        clipped = add(*args)
        for error in errors:
            raise error
        return clipped

    trained._mechanism.sums.add = interrupted_once  # type: ignore[method-assign]
    for batch in trained.batches(dataset(), physical_batch_size=30):
        for _ in range(2):
            with contextlib.suppress(KeyboardInterrupt, dp.PrivacyError):
                trained.backward(losses_of(trained._model, batch))
    found = torch.cat([p.grad.flatten() for p in trained._model.parameters() if p.grad is not None])
    torch.testing.assert_close(found, most)


def test_refused_steps_are_no_failed_releases() -> None:
    trained, undisturbed = private(), private()
    losses = losses_of(trained._model, next(trained.batches(dataset())))
    with pytest.raises(dp.PrivacyError, match="give one loss for each"):
        trained.step(losses[:1])
    advance(trained, 6)
    advance(undisturbed, 6)
    assert torch.equal(flat(trained._model), flat(undisturbed._model))


@pytest.mark.parametrize("seed", [0, None])
def test_a_forked_process_draws_nothing(seed: int | None) -> None:
    trained = noisy_run(seed=seed)
    batches = trained.batches(dataset())
    losses = losses_of(trained._model, next(batches))
    for attempt in (
        lambda: advance(trained),
        lambda: next(batches),
        lambda: trained.step(losses),
    ):
        assert "PrivacyError: this process was forked" in said_by_child(attempt)
    trained.step(losses)


def test_a_forked_process_goes_on_with_noise_of_its_own_once_it_has_resumed() -> None:
    trained = noisy_run()

    def resumed() -> list[float]:
        with drawn() as found:
            trained.load_state_dict(trained.state_dict())
            advance(trained)
        return found

    with drawn() as found:
        advance(trained)
        there = said_by_child(resumed)
        advance(trained)
    assert there.startswith("[")
    assert float(there.strip("[]")) not in found


def test_workers_are_forked_while_a_journal_is_kept(tmp_path: Path) -> None:
    trained, alone = private(journal=tmp_path / "journal"), private()
    for run, workers in ((trained, 2), (alone, 0)):
        for batch in run.batches(dataset(), num_workers=workers, multiprocessing_context="fork" if workers else None):
            run.step(losses_of(run._model, batch))
    assert trained.steps == 6
    assert torch.equal(flat(trained._model), flat(alone._model))


class Trainer:
    def __init__(self) -> None:
        self.model = network()
        self.private = private(self.model, seed=123456789)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "twice": lambda value: copy.deepcopy(pickle.loads(pickle.dumps(copy.copy(value)))),
}


@pytest.mark.parametrize("way", COPIES)
def test_copies_draw_nothing(way: str) -> None:
    trainer = Trainer()
    batch = next(trainer.private.batches(dataset()))
    losses = losses_of(trainer.model, batch)
    copied = COPIES[way](trainer.private)
    for attempt in (
        lambda: copied.step(losses),
        lambda: copied.backward(losses),
        lambda: copied.batches(dataset()),
        lambda: copied.state_dict(),
        lambda: copied.save("run"),
    ):
        with pytest.raises(dp.PrivacyError, match=r"this is a copy of a dp\.Private"):
            attempt()
    trainer.private.step(losses)


def test_what_holds_a_run_can_be_copied() -> None:
    trainer = Trainer()
    copied = copy.deepcopy(trainer)
    assert torch.equal(flat(copied.model), flat(trainer.model))
    assert not hasattr(copied.private, "_source")
    assert trainer.private._source.secret not in pickle.dumps(trainer)  # type: ignore[attr-defined]


def first_draws(model: nn.Module | None = None, lr: float = 0.1, clip: Any = None, **planned: Any) -> list[float]:
    """Samples and noise of the first step."""
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    trained = private(model, plan(**planned), clip=clip, optimizer=optimizer)
    noise = torch.empty(2, dtype=torch.float64).numpy()
    trained._source.normals(0, 0, noise)
    return [*trained._source.uniforms(0, 2).tolist(), *noise.tolist()]


def test_a_run_that_is_set_up_alike_draws_the_same() -> None:
    assert first_draws() == first_draws()
    model = network()
    scheduled = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.optim.lr_scheduler.ConstantLR(scheduled, 0.1)  # changes the learning rate at once
    assert private(model, optimizer=scheduled)._source.secret == private()._source.secret


OTHERS: dict[str, dict[str, Any]] = {
    "learning rate": {"lr": 0.2},
    "bound": {"clip": ps.ClippedSum(0.4)},
    "clip": {"clip": ps.ClippedSum(0.3, per="parameter")},
    "noise": {"noise_multiplier": 2.0},
    "length": {"steps": 7},
    "batch size": {"batch_size": 13},
    "model": {"model": mlp(5, 8, 3, dtype=torch.float32)},
}


@pytest.mark.parametrize("other", OTHERS)
def test_runs_that_share_no_more_than_a_seed_share_no_draws(other: str) -> None:
    assert not set(first_draws()) & set(first_draws(**OTHERS[other]))
