"""Private training of sharded embeddings, and under autocast, by every team: what one process alone would do."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import persample as ps
from persample import dp
from tests.distributed.processes import Processes

EXAMPLES, WORDS, WIDTH, CLASSES = 40, 7, 6, 3  # words and classes do not divide by the number of processes
CLIPS = {"flat": ps.ClippedSum(0.5), "parameter": ps.ClippedSum(0.5, per="parameter")}
TEAMS = ["plain", "ddp", "fsdp", "hsdp", "tp", "dp x tp", "fsdp x tp"]
FAST = ("hsdp", "dp x tp")


class Text(nn.Module):
    """A few words to one of three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.words(ids))
        out: Tensor = self.head((x + self.down(torch.tanh(self.up(x)))).mean(1))
        return out


def text(dtype: torch.dtype) -> Text:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return Text().to(dtype)


def sentences() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(WORDS, (EXAMPLES, 4), generator=generator)
    return TensorDataset(ids, ids.sum(1) % CLASSES)


def shared(model: Text, how: str, words: str) -> tuple[nn.Module, dp.Team | None]:
    """The model as a team trains it: tables of embeddings in parts of their rows, or of their columns."""
    if how == "ddp":
        return DistributedDataParallel(model), None
    if how in ("fsdp", "hsdp"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if how == "hsdp" else None
        fully_shard(model, mesh=mesh)
        return model, None
    if how == "plain":
        return model, None
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    if how != "tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    by_rows, by_columns = RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(output_layouts=Replicate())
    styles = {"words": by_rows if words == "rows" else by_columns, "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], {**styles, "head": ColwiseParallel(output_layouts=Replicate())})
    if how == "fsdp x tp":
        fully_shard(model, mesh=mesh["dp"])
    return model, dp.Shards(model, data=mesh["dp"]) if how == "dp x tp" else None


def trained(model: nn.Module, team: dp.Team | None, clip: Any, half: bool, noise: float) -> list[Tensor]:
    """The changes of all parameters, which are not sharded any more."""
    before = whole(model)
    plan = dp.Plan(examples=EXAMPLES, batch_size=10, steps=6, noise_multiplier=noise, delta=1e-3, accountant="rdp")
    private = dp.Private(model, torch.optim.SGD(model.parameters(), lr=1.0), plan, clip, seed=3, team=team)
    for ids, y in private.batches(sentences()):
        with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
            losses = F.cross_entropy(model(ids).float() if half else model(ids), y, reduction="none")
        private.step(losses)
    assert private.steps == 6
    return [now - then for now, then in zip(whole(model), before, strict=True)]


def whole(model: nn.Module) -> list[Tensor]:
    found = [p.detach() for p in model.parameters()]
    return [(p.full_tensor() if isinstance(p, DTensor) else p).clone() for p in found]


def as_one_alone(rank: int, world: int, how: str, words: str, clip: str, half: bool) -> None:
    dtype = torch.float32 if half else torch.float64
    want = trained(text(dtype), dp.Team(), CLIPS[clip], half, 0.0)
    model, team = shared(text(dtype), how, words)
    found = trained(model, team, CLIPS[clip], half, 0.0)
    for got, wanted in zip(found, want, strict=True):
        assert got.dtype == dtype
        close = 0.02 if half else 1e-6  # of bfloat16's rounding, that of other shapes of batches
        assert float((got - wanted).norm()) <= close * float(wanted.norm()) + 1e-12
    noisy = trained(*shared(text(dtype), how, words), CLIPS[clip], half, 1.0)
    assert all(float((a - b).norm()) > 0.1 * float(b.norm()) for a, b in zip(noisy, want, strict=True))


@pytest.mark.parametrize("clip", ["flat", pytest.param("parameter", marks=pytest.mark.slow)])
@pytest.mark.parametrize("words", ["rows", "columns"])
@pytest.mark.parametrize(
    "how", ["dp x tp", *[pytest.param(how, marks=pytest.mark.slow) for how in ("tp", "fsdp x tp")]]
)
def test_embeddings_in_parts(four: Processes, how: str, words: str, clip: str) -> None:
    four.run(as_one_alone, how, words, clip, False)


@pytest.mark.parametrize("clip", ["flat", pytest.param("parameter", marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", [how if how in FAST else pytest.param(how, marks=pytest.mark.slow) for how in TEAMS])
def test_autocast(four: Processes, how: str, clip: str) -> None:
    four.run(as_one_alone, how, "rows", clip, True)
