"""Gradients whose squares are beyond float32: of confident models they are next to nothing, and count all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from persample import influence as pi
from tests.influence.programs import batches_of, losses_fn, model_of, token_losses_fn

DATA, QUERY = batches_of(), batches_of(2, 4, 9)[0]
EXACT = pi.Blocks(None, None)


def index_with_losses_times(factor: float, folder: Path, dtype: Any = "float32") -> pi.Index:
    scaled = lambda model, batch: losses_fn(model, batch) * factor  # noqa: E731
    return pi.Index(folder, model_of(), scaled, sketch=EXACT, dtype=dtype).build(DATA)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("factor", [1e-28, 1e-22, 1e22])
def test_cosines_do_not_depend_on_length(tmp_path: Path, factor: float, dtype: Any) -> None:
    want = index_with_losses_times(1, tmp_path / "one", dtype)
    index = index_with_losses_times(factor, tmp_path / "i", dtype)
    for parameters in (None, ["3.weight"]):
        cosines = index.scores(QUERY, normalise=True, parameters=parameters)
        assert torch.allclose(cosines, want.scores(QUERY, normalise=True, parameters=parameters), atol=1e-4)


def test_cosines_of_sums_over_tokens(tmp_path: Path) -> None:
    model, data = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7)), [torch.randint(7, (3, 5))]
    found = []
    for factor in (1, 1e-24):
        scaled = lambda model, ids, factor=factor: token_losses_fn(model, ids) * factor  # noqa: E731
        index = pi.Index(tmp_path / str(factor), model, scaled, sketch=EXACT).build(data)
        found.append(index.scores(data[0], normalise=True))
    assert torch.allclose(*found, atol=1e-5)


def test_what_is_wrong_with_small_gradients_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_with_losses_times(1e-26, tmp_path)
    assert index.check(QUERY).worst < 1e-5
    of_stack = pi.Blocks.of_stack
    monkeypatch.setattr(pi.Blocks, "of_stack", lambda *given: 2 * of_stack(*given))
    assert index.check(QUERY).worst > 0.4


def test_selection_goes_by_angles() -> None:
    sketches, target = torch.randn(9, 5), torch.randn(2, 5)
    want = pi.select(sketches, target, count=9)
    lengths = torch.logspace(-30, 30, 9).unsqueeze(1)
    found = pi.select(sketches * lengths, target * 1e-28, count=9)
    assert torch.equal(found.ids, want.ids)
    torch.testing.assert_close(found.scores, want.scores, rtol=1e-4, atol=1e-4)


def test_queries_with_small_gradients_are_solved_for() -> None:
    def faint(model: nn.Module, batch: Any) -> Tensor:
        return losses_fn(model, batch) * (1e-26 if len(batch[0]) == 4 else 1)

    model = model_of().eval()
    scores = [pi.exact(model, fn, DATA, QUERY, damping=1e-2, products=40) for fn in (losses_fn, faint)]
    torch.testing.assert_close(scores[1] * 1e26, scores[0], rtol=1e-2, atol=1e-2 * float(scores[0].abs().max()))
