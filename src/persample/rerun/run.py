"""Running a recorded call again on some of its samples, without leaving a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..trees import leaves, tree_map
from .calls import RecordedCall

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class SampleDim:
    """Where the samples of a call lie: every input with ``batch`` elements along ``dim`` has one for each sample."""

    batch: int
    dim: int

    def holds_samples(self, value: Any) -> bool:
        """Is this a tensor with one element per sample?"""
        return isinstance(value, Tensor) and value.ndim > self.dim and value.shape[self.dim] == self.batch

    def select(self, value: Any, samples: Sequence[int]) -> Any:
        """Some samples of a tensor that has them; a copy of any other tensor, as the call may write into it."""
        if self.holds_samples(value):
            return value.index_select(self.dim, torch.tensor(samples, device=value.device))
        return value.clone() if isinstance(value, Tensor) else value


def run_again(
    call: RecordedCall, place: SampleDim, samples: Sequence[int], seed: int
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The outputs for some of the samples, and the buffers afterwards; the module's own buffers stay as they are."""
    torch.manual_seed(seed)
    buffers = {name: _initial_buffer(call, name, b).clone() for name, b in call.module.named_buffers()}
    args, kwargs = tree_map(lambda value: place.select(value, samples), (call.args, call.kwargs))
    output = torch.func.functional_call(call.module, buffers, args, kwargs)
    return [t for t in leaves(output) if isinstance(t, Tensor) and t.is_floating_point()], buffers


def _initial_buffer(call: RecordedCall, name: str, now: Tensor) -> Tensor:
    """A buffer from before the call; or of now, if it has grown since: a cache for longer inputs."""
    before = call.buffers_before.get(name, now)
    return before if before.shape == now.shape else now


@contextmanager
def without_dropout(module: nn.Module, *, evaluating: bool) -> Iterator[None]:
    """Dropout off, or the whole module in eval mode; random generators and modes are restored afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    rates = [(part, part.dropout) for part in module.modules() if isinstance(part, (nn.RNNBase, nn.MultiheadAttention))]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            for part, _ in modes:
                part.training = part.training and not evaluating and not isinstance(part, _DROPOUTS)
            for part, _ in rates:
                part.dropout = 0.0
            yield
    finally:
        for part, training in modes:
            part.training = training
        for part, rate in rates:
            part.dropout = rate
