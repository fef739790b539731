"""Builds with unusual data: what is stored is all of it, or something is said."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from persample import influence as pi
from persample.influence.store import Encoding
from tests.influence.programs import CHUNK, batches_of, index_of, losses_fn, model_of, token_losses_fn

DATA = batches_of()


class Counted(IterableDataset[Any]):
    """Items one after another, whose number is known; a DataLoader has no indices for them."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(0)
        return iter([(torch.randn(6, generator=generator), i % 3) for i in range(10)])


def test_an_iterable_dataset_with_a_length_is_gone_through(tmp_path: Path) -> None:
    assert len(index_of(tmp_path / "i").build(DataLoader(Counted(), batch_size=4))) == 10


class Uncounted:
    """Batches whose number is not known before they are gone through."""

    def __init__(self, data: list[Any]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


@pytest.mark.parametrize("count", [1, 2, 4, 6, 7])
def test_more_or_fewer_batches_than_before_are_refused(tmp_path: Path, count: int) -> None:
    """Where a chunk was written with fewer batches than it has room for, later ones would be left out."""
    index_of(tmp_path / "i").build(Uncounted(DATA[:5]), chunk_bytes=CHUNK["float32"])
    with pytest.raises(pi.MismatchError, match=r"the loader has .* batches .* choose another folder"):
        index_of(tmp_path / "i").build(Uncounted(DATA[:count]), chunk_bytes=CHUNK["float32"])
    again = index_of(tmp_path / "i").build(Uncounted(DATA[:5]), chunk_bytes=CHUNK["float32"])
    assert len(again) == 25


@pytest.mark.parametrize("dtype", ["float16", "int8"])
@pytest.mark.parametrize("sketch", [pi.Blocks(None, None), pi.Sparse(1024, 4), pi.Masked(1024)], ids=lambda s: s.kind)
def test_builds_in_few_bytes_go_on_whatever_rounding_costs(tmp_path: Path, dtype: Any, sketch: pi.Sketch) -> None:
    """Rows with a few large numbers and many small ones lose most in int8."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 60), nn.ReLU(), nn.Linear(60, 10))
    x = torch.distributions.StudentT(2.0).sample((16, 100))
    data = [(part, torch.arange(len(part))) for part in x.split(4)]

    def build(losses: Any = losses_fn) -> int:
        made = pi.Index(tmp_path / "i", model, losses, sketch=sketch, dtype=dtype)
        return len(made.build(data, chunk_bytes=1))

    assert build() == 16
    (tmp_path / "i" / "chunks" / "00-000002.safetensors").unlink()
    assert build() == 16
    with pytest.raises(pi.MismatchError, match="losses_fn has changed"):
        build(lambda model, batch: 1.1 * losses_fn(model, batch))


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_rows_next_to_nothing_keep_their_signs(dtype: Any) -> None:
    least = torch.finfo(torch.float32).tiny
    rows = torch.tensor([[200.0, -200.0, 1.0], [0.0, 0.0, 0.0]]) * 2.0**-149
    encoding = Encoding(dtype, (3,))
    found = encoding.decode(*encoding.encode(rows))
    assert float((found - rows).abs().max()) < least
    assert bool((found * rows >= 0).all())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([0.5, 1.7, 2.9, 3.0, 4.0], "whole numbers, one for each sample, not torch.float32"),
        (["a", "b", "c", "d", "e"], "whole numbers, one for each sample: "),
        ([True] * 5, "whole numbers, one for each sample, not torch.bool"),
        ([1, 2], "returned 2 ids for a batch of 5 samples"),
    ],
)
def test_ids_are_whole_numbers(tmp_path: Path, given: list[Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        index_of(tmp_path / "i").build(DATA[:1], ids_fn=lambda batch: given)


def test_samples_without_tokens_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    data = [torch.randint(5, (2, 4)), torch.randint(5, (3, 1))]
    with pytest.raises(ValueError, match=r"batch 1 has losses of shape \(3, 0\): a sample needs one token at least"):
        pi.Index(tmp_path / "i", model, token_losses_fn).build(data)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_queries_without_a_gradient_are_refused(tmp_path: Path, bad: float) -> None:
    """No example is better for them than another: the first ones would come out."""
    index = index_of(tmp_path / "i").build(DATA)
    x, y = DATA[0]
    wrong = x.index_fill(0, torch.tensor([1]), bad), y
    for ask in (index.query, index.scores, index.vectors):
        with pytest.raises(ValueError, match=r"queries \[1\] have gradients that are infinite or NaN"):
            ask(wrong)


def test_a_plan_of_another_version_is_damage(tmp_path: Path) -> None:
    index_of(tmp_path / "i").build(DATA)
    path = tmp_path / "i" / "index.json"
    told = json.loads(path.read_text())
    told["plan"]["colour"] = "green"
    path.write_text(json.dumps(told))
    with pytest.raises(pi.DamagedError, match=r"index.json is damaged .*colour"):
        pi.Index.open(tmp_path / "i", model_of(), losses_fn)
