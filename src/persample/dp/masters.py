"""Float32 copies of parameters in bfloat16, which the optimizer steps in their place."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..distributed import is_sharded
from .gradients import innermost


class Masters:
    """Lets the optimizer see float32 where the model has bfloat16.

    A number in bfloat16 has eight binary digits, and most steps are smaller than the last of them: they would be lost.
    So gradients of these parameters are given in float32, and while the optimizer steps each parameter is its float32
    copy, the master: all that the optimizer keeps is in float32, too. Afterwards the parameter, in the memory that it
    always had, is the master rounded. A parameter that was changed by anybody else is believed.

    With ``keep=False``, or without such parameters, nothing is done.
    """

    def __init__(self, owner: object, params: Mapping[str, Tensor], optimizer: Optimizer, *, keep: bool) -> None:
        self._kept = {name: p for name, p in params.items() if keep and p.dtype == torch.bfloat16}
        sharded = [name for name, p in self._kept.items() if is_sharded(p)]
        if sharded:
            raise ValueError(
                f"parameters {sharded} are in bfloat16 and sharded: keep them in float32, and let FSDP compute in "
                f"bfloat16, by fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)); or "
                f"masters=False, if the optimizer keeps float32 copies itself"
            )
        self._masters = {name: p.detach().float() for name, p in self._kept.items()}
        self._rounded: dict[str, Tensor] = {}  # the memory of the parameters, while masters are in their place
        if self._kept:
            for p in self._kept.values():
                _let_gradient_be(p, torch.float32)
            inner = innermost(optimizer)
            handles = [
                inner.register_step_pre_hook(self._show),
                inner.register_load_state_dict_pre_hook(self._show),  # which gives a state the dtype of its parameter
                inner.register_load_state_dict_post_hook(lambda _: self.hide()),
            ]
            weakref.finalize(owner, _leave, handles, [weakref.ref(p) for p in self._kept.values()])

    def _show(self, *_: Any) -> None:
        """Put masters in the place of the parameters."""
        for name, p in self._kept.items():
            if name not in self._rounded:
                self._rounded[name], master = p.data, self._masters[name]
                unchanged = p.data == master.to(p.dtype)
                p.data = torch.where(unchanged, master, p.data.float())

    def hide(self) -> None:
        """Put the parameters, rounded anew, in their place again, if they are not there."""
        for name, rounded in self._rounded.items():
            p = self._kept[name]
            self._masters[name] = p.data
            p.data = rounded.copy_(p.data)
            torch.autograd.graph.increment_version(p)  # as if it had been written in place
        self._rounded.clear()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While model and optimizer are saved or loaded, parameters are their masters."""
        self._show()
        try:
            yield
        finally:
            self.hide()


def _let_gradient_be(p: Tensor, dtype: torch.dtype) -> None:
    """Let ``p.grad`` be of another dtype than the parameter; one that is there is converted."""
    gradient, p.grad = p.grad, None
    p.grad_dtype = dtype
    p.grad = None if gradient is None else gradient.to(dtype)


def _leave(handles: Sequence[Any], params: Sequence[weakref.ref[Tensor]]) -> None:
    for handle in handles:
        handle.remove()
    for reference in params:
        if (p := reference()) is not None:
            _let_gradient_be(p, p.dtype)
