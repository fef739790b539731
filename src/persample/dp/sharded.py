"""Processes that train parts of one model together: FSDP2, over a mesh of one dim or of several (HSDP)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._errors import NonFiniteError
from ..distributed import Ranks, described, group_of, is_sharded, like_shard, own_part, spread
from ..reductions import Clipping
from ..reductions.exact import ExactClippedSum, ExactSums
from ..verbs import reduce
from .binding import trainable
from .errors import PrivacyError
from .several import Several, everybody
from .sums import Clipped, Line, Whole
from .team import AddNoise


class Shards(Several):
    """Every process has a part of the model (FSDP2), and a share of each batch.

    Every process clips its own samples, with weights that are gathered for that; sums are added up one parameter after
    another, and every process keeps its part of them. Noise is made once for every part, by the first process that
    holds it, and sent to the others. All processes run the model equally often, those that have no sample left
    included.

    Args:
        model: a model sharded by ``fully_shard`` over one mesh, all trainable parameters included.
    """

    reruns, lockstep = False, True  # its processes gather the weights together

    def __init__(self, model: nn.Module) -> None:
        params = trainable(model)
        _check_shards(params)
        mesh = next(iter(params.values())).device_mesh  # type: ignore[attr-defined]
        super().__init__(model, group_of(mesh.mesh.flatten().tolist(), [everybody(), *mesh.get_all_groups()]))
        self._spread = spread(params, self._ranks, self._device)
        self._made = {name for one in self._spread if one.is_first for name in one.names}

    def own(self, p: Tensor) -> Tensor:
        local: Tensor = p.detach().to_local()  # type: ignore[attr-defined]
        return local

    def give(self, p: Tensor, gradient: Tensor) -> None:
        part = (torch.view_as_complex(gradient.contiguous()) if p.is_complex() else gradient).to(p.dtype)
        p.grad = like_shard(p, part)

    def makes_noise_for(self, name: str) -> bool:
        return name in self._made

    @property
    def part(self) -> str:
        return f"{self.rank} of {self.size}{described(self._params)}"

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
        noisy = self._with_noise(dict(zip(self._params, sums[:own], strict=True)), add_noise)
        if not sums[own:]:
            return noisy
        others = self._noisy_total(sums[own:], add_noise, self.size)
        return Line([*noisy.tensors, *others.tensors])

    def _with_noise(self, sums: Mapping[str, Whole], add_noise: AddNoise) -> Line:
        """Noise of one stream for each process that makes some; those who hold the same part have one result.

        It is sent, and not made by each of them: other processors may round it in another way.
        """
        sizes = {name: whole.numbers.numel() for name, whole in sums.items()}
        made = [name for name in sums if name in self._made]
        noisy = add_noise([sums[name] for name in made], self.rank) if made else Line([])
        if all(one.group is None for one in self._spread):
            return noisy
        empty = torch.empty(0, dtype=torch.float64, device=self._device)
        pieces = torch.cat([empty, *noisy.tensors]).split([sizes[name] for name in made])
        found = dict(zip(made, pieces, strict=True))
        for one in self._spread:
            line = torch.cat([found.get(name, empty.new_zeros(sizes[name])) for name in one.names])
            with self._explaining_lost_processes():
                one.from_first(line)
            found.update(zip(one.names, line.split([sizes[name] for name in one.names]), strict=True))
        return Line([found[name] for name in sums])

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


def _check_shards(params: Mapping[str, Tensor]) -> None:
    whole = [name for name, p in params.items() if not is_sharded(p)]
    if whole:
        raise ValueError(
            f"parameters {whole} are not sharded, and FSDP would not add up their gradients: apply fully_shard to the "
            f"whole model"
        )
    meshes = {p.device_mesh for p in params.values()}  # type: ignore[attr-defined]
    if len(meshes) != 1:
        raise ValueError(f"a model has to be sharded over one mesh, but there are {list(meshes)}")
