"""Selection from sketches, scores and things like an index."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from persample import influence as pi
from tests.influence.programs import batches_of, losses_fn, model_of, token_losses_fn


def test_top_by_scores() -> None:
    scores = torch.tensor([[1.0, 5.0, 0.0, 2.0], [1.0, 1.0, 0.0, 6.0]])
    chosen = pi.select(scores, fraction=0.5)
    assert chosen.ids.tolist() == [3, 1]
    assert chosen.scores.tolist() == [4, 3]
    assert len(pi.select(scores, count=0)) == 0


def test_top_by_target_with_and_without_norms() -> None:
    sketches = torch.tensor([[1.0, 0.0], [9.0, 9.0], [0.0, 2.0]])
    target = torch.tensor([[3.0, 0.0], [1.0, 0.0]])
    assert pi.select(sketches, target, count=1).ids.tolist() == [0]
    assert pi.select(sketches, target, count=1, normalise=False).ids.tolist() == [1]
    tasks = [target, torch.tensor([[0.0, 1.0]])]  # an example counts by the task it is best for
    assert sorted(pi.select(sketches, tasks, count=2).ids.tolist()) == [0, 2]


def test_diverse_does_not_choose_the_same_thing_twice() -> None:
    sketches = torch.tensor([[1.0, 0.0, 0.0]] * 5 + [[0.0, 1.0, 0.0]] + [[0.0, 0.0, 1.0]])
    target = torch.tensor([[3.0, 2.0, 1.0]])
    chosen = pi.select(sketches, target, count=3, method="diverse")
    assert chosen.ids.tolist() == [0, 5, 6]
    assert chosen.weights is not None
    torch.testing.assert_close(chosen.weights @ sketches[chosen.ids].double(), target[0].double())
    assert pi.select(sketches, target, count=3).ids.tolist() == [0, 1, 2]


def test_diverse_matches_the_mean_better_than_chance() -> None:
    generator = torch.Generator().manual_seed(0)
    sketches = torch.randn(200, 30, generator=generator)
    goal = sketches.double().mean(0)
    chosen = pi.select(sketches, count=20, method="diverse", normalise=False)
    assert chosen.weights is not None
    assert (chosen.weights >= 0).all()
    left = (goal - chosen.weights @ sketches[chosen.ids].double()).norm()
    random = sketches[torch.randperm(200, generator=generator)[:20]].double()
    assert left < 0.5 * (goal - random.mean(0)).norm()
    assert len(set(chosen.ids.tolist())) == 20


def test_mislabelled_by_self_influence() -> None:
    sketches = torch.randn(10, 4)
    sketches[7] *= 100
    assert pi.select(sketches, count=1, method="mislabelled").ids.tolist() == [7]
    assert pi.select(torch.tensor([1.0, 3.0, 2.0]), count=2, method="mislabelled").ids.tolist() == [1, 2]


class LikeAnIndex:
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def scores(self, batch: Any, *, normalise: bool = False) -> Tensor:
        rows = torch.nn.functional.normalize(self.rows) if normalise else self.rows
        return batch @ rows.t()

    def sketches(self) -> Iterator[Tensor]:
        yield from self.rows.split(3)

    def ids(self) -> Tensor:
        return torch.arange(len(self.rows)) + 100


def test_an_index_gives_the_same_by_its_own_ids() -> None:
    rows, target = torch.randn(10, 4), torch.randn(1, 4)
    index = LikeAnIndex(rows)
    for method in ("top", "diverse", "mislabelled"):
        want = pi.select(rows, target, count=4, method=method)  # type: ignore[arg-type]
        got = pi.select(index, target, count=4, method=method)  # type: ignore[arg-type]
        assert (got.ids - 100).tolist() == want.ids.tolist()
    with pytest.raises(ValueError, match="needs targets"):
        pi.select(index, count=1)
    with pytest.raises(TypeError, match=r"index with scores\(batch\)"):
        pi.select("folder", target, count=1)


def test_bad_input_is_refused() -> None:
    rows = torch.randn(4, 3)
    with pytest.raises(ValueError, match="fraction= or count="):
        pi.select(rows)
    with pytest.raises(ValueError, match="fraction must be"):
        pi.select(rows, fraction=1.5)
    with pytest.raises(ValueError, match="from 0 to 3"):
        pi.select(rows, count=4)
    with pytest.raises(ValueError, match="space of sketches"):
        pi.select(rows, torch.ones(1, 2), count=1)
    with pytest.raises(ValueError, match="method must be"):
        pi.select(rows, count=1, method="best")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="NaN"):
        pi.select(torch.full((2, 2), torch.nan), count=1)


def test_an_index_on_disk(tmp_path: Path) -> None:
    """The real one: as with a tensor of all its gradients, by the ids that the examples have."""
    data, target = batches_of(), batches_of(2, 4, 9)[0]
    index = pi.Index(tmp_path / "i", model_of(), losses_fn, sketch=pi.Blocks(None, None))
    index.build(data, ids_fn=lambda batch: 100 + (1000 * batch[0][:, 0]).round().long(), progress=False)
    rows = torch.cat(list(index.sketches(max_memory=3000)))
    assert len(rows) == len(index) == 32
    for method in ("diverse", "mislabelled"):
        whole = pi.select(rows, count=5, method=method)  # type: ignore[arg-type]
        assert pi.select(index, count=5, method=method).ids.tolist() == index.ids()[whole.ids].tolist()  # type: ignore[arg-type]
    best = index.scores(target, normalise=True).mean(0).argmax()
    assert pi.select(index, target, count=1).ids.tolist() == [int(index.ids()[best])]


def test_an_index_of_tokens(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    data = [torch.randint(7, (n, 4)) for n in (3, 3, 1)]
    tokens = pi.Index(tmp_path / "t", model, token_losses_fn, sketch=pi.Blocks(None, None))
    whole = pi.Index(tmp_path / "s", model, lambda m, b: token_losses_fn(m, b).sum(1), sketch=pi.Blocks(None, None))
    for chunk in (1, 10**6):
        for index in (tokens, whole):
            shutil.rmtree(index.folder.path, ignore_errors=True)
            index.build(data, chunk_bytes=chunk, progress=False)
        want = torch.cat(list(whole.sketches()))
        for memory in (1, 1000, 10**6):
            torch.testing.assert_close(torch.cat(list(tokens.sketches(max_memory=memory))), want)
