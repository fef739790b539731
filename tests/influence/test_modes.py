"""Models in training mode, and gradients that are switched off: an index takes gradients in evaluation mode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from persample import influence as pi
from tests.influence.programs import batches_of, index_of, losses_fn

DATA, QUERY = batches_of(), batches_of(2, 4, 9)[0]
EXACT = pi.Blocks(None, None)


class Louder(nn.Module):
    """Something that only training has, and that leaves shapes as they are."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * x if self.training else x


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.rest = nn.Sequential(nn.Linear(8, 8), Louder(), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.rest(x) if self.reentrant is None else checkpoint(self.rest, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_runs_again_is_in_evaluation_mode_too(tmp_path: Path, reentrant: bool) -> None:
    plain, model = Checkpointed(None), Checkpointed(reentrant)
    model.load_state_dict(plain.state_dict())
    want = pi.Index(tmp_path / "plain", plain, losses_fn, sketch=EXACT).build(DATA).scores(QUERY)
    index = pi.Index(tmp_path / "i", model, losses_fn, sketch=EXACT).build(DATA)
    assert torch.allclose(index.scores(QUERY), want, atol=1e-6)
    assert all(module.training for module in model.modules())
    if not reentrant:  # with which torch.autograd.grad cannot do
        assert index.check(QUERY).worst < 1e-5


def test_gradients_may_be_switched_off_around_an_index(tmp_path: Path) -> None:
    want = index_of(tmp_path / "i", sketch=EXACT).build(DATA).scores(QUERY)
    with torch.no_grad():
        index = index_of(tmp_path / "j", sketch=EXACT).build(DATA)
        assert torch.equal(index.scores(QUERY), want)
        assert index.check(QUERY).worst < 1e-5
