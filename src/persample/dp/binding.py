"""What a run is bound to: if the model, the optimizer or the clip has changed since, the accounts would not hold."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..distributed import owners
from ..graph.read.saved import born
from ..kernels.norms import widest
from ..modules import parameters_of
from ..params import named, refuse_hooks
from .clips import Clipper
from .errors import PrivacyError
from .plan import Plan

_TRAINABLE = (torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


class Binding:
    """The parameters, the optimizer and the clip of a run, as they were at its start."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, clipper: Clipper) -> None:
        self._model, self._optimizer, self._clipper = model, optimizer, clipper
        self._every = parameters_of(model)
        self.params = trainable(model)
        check_optimizer(optimizer, self.params, set(self.every().values()))
        self._facts: list[object] = []  # with which all was well
        self._clip = clipper.describe()

    def every(self) -> Mapping[str, Tensor]:
        """All parameters that the model has now, frozen ones included: the same object, if it has the same."""
        now = parameters_of(self._model)
        if list(now) != list(self._every) or not all(map(is_, now.values(), self._every.values())):
            self._every = now
        return owners(self._every)

    def check(self) -> Mapping[str, Tensor]:
        """Refuse, by name, what has changed; returns `every`."""
        every = self.every()
        optimized = [p for group in self._optimizer.param_groups for p in group["params"]]
        facts = [*every.values(), None, *optimized, None, *[p.requires_grad for p in every.values()]]
        if len(facts) != len(self._facts) or not all(map(is_, facts, self._facts)):
            self._check_parameters(every)
            self._facts = facts
        else:
            refuse_hooks(self.params)
        self._check_clip()
        return every

    def _check_parameters(self, every: Mapping[str, Tensor]) -> None:
        now = named(every)
        if list(now) != list(self.params) or any(now[name] is not p for name, p in self.params.items()):
            gone = [name for name, p in self.params.items() if now.get(name) is not p]
            new = [name for name, p in now.items() if self.params.get(name) is not p]
            raise PrivacyError(
                f"the trainable parameters have changed since the run began: {gone} are gone, {new} are new. "
                f"The noise was planned for those of the start: freeze or replace parameters before dp.Private is made"
            )
        check_optimizer(self._optimizer, self.params, set(every.values()))

    def _check_clip(self) -> None:
        clip = self._clipper.describe()
        if clip != self._clip:
            changes = [f"{key} from {old} to {clip[key]}" for key, old in self._clip.items() if clip[key] != old]
            raise PrivacyError(
                f"the clip was changed since the run began: {', '.join(changes)}. Noise and accounts are for the clip "
                f"that dp.Private was made with; for a bound that moves use dp.AdaptiveClip"
            )

    def describe(self) -> dict[str, Any]:
        """Parameters and clip, to be stored and compared."""
        return {"parameters": {name: list(p.shape) for name, p in self.params.items()}, "clip": self._clip}

    def setup(self, plan: Plan) -> str:
        """How the run is set up, but for names, which DDP changes, and a solved epsilon, which machines round.

        Runs that differ in it draw nothing in common, though they have one seed.
        """
        shapes = [list(p.shape) for p in self.params.values()]
        planned: list[object] = [plan.examples, plan.batch_size, plan.steps, plan.noise_multiplier, plan.sampling]
        if plan.mechanism != "gaussian":
            planned += [plan.mechanism, plan.bands, plan.buffers, plan.momentum]
        if plan.users is not None:
            planned += [plan.users, plan.items_per_user]
        if plan.noise_schedule is not None:
            planned += ["noise", *plan.noise_schedule]
        clip = {name: value for name, value in self._clip.items() if name != "groups"}
        return repr([shapes, planned, clip, [_settings(group) for group in self._optimizer.param_groups]])


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Learning rate and the like, as they were before a scheduler changed them."""
    settings = {name: value for name, value in group.items() if isinstance(value, (bool, int, float, str, tuple))}
    settings.pop("initial_lr", None)
    rate = group.get("initial_lr", group.get("lr"))
    return {**settings, "lr": None if rate is None else float(rate)}


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained, if they can be."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not a {type(model).__name__}")
    params = dict(owners(named(model)))
    if not params:
        raise ValueError("the model has no trainable parameters")
    for name, p in params.items():
        if is_lazy(p):
            raise ValueError(f"parameter {name!r} has no shape yet: call the model once with made-up data before")
        if p.dtype not in _TRAINABLE:
            raise ValueError(
                f"parameter {name!r} is {p.dtype}, whose range is too small for gradients: use torch.bfloat16, or keep "
                f"parameters in float32 and compute under torch.autocast"
            )
        if widest(p.device) != torch.float64:
            raise ValueError(
                f"parameter {name!r} is on {p.device}, which has no float64: sums there cannot be exact. Train on the "
                f"CPU or on another device"
            )
    return params


def check_optimizer(optimizer: torch.optim.Optimizer, params: Mapping[str, Tensor], known: set[Tensor]) -> None:
    """The optimizer must step the trained parameters, and none that is not the model's."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not a {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates the losses several times in a step, which is not accounted for")
    held = {p for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in params.items() if p not in held]
    if missing:
        raise ValueError(f"the optimizer does not hold the trainable parameters {missing}: add or freeze them")
    strange = [tuple(p.shape) for p in held if p not in known]
    if strange:
        raise ValueError(
            f"the optimizer holds parameters that are not the model's, of shapes {strange}: they would be trained "
            f"without noise. Give them to a module together with the model, or to another optimizer"
        )


def mark() -> int:
    """A number that grows with every op that autograd records."""
    with torch.enable_grad(), torch.inference_mode(False):
        node = (torch.ones((), requires_grad=True) * 1).grad_fn
    assert node is not None
    return born(node)


def is_older(losses: Tensor, marked: int) -> bool:
    """Whether losses were computed before a mark was set."""
    return losses.grad_fn is not None and born(losses.grad_fn) < marked
