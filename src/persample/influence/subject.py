"""What gradients are taken of: a model, its losses and its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import verbs
from ..distributed import is_sharded, owners, placed_like
from ..params import named
from .sketches import Sketch, Sketched
from .store.files import safetensors
from .store.fingerprints import Known

LossesFn = Callable[[nn.Module, Any], Tensor]
Checkpoint = str | PathLike[str] | Mapping[str, Tensor] | None  # a file, a state, or the model as it is


@dataclass(frozen=True)
class Rows:
    """The sketches of a batch, one row for every loss."""

    blocks: dict[str, Tensor]  # (N, l, r)
    losses: Tensor  # (B,) or (B, T)

    @property
    def line(self) -> Tensor:
        """(N, D): all parameters beside each other, on the CPU."""
        return torch.cat([block.flatten(1) for block in self.blocks.values()], 1).to("cpu", torch.float32)


@dataclass(frozen=True)
class Subject:
    """A model in evaluation mode, and what is asked of it."""

    model: nn.Module
    losses_fn: LossesFn
    sketch: Sketch
    names: Sequence[str]  # of the parameters that are asked
    _known: Known = field(default_factory=Known, repr=False, compare=False)

    @classmethod
    def of(cls, model: nn.Module, losses_fn: LossesFn, sketch: Sketch, params: Sequence[str] | None) -> Subject:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
        if not callable(losses_fn):
            raise TypeError(f"losses_fn must be a function losses_fn(model, batch), not {type(losses_fn).__name__}")
        if not isinstance(sketch, Sketch):
            raise TypeError(f"sketch must be one such as pi.Blocks(16, 16), not {type(sketch).__name__}")
        if isinstance(params, str):
            raise TypeError(f"params must be names of parameters, [{params!r}], not one string")
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module  # every process takes batches of its own; names are those of the model itself
        every = named(model)
        unknown = [] if params is None else [name for name in params if name not in every]
        if unknown:
            raise ValueError(f"no trainable parameters of the model: {unknown}; it has {list(every)[:8]} …")
        chosen = [name for name in every if params is None or name in set(params)]
        if not chosen:
            raise ValueError("the model has no trainable parameters: gradients are taken of those that require grad")
        return cls(model, losses_fn, sketch, chosen)

    @property
    def params(self) -> dict[str, Tensor]:
        """The parameters that the model has now; a state may have been loaded with ``assign=True`` meanwhile."""
        every = named(self.model)
        gone = [name for name in self.names if name not in every]
        if gone:
            raise ValueError(
                f"{gone[:8]} are no trainable parameters of the model any more: it has {list(every)[:8]} …"
            )
        return {name: every[name] for name in self.names}

    @property
    def is_sharded(self) -> bool:
        """Does every process hold a part of the model, so that all have to compute together?"""
        held: Mapping[str, Any] = owners(self.params)
        return any(is_sharded(p) and p.device_mesh.size() > 1 for p in held.values())

    @property
    def blocks(self) -> dict[str, tuple[int, int]]:
        """The shape of every parameter's sketch."""
        return {name: self.sketch.block(p) for name, p in self.params.items()}

    def rows(self, batch: Any, *, seed: int = 0, losses_fn: LossesFn | None = None) -> Rows:
        """The sketches of a batch's gradients; random numbers, if the losses need any, are those of the ``seed``."""
        with evaluating(self.model):
            losses = self.losses(batch, seed, losses_fn)
            (found,) = verbs.reduce(losses, self.params, Sketched(self.sketch))
        tokens = losses.ndim - 1
        return Rows({name: block.flatten(0, tokens) for name, block in found.items()}, losses.detach())

    def query(self, batch: Any, scales: Mapping[str, Tensor]) -> Rows:
        """The sketches of a batch of queries, one row for each: losses of tokens are added up."""
        with evaluating(self.model), torch.enable_grad():
            losses = self.losses(batch, 0)
            losses = losses if losses.ndim == 1 else losses.flatten(1).sum(1)
            (found,) = verbs.reduce(losses, self.params, Sketched(self.sketch, scales))
        return Rows(found, losses.detach())

    def losses(self, batch: Any, seed: int, losses_fn: LossesFn | None = None) -> Tensor:
        """(B,) or (B, T), with their graph."""
        devices = list({p.device for p in self.params.values() if p.device.type == "cuda"})
        with evaluating(self.model), torch.enable_grad(), torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            losses = (losses_fn or self.losses_fn)(self.model, batch)
        if not isinstance(losses, Tensor) or losses.ndim not in (1, 2):
            shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise ValueError(
                f"losses_fn must return losses of shape (B,), or (B, T) for one per token, not {shape}: "
                f"use reduction='none' and take the mean over other dims"
            )
        return losses

    @contextmanager
    def at(self, checkpoint: Checkpoint) -> Iterator[None]:
        """The model with the state of a checkpoint; afterwards it has its own again."""
        if checkpoint is None:
            yield
            return
        own = copied_state(self.model)
        try:
            self._load(checkpoint)
            yield
        finally:
            self.model.load_state_dict(own)

    def _load(self, checkpoint: Checkpoint) -> None:
        state = checkpoint if isinstance(checkpoint, Mapping) else read_state(Path(fspath(checkpoint)))  # type: ignore[arg-type]
        try:
            self.model.load_state_dict(_like_own(state, self.model.state_dict()))
        except RuntimeError as error:
            named_ = "a checkpoint" if isinstance(checkpoint, Mapping) else f"checkpoint {checkpoint}"
            raise ValueError(f"{named_} does not fit the model: {error}") from error

    def fingerprint(self) -> str:
        """Of every parameter and buffer as they are now; of a sharded model, that of the whole one, by all together."""
        return self._known.of({name: t for name, t in self.model.state_dict().items() if isinstance(t, Tensor)})


def copied_state(model: nn.Module) -> dict[str, Any]:
    """A model's state that later changes of the model leave as it is; what it has beside tensors, too."""
    state = model.state_dict()
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else deepcopy(value) for key, value in state.items()
    }


def _like_own(state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A state, with this process's parts of what a model has in parts."""
    return {
        name: placed_like(own[name], t.to(own[name].device)) if _is_whole_of(t, own.get(name)) else t
        for name, t in state.items()
    }


def _is_whole_of(t: Any, own: Any) -> bool:
    return isinstance(t, Tensor) and isinstance(own, Tensor) and is_sharded(own) and not is_sharded(t)


def read_state(path: Path) -> Mapping[str, Tensor]:
    """A state dict from a file of torch.save or safetensors; nothing in it is executed."""
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    if path.suffix == ".safetensors":
        found: Mapping[str, Tensor] = safetensors().load_file(path)
        return found
    state = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("state_dict", "model"):  # of trainers that keep more beside it
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping):
        raise ValueError(f"checkpoint {path} holds a {type(state).__name__}: save model.state_dict()")
    return state


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode: with dropout, or statistics of the batch, gradients would be of no example alone.

    It lasts until gradients are there: checkpointed parts of a model are run again for them.
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
