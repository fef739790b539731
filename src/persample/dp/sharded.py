"""Processes that train parts of one model together: FSDP2, tensor parallel, or both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._errors import NonFiniteError
from ..distributed import (
    Ranks,
    data_meshes,
    described,
    group_of,
    held_by_several,
    is_sharded,
    like_shard,
    own_part,
    placed_like,
    ranks_of,
    spread,
)
from ..reductions import Clipping
from ..reductions.exact import ExactClippedSum, ExactSums
from ..verbs import reduce
from .binding import trainable
from .errors import PrivacyError
from .noise import Sum
from .several import Several, everybody
from .sums import Clipped, Line, Whole
from .team import AddNoise


class Shards(Several):
    """Every process has a part of the model (FSDP2, tensor parallel or both), and a share of each batch.

    Every process clips its own samples, with weights that are gathered for that; sums are added up one parameter after
    another, and every process keeps its part of them. Noise is made once for every part, by the first process that
    holds it, and sent to the others. All processes run the model equally often, those that have no sample left
    included.

    Args:
        model: a model sharded by ``fully_shard`` over one mesh, all trainable parameters included; or one made tensor
            parallel by ``parallelize_module``, where others may be plain; or both.
        data: the mesh, or the part of one, whose processes have samples of their own, such as ``mesh["dp"]``: for each
            place on it there may be several processes with the same samples. By default FSDP2's; without FSDP2, all
            processes have all samples.
    """

    reruns, lockstep = False, True  # its processes gather the weights together

    def __init__(self, model: nn.Module, data: DeviceMesh | None = None) -> None:
        params = trainable(model)
        mesh = _mesh_of_samples(params, data)
        shares = [dist.get_rank()] if mesh is None else ranks_of(mesh)
        super().__init__(model, group_of(_processes(params, shares), [everybody()]))
        self._spread = spread(params, self._ranks, self._device)
        self._made = {name for one in self._spread if one.is_first for name in one.names}
        self.share, self.shares = shares.index(dist.get_rank()), len(shares)
        every = [numbers[0] for numbers in self._ranks.each([self.share], self._device)]
        if len({every.count(share) for share in range(self.shares)}) > 1:
            raise ValueError(
                f"each share of a batch must have as many processes, but the processes have shares {every}"
            )
        self._copies = self.size // self.shares  # processes with the same samples
        groups = [] if mesh is None else mesh.get_all_groups()
        self._data = Ranks(group_of(shares, [self._ranks.group, *groups])) if self.shares > 1 else None
        self._is_counted = dist.get_process_group_ranks(self._ranks.group)[0] in shares

    def own(self, p: Tensor) -> Tensor:
        return p.detach().to_local() if is_sharded(p) else p.detach()  # type: ignore[attr-defined]

    def give(self, p: Tensor, gradient: Tensor) -> None:
        if not is_sharded(p):
            super().give(p, gradient)
            return
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
            all_bad = self._ranks.count([len(bad)], self._device)[0]
        if whether_raised == "raise" and all_bad:
            raise NonFiniteError(bad, len(losses), max(0, all_bad // self._copies - len(bad)))
        return _Scattered(sums, params, self._total)

    def _total(self, numbers: Tensor) -> None:
        """From a process's own sums to those of all samples, in place.

        Where several processes have the same samples, the sums of all parameters are those of the first of them: others
        may round a weight in another way, and no bound would hold of parts of both.
        """
        if self._data is not None:
            dist.all_reduce(numbers, group=self._data.group)
        if self._copies > 1:
            dist.broadcast(numbers, group=self._ranks.group, group_src=0)

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
        counts = [
            whole if self._is_counted else Whole(torch.zeros_like(whole.numbers), whole.unit) for whole in sums[own:]
        ]
        others = self._noisy_total(counts, add_noise, self.size)
        return Line([Sum(t) for t in (*noisy.tensors, *others.tensors)])

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
        return Line([Sum(found[name]) for name in sums])

    def states(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        with self._explaining_lost_processes():
            weights, inner = get_state_dict(model, optimizer, options=whole)
        return {"model": weights, "optimizer": inner}

    def load_states(self, model: nn.Module, optimizer: torch.optim.Optimizer, states: dict[str, Any]) -> None:
        from torch.distributed.checkpoint import state_dict as states_of

        inner: Any = states["optimizer"]
        with self._explaining_lost_processes():
            held = states_of.get_model_state_dict(model)
            states_of.set_model_state_dict(model, _placed(states["model"], held))
            if inner["state"]:
                own: Any = {
                    name: _placed(state, dict.fromkeys(state, held[name])) for name, state in inner["state"].items()
                }
                states_of.set_optimizer_state_dict(model, optimizer, {**inner, "state": own})
        if not inner["state"]:  # of plain SGD, for which PyTorch has no answer: there is nothing to distribute
            groups = optimizer.state_dict()["param_groups"]
            groups = [{**g, "params": o["params"]} for g, o in zip(inner["param_groups"], groups, strict=True)]
            optimizer.load_state_dict({"state": {}, "param_groups": groups})


def _placed(whole: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, Any]:
    """Of whole tensors, what this process holds of others of their shape; anything else as it is.

    PyTorch's own distribution takes no parts of parts that are not all of one size.
    """
    found = dict(whole)
    for name, t in whole.items():
        like = held.get(name)
        if isinstance(t, Tensor) and isinstance(like, Tensor) and is_sharded(like) and t.shape == like.shape:
            found[name] = placed_like(like, t.to(like.device))
    return found


@dataclass(frozen=True)
class _Scattered:
    """Sums of all processes, of which each keeps its part: all ask for the same parameters in the same order."""

    sums: ExactSums
    params: Mapping[str, Tensor]
    add_up: Callable[[Tensor], None]  # over all processes, in place

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
        self.add_up(total)
        return own_part(p, total) if is_sharded(p) else total


def _mesh_of_samples(params: Mapping[str, Tensor], data: DeviceMesh | None) -> DeviceMesh | None:
    """The mesh whose processes have samples of their own; None where all processes have all samples."""
    if data is not None and not isinstance(data, DeviceMesh):
        raise TypeError(f"data must be a DeviceMesh, such as mesh['dp'], not a {type(data).__name__}")
    meshes: list[DeviceMesh] = data_meshes(params)
    whole = [name for name, p in params.items() if not is_sharded(p)]
    if len(whole) == len(params) or (meshes and whole):
        raise ValueError(
            f"parameters {whole} are not sharded, and FSDP would not add up their gradients: apply fully_shard to the "
            f"whole model"
        )
    if len(meshes) > 1:
        raise ValueError(f"a model has to be sharded over one mesh, but there are {meshes}")
    if meshes:
        if data is not None and ranks_of(data) != ranks_of(meshes[0]):
            raise ValueError(f"FSDP shards the model over {meshes[0]}: its processes have samples of their own")
        return meshes[0]
    return _beside_tensor_parallel(params, data)


def _beside_tensor_parallel(params: Mapping[str, Tensor], data: DeviceMesh | None) -> DeviceMesh | None:
    """The mesh that was given, if its processes hold the same parts; without one, the model must be on all of them."""
    if data is not None:
        if shared := held_by_several(params, ranks_of(data)):
            raise ValueError(
                f"{data} has processes that hold different parts of {shared}: they need the same samples. Pass the "
                f"mesh's dim for data parallelism"
            )
        return data
    if any(p.device_mesh.size() < dist.get_world_size() for p in params.values() if is_sharded(p)):  # type: ignore[attr-defined]
        raise ValueError(
            "the model is tensor parallel over some of the processes: say which of them have samples of their own, by "
            "team=dp.Shards(model, data=mesh['dp']) with the mesh's dim for data parallelism"
        )
    return None


def _processes(params: Mapping[str, Tensor], shares: list[int]) -> list[int]:
    """The processes that the model is on: those of its one mesh, or all, if it has several."""
    known = {tuple(ranks_of(p.device_mesh)) for p in params.values() if is_sharded(p)}  # type: ignore[attr-defined]
    if len(known) == 1 and set(shares) <= set(*known):
        return list(*known)
    return dist.get_process_group_ranks(everybody())
