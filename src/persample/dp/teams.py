"""Several processes that train together, on ``torch.distributed``: replicas of a model, and which team is meant."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..distributed import is_sharded
from .binding import trainable
from .several import Several, everybody
from .sharded import Shards
from .sums import Line, Whole
from .team import AddNoise, Alike, Team


class Replicas(Several):
    """Every process has the whole model, plain or in DDP, and a share of each batch.

    Local clipped sums are added up share by share, each in the process that adds its noise and gives all of them the
    result: an all-reduce in two halves. Batches are drawn for all processes together, with the plan's rate, and dealt
    out.

    Args:
        model: the model, with the same parameters in every process.
        process_group: the processes; by default all of them.
    """

    def __init__(self, model: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
        _check_replicas(model)
        super().__init__(model, process_group or everybody())
        self._waited_for = False  # whether others wait, or will wait, for a word of this process
        mine = _digest(self._params)
        if self._ranks.count([mine != self.agree(mine)], self._device)[0]:
            raise ValueError(
                "the processes start with different parameters: seed them alike, load the same state, or wrap the "
                "model in DistributedDataParallel, which gives all of them the first one's"
            )

    @contextmanager
    def together(self, alike: Alike) -> Iterator[None]:
        self._alike, self._waited_for = alike, True
        try:
            yield
        except Exception:
            if self._waited_for:
                self._confirm_agreement(failed=True)  # the others come to `release` and hear of it there
            raise

    def release(self, sums: Sequence[Whole], add_noise: AddNoise) -> Line:
        self._waited_for = False
        self._confirm_agreement()
        return self._noisy_total(sums, add_noise)


def team_of(model: nn.Module) -> Team:
    """The team that is meant where none is given."""
    if not (dist.is_available() and dist.is_initialized()):
        return Team()
    if any(is_sharded(p) for p in trainable(model).values()):
        return Shards(model)
    return Replicas(model) if dist.get_world_size() > 1 else Team()


def _check_replicas(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if (
            isinstance(module, DistributedDataParallel)
            and module.broadcast_buffers
            and any(True for _ in module.buffers())
        ):
            raise ValueError(
                f"DistributedDataParallel{f' {name!r}' if name else ''} would send its buffers around at every forward "
                f"pass, and each process runs the model again on samples of its own: wrap with broadcast_buffers=False"
            )
    sharded = [name for name, p in trainable(model).items() if is_sharded(p)]
    if sharded:
        raise ValueError(f"parameters {sharded} are sharded: use dp.Shards(model)")


def _digest(params: Mapping[str, Tensor]) -> bytes:
    digest = hashlib.sha256()
    for name, p in params.items():
        digest.update(name.encode())
        digest.update(p.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()
