"""Gradients that did not come from a private step, and would be applied with those that did."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed import is_sharded
from .errors import PrivacyError

_REMEDY = "Everything that trains the model belongs into the losses; for public data, use another optimizer"


class Gradients:
    """Tells what autograd has added to ``p.grad`` from what was released, and keeps the optimizer from applying it.

    Released gradients may be changed at will (clipped, rescaled, replaced): that is computed from noisy sums. Hooks
    tell of everything that a backward adds. They hold no tensor, and go with their owner.
    """

    def __init__(
        self,
        owner: object,
        model: nn.Module,
        optimizer: Optimizer,
        params: Mapping[str, Tensor],
        after_step: Callable[[], None],
    ) -> None:
        self._trained = {id(p): name for name, p in params.items()}
        self._frozen = {id(p): name for name, p in model.named_parameters() if id(p) not in self._trained}
        self._added: dict[int, weakref.ref[Tensor]] = {}  # the gradients that a backward has added to
        self._since_batch: set[int] = set()
        self._in_step, self._tell = False, weakref.WeakMethod(after_step)
        inner = innermost(optimizer)
        handles = [p.register_post_accumulate_grad_hook(self._note) for p in params.values()]
        handles += [inner.register_step_pre_hook(self._before_step), inner.register_step_post_hook(self._after_step)]
        weakref.finalize(owner, _remove, handles)

    def begin(self) -> None:
        """Forget what was added before: a new batch is drawn."""
        self._since_batch.clear()
        self._in_step = False

    def check(self, optimizer: Optimizer) -> None:
        """Refuse what would be lost or applied with the gradients that are about to be released."""
        lost = self._tainted(optimizer, self._since_batch)
        if lost:
            raise PrivacyError(
                f"a backward has added to the gradients of {lost} since the batch was drawn, which private.step would "
                f"overwrite. {_REMEDY}, or p.grad = None if they are of no use"
            )
        self._check_frozen(optimizer)

    def released(self) -> None:
        """Forget what was added: ``p.grad`` is a noisy sum now."""
        self._added.clear()

    def _note(self, p: Tensor) -> None:
        if self._in_step:
            raise PrivacyError(
                f"the closure of optimizer.step adds to the gradient of {self._trained[id(p)]!r} without clipping or "
                f"noise: leave it out, private.backward has computed the gradients"
            )
        if p.grad is not None:
            self._added[id(p)] = weakref.ref(p.grad)
            self._since_batch.add(id(p))

    _note.needs_no_gradient = True  # type: ignore[attr-defined]

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        tainted = self._tainted(optimizer, self._added)
        if tainted:
            raise PrivacyError(
                f"the optimizer would apply gradients of {tainted} that a backward has added to, without clipping or "
                f"noise. {_REMEDY}, or optimizer.zero_grad() if they are of no use"
            )
        self._check_frozen(optimizer)
        self._in_step = True

    def _after_step(self, *_: Any) -> None:
        self._in_step = False
        if (tell := self._tell()) is not None:
            tell()

    def _tainted(self, optimizer: Optimizer, among: Collection[int]) -> list[str]:
        """Parameters whose gradient is still the one that a backward has added to, and not zero."""
        return [
            self._trained[id(p)]
            for p in _held(optimizer)
            if id(p) in among and id(p) in self._added and p.grad is self._added[id(p)]() and _says_something(p.grad)
        ]

    def _check_frozen(self, optimizer: Optimizer) -> None:
        frozen = [p for p in _held(optimizer) if id(p) not in self._trained]
        stale = [self._frozen.get(id(p), tuple(p.shape)) for p in frozen if _says_something(p.grad)]
        if stale:
            raise PrivacyError(
                f"the frozen parameters {stale} have gradients, from an earlier backward, which the optimizer would "
                f"apply without clipping or noise: call optimizer.zero_grad() before, or leave these parameters out of "
                f"the optimizer"
            )


def _held(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _says_something(gradient: Tensor | None) -> bool:
    """Whether it is there, and not zero in the part that this process has."""
    if gradient is None:
        return False
    own = gradient.to_local() if is_sharded(gradient) else gradient  # type: ignore[attr-defined]
    return bool((own.coalesce().values() if own.is_sparse else own).any())


def innermost(optimizer: Optimizer) -> Optimizer:
    """The one that steps, below wrappers such as accelerate's, which have no hooks of their own."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()
