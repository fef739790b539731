"""Per-sample gradients of a module by an ordinary ``loss.backward()``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any, cast

import torch
from torch import Tensor, nn

from .checks import check_reductions
from .distributed import is_sharded
from .expanded.gate import Receiver
from .expanded.inputs import batch_of
from .expanded.module import record_call
from .factors import Factor, one_by_one
from .graph.read.compiled import break_graph, original_of
from .graph.read.saved import late_hooks
from .kernels.pages import fresh
from .numberless import has_numbers
from .params import named
from .reductions import Reduction
from .verbs import begin_run


@break_graph
def call_for_per_sample_grads(
    module: nn.Module,
    *,
    batch_size: int | None = None,
    loss_reduction: str = "sum",
    batch_first: bool = True,
    reductions: Sequence[Reduction] | None = None,
    max_memory: int | None = None,
) -> PerSampleCall:
    """Call a module so that the backward of its loss gives every sample's gradient.

    >>> import torch, persample as ps
    >>> model = torch.nn.Linear(3, 2)
    >>> ps.call_for_per_sample_grads(model)(torch.ones(5, 3)).square().sum().backward()
    >>> model.weight.grad_sample.shape, model.weight.grad
    (torch.Size([5, 2, 3]), None)

    With ``reductions``, they are computed during the backward and nothing is written out:

    >>> call = ps.call_for_per_sample_grads(model, reductions=[ps.Norms(), ps.ClippedSum(1.0)])
    >>> call(torch.ones(5, 3)).square().sum().backward()
    >>> norms, total = call.results()
    >>> norms.shape, total["weight"].shape
    (torch.Size([5]), torch.Size([2, 3]))

    Args:
        module: any module that keeps samples apart.
        batch_size: the number of samples; by default that of the tensors the module is called with.
        loss_reduction: ``"sum"``, or ``"mean"`` if the loss is divided by the batch size: gradients are then
            multiplied by it.
        batch_first: whether the batch is dim 0 of inputs and outputs, or dim 1.
        reductions: what to compute in place of ``grad_sample``, as for ``ps.reduce``.
        max_memory: bytes for temporaries of ``reductions``, as for ``ps.reduce``.

    Returns:
        A callable with the signature of ``module.forward``. After a backward of what it returned, each trainable
        parameter has ``grad_sample`` of shape (B, *shape), and ``grad`` as before; or the results of ``reductions``
        can be fetched by its method ``results()``.
    """
    if loss_reduction not in ("sum", "mean"):
        raise RuntimeError(f"Expected loss_reduction argument to be sum or mean, got {loss_reduction!r}")
    _check_module(module)
    _check_batch_size(batch_size)
    if isinstance(reductions, Reduction):
        raise TypeError(f"reductions must be a sequence: write reductions=[{type(reductions).__name__}(...)]")
    check_reductions(reductions or (), max_memory)
    if reductions is None:
        _check_clear(module.named_parameters())
    return PerSampleCall(module, batch_size, loss_reduction, batch_first, reductions, max_memory)


def _check_module(module: object) -> None:
    """Refuse what is no module, and modules whose calls cannot be recorded."""
    if not isinstance(module, nn.Module):
        raise RuntimeError(f"Module passed must be nn.Module, got {type(module).__name__}")
    if any(original_of(part) is not None for part in module.modules()):
        raise RuntimeError("module was made by torch.compile, which does not know expanded weights: pass the original")
    if isinstance(module, nn.DataParallel):
        raise RuntimeError("module is an nn.DataParallel, whose copies cannot be recorded: pass module.module")
    if any(is_sharded(p) for p in module.parameters()):
        raise RuntimeError("module is sharded, and shards cannot be recorded: use ps.grad(losses, module) or ps.reduce")
    if not all(has_numbers(p) for p in module.parameters()):
        raise RuntimeError(
            "module is on meta or of a FakeTensorMode, where its calls cannot be recorded: use ps.grad(losses, module) "
            "or ps.explain(losses, module)"
        )


def _check_batch_size(batch_size: object) -> None:
    if batch_size is None:
        return
    if not isinstance(batch_size, int) or isinstance(batch_size, bool):
        raise RuntimeError(
            f"Batch size passed must be None or an integer, got batch_size={batch_size!r}, {type(batch_size).__name__}"
        )
    if batch_size < 1:
        raise RuntimeError(f"Batch size must be positive, got batch_size={batch_size}")


class PerSampleCall:
    """A module to be called; made by `call_for_per_sample_grads`."""

    def __init__(
        self,
        module: nn.Module,
        batch_size: int | None,
        loss_reduction: str,
        batch_first: bool,
        reductions: Sequence[Reduction] | None,
        max_memory: int | None,
    ) -> None:
        self.module = module
        self._batch_size, self._loss_reduction, self._dim = batch_size, loss_reduction, 0 if batch_first else 1
        self._reductions, self._max_memory = reductions, max_memory
        self._results: tuple[Any, ...] | None = None
        update_wrapper(cast(Callable[..., Any], self), module.forward)

    @break_graph
    def results(self) -> tuple[Any, ...]:
        """One result per reduction, of the last backward; they are handed over once."""
        if self._reductions is None:
            raise RuntimeError("there are results where reductions=[...] were asked for; here, look at p.grad_sample")
        if self._results is None:
            raise RuntimeError("no backward has run since results were last taken")
        results, self._results = self._results, None
        return results

    @break_graph
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, and wait for the backward."""
        params = named(self.module)
        if not params or not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        batch = batch_of((args, kwargs), self._batch_size, self._dim)
        self._check_results_taken(params)
        _refuse_late_hooks(params)
        _refuse_batch_norms(self.module)
        return record_call(
            self.module,
            params,
            (args, kwargs),
            batch,
            self._dim,
            self._loss_reduction,
            1 if self._reductions is None else self._scale(batch),  # stacks are scaled as they are written
            lambda: self._receive(params, batch),
        )

    def _scale(self, batch: int) -> int:
        """What the user's loss was divided by."""
        return batch if self._loss_reduction == "mean" else 1

    def _check_results_taken(self, params: Mapping[str, Tensor]) -> None:
        """Refuse to mix this backward's results with an earlier one's."""
        if self._reductions is None:
            _check_clear(params.items())
        elif self._results is not None:
            raise RuntimeError("the results of an earlier backward are still there: take them by results() first")

    @contextmanager
    def _receive(self, params: Mapping[str, Tensor], batch: int) -> Iterator[Receiver]:
        """Write ``grad_sample`` during one backward, or feed the reductions."""
        self._check_results_taken(params)
        if self._reductions is None:
            with _writing(params, batch, self._scale(batch)) as write:
                yield Receiver(one_by_one(write))
        else:
            device = next(iter(params.values())).device
            run = begin_run(self._reductions, self.module, params, batch, device, self._max_memory)
            yield Receiver(run.add, run.set_default_memory)
            self._results = run.results()


@contextmanager
def _writing(params: Mapping[str, Tensor], batch: int, scale: int) -> Iterator[Callable[[str, Factor], None]]:
    """All parameters get their ``grad_sample``, or none: zeros where the loss does not reach them."""
    stacks: dict[str, Tensor] = {}

    def write(name: str, factor: Factor) -> None:
        assert name not in stacks, "a parameter has one factor"
        p = params[name]
        stack = factor.stack(fresh((batch, *p.shape), p.dtype, p.device))
        stacks[name] = stack if scale == 1 else stack.mul_(scale)

    yield write
    for name, p in params.items():
        stack = stacks.get(name)
        p.grad_sample = p.detach().new_zeros(batch, *p.shape) if stack is None else stack  # type: ignore[attr-defined]


def _check_clear(params: Iterable[tuple[str, Tensor]]) -> None:
    for name, p in params:
        if getattr(p, "grad_sample", None) is not None:
            raise RuntimeError(
                f"parameter {name!r} still holds a grad_sample, to which other samples' gradients would be added, "
                f"which will be incorrect for multiple calls without clearing gradients: set it to None first, or call "
                f"once on all samples"
            )


def _refuse_late_hooks(params: Mapping[str, Tensor]) -> None:
    for name, p in params.items():
        if any(not getattr(hook, "needs_no_gradient", False) for hook in late_hooks(p)):
            raise RuntimeError(
                f"parameter {name!r} has hooks (register_post_accumulate_grad_hook), which would be called without a "
                f"gradient: remove them, or use ps.backward, which accumulates one"
            )


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def _refuse_batch_norms(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, _BATCH_NORMS) and (part.training or part.running_mean is None):
            raise RuntimeError(
                f"samples interact in batch_norm: {type(part).__name__} {name!r} normalises by the statistics of the "
                f"batch, so that a sample has no gradient of its own. Put it into eval mode, or use GroupNorm"
            )
