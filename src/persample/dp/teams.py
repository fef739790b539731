"""Several processes that train together, on ``torch.distributed``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._errors import NonFiniteError
from ..distributed import Ranks, computes_in, is_sharded, summing
from ..reduce import reduce
from ..reductions import ClippedSum, Clipping, Norms
from ..reductions.clipping import ClippedDict
from .binding import trainable
from .errors import PrivacyError
from .team import AddNoise, Parts, Team, split


class Several(Team):
    """What all teams of several processes share: draws of the first process, and errors that reach all of them."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._params = trainable(model)
        self._device = next(iter(self._params.values())).device
        self._ranks = Ranks(group)
        self.rank, self.size = self._ranks.rank, self._ranks.size

    def agree(self, value: bytes) -> bytes:
        with self._all_there():
            return self._ranks.first(value, self._device)

    def _noisy_total(self, sums: Sequence[Tensor], add_noise: AddNoise, stream: int = 0) -> None:
        """Local sums to the first process, noise there, and the result to all: in float64, in place."""
        flat = [torch.view_as_real(t) if t.is_complex() else t for t in sums]
        line = torch.cat([t.reshape(-1).to(self._device, torch.float64) for t in flat])
        parts = [part.view(t.shape) for part, t in zip(line.split([t.numel() for t in flat]), flat, strict=True)]
        with self._all_there():
            dist.reduce(line, group=self._ranks.group, group_dst=0)
            if self.rank == 0:
                add_noise(parts, stream)
            dist.broadcast(line, group=self._ranks.group, group_src=0)
        for t, part in zip(flat, parts, strict=True):
            t.copy_(part)

    @contextmanager
    def _all_there(self) -> Iterator[None]:
        """PyTorch's error for a process that is gone or does not answer, with the remedy."""
        try:
            yield
        except RuntimeError as error:
            raise PrivacyError(
                f"another of the {self.size} processes is gone, or does not come to the same step in time: end all of "
                f"them, and resume from the last private.save. What was accounted for is spent. PyTorch says: {error}"
            ) from error


class Replicas(Several):
    """Every process has the whole model, plain or in DDP, and a share of each batch.

    Local clipped sums are added up in the first process, which adds the noise once and gives all of them the result: an
    all-reduce in two halves. Batches are drawn for all processes together, with the plan's rate, and dealt out.

    Args:
        model: the model, with the same parameters in every process.
        process_group: the processes; by default all of them.
    """

    def __init__(self, model: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
        _check_replicas(model)
        super().__init__(model, process_group or _everybody())
        self._waited_for = False  # whether others wait, or will wait, for a word of this process
        mine = _digest(self._params)
        if self._ranks.count([mine != self.agree(mine)], self._device)[0]:
            raise ValueError(
                "the processes start with different parameters: seed them alike, load the same state, or wrap the "
                "model in DistributedDataParallel, which gives all of them the first one's"
            )

    @contextmanager
    def together(self) -> Iterator[None]:
        self._waited_for = True
        try:
            yield
        except Exception:
            if self._waited_for:
                self._ranks.count([1], self._device)  # the others come to `release` and hear of it there
            raise

    def release(self, sums: Sequence[Tensor], add_noise: AddNoise) -> None:
        self._waited_for = False
        with self._all_there():
            failed = self._ranks.count([0], self._device)[0]
        if failed:
            raise PrivacyError(
                f"{failed} of {self.size} processes could not make this step, and say why themselves: nothing was "
                f"released. The step counts as spent; resume from the last private.save"
            )
        self._noisy_total(sums, add_noise)


class Shards(Several):
    """Every process has a part of the model (FSDP2), and a share of each batch.

    Norms come first, then an ordinary weighted backward: sharded gradients flow by FSDP's own reduce-scatter, and every
    process adds noise to its part. All processes run the model equally often: one that has no sample left in a part of
    a batch is given one to run, which does not count.

    Args:
        model: a model sharded by ``fully_shard`` over one mesh of one dim, all trainable parameters included.
    """

    reruns = False  # its processes would have to do so together

    def __init__(self, model: nn.Module) -> None:
        params = trainable(model)
        _check_shards(params)
        mesh = next(iter(params.values())).device_mesh  # type: ignore[attr-defined]
        super().__init__(model, mesh.get_group())

    def parts(self, samples: list[int], physical: int | None) -> Parts:
        shares = [split(samples[rank :: self.size], physical) for rank in range(self.size)]
        found: Parts = []
        for place in range(len(shares[0])):  # the first process's share is the largest
            own = shares[self.rank][place] if place < len(shares[self.rank]) else []
            found.append((own or samples[:1], 0 if own else 1))
        return found

    def clipped(self, losses: Tensor, params: Mapping[str, Tensor], clip: ClippedSum, padding: int) -> Any:
        if clip.per is not None or clip.nonfinite != "raise":
            raise ValueError(
                "a sharded model is clipped by one weight per sample in an ordinary backward: use a flat ClippedSum "
                "(no per=), and nonfinite='raise', because a weight of zero does not remove a NaN"
            )
        (norms,) = reduce(losses, params, Norms(), independent=True, retain_graph=True)
        bad = (~norms.isfinite()).nonzero().flatten().tolist()
        with self._all_there():
            elsewhere = self._ranks.count([len(bad)], self._device)[0] - len(bad)
        if bad or elsewhere:
            raise NonFiniteError(bad, len(norms), elsewhere)
        counted = len(norms) - padding
        weights = clip.weigh(norms.double())
        weights[counted:] = 0
        for p in params.values():
            p.grad = None
        with summing(params):
            losses.backward(weights.to(losses.dtype))
        found = ClippedDict({name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in params.items()})
        found.clipping = Clipping(norms[:counted], weights[:counted], (), clip.sensitivity)
        for p in params.values():
            p.grad = None
        return found

    @contextmanager
    def accounting(self) -> Iterator[None]:
        failed = 1
        try:
            yield
            failed = 0
        finally:
            with self._all_there():
                failed = self._ranks.count([failed], self._device)[0]
        if failed:
            raise PrivacyError(
                f"{failed} of {self.size} processes could not account for this step, and say why themselves: nothing "
                f"was released. Resume from the last private.save"
            )

    def release(self, sums: Sequence[Tensor], add_noise: AddNoise) -> None:
        add_noise([t.to_local() for t in sums if is_sharded(t)], self.rank)  # type: ignore[attr-defined]
        whole = [t for t in sums if not is_sharded(t)]  # an adaptive clip's count
        if whole:
            self._noisy_total(whole, add_noise, stream=self.size)

    def states(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        with self._all_there():
            weights, inner = get_state_dict(model, optimizer, options=whole)
        return {"model": weights, "optimizer": inner}

    def load_states(self, model: nn.Module, optimizer: torch.optim.Optimizer, states: dict[str, Any]) -> None:
        from torch.distributed.checkpoint import state_dict as states_of

        whole = states_of.StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, inner = states["model"], states["optimizer"]
        with self._all_there():
            states_of.set_model_state_dict(model, weights, options=whole)
            if inner["state"]:
                states_of.set_optimizer_state_dict(model, optimizer, inner, options=whole)
        if not inner["state"]:  # of plain SGD, for which PyTorch has no answer: there is nothing to distribute
            own = optimizer.state_dict()["param_groups"]
            groups = [{**g, "params": o["params"]} for g, o in zip(inner["param_groups"], own, strict=True)]
            optimizer.load_state_dict({"state": {}, "param_groups": groups})


def team_of(model: nn.Module) -> Team:
    """The team that is meant where none is given."""
    if not (dist.is_available() and dist.is_initialized()):
        return Team()
    if any(is_sharded(p) for p in trainable(model).values()):
        return Shards(model)
    return Replicas(model) if dist.get_world_size() > 1 else Team()


def _everybody() -> dist.ProcessGroup:
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "a team of several processes needs torch.distributed.init_process_group first, and torchrun to start them"
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def _check_replicas(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if (
            isinstance(module, DistributedDataParallel)
            and module.broadcast_buffers
            and any(True for _ in module.buffers())
        ):
            raise ValueError(
                f"DistributedDataParallel{f' {name!r}' if name else ''} would send its buffers around at every forward "
                f"pass, and processes that have no sample in a batch make none: wrap with broadcast_buffers=False"
            )
    sharded = [name for name, p in trainable(model).items() if is_sharded(p)]
    if sharded:
        raise ValueError(f"parameters {sharded} are sharded: use dp.Shards(model)")


def _check_shards(params: Mapping[str, Tensor]) -> None:
    whole = [name for name, p in params.items() if not is_sharded(p)]
    if whole:
        raise ValueError(
            f"parameters {whole} are not sharded, and FSDP would not add up their gradients: apply fully_shard to the "
            f"whole model"
        )
    meshes = {p.device_mesh for p in params.values()}  # type: ignore[attr-defined]
    if len(meshes) != 1 or next(iter(meshes)).ndim != 1:
        raise ValueError(f"a model has to be sharded over one mesh of one dim, but there are {list(meshes)}")
    coarse = [dtype for dtype in computes_in(params) if dtype not in (torch.float32, torch.float64)]
    if coarse:
        raise ValueError(
            f"FSDP's mixed precision computes gradients in {coarse}, too coarse for the sensitivity to hold: leave out "
            f"its MixedPrecisionPolicy, and use torch.autocast"
        )


def _digest(params: Mapping[str, Tensor]) -> bytes:
    found = hashlib.sha256()
    for name, p in params.items():
        found.update(name.encode())
        found.update(p.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.digest()
