"""FSDP2 (``torch.distributed.fsdp.fully_shard``): full parameters for the sharded ones, and its hooks held still.

The graph of a sharded model holds full parameters, which are not those of ``model.parameters()`` and have no memory but
while the module runs. Weights are gathered before anything else, module by module: how often the engine passes a module
depends on a rank's samples (none, one, or enough for a probe), what the ranks gather together must not.

The names used here are private to PyTorch, and hold for torch 2.13 to 2.15; ``tests/distributed/test_names.py`` looks
them up, those that only some releases have with the releases.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# What a backward for per-sample gradients sets in groups of parameters and in the context of a whole model, and what it
# may change there: all of it is put back afterwards.
_SET_IN_GROUP = {"reduce_grads": False, "reshard_after_backward": False}
_KEPT_IN_GROUP = ("_training_state",)
_SET_IN_CONTEXT = {"is_last_backward": False}
_KEPT_IN_CONTEXT = ("post_backward_final_callback_queued", "iter_forward_root")
# In later releases only: that gradients wait for `finalize_backward`, and who is to call it.
_LATER_IN_GROUP = ("_post_backward_pending",)
_LATER_IN_CONTEXT = ("manual_backward_finalization_active",)


@dataclass(frozen=True, slots=True)
class Leaves:
    """Parameters by name: as the graph knows them, and as the optimizer does. They differ where they are sharded."""

    full: Mapping[str, Tensor]
    owned: Mapping[str, Tensor]

    @property
    def sharded(self) -> list[str]:
        """The names of those that differ."""
        return [name for name, p in self.owned.items() if p is not self.full[name]]


def is_sharded(t: Tensor) -> bool:
    """A DTensor, of which this process may hold a part only."""
    return hasattr(t, "_local_tensor")


def is_flattened(t: Tensor) -> bool:
    """A parameter that the older FSDP has made a part of a flat one."""
    return hasattr(t, "_fsdp_flattened") or hasattr(t, "_is_flat_param")


def owners(params: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Parameters by name, with the sharded one for a full one that a module holds while it is gathered."""
    members = [group for _, state in _units() for group in _groups(state)]
    parts = {id(one._unsharded_param): one.sharded_param for one in _initialised(members)}
    return {name: parts.get(id(p), p) for name, p in params.items()} if parts else params


def data_meshes(params: Mapping[str, Tensor]) -> list[Any]:
    """The meshes over which FSDP2 shards these parameters: their processes have samples of their own."""
    wanted = {id(p) for p in params.values()}
    groups = [group for _, state in _units() for group in _groups(state) if _holds(group, wanted)]
    meshes: dict[Any, None] = dict.fromkeys(group.mesh_info.mesh for group in groups)
    return list(meshes)


def own_shard(p: Any, total: Tensor) -> Tensor:
    """This process's part of a full tensor that all ranks have, as a DTensor like a sharded parameter."""
    shard: Tensor = placed_like(p, total.to(p.dtype))
    return shard


def like_shard(p: Any, part: Tensor) -> Tensor:
    """A plain tensor as this process's part of a DTensor like a sharded parameter."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def own_part(p: Any, total: Tensor) -> Tensor:
    """This process's part of a full tensor that all ranks have, of any dtype and with further dims; no DTensor."""
    part: Tensor = placed_like(p, total).to_local()
    return part


def zeros_for(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros of the whole shape of a parameter; no DTensor."""
    if is_sharded(p):
        return torch.zeros(p.shape, dtype=dtype, device=p.device)
    return torch.zeros_like(p, dtype=dtype, requires_grad=False)


def placed_like(p: Any, total: Tensor) -> Any:
    """A full tensor that all ranks have, of any dtype, as a DTensor like a sharded parameter."""
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * p.device_mesh.ndim
    whole = DTensor.from_local(total, p.device_mesh, everywhere, run_check=False)
    return whole.redistribute(placements=p.placements)


@contextmanager
def gathered(
    params: Mapping[str, Tensor], leaves: Sequence[Tensor], groups: Sequence[Any], *, last: bool
) -> Iterator[Leaves]:
    """Full parameters by the same names, with memory, for whole models that hold one of these tensors or groups.

    Every process gathers the same, whatever its samples: all modules of these models, in their order.
    """
    states = _states_of(params, leaves, groups)
    if not states:
        yield Leaves(params, params)
        return
    modules = [module for module, _ in states]
    sharded = [module for module, state in states if not all(group.is_unsharded for group in _groups(state))]
    for module in modules:
        module.unshard()
    members = [group for _, state in states for group in _groups(state)]
    try:
        with _held_still([state for _, state in states], members):
            yield _leaves(params, members)
    finally:
        _reshard(modules, sharded, last)
        if last:
            _end_backward(members)


def _reshard(modules: Sequence[Any], sharded: Sequence[Any], last: bool) -> None:
    """Free the weights of modules that were sharded before; after the last backward, of those that it would free."""
    for module in modules:
        if module in sharded or (last and _frees_weights(module)):
            module.reshard()


def _leaves(params: Mapping[str, Tensor], members: Sequence[Any]) -> Leaves:
    """Parameters by name, each as the full tensor of its group and as its sharded one, whichever was given."""
    pairs = [(one.sharded_param, one._unsharded_param) for one in _initialised(members)]
    full = {id(part): whole for part, whole in pairs}
    parts = {id(whole): part for part, whole in pairs}
    return Leaves(
        {name: full.get(id(p), p) for name, p in params.items()},
        {name: parts.get(id(p), p) for name, p in params.items()},
    )


@contextmanager
def _held_still(states: Sequence[Any], members: Sequence[Any]) -> Iterator[None]:
    """Hooks that a backward calls reduce no gradients and free no weights, and all is put back as it was."""
    contexts = {id(state._state_ctx): state._state_ctx for state in states}.values()  # one for each model
    before = [_attribute(state, "_training_state") for state in states]
    for context in contexts:
        before += _attributes(context, (*_SET_IN_CONTEXT, *_KEPT_IN_CONTEXT), _LATER_IN_CONTEXT)
    for group in members:
        before += _attributes(group, (*_SET_IN_GROUP, *_KEPT_IN_GROUP), _LATER_IN_GROUP)
        before.append((group, "_post_forward_indices", list(group._post_forward_indices)))
    _set_all(contexts, _SET_IN_CONTEXT)
    _set_all(members, _SET_IN_GROUP)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


_Attribute = tuple[Any, str, Any]  # of what, its name, its value


def _attribute(owner: Any, name: str) -> _Attribute:
    return owner, name, getattr(owner, name)


def _attributes(owner: Any, names: Sequence[str], later: Sequence[str]) -> list[_Attribute]:
    """Attributes as they are now; those of later releases where there are any."""
    return [_attribute(owner, name) for name in (*names, *[name for name in later if hasattr(owner, name)])]


def _set_all(owners: Iterable[Any], values: Mapping[str, Any]) -> None:
    for owner in owners:
        for name, value in values.items():
            setattr(owner, name, value)


def _end_backward(members: Sequence[Any]) -> None:
    """Forget the order of the forward pass, which is only of use to its backward."""
    for group in members:
        group._post_forward_indices.clear()
        group.comm_ctx.post_forward_order.clear()


def _states_of(params: Mapping[str, Tensor], leaves: Sequence[Tensor], groups: Sequence[Any]) -> list[tuple[Any, Any]]:
    """One module and the state of each sharded unit, for all units of the models that are concerned."""
    units = _units()
    wanted = {id(t) for t in [*params.values(), *leaves]} | {id(group) for group in groups}
    chosen: set[int] = set()
    for _, state in units:
        if any(_holds(group, wanted) for group in _groups(state)):
            chosen.update(id(other) for other in state._state_ctx.all_states or [state])
    return [(module, state) for module, state in units if id(state) in chosen]


def _units() -> list[tuple[nn.Module, Any]]:
    """All sharded units of this process, in the order in which they were made."""
    registry = sys.modules.get("torch.distributed._composable_state")
    if registry is None or "torch.distributed.fsdp" not in sys.modules:
        return []
    units: dict[int, tuple[nn.Module, Any]] = {}
    for module, reference in list(registry._module_state_mapping.items()):
        state = reference()
        if hasattr(module, "unshard") and hasattr(state, "_state_ctx"):
            units.setdefault(id(state), (module, state))
    return list(units.values())


def _groups(state: Any) -> list[Any]:
    """The parameters that a unit gathers together: one group in older versions, then several."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _initialised(members: Sequence[Any]) -> list[Any]:
    """The parameters of groups, those that have been gathered once."""
    return [one for group in members for one in group.fsdp_params if hasattr(one, "_unsharded_param")]


def _holds(group: Any, wanted: set[int]) -> bool:
    return id(group) in wanted or any(
        id(one.sharded_param) in wanted or id(getattr(one, "_unsharded_param", None)) in wanted
        for one in group.fsdp_params
    )


def _frees_weights(module: Any) -> bool:
    """Would an ordinary backward free this unit's weights?"""
    return any(group.reshard_after_backward for group in _groups(module._get_fsdp_state()))
