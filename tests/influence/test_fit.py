"""A curvature between gradients: kept beside the index, and taken away again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from persample import influence as pi
from persample.influence.curvature.kinds import Shampoo
from tests.influence.programs import CHUNK, batches_of, index_of

DATA, QUERY = batches_of(), batches_of(2, 4, 9)[0]


def sampled(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch[0])
    return F.cross_entropy(logits, torch.distributions.Categorical(logits=logits).sample(), reduction="none")


def test_scores_with_a_curvature_are_those_of_applied_queries(tmp_path: Path) -> None:
    index = index_of(tmp_path).build(DATA, chunk_bytes=CHUNK["float32"])
    plain = index.scores(QUERY)
    index.fit(Shampoo(), damping=0.01)
    (fitted,) = index.fitted() or []
    rows = [index.subject.rows(batch).blocks for batch in [QUERY, *DATA]]
    applied = fitted.apply(rows[0])
    want = torch.cat([_product(applied, some) for some in rows[1:]], 1)
    assert torch.allclose(index.scores(QUERY), want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    assert torch.equal(index_of(tmp_path).scores(QUERY), index.scores(QUERY))  # read from disk
    index.fit(None)
    assert torch.equal(index.scores(QUERY), plain)


def _product(left: Any, right: Any) -> Tensor:
    return sum((left[name].flatten(1) @ right[name].flatten(1).t() for name in left), torch.zeros(()))


def test_sampled_labels_need_the_data_and_are_the_same_every_time(tmp_path: Path) -> None:
    index = index_of(tmp_path).build(DATA)
    with pytest.raises(ValueError, match="needs the data again: pass loader= and sample_losses_fn="):
        index.fit(Shampoo(labels="sampled"))
    scores = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        index.fit(Shampoo(labels="sampled"), DATA, sample_losses_fn=sampled)
        scores.append(index.scores(QUERY))
    assert torch.equal(*scores)
    index.fit(Shampoo())
    assert not torch.allclose(index.scores(QUERY), scores[0])


def test_a_damaged_curvature_is_named(tmp_path: Path) -> None:
    index_of(tmp_path).build(DATA).fit(Shampoo())
    (curvature,) = tmp_path.glob("curvature-00-*.safetensors")
    curvature.write_bytes(b"no")
    with pytest.raises(pi.DamagedError, match=r"curvature of .* cannot be read .*: call index.fit again"):
        index_of(tmp_path).query(QUERY)


def test_a_curvature_of_which_a_bit_has_changed_is_found_by_verify(tmp_path: Path) -> None:
    index = index_of(tmp_path).build(DATA).fit(Shampoo())
    index.verify(DATA)
    (path,) = tmp_path.glob("curvature-00-*.safetensors")
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    with pytest.raises(pi.DamagedError, match=r"curvature-00-\w+\.safetensors has changed since it was written"):
        index.verify()
