"""From a row of the table to a tiny float64 model and its per-sample losses."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.modes import default_dtype
from tests.zoo.config import Spec, tiny_config
from tests.zoo.feeds import FEEDS


class Float64(TorchFunctionMode):
    """Turns the casts to float32 inside a model into casts to float64, so that 1e-8 can be asked of all."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        return func(*args, **{k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()})


@contextlib.contextmanager
def precision(float32: bool) -> Iterator[None]:
    """Everything created or cast inside is float64, unless float32 is asked for."""
    if float32:
        yield
        return
    with default_dtype(torch.float64), Float64():
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what the library logs about missing kernels, and two warnings of torch about it."""
    from transformers import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
            warnings.filterwarnings("ignore", "Using padding='same' with even kernel lengths", UserWarning)
            yield
    finally:
        logging.set_verbosity(before)


def make_model(spec: Spec) -> nn.Module:
    """The model in eval mode, moved off every special point of its initialisation."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = tiny_config(CONFIG_MAPPING[spec.model_type], spec.config)
    head = getattr(transformers, spec.head)
    model: Any = head.from_config(config) if spec.head.startswith("Auto") else head(config)
    model.set_experts_implementation(spec.experts)
    if spec.attention:
        model.set_attn_implementation(spec.attention)
    model.to(torch.get_default_dtype()).eval().requires_grad_()
    with torch.no_grad():
        # Zero biases, zero gates and unit scales would hide mistakes.
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=spec.noise)
        # Codebooks are buffers, and all zero before training.
        for name, b in model.named_buffers():
            if name.endswith(("codebook.embed", "codebook.embed_sum")):
                b.normal_()
    assert isinstance(model, nn.Module)
    return model


@dataclass
class Losses:
    """Runs the model on fixed inputs: a fixed random quadratic form of its outputs, per sample."""

    model: nn.Module
    inputs: dict[str, Any]
    B: int
    outputs: tuple[str, ...]
    float32: bool

    def __call__(self) -> Tensor:
        rng = torch.Generator().manual_seed(0)
        with quiet(), precision(self.float32), torch.random.fork_rng():
            torch.manual_seed(0)
            found = self.model(**self.inputs)
            terms = [self._term(t, rng) for t in self._main(found)]
        return torch.stack(terms).sum(0)

    def _main(self, found: Mapping[str, Any]) -> list[Tensor]:
        """The outputs asked for, or all that are differentiable and have the batch first."""
        if self.outputs:
            chosen = [found[name] for name in self.outputs]
            return [t for value in chosen for t in ([value] if isinstance(value, Tensor) else value)]
        tensors = [t for t in found.values() if isinstance(t, Tensor) and t.requires_grad]
        return [t for t in tensors if t.dim() > 1 and t.shape[0] == self.B]

    def _term(self, t: Tensor, rng: torch.Generator) -> Tensor:
        t = t.reshape(self.B, -1)
        return (torch.randn(t.shape[1], generator=rng) * t.square()).sum(1)


def build(spec: Spec) -> tuple[nn.Module, Callable[[], Tensor]]:
    """The model and its losses, the same on every call."""
    with quiet(), precision(spec.float32), torch.random.fork_rng():
        torch.manual_seed(0)
        model = make_model(spec)
        inputs = FEEDS[spec.feed](model, spec)
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    return model, Losses(model, inputs, spec.B, spec.outputs, spec.float32)
