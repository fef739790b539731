"""Other ways to per-sample gradients, each as its documentation recommends.

What had to be changed in a model for a peer is in ``_rows_everywhere``, ``_for_vmap`` and ``for_opacus``; the plain
step that it is compared with is never changed.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

from .contender import MAX_NORM, Contender
from .models import GPT, UnrolledLSTM
from .workloads import Task


def vmap(task: Task) -> Contender:
    """``vmap(grad(loss))`` over the samples; forward and backward are one call."""
    rows, params = rows_by_vmap(task)
    params = {name: p.detach() for name, p in params.items()}
    return Contender(lambda: None, lambda _: rows(params))


def rows_by_vmap(task: Task) -> tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], dict[str, Tensor]]:
    """A function from parameters to every sample's gradient, and the parameters of a model that suits it."""
    model = _for_vmap(task.model)

    def loss(params: dict[str, Tensor], *sample: Tensor) -> Tensor:
        def call(*args: Tensor) -> Any:
            return functional_call(model, params, args)

        return task.losses_fn(call, *(part[None] for part in sample))[0]

    rows = torch.func.vmap(grad(loss), in_dims=(None, *(0 for _ in task.inputs)))
    return lambda params: rows(params, *task.inputs), dict(model.named_parameters())


def expanded(task: Task) -> Contender:
    """PyTorch's private ``call_for_per_sample_grads``."""
    model = _rows_everywhere(task.model)

    def forward() -> Tensor:
        call = call_for_per_sample_grads(model, batch_size=len(task.inputs[0]))
        return task.losses_fn(call, *task.inputs)

    return Contender(forward, partial(_backward, model, "grad_sample"), partial(_forget, model, "grad_sample"))


def opacus_hooks(task: Task) -> Contender:
    """``GradSampleModule``: a hook per layer writes ``grad_sample``."""
    from opacus import GradSampleModule

    model = GradSampleModule(for_opacus(task.model), loss_reduction="sum")
    return Contender(
        lambda: task.losses_fn(model, *task.inputs),
        partial(_backward, model._module, "grad_sample"),
        lambda: model.zero_grad(set_to_none=True),
    )


def opacus_ghost(task: Task) -> Contender:
    """Fast gradient clipping: a backward for the norms, a second one for the weighted sum."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    inner = for_opacus(task.model)
    model = GradSampleModuleFastGradientClipping(inner, loss_reduction="sum", max_grad_norm=MAX_NORM)
    optimizer = torch.optim.SGD(inner.parameters())  # only its zero_grad() is called

    def after(losses: Tensor) -> dict[str, Tensor | None]:
        DPTensorFastGradientClipping(model, optimizer, losses, loss_reduction="sum").backward()
        return {name: p.grad for name, p in inner.named_parameters()}

    return Contender(lambda: task.losses_fn(model, *task.inputs), after, lambda: inner.zero_grad(set_to_none=True))


def backpack_grad(task: Task) -> Contender:
    """The extension ``BatchGrad``."""
    from backpack.extensions import BatchGrad

    return _backpack(task, BatchGrad, "grad_batch", lambda rows: rows)


def backpack_norms(task: Task) -> Contender:
    """The extension ``BatchL2Grad``: squared norms of every parameter's rows."""
    from backpack.extensions import BatchL2Grad

    return _backpack(task, BatchL2Grad, "batch_l2", lambda squares: torch.stack(list(squares.values())).sum(0).sqrt())


def _backpack(task: Task, extension: Any, field: str, finish: Callable[[dict[str, Tensor]], Any]) -> Contender:
    from backpack import backpack, extend

    model = extend(_rows_everywhere(task.model))

    def after(losses: Tensor) -> Any:
        with backpack(extension()):
            return finish(_backward(model, field, losses))

    return Contender(lambda: task.losses_fn(model, *task.inputs), after, partial(_forget, model, field))


def _rows_everywhere(model: nn.Module) -> nn.Module:
    """A copy in which every module's input has a row per sample, as rules per module need it."""
    model = deepcopy(model)
    if isinstance(model, GPT):
        model.shared_positions = False
    return model


def _for_vmap(model: nn.Module) -> nn.Module:
    """A copy without ``nn.LSTM``, which vmap runs sample by sample, four times slower than the steps of it."""
    model = deepcopy(model)
    for name, child in model.named_children():
        if type(child) is nn.LSTM:
            steps = UnrolledLSTM(child.input_size, child.hidden_size, batch_first=True)
            steps.load_state_dict(child.state_dict(), assign=True)
            setattr(model, name, steps)
    return model


def for_opacus(model: nn.Module) -> nn.Module:
    """A copy with ``DPLSTM``, a loop of linear layers, in place of ``nn.LSTM``: Opacus's own repair."""
    from opacus.validators import ModuleValidator

    return ModuleValidator.fix(_rows_everywhere(model))  # type: ignore[no-any-return]


def _backward(model: nn.Module, field: str, losses: Tensor) -> dict[str, Tensor]:
    """An ordinary backward, and what it has left on the parameters."""
    losses.sum().backward()
    missing = [name for name, p in model.named_parameters() if getattr(p, field, None) is None]
    if missing:
        raise NotImplementedError(f"no {field} for {len(missing)} parameters, the first is {_owner(model, missing[0])}")
    return {name: getattr(p, field) for name, p in model.named_parameters()}


def _owner(model: nn.Module, name: str) -> str:
    module = model.get_submodule(name.rpartition(".")[0])
    return f"{name} of {type(module).__name__}"


def _forget(model: nn.Module, field: str) -> None:
    for p in model.parameters():
        p.grad = None
        if hasattr(p, field):
            delattr(p, field)
