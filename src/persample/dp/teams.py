"""Several processes that train together, on ``torch.distributed``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._errors import NonFiniteError
from ..distributed import Ranks, is_sharded, like_shard, own_part
from ..reductions import Clipping
from ..reductions.exact import ExactClippedSum, ExactSums
from ..verbs import reduce
from .binding import trainable
from .errors import PrivacyError
from .fingerprints import summary
from .sums import Clipped, Line, Whole
from .team import AddNoise, Alike, Team


class Several(Team):
    """What all teams of several processes share: draws of the first process, and errors that reach all of them."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._params = trainable(model)
        self._device = next(iter(self._params.values())).device
        self._ranks = Ranks(group)
        self.rank, self.size = self._ranks.rank, self._ranks.size

    def agree(self, value: bytes) -> bytes:
        with self._explaining_lost_processes():
            return self._ranks.first(value, self._device)

    def _noisy_total(self, sums: Sequence[Whole], add_noise: AddNoise, stream: int = 0) -> Line:
        """Local sums to the first process, in int64; noise there, and the result to all, in float64."""
        sizes = [whole.numbers.numel() for whole in sums]
        line = torch.cat([whole.numbers.reshape(-1).to(self._device, torch.int64) for whole in sums])
        noisy = torch.empty_like(line, dtype=torch.float64)
        with self._explaining_lost_processes():
            dist.reduce(line, group=self._ranks.group, group_dst=0)
            if self.rank == 0:
                totals = [Whole(part, whole.unit) for part, whole in zip(line.split(sizes), sums, strict=True)]
                torch.cat(add_noise(totals, stream).tensors, out=noisy)
            dist.broadcast(noisy, group=self._ranks.group, group_src=0)
        return Line([noisy])

    @contextmanager
    def together(self, alike: Alike) -> Iterator[None]:
        self._alike = alike
        yield

    def _confirm_agreement(self, failed: bool = False) -> None:
        """Wait for all, and hear whether one of them has failed, or is no longer what the others are."""
        mine = {} if failed else dict(self._alike())
        with self._explaining_lost_processes():
            answers = self._ranks.each([failed, summary(mine)], self._device)
        failures = sum(one for one, _ in answers)
        if failures and not failed:
            raise PrivacyError(
                f"{failures} of {self.size} processes could not make this step, and say why themselves: nothing was "
                f"released. The step counts as spent; resume from the last private.save"
            )
        if not failures and len({number for _, number in answers}) > 1:
            raise PrivacyError(
                f"the processes have drifted apart, in {', '.join(self._different(mine))}: each would train a model of "
                f"its own. Run the same loop in all of them: whatever follows a record of private.step (a schedule, a "
                f"clipped or rescaled p.grad, optimizer.step) follows it everywhere. Resume from the last private.save"
            )

    def _different(self, mine: Mapping[str, int]) -> list[str]:
        """The names of what is not the same in all processes, by those that the first one has."""
        names = json.loads(self.agree(json.dumps(list(mine)).encode()))
        with self._explaining_lost_processes():
            answers = self._ranks.each([mine.get(name, -1) for name in names], self._device)
        return [name for name, *values in zip(names, *answers, strict=True) if len(set(values)) > 1] or ["settings"]

    @contextmanager
    def _explaining_lost_processes(self) -> Iterator[None]:
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


class Shards(Several):
    """Every process has a part of the model (FSDP2), and a share of each batch.

    Every process clips its own samples, with weights that are gathered for that; sums are added up one parameter after
    another, and every process keeps its part of them and adds noise to it. All processes run the model equally often,
    those that have no sample left included.

    Args:
        model: a model sharded by ``fully_shard`` over one mesh of one dim, all trainable parameters included.
    """

    reruns, lockstep = False, True  # its processes gather the weights together

    def __init__(self, model: nn.Module) -> None:
        params = trainable(model)
        _check_shards(params)
        mesh = next(iter(params.values())).device_mesh  # type: ignore[attr-defined]
        super().__init__(model, mesh.get_group())

    def own(self, p: Tensor) -> Tensor:
        local: Tensor = p.detach().to_local()  # type: ignore[attr-defined]
        return local

    def give(self, p: Tensor, gradient: Tensor) -> None:
        part = (torch.view_as_complex(gradient.contiguous()) if p.is_complex() else gradient).to(p.dtype)
        p.grad = like_shard(p, part)

    def clipped(self, losses: Tensor, params: Mapping[str, Tensor], clip: ExactClippedSum) -> Clipped:
        whether_raised = clip.nonfinite
        clip.nonfinite = "drop"  # all processes raise together, or none
        sums: ExactSums = reduce(losses, params, clip, independent=True)[0]
        bad = list(sums.clipping.dropped)
        with self._explaining_lost_processes():
            elsewhere = self._ranks.count([len(bad)], self._device)[0] - len(bad)
        if whether_raised == "raise" and (bad or elsewhere):
            raise NonFiniteError(bad, len(losses), elsewhere)
        return _Scattered(sums, params, self._ranks)

    @contextmanager
    def accounting(self) -> Iterator[None]:
        failed = 1
        try:
            yield
            failed = 0
        finally:
            with self._explaining_lost_processes():
                failed = self._ranks.count([failed], self._device)[0]
        if failed:
            raise PrivacyError(
                f"{failed} of {self.size} processes could not account for this step, and say why themselves: nothing "
                f"was released. Resume from the last private.save"
            )

    def release(self, sums: Sequence[Whole], add_noise: AddNoise) -> Line:
        self._confirm_agreement()
        own = len(self._params)
        noisy = add_noise(sums[:own], self.rank)
        if not sums[own:]:
            return noisy
        others = self._noisy_total(sums[own:], add_noise, self.size)
        return Line([*noisy.tensors, *others.tensors])

    def states(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        with self._explaining_lost_processes():
            weights, inner = get_state_dict(model, optimizer, options=whole)
        return {"model": weights, "optimizer": inner}

    def load_states(self, model: nn.Module, optimizer: torch.optim.Optimizer, states: dict[str, Any]) -> None:
        from torch.distributed.checkpoint import state_dict as states_of

        whole = states_of.StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, inner = states["model"], states["optimizer"]
        with self._explaining_lost_processes():
            states_of.set_model_state_dict(model, weights, options=whole)
            if inner["state"]:
                states_of.set_optimizer_state_dict(model, optimizer, inner, options=whole)
        if not inner["state"]:  # of plain SGD, for which PyTorch has no answer: there is nothing to distribute
            own = optimizer.state_dict()["param_groups"]
            groups = [{**g, "params": o["params"]} for g, o in zip(inner["param_groups"], own, strict=True)]
            optimizer.load_state_dict({"state": {}, "param_groups": groups})


@dataclass(frozen=True)
class _Scattered:
    """Sums of all processes, of which each keeps its part: all ask for the same parameters in the same order."""

    sums: ExactSums
    params: Mapping[str, Tensor]
    ranks: Ranks

    @property
    def clipping(self) -> Clipping:
        return self.sums.clipping

    @property
    def asked(self) -> Clipping:
        return self.sums.asked

    @property
    def weighed_down(self) -> float:
        return self.sums.weighed_down

    @property
    def line(self) -> None:
        return None

    def take(self, name: str) -> Tensor:
        p, total = self.params[name], self.sums.take(name)
        if total is None:
            total = torch.zeros(*p.shape, *[2] * p.is_complex(), dtype=self.sums.units[name].dtype, device=p.device)
        dist.all_reduce(total, group=self.ranks.group)
        return own_part(p, total)


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
                f"pass, and each process runs the model again on samples of its own: wrap with broadcast_buffers=False"
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


def _digest(params: Mapping[str, Tensor]) -> bytes:
    digest = hashlib.sha256()
    for name, p in params.items():
        digest.update(name.encode())
        digest.update(p.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()
