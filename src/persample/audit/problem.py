"""What is audited: a model, a batch and a loss, and how they give one loss per sample."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._factories import in_words, seeded
from ..numberless import has_numbers, shapes_alone
from ..trees import tree_map
from .errors import AuditError

Loss = Callable[..., Tensor]


class Problem(nn.Module):
    """Gives the losses of a model on a batch, the same ones at every call of `losses`."""

    model: nn.Module
    loss: Loss | None
    inputs: Any
    targets: Any

    def __init__(
        self, model: nn.Module, inputs: Any, targets: Any = None, loss: Loss | None = None, *, seed: int = 0
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise AuditError(f"the model must be an nn.Module, not {_kind(model)}")
        if loss is not None and not callable(loss):
            raise AuditError(f"the loss must be callable, not {_kind(loss)}")
        if targets is not None and loss is None:
            raise AuditError("there are targets but no loss: add one, which is called as loss(output, targets)")
        self.model, self.loss, self.seed = model, loss, seed
        self.inputs, self.targets = inputs, targets
        self.whole = loss is not None and targets is None and _arguments(loss) == 2

    @property
    def how(self) -> str:
        """How the losses are computed."""
        called = {"args": "model(*inputs)", "kwargs": "model(**inputs)", "one": "model(inputs)"}[_spread(self.inputs)]
        if self.loss is None:
            return called
        if self.whole:
            return "loss(model, inputs)"
        return f"loss({called})" if self.targets is None else f"loss({called}, targets)"

    def forward(self, inputs: Any, targets: Any) -> Tensor:
        """The losses of any batch."""
        with shapes_alone(self.model.parameters()):
            return self._losses(inputs, targets)

    def _losses(self, inputs: Any, targets: Any) -> Tensor:
        if self.loss is None:
            return self._output(inputs)  # type: ignore[no-any-return]
        if self.whole:
            return self.loss(self.model, inputs)
        output = self._output(inputs)
        return self.loss(output) if self.targets is None else self.loss(output, targets)

    def _output(self, inputs: Any) -> Any:
        spread = _spread(inputs)
        if spread == "one":
            return self.model(inputs)
        return self.model(*inputs) if spread == "args" else self.model(**inputs)

    def losses(self) -> Tensor:
        """The losses of the batch, with the same random numbers and buffers at every call."""
        with seeded(self.seed):
            buffers = {name: b.clone() for name, b in self.named_buffers()}
            if not buffers:
                return self(self.inputs, self.targets)  # type: ignore[no-any-return]
            return torch.func.functional_call(self, buffers, (self.inputs, self.targets))  # type: ignore[no-any-return]

    def once(self) -> Tensor:
        """The losses of the batch as a training step would compute them."""
        return self(self.inputs, self.targets)  # type: ignore[no-any-return]

    def moved(self, device: torch.device) -> Problem:
        """Move model, inputs and targets to a device."""
        self.to(device)
        self.inputs, self.targets = (
            tree_map(lambda leaf: leaf.to(device) if hasattr(leaf, "to") and leaf is not None else leaf, tree)
            for tree in (self.inputs, self.targets)
        )
        return self

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """A context after which buffers and random generators are restored."""
        before = {name: b.clone() for name, b in self.named_buffers()}
        try:
            with seeded(self.seed):
                yield
        finally:
            with torch.no_grad():
                for name, buffer in self.named_buffers():
                    if name in before:
                        buffer.copy_(before[name])


def first_losses(problem: Problem) -> Tensor:
    """The losses, refused if they are not one finite, differentiable loss for each of at least two samples."""
    if not any(p.requires_grad for p in problem.model.parameters()):
        count = len(list(problem.model.parameters()))
        raise AuditError(f"the model has no trainable parameters ({count} frozen): there are no gradients to audit")
    try:
        losses, again = problem.losses(), problem.losses()
    except (Exception, SystemExit) as error:
        raise AuditError(f"{problem.how} raised {in_words(error)}{_hint(problem)}") from error
    _check(losses, problem)
    if has_numbers(losses) and not torch.equal(losses.detach(), again.detach()):
        raise AuditError(
            f"{problem.how} gave other losses at a second call, though seed and buffers were the same: it must not "
            f"keep a state outside of its buffers, nor use random numbers that torch.manual_seed does not set"
        )
    return losses


def _check(losses: object, problem: Problem) -> None:
    remedy = "return one loss per sample, e.g. with reduction='none' and a mean over all dims but the first"
    if not isinstance(losses, Tensor):
        raise AuditError(f"{problem.how} gave {_kind(losses)}, not losses of shape (B,): {remedy}{_hint(problem)}")
    if losses.ndim != 1:
        raise AuditError(f"{problem.how} gave shape {tuple(losses.shape)}, not (B,): {remedy}{_hint(problem)}")
    if not losses.is_floating_point() or not losses.requires_grad:
        raise AuditError(
            f"{problem.how} gave losses of dtype {losses.dtype} with{'' if losses.requires_grad else 'out'} a graph: "
            f"they must be floating-point numbers, computed from the parameters with gradients enabled (no "
            f"torch.no_grad, no .detach())"
        )
    if len(losses) < 2:
        raise AuditError(
            f"the batch has {len(losses)} sample{'' if len(losses) else 's'}: whether samples interact can be asked of "
            f"two or more. Make it larger (eight are enough)"
        )
    if not has_numbers(losses):
        return
    bad = [i for i, fine in enumerate(losses.isfinite().tolist()) if not fine]
    if bad:
        shown = ", ".join(map(str, bad[:20])) + (", …" if len(bad) > 20 else "")
        raise AuditError(f"losses of {len(bad)} of {len(losses)} samples are not finite: {shown}. Use finite data")


def _hint(problem: Problem) -> str:
    if problem.loss is None:
        return ". Without a loss the model itself must give the losses: return (model, inputs, targets, loss)?"
    if problem.whole:
        return (
            ". A loss of two arguments is given the model and the batch; for loss(output, targets) return "
            "(model, inputs, targets, loss)"
        )
    return ""


def _spread(inputs: Any) -> str:
    """How a model is called: a list or tuple is spread over its arguments, a mapping by name."""
    if isinstance(inputs, Mapping):
        return "kwargs"
    return "args" if isinstance(inputs, (list, tuple)) and not hasattr(inputs, "_fields") else "one"


def _arguments(loss: Loss) -> int:
    """How many arguments a loss must be given; one if it does not say."""
    try:
        listed = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters.values()
    except (TypeError, ValueError):
        return 1
    places = [p for p in listed if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty]
    if len(places) not in (1, 2):
        raise AuditError(
            f"the loss must take one argument (the output) or two (the model and the batch), but takes {len(places)}"
        )
    return len(places)


def _kind(thing: object) -> str:
    return "None" if thing is None else f"a {type(thing).__name__}"
