"""The linear datamodelling score and counterfactuals, in worlds whose answers are known."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from persample import influence as pi
from persample.influence.lds import ranks, spearman
from persample.influence.time_left import counted

from .retrained import EXAMPLES, QUERIES, Counting, failing, linear, truth


def test_right_scores_get_one_and_wrong_signs_minus_one() -> None:
    right = pi.lds(truth(), linear, subsets=12, drop=0.2)
    assert right.score == pytest.approx(1)
    assert right.interval == pytest.approx((1, 1))
    assert right.per_query.shape == (QUERIES,)
    assert right.actual.shape == right.predicted.shape == (12, QUERIES)
    assert pi.lds(-truth(), linear, subsets=12, drop=0.2).score == pytest.approx(-1)
    noise = pi.lds(torch.randn(QUERIES, EXAMPLES), linear, subsets=40, drop=0.2)
    assert abs(noise.score) < 0.6
    assert noise.interval[0] < noise.score < noise.interval[1]


def test_ranks_share_ties_as_scipy_does() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = torch.randint(4, (30, 5)).double()
    other = torch.randn(30, 5).double()
    assert ranks(values)[:, 0].tolist() == stats.rankdata(values[:, 0].numpy()).tolist()
    want = [stats.spearmanr(values[:, q].numpy(), other[:, q].numpy()).statistic for q in range(5)]
    torch.testing.assert_close(spearman(values, other), torch.tensor(want, dtype=torch.float64))
    assert spearman(torch.ones(4, 1), torch.randn(4, 1)).isnan().all()


def test_what_is_in_the_folder_is_not_trained_again(tmp_path: Path) -> None:
    first = Counting(7)
    with pytest.raises(KeyboardInterrupt):
        pi.lds(truth(), first, subsets=6, seeds=(0, 1), folder=tmp_path)
    second = Counting(100)
    found = pi.lds(truth(), second, subsets=6, seeds=(0, 1), folder=tmp_path)
    assert second.calls == 12 - 7
    torch.testing.assert_close(found.actual, pi.lds(truth(), linear, subsets=6, seeds=(0, 1)).actual)
    assert not list(tmp_path.glob("*.part"))
    next(tmp_path.glob("*.json")).write_text("[1.0]")
    with pytest.raises(ValueError, match="choose another folder"):
        pi.lds(truth(), second, subsets=6, seeds=(0, 1), folder=tmp_path)


@pytest.mark.slow
def test_processes_give_the_same(tmp_path: Path) -> None:
    one = pi.lds(truth(), linear, subsets=5, workers=2, folder=tmp_path)
    assert torch.equal(one.actual, pi.lds(truth(), linear, subsets=5).actual)
    with pytest.raises(RuntimeError, match="no training with seed 0"):
        pi.lds(truth(), failing, subsets=5, workers=2)


@pytest.mark.parametrize("which", ["harmful", "helpful"])
def test_counterfactuals(which: str) -> None:
    found = pi.counterfactual(truth(), linear, count=4, which=which)  # type: ignore[arg-type]
    torch.testing.assert_close(found.actual, found.predicted, rtol=1e-4, atol=1e-5)
    assert bool((found.actual < 0).all() if which == "harmful" else (found.actual > 0).all())
    assert found.removed[0].tolist() == truth()[0].argsort(descending=which == "helpful")[:4].tolist()


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pi.lds(truth(), linear, subsets=5).plot(tmp_path / "lds.png")
    pi.counterfactual(truth(), linear, count=2).plot(tmp_path / "counterfactual.png")
    assert all((tmp_path / name).read_bytes()[:4] == b"\x89PNG" for name in ("lds.png", "counterfactual.png"))


def test_progress_says_how_long_it_takes() -> None:
    out = io.StringIO()
    with counted("training", 4, done=1, show=True, out=out) as advance:
        for _ in range(3):
            advance()
    assert "4/4" in out.getvalue()
    assert "left" in out.getvalue()


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(queries, examples\)"):
        pi.lds(torch.ones(3), linear)
    with pytest.raises(ValueError, match="NaN"):
        pi.lds(torch.full((2, 2), torch.nan), linear)
    with pytest.raises(ValueError, match="at least one"):
        pi.lds(truth(), linear, drop=0.001)
    with pytest.raises(ValueError, match="3 subsets"):
        pi.lds(truth(), linear, subsets=2)
    with pytest.raises(ValueError, match="seeds"):
        pi.lds(truth(), linear, seeds=())
    with pytest.raises(ValueError, match="each of 3 queries"):
        pi.lds(truth(), lambda ids, seed: torch.ones(2))
    with pytest.raises(ValueError, match="diverged"):
        pi.lds(truth(), lambda ids, seed: torch.full((3,), torch.nan))
    with pytest.raises(ValueError, match="count must be"):
        pi.counterfactual(truth(), linear, count=EXAMPLES)
    with pytest.raises(TypeError, match=r"retrain cannot be sent to other processes .* must be a function of a module"):
        pi.lds(truth(), lambda ids, seed: torch.ones(3), workers=2)


@pytest.mark.slow
def test_replays_predict_what_training_without_examples_does() -> None:
    """The figure of benchmarks/influence/runs.py, with fewer subsets."""
    pytest.importorskip("sklearn")
    from benchmarks.influence.runs import replayed

    (row,) = replayed(drops=(0.01,), subsets=20)
    assert row["lds"] >= 0.97
