"""Private runs with correlated noise: what is released, saved and resumed; and what becomes of noise that is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import persample as ps
from persample import dp
from persample.dp import mechanism as module
from persample.dp.noise import Sum
from persample.dp.sources import Seeded
from tests.dp.correlated import dense
from tests.dp.correlated.dense import Matrix
from tests.dp.helpers import dataset, flat, losses_of, network, plan, private
from tests.dp.noises import advance, said_by_child

STEPS = 8
KINDS: dict[str, dict[str, Any]] = {
    "banded": {"mechanism": "banded", "bands": 3},
    "banded, cyclic": {"mechanism": "banded", "bands": 5, "sampling": "cyclic"},
    "blt": {"mechanism": "blt", "sampling": "cyclic"},
}
pytestmark = pytest.mark.filterwarnings("ignore:an earlier run in this process:persample.dp.PrivacyWarning")


def run(kind: str, noise: float = 1.0, **more: Any) -> dp.Private:
    """Nothing is learnt, so that noise is what releases differ by; in float64, so that none of it is lost."""
    model = network().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    planned = plan(steps=STEPS, noise_multiplier=noise, **KINDS[kind])
    return private(model, planned, optimizer=optimizer, **more)


def released(trained: dp.Private, steps: int = STEPS) -> list[Matrix]:
    """The noisy sums of some steps."""
    found = []
    for x, y in trained.batches(dataset(), steps=steps):
        trained.backward(losses_of(trained._model, (x.double(), y)))
        gradients = [p.grad for p in trained._model.parameters() if p.grad is not None]
        found.append(torch.cat([g.flatten() for g in gradients]).numpy() * trained.plan.batch_size)
        trained._optimizer.step()
    return found


def noise_of(trained: dp.Private, steps: int = STEPS) -> Matrix:
    """The noise of some steps: what a run has without which draws the same samples."""
    first = trained.steps
    noisy = np.stack(released(trained, steps))
    still = torch.optim.SGD(trained._model.parameters(), lr=0.0)
    clean = private(trained._model, plan(steps=STEPS, noise_multiplier=0.0, **kind_of(trained)), optimizer=still)
    clean._source = trained._source
    clean._ledger.steps = first
    return noisy - np.stack(released(clean, steps))


def kind_of(trained: dp.Private) -> dict[str, Any]:
    found = trained.plan
    return {"mechanism": found.mechanism, "bands": found.bands, "buffers": found.buffers, "sampling": found.sampling}


def independent(trained: dp.Private, numbers: range) -> Matrix:
    """The independent noise of releases with these numbers."""
    stream, size = trained._mechanism.stream, trained._mechanism.drawn_on_host(trained._source)
    assert stream is not None
    scale = module.Scale(0.3, trained.plan.noise, size, stream.factor)
    found = np.empty((len(numbers), size))
    for row, number in zip(found, numbers, strict=True):
        trained._source.normals(number, 0, row)
    return found * scale.std


def expected(trained: dp.Private, z: Matrix) -> Matrix:
    return np.linalg.inv(dense.matrix(trained.plan.encoder.column[: len(z)])) @ z


@pytest.mark.filterwarnings("ignore:the gradients of the last:persample.dp.PrivacyWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_noise_is_that_of_the_dense_matrix(kind: str) -> None:
    trained = run(kind)
    found = noise_of(trained)
    np.testing.assert_allclose(found, expected(trained, independent(trained, range(STEPS))), atol=1e-3, rtol=0)
    assert np.abs(found).max() > 0.3


@pytest.mark.parametrize("kind", KINDS)
def test_the_sums_are_released_on_the_grid(kind: str) -> None:
    trained = run(kind)
    stream = trained._mechanism.stream
    assert stream is not None
    add_noise, seen = module.add_noise, []

    def adding(sums: list[Sum], *rest: Any) -> None:
        add_noise([each._replace(into=None, divisor=1.0) for each in sums], *rest)
        seen.append(torch.cat([each.numbers for each in sums]) / stream.grid)
        for each in sums:
            each.goal.copy_(each.numbers / each.divisor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "add_noise", adding)
        released(trained)
    assert len(seen) == STEPS
    assert all(torch.equal(numbers, numbers.round()) for numbers in seen)


def test_one_band_is_dp_sgd_bit_by_bit() -> None:
    ends = []
    for settings in ({}, {"mechanism": "banded", "bands": 1}):
        trained = private(network(), plan(**settings))
        trained._source = Seeded(0)  # those of different plans are never the same
        advance(trained, 6)
        ends.append(flat(trained._model))
    assert torch.equal(*ends)


def test_runs_that_correlate_differently_share_no_noise() -> None:
    plans = [plan(), plan(mechanism="banded", bands=1), plan(mechanism="banded", bands=2)]
    keys = {private(network(), one)._source.secret for one in plans}
    assert len(keys) == 3


def go_on_as(resumed: dp.Private, trained: dp.Private) -> None:
    """With the draws that the other run would have made next; in earnest, a resumed run has new ones."""
    resumed._source.nonce = trained._source.nonce
    resumed._releases.upcoming = trained._releases.upcoming


@pytest.mark.parametrize("cut", [1, 4, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_goes_on_with_the_very_same_noise(kind: str, cut: int, tmp_path: Path) -> None:
    def make() -> dp.Private:
        return private(network(), plan(steps=STEPS, **KINDS[kind]))

    undisturbed, trained, resumed = make(), make(), make()
    advance(undisturbed, STEPS)
    advance(trained, cut)
    trained.save(tmp_path / "run")
    assert (tmp_path / "run.noise").exists()
    resumed.resume(tmp_path / "run")
    go_on_as(resumed, trained)
    advance(resumed, STEPS)
    assert torch.equal(flat(resumed._model), flat(undisturbed._model))
    resumed.save(tmp_path / "run")
    assert not (tmp_path / "run.noise").exists()  # there is nothing more to come


def test_a_resumed_run_has_new_noise_that_takes_away_the_old(tmp_path: Path) -> None:
    trained, resumed = run("blt"), run("blt")
    first = noise_of(trained, 3)
    z = independent(trained, range(3))
    trained.save(tmp_path / "run")
    resumed.resume(tmp_path / "run")
    later = noise_of(resumed, 3)
    z = np.concatenate([z, independent(resumed, range(3))])
    assert not np.allclose(z[:3], z[3:])
    np.testing.assert_allclose(np.concatenate([first, later]), expected(trained, z), atol=1e-3, rtol=0)


def lose_file(path: Path, trained: dp.Private) -> None:
    path.with_name("run.noise").unlink()


def damage_file(path: Path, trained: dp.Private) -> None:
    path.with_name("run.noise").write_bytes(b"nonsense")


def make_a_step(path: Path, trained: dp.Private) -> None:
    released(trained, 1)


def bring_an_older_one(path: Path, trained: dp.Private) -> None:
    older = path.with_name("run.noise").read_bytes()
    released(trained, 1)
    trained.save(path)
    path.with_name("run.noise").write_bytes(older)


def put_what_cannot_be_read(path: Path, trained: dp.Private) -> None:
    """As a file of another user cannot; root could read that."""
    noise = path.with_name("run.noise")
    noise.unlink()
    noise.mkdir()


LOSSES: dict[str, tuple[Callable[[Path, dp.Private], None], str]] = {
    "gone": (lose_file, "there is no .*run.noise"),
    "damaged": (damage_file, "run.noise is damaged"),
    "not to be read": (put_what_cannot_be_read, "run.noise cannot be read"),
    "a step since": (make_a_step, "run is of step 3"),
    "an older one": (bring_an_older_one, "run.noise is of another step or run"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", LOSSES)
def test_noise_that_is_lost_is_correlated_anew(kind: str, loss: str, tmp_path: Path) -> None:
    trained, resumed = run(kind), run(kind)
    released(trained, 3)
    trained.save(tmp_path / "run")
    lose, why = LOSSES[loss]
    lose(tmp_path / "run", trained)
    with pytest.warns(dp.PrivacyWarning, match=f"(?s)correlated anew from step . on, .*{why}"):
        resumed.resume(tmp_path / "run")
    assert resumed.steps == trained.steps
    found = noise_of(resumed, 3)
    np.testing.assert_allclose(found, expected(resumed, independent(resumed, range(3))), atol=1e-3, rtol=0)


def test_states_and_journals_have_no_noise(tmp_path: Path) -> None:
    trained = run("banded", journal=tmp_path / "journal")
    released(trained, 2)
    state = trained.state_dict()
    with pytest.warns(dp.PrivacyWarning, match=r"anew from step 3 on.*a state_dict does not have it"):
        trained.load_state_dict(state)
    assert trained._mechanism.stream is not None
    assert trained._mechanism.stream.memory.steps == 0
    again = run("banded", journal=tmp_path / "journal")
    with pytest.warns(dp.PrivacyWarning, match=r"anew from step 3 on.*a journal does not have it"):
        released(again, 1)
    released(again, 1)  # which is said once


def test_a_run_that_names_its_journal_goes_on_with_its_noise(tmp_path: Path) -> None:
    """Nothing is lost, and nothing is said."""
    journal = tmp_path / "elsewhere" / "journal"
    journal.parent.mkdir()
    trained = run("banded", journal=journal)
    released(trained, 2)
    trained.save(tmp_path / "run")
    again = run("banded", journal=journal)
    again.resume(tmp_path / "run")
    assert again._mechanism.stream is not None
    assert again._mechanism.stream.memory.steps == 2
    released(again, 1)


def test_nothing_is_said_before_the_first_step_and_after_the_last(tmp_path: Path) -> None:
    trained = run("banded")
    trained.save(tmp_path / "run")
    resumed = run("banded")
    resumed.resume(tmp_path / "run")
    released(resumed)
    resumed.load_state_dict(resumed.state_dict())
    resumed.save(tmp_path / "run")
    run("banded").resume(tmp_path / "run")


def test_after_a_failed_release_noise_is_correlated_anew() -> None:
    trained = run("banded")
    released(trained, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("persample.dp.sums._place", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            released(trained, 1)
    with pytest.raises(dp.PrivacyError, match="last step of this run failed"):
        released(trained, 1)
    with pytest.warns(dp.PrivacyWarning, match="anew from step 4 on"):
        trained.load_state_dict(trained.state_dict())
    first = trained._releases.upcoming
    found = noise_of(trained, 3)
    z = independent(trained, range(first, first + 3))
    np.testing.assert_allclose(found, expected(trained, z), atol=1e-3, rtol=0)


def fail_before_noise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "add_noise", lambda *_: 1 / 0)


def fail_amid_noise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("persample.dp.correlated.memory.Memory.advance", lambda _: 1 / 0)


@pytest.mark.parametrize("fail", [fail_before_noise, fail_amid_noise])
@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_lags_behind_a_failed_step_is_not_saved(
    kind: str, fail: Callable[[pytest.MonkeyPatch], None], tmp_path: Path
) -> None:
    """The step is accounted for: noise that does not know of it would be correlated with the wrong steps."""
    trained = run(kind)
    released(trained, 2)
    trained.save(tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        fail(patch)
        with pytest.raises(ZeroDivisionError):
            released(trained, 1)
    assert trained.steps == 3
    trained.save(tmp_path / "run")
    assert not (tmp_path / "run.noise").exists()
    with pytest.warns(dp.PrivacyWarning, match="anew from step 4 on"):
        trained.resume(tmp_path / "run")
    released(trained, 2)
    trained.save(tmp_path / "run")
    resumed = run(kind)
    resumed.resume(tmp_path / "run")  # with what is remembered since then
    assert resumed._mechanism.stream is not None
    assert resumed._mechanism.stream.memory.steps == 2


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_process_has_no_use_of_the_noise() -> None:
    trained = run("banded")
    released(trained, 2)
    assert "PrivacyError: this process was forked" in said_by_child(lambda: released(trained, 1))


def test_the_file_of_the_run_does_not_have_the_noise(tmp_path: Path) -> None:
    """It may be published: noise beside it would be taken out of the weights."""
    trained = run("banded")
    released(trained, 2)
    trained.save(tmp_path / "run")
    assert trained._mechanism.stream is not None
    noise = trained._mechanism.stream.memory.kept
    assert noise[0].tobytes() in (tmp_path / "run.noise").read_bytes()
    assert noise[0].tobytes() not in (tmp_path / "run").read_bytes()
    assert (tmp_path / "run.noise").stat().st_mode & 0o077 == 0


def test_a_file_of_another_mechanism_is_refused(tmp_path: Path) -> None:
    run("banded").save(tmp_path / "run")
    with pytest.raises(dp.PrivacyError, match="bands=3 instead of 5"):
        run("banded, cyclic").resume(tmp_path / "run")


def test_a_bound_that_moves_is_refused() -> None:
    with pytest.raises(ValueError, match=r"use a ps.ClippedSum in place of dp.AdaptiveClip, or mechanism='gaussian'"):
        private(plan_=plan(mechanism="banded", bands=2), clip=dp.AdaptiveClip())


@pytest.mark.parametrize("clip", [ps.ClippedSum(0.3, per="parameter"), ps.ClippedSum(0.3, gamma=0.01)])
def test_other_clips_work(clip: ps.ClippedSum) -> None:
    trained = private(plan_=plan(mechanism="banded", bands=2), clip=clip)
    advance(trained, 6)
    assert trained.steps == 6


def test_without_noise_nothing_is_remembered(tmp_path: Path) -> None:
    trained = run("banded", noise=0.0)
    released(trained, 2)
    trained.save(tmp_path / "run")
    assert trained._mechanism.stream is None
    assert not (tmp_path / "run.noise").exists()
    run("banded", noise=0.0).resume(tmp_path / "run")


def test_parts_of_batches_get_the_same_noise() -> None:
    whole, parts = network(), network()
    advance(private(whole, plan(mechanism="banded", bands=3)), 6)
    trained = private(parts, plan(mechanism="banded", bands=3))
    for batch in trained.batches(dataset(), physical_batch_size=5):
        trained.step(losses_of(parts, batch))
    torch.testing.assert_close(flat(parts), flat(whole), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_compiled_steps_get_the_same_noise() -> None:
    eager, compiled = network(), network()
    advance(private(eager, plan(mechanism="banded", bands=3)), 6)
    trained = private(
        compiled,
        plan(mechanism="banded", bands=3),
        compile=lambda x, y: losses_of(compiled, (x, y)),
        backend="aot_eager",
    )
    for batch in trained.batches(dataset()):
        trained.step(*batch)
    torch.testing.assert_close(flat(compiled), flat(eager), atol=1e-5, rtol=0)
