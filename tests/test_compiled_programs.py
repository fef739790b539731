"""Verbs called inside a program that the user compiles: one clean break of the graph, and the exact answer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample as ps
from persample import dp
from persample.testing import check
from tests.models import mlp, squares
from tests.reference import assert_same, definition

pytestmark = pytest.mark.filterwarnings("ignore")  # compiling says what it likes

MODEL, X = mlp(), torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).double()
V = {name: torch.ones_like(p) for name, p in MODEL.named_parameters()}
VERBS: dict[str, Callable[[Tensor], Any]] = {
    "grad": lambda losses: ps.grad(losses, MODEL),
    "reduce": lambda losses: ps.reduce(losses, MODEL, ps.Norms(), ps.SecondMoment()),
    "backward": lambda losses: ps.backward(losses, MODEL, ps.ClippedSum(1.0)),
    "norms": lambda losses: ps.norms(losses, MODEL),
    "clipped_sum": lambda losses: ps.clipped_sum(losses, MODEL, 1.0),
    "second_moment": lambda losses: ps.second_moment(losses, MODEL),
    "variance": lambda losses: ps.variance(losses, MODEL),
    "gram": lambda losses: ps.gram(losses, MODEL),
    "dot": lambda losses: ps.dot(losses, MODEL, V),
    "project": lambda losses: ps.project(losses, MODEL, ps.Projection(4, seed=0)),
    "explain": lambda losses: len(ps.explain(losses, MODEL).interactions),
}


@pytest.fixture(params=["eager", "aot_eager"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield request.param
    torch.compiler.reset()
    MODEL.zero_grad()


def breaks() -> list[str]:
    """The reasons for which Dynamo has broken graphs."""
    return list(torch._dynamo.utils.counters["graph_break"])


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_between_compiled_code(verb: str, backend: str) -> None:
    run = VERBS[verb]

    def step(x: Tensor) -> tuple[Any, Tensor]:
        scaled = x * 2
        answer = run(squares(MODEL(scaled / 2)))
        return answer, scaled + 1

    want, after = step(X)
    got, also = torch.compile(step, backend=backend)(X)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(also, after)
    assert [f"{verb} reads autograd's graph" in reason for reason in breaks()] == [True]


def test_a_training_step(backend: str) -> None:
    model = mlp(seed=1)

    def step(x: Tensor) -> Tensor:
        losses = squares(model(x))
        norms = ps.norms(losses, model, retain_graph=True)
        losses.mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        return norms

    compiled, found = torch.compile(step, backend=backend), []
    for _ in range(3):
        want = definition(squares(model(X)), model)
        found.append((compiled(X), torch.stack([g.flatten(1).square().sum(1) for g in want.values()]).sum(0).sqrt()))
    for norms, want_norms in found:
        torch.testing.assert_close(norms, want_norms)
    assert found[0][0].ne(found[2][0]).all()


def test_calls_that_record(backend: str) -> None:
    model = mlp(seed=2)

    def step(x: Tensor) -> tuple[Any, ...]:
        call = ps.call_for_per_sample_grads(model, reductions=[ps.Stack()])
        squares(call(x + 0)).sum().backward()
        return call.results()

    (got,) = torch.compile(step, backend=backend)(X)
    assert_same(got, definition(squares(model(X)), model))


def test_monitors_and_checks(backend: str) -> None:
    model = mlp(seed=3)
    monitor = ps.Monitor(model)

    def step(x: Tensor) -> bool:
        losses = squares(model(x * 1))
        monitor(losses)
        return check(lambda: squares(model(x)), model).ok

    assert torch.compile(step, backend=backend)(X)


def test_private_steps(backend: str) -> None:
    model = nn.Linear(3, 2)
    plan = dp.Plan(examples=10, batch_size=5, steps=2, noise_multiplier=1.0, delta=1e-3)
    private = dp.Private(model, torch.optim.SGD(model.parameters(), 0.1), plan, ps.ClippedSum(1.0))
    data = torch.utils.data.TensorDataset(torch.randn(10, 3))

    def step(x: Tensor) -> Any:
        return private.step(squares(model(x * 1)))

    compiled, batches = torch.compile(step, backend=backend), private.batches(data)
    if backend != "eager":  # whatever a compiled region does, nobody has promised that it keeps samples apart
        with pytest.raises(ps.InteractionError, match="COMPILED"):
            compiled(*next(batches))
        return
    for (x,) in batches:
        compiled(x)
    assert private.steps == 2


def test_importing_does_not_bring_the_compiler() -> None:
    code = "import sys, persample; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_functions_stay_what_they_were() -> None:
    """No wrapper around them: whom a warning points at, signatures and docs are as they were written."""
    for verb in VERBS:
        function = getattr(ps, verb)
        assert function.__code__.co_name == verb
        assert not hasattr(function, "__wrapped__")
