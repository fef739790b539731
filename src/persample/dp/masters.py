"""Float32 copies of parameters in bfloat16, which the optimizer steps in their place."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from ..distributed import is_sharded
from .gradients import innermost


@dataclass
class _Master:
    """The float32 copy of one parameter, which all runs that train it share."""

    numbers: Tensor
    rounded: Tensor | None = None  # the memory of the parameter, while the copy is in its place
    runs: int = 0

    def show(self, p: Tensor) -> None:
        """Put the copy in the place of the parameter, if it is not there."""
        if self.rounded is None:
            self.rounded = p.data
            unchanged = p.data == self.numbers.to(p.dtype)
            p.data = torch.where(unchanged, self.numbers, p.data.float())

    def hide(self, p: Tensor) -> None:
        """Put the parameter, rounded anew, in its place again, if it is not there."""
        if self.rounded is not None:
            self.numbers = p.data
            p.data = self.rounded.copy_(p.data)
            self.rounded = None
            torch.autograd.graph.increment_version(p)  # as if it had been written in place


_MASTERS = WeakTensorKeyDictionary()  # of every parameter that has one


class Masters:
    """Lets the optimizer see float32 where the model has bfloat16.

    A number in bfloat16 has eight binary digits, and most steps are smaller than the last of them: they would be lost.
    So gradients of these parameters are given in float32, and while the optimizer steps each parameter is its float32
    copy, the master: all that the optimizer keeps is in float32, too. Afterwards the parameter, in the memory that it
    always had, is the master rounded. A parameter that was changed by anybody else is believed. Runs that train the
    same parameter have one master, which goes with the last of them.

    With ``keep=False``, or without such parameters, nothing is done.
    """

    def __init__(self, owner: object, params: Mapping[str, Tensor], optimizer: Optimizer, *, keep: bool) -> None:
        kept = {name: p for name, p in params.items() if keep and p.dtype == torch.bfloat16}
        sharded = [name for name, p in kept.items() if is_sharded(p)]
        if sharded:
            raise ValueError(
                f"parameters {sharded} are in bfloat16 and sharded: keep them in float32, and let FSDP compute in "
                f"bfloat16, by fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)); or "
                f"masters=False, if the optimizer keeps float32 copies itself"
            )
        self._kept = [(p, _enter(p)) for p in kept.values()]
        if self._kept:
            inner = innermost(optimizer)
            for p, _ in self._kept:
                _widen(inner.state.get(p, {}))
            handles = [
                inner.register_step_pre_hook(self._show),
                inner.register_load_state_dict_pre_hook(self._show),  # which gives a state the dtype of its parameter
                inner.register_load_state_dict_post_hook(lambda _: self.hide()),
            ]
            weakref.finalize(owner, _leave, handles, [weakref.ref(p) for p, _ in self._kept])

    def _show(self, *_: Any) -> None:
        """Put masters in the place of the parameters."""
        for p, master in self._kept:
            master.show(p)

    def hide(self) -> None:
        """Put the parameters, rounded anew, in their place again, if they are not there."""
        for p, master in self._kept:
            master.hide(p)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While model and optimizer are saved or loaded, parameters are their masters."""
        self._show()
        try:
            yield
        finally:
            self.hide()


def _widen(state: dict[str, Any]) -> None:
    """What an optimizer has kept of a parameter, from steps before the run, in float32."""
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dtype == torch.bfloat16:
            state[name] = value.float()


def _enter(p: Tensor) -> _Master:
    """The master of a parameter, for one run more."""
    if p not in _MASTERS:
        _MASTERS[p] = _Master(p.detach().float())
        _let_gradient_be(p, torch.float32)
    master: _Master = _MASTERS[p]
    master.runs += 1
    return master


def _leave(handles: Sequence[Any], params: Sequence[weakref.ref[Tensor]]) -> None:
    """For one run less: the last one leaves parameters as others have them."""
    for handle in handles:
        handle.remove()
    for reference in params:
        if (p := reference()) is not None:
            master: _Master = _MASTERS[p]
            master.runs -= 1
            if not master.runs:
                master.hide(p)
                del _MASTERS[p]
                _let_gradient_be(p, p.dtype)


def _let_gradient_be(p: Tensor, dtype: torch.dtype) -> None:
    """Let ``p.grad`` be of another dtype than the parameter; one that is there is converted."""
    gradient, p.grad = p.grad, None
    p.grad_dtype = dtype
    p.grad = None if gradient is None else gradient.to(dtype)
