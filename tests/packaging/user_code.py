"""Code as users write it, with the types that they should see; `mypy --strict` reads it, nothing calls it."""

from __future__ import annotations

from typing import Any, assert_type

import torch
from torch import Tensor, nn

import persample as ps
from persample import testing
from persample.monitor import Record


def gradients(losses: Tensor, model: nn.Module, w: Tensor) -> None:
    """A module or a mapping gives a dict, a sequence a tuple."""
    assert_type(ps.grad(losses, model), dict[str, Tensor])
    assert_type(ps.grad(losses, {"w": w}, retain_graph=True), dict[str, Tensor])
    assert_type(ps.grad(losses, [w], independent=True), tuple[Tensor, ...])
    assert_type(ps.grad(losses, model, out=ps.grad(losses, model)), dict[str, Tensor])


def shortcuts(losses: Tensor, model: nn.Module) -> None:
    """All verbs take losses and parameters; what they give depends on values, or on ``per``."""
    ps.norms(losses, model)
    ps.norms(losses, model, per="parameter")
    ps.norms(losses, model, per=[model])
    ps.clipped_sum(losses, model, max_norm=1.0)
    ps.second_moment(losses, model)
    ps.variance(losses, model)
    ps.gram(losses, model, losses)
    ps.dot(losses, model, dict(model.named_parameters()))
    ps.project(losses, model, ps.Projection(dim=8, seed=0))


def reductions(losses: Tensor, model: nn.Module) -> None:
    """Several at once, one's own among them, and into ``p.grad``."""
    assert_type(ps.reduce(losses, model, ps.Norms(), ps.ClippedSum(1.0), Largest()), tuple[Any, ...])
    clipping = ps.backward(losses, model, ps.ClippedSum(1.0, nonfinite="drop"))
    assert_type(clipping, ps.Clipping)
    norms, weights = clipping
    print(norms, weights, clipping.dropped, clipping.sensitivity)


class Largest(ps.Reduction):
    """The largest entry of every gradient."""

    def start(self, call: ps.Call) -> None:
        self.call, self.found = call, call.zeros(call.batch)

    def add(self, name: str, factor: ps.Factor) -> None:
        for some, stack in factor.stacks(self.call.space):
            assert_type(some, slice)
            self.found[some] = self.found[some].maximum(stack.abs().reshape(len(stack), -1).amax(1))

    def result(self) -> Tensor:
        return self.found


def ways_in(model: nn.Module, x: Tensor) -> None:
    """A module called so that its backward gives every sample's gradient."""
    call = ps.call_for_per_sample_grads(model, loss_reduction="mean", reductions=[ps.Norms()])
    call(x).mean().backward()
    assert_type(call.results(), tuple[Any, ...])


def monitored(losses: Tensor, model: nn.Module) -> None:
    """A training loop's diagnostics."""
    seen: list[dict[str, float]] = []
    monitor = ps.Monitor(model, log=seen.append, every=10)
    record = monitor.backward(losses, ids=[1, 2, 3])
    assert_type(record, Record | None)
    if record is not None:
        assert_type(record.values, dict[str, float])
        assert_type(record.norms, Tensor)
        assert_type(record.unusual, list[tuple[Any, float]])


def checked(losses: Tensor, model: nn.Module) -> bool:
    """What is known before anything is computed, and whether it is right."""
    assert_type(ps.explain(losses, model), ps.Explanation)
    report = testing.check(lambda: losses, model)
    assert_type(report.ok, bool)
    assert_type(ps.__version__, str)
    try:
        ps.clipped_sum(losses, model, max_norm=1.0)
    except ps.NonFiniteError as error:
        print(error.samples)
    ps.empty_cache()
    return torch.cuda.is_available()
