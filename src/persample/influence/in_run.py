"""The value of every training example, noted while training, in the training backward itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from ..distributed.accumulate import accumulate
from ..graph.read.saved import late_hooks
from ..params import named
from ..verbs import reduce
from .files import load_plain, save_whole
from .validation import Gradient, ValuesAndMean, are_mostly_sides, as_sides, by_autograd, times, written

LossesFn = Callable[[nn.Module, Any], Tensor]


class InRun:
    """What every training example did for the validation loss, step by step, added up over a run.

    ``run.backward(losses, ids)`` takes the place of ``losses.mean().backward()``. Beside the gradient, it notes for
    every example of the step ``lr / B * <g_i, P v>``, where ``v`` is the gradient of the mean validation loss: to first
    order, how much lower the validation loss is because of this example. Positive values are of helpful examples, and
    the values of a step add up to the decrease that the step promises.

    ``P`` is what the optimizer does to a gradient. SGD: the identity, times ``(1 - dampening) / (1 - momentum)``, which
    momentum makes of a gradient in the end. Adam, AdamW: ``1 / (sqrt(v_hat) + eps)``, by the second moments before
    the step (in the first step: of its own gradient). Others: the identity. Without an optimizer, ``lr`` is given.

    >>> import torch
    >>> from persample import influence as pi
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> losses_fn = lambda model, batch: (model(batch[0]).squeeze(1) - batch[1]).square()
    >>> validation, train = ((torch.randn(n, 3), torch.randn(n)) for n in (4, 8))
    >>> run = pi.InRun(model, validation, losses_fn, optimizer=optimizer)
    >>> run.backward(losses_fn(model, train), ids=torch.arange(8))
    >>> optimizer.step()
    >>> run.values().shape
    torch.Size([8])

    Args:
        model: the model that is trained.
        validation: a batch for ``losses_fn``, or a function without arguments that returns one, asked each time.
        losses_fn: ``losses_fn(model, batch)`` returns one loss per example; the model is in evaluation mode then.
        optimizer: whose learning rates, at the time of each step, and second moments count.
        lr: the learning rate, if there is no optimizer; it may be changed (``run.lr = ...``).
        every: how many steps one validation gradient is used for. Above 1, values are of a gradient that is somewhat
            old, and cost less.
    """

    def __init__(
        self,
        model: nn.Module,
        validation: Any,
        losses_fn: LossesFn,
        *,
        optimizer: Optimizer | None = None,
        lr: float | None = None,
        every: int = 1,
    ) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ValueError("InRun takes the model of one process, not DistributedDataParallel: pass model.module")
        if every < 1:
            raise ValueError(f"every must be at least 1 step, not {every}")
        if (optimizer is None) == (lr is None):
            raise ValueError("InRun needs the learning rate: give optimizer=, or lr= (and not both)")
        if not callable(losses_fn):
            raise TypeError(f"losses_fn must be a function of model and batch, not {type(losses_fn).__name__}")
        self.model, self.validation, self.losses_fn = model, validation, losses_fn
        self.optimizer, self.lr, self.every = optimizer, lr, every
        self.steps = 0
        self._gradient: dict[str, Gradient] = {}
        self._has_sides = not isinstance(optimizer, Adam)  # which needs every element of a gradient
        self._totals = torch.zeros(0, dtype=torch.float64)
        self._times = torch.zeros(0, dtype=torch.int64)

    def backward(self, losses: Tensor, ids: Tensor) -> None:
        """Add the gradient of ``losses.mean()`` to ``p.grad``, and note the value of each example.

        Args:
            losses: one loss per example, of shape (B,), with their graph.
            ids: (B,) whole numbers from 0 on that name the examples; one may come several times.
        """
        ids = _checked(losses, ids)
        if not len(ids):
            return
        params = named(self.model)
        if self.steps % self.every == 0 or not self._gradient:
            self._gradient = self._validation_gradient(params)
        direction = self._direction(params)
        if direction is None:  # the first step of Adam, whose second moments are those of this gradient
            _, sums = reduce(losses, params, ValuesAndMean(None), retain_graph=True)[0]
            direction = self._first_direction(params, sums)
            values, _ = reduce(losses, params, ValuesAndMean(direction, with_mean=False))[0]
        else:
            values, sums = reduce(losses, params, ValuesAndMean(direction))[0]
        for name, total in sums.items():
            accumulate(params[name], total, late_hooks(params[name]))
        self._note(ids, values / len(ids))
        self.steps += 1

    def values(self) -> Tensor:
        """(examples,): the value of every example so far, by id, in float64; 0 for those that never came."""
        return self._totals.clone()

    def times(self) -> Tensor:
        """(examples,): how often each example was seen."""
        return self._times.clone()

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on, beside the model and its optimizer."""
        params = named(self.model)
        return {
            "steps": self.steps,
            "every": self.every,
            "totals": self._totals.clone(),
            "times": self._times.clone(),
            "gradient": {name: written(g, params[name].shape).clone() for name, g in self._gradient.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        missing = {"steps", "every", "totals", "times", "gradient"} - set(state)
        if missing:
            raise ValueError(f"this is not the state of an InRun: {sorted(missing)} are missing")
        params = named(self.model)
        wrong = [n for n, g in state["gradient"].items() if n not in params or params[n].shape != g.shape]
        if wrong or state["every"] != self.every:
            what = f"parameters {wrong}" if wrong else f"every={state['every']}"
            raise ValueError(f"the state is of another run ({what}): make the InRun as it was made then")
        self.steps, self._totals, self._times = state["steps"], state["totals"].clone(), state["times"].clone()
        self._gradient = {name: g.to(params[name].device) for name, g in state["gradient"].items()}

    def save(self, path: str | Path) -> None:
        """Write `state_dict` to a file, which is never left half written."""
        save_whole(self.state_dict(), Path(path))

    def load(self, path: str | Path) -> None:
        """Go on from a file of `save`."""
        state = load_plain(Path(path))
        if not isinstance(state, Mapping):
            raise ValueError(f"{path} is not the state of an InRun")
        self.load_state_dict(state)

    def _validation_gradient(self, params: Mapping[str, Tensor]) -> dict[str, Gradient]:
        batch = self.validation() if callable(self.validation) else self.validation
        with evaluated(self.model), torch.enable_grad():
            losses = self.losses_fn(self.model, batch)
            if not isinstance(losses, Tensor) or losses.ndim != 1 or not len(losses):
                got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
                raise ValueError(f"losses_fn must return one loss per validation example, of shape (B,), not {got}")
            found = as_sides(losses, params) if self._has_sides else None
            if found is None:
                found = by_autograd(losses, params)
            self._has_sides = are_mostly_sides(found)
        return {name: found.get(name, torch.zeros_like(p)) for name, p in params.items()}

    def _direction(self, params: Mapping[str, Tensor]) -> dict[str, Gradient] | None:
        """What a gradient's inner product is taken with; None where moments are missing."""
        if self.optimizer is None:
            assert self.lr is not None
            return {name: times(g, self.lr) for name, g in self._gradient.items()}
        return self._scaled(params, None)

    def _first_direction(self, params: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> dict[str, Gradient]:
        direction = self._scaled(params, sums)
        assert direction is not None
        return direction

    def _scaled(self, params: Mapping[str, Tensor], sums: Mapping[str, Tensor] | None) -> dict[str, Gradient] | None:
        assert self.optimizer is not None
        groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        direction: dict[str, Gradient] = {}
        for name, p in params.items():
            g, group = self._gradient[name], groups.get(id(p))
            if group is None:  # which is never updated
                direction[name] = torch.zeros_like(p)
            elif isinstance(self.optimizer, Adam):
                second = _second_moment(self.optimizer.state.get(p, {}), group)
                if second is None and sums is None:
                    return None
                if second is None:
                    second = sums[name].square() if sums is not None and name in sums else torch.ones_like(p)
                direction[name] = (
                    _step_size(self.optimizer, group) * written(g, p.shape) / (second.sqrt() + group["eps"])
                )
            else:
                direction[name] = times(g, _step_size(self.optimizer, group))
        return direction

    def _note(self, ids: Tensor, values: Tensor) -> None:
        size = max(len(self._totals), int(ids.max()) + 1)
        if size > len(self._totals):
            room = max(size - len(self._totals), 0)
            self._totals = torch.cat([self._totals, self._totals.new_zeros(room)])
            self._times = torch.cat([self._times, self._times.new_zeros(room)])
        self._totals.index_add_(0, ids, values.detach().cpu().double())
        self._times.index_add_(0, ids, torch.ones_like(ids))


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; its modes and the random numbers are as before afterwards."""
    training = {module: module.training for module in model.modules()}
    with torch.random.fork_rng():
        model.eval()
        try:
            yield
        finally:
            for module, mode in training.items():
                module.training = mode


def _checked(losses: Tensor, ids: Tensor) -> Tensor:
    if not isinstance(losses, Tensor) or losses.ndim != 1:
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(f"losses must be one per example, of shape (B,), not {got}: use reduction='none'")
    ids = torch.as_tensor(ids).detach().cpu()
    if ids.shape != losses.shape:
        raise ValueError(f"ids must name the {len(losses)} examples of the batch; their shape is {tuple(ids.shape)}")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool or (len(ids) and int(ids.min()) < 0):
        raise ValueError("ids must be whole numbers from 0 on: the places of the examples in the data")
    return ids.long()


def _step_size(optimizer: Optimizer, group: Mapping[str, Any]) -> float:
    """What a gradient is multiplied with in the end, momentum included."""
    lr = float(group["lr"])
    if isinstance(optimizer, SGD) and group["momentum"]:
        if group["momentum"] == 1:
            raise ValueError("with momentum=1 a gradient moves the weights without end, and has no value: choose less")
        lr *= (1 - group["dampening"]) / (1 - group["momentum"])
    return -lr if group.get("maximize") else lr


def _second_moment(state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor | None:
    """Adam's second moments of one parameter, as of the step before, corrected for their beginning at zero."""
    if "exp_avg_sq" not in state:
        return None
    moment: Tensor = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    correction: float = 1 - group["betas"][1] ** float(state["step"])
    return moment / correction
