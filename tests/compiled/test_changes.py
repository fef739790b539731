"""What changes from call to call, and is no input of the losses' function: nothing of it may survive in the code."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample as ps
from persample.reductions.answers import differing, plain_parts

NUMBER = 2.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x)))
        return out


class Checked:
    """A compiled step that is compared with the eager engine whenever it is called."""

    def __init__(self, params: Any, *reductions: ps.Reduction, losses: Any = None, **options: Any) -> None:
        self.losses = losses or (lambda x: params(x).square().sum(1))
        self.params, self.reductions = params, reductions
        options = {"backend": "eager", "verbose": False, **options}
        self.step = ps.compile(self.losses, params, *reductions, **options)

    def __call__(self, x: Tensor) -> None:
        got, want = self.step(x), ps.reduce(self.losses(x), self.params, *self.reductions)
        assert differing(got, want) is None
        tensors = ps.reductions.answers.take_apart
        for a, b in zip(tensors(got)[0], tensors(want)[0], strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))


def x(B: int = 5) -> Tensor:
    return torch.randn(B, 4)


def _set(name: str, value: Any) -> Callable[[Any, Any], None]:
    return lambda model, reduction: setattr(reduction, name, value)


def _add_parameter(model: Net, _: Any) -> None:
    model.extra = nn.Parameter(torch.ones(3))


def _rename(model: Net, _: Any) -> None:
    model.other, model.first = model.first, nn.Linear(4, 6)


@pytest.mark.parametrize(
    ("reduction", "change"),
    [
        (lambda m: ps.ClippedSum(0.1), _set("max_norm", 0.5)),
        (lambda m: ps.ClippedSum(0.1), _set("gamma", 0.2)),
        (lambda m: ps.Norms(), _set("per", "parameter")),
        (lambda m: ps.Norms([m.first, m.last]), lambda m, r: r.per.reverse()),
        (lambda m: ps.Variance(), _set("correction", 0)),
        (lambda m: ps.Project(ps.Projection(8)), _set("projection", ps.Projection(8, seed=1))),
        (lambda m: ps.Dot(dict(m.named_parameters())), lambda m, r: r.direction.update({"first.bias": torch.ones(6)})),
        (lambda m: ps.Stack(), lambda m, r: m.unused.requires_grad_(False)),
        (lambda m: ps.Stack(), lambda m, r: setattr(m, "unused", nn.Parameter(torch.ones(5)))),
        (lambda m: ps.Stack(), _add_parameter),
        (lambda m: ps.Stack(), _rename),
    ],
)
def test_settings_and_parameters(reduction: Any, change: Any) -> None:
    model = Net()
    made = reduction(model)
    step = Checked(model, made)
    step(x())
    change(model, made)
    step(x())
    step(x())
    assert step.step.refused is None


class _Weigher:
    shared = 1.0

    def __init__(self) -> None:
        self.number, self.tensor, self.numbers = 2.0, torch.tensor(2.0), [2.0]

    def __call__(self, norms: Tensor) -> Tensor:
        return self._number() * self.numbers[0] * self.tensor * self.shared / (1 + norms)

    def _number(self) -> float:
        return self.number

    def method(self, norms: Tensor) -> Tensor:
        return self(norms)


def _change(weigher: _Weigher, what: str) -> None:
    if what == "numbers":
        weigher.numbers[0] = 5.0
    elif what == "in place":
        weigher.tensor.fill_(5.0)
    elif what == "class":
        _Weigher.shared += 1.0
    else:
        setattr(weigher, what, torch.tensor(5.0) if what == "tensor" else 5.0)


@pytest.mark.parametrize("what", ["number", "tensor", "in place", "numbers", "class"])
@pytest.mark.parametrize("form", ["object", "method", "closure", "partial"])
def test_what_a_function_for_weights_reads(form: str, what: str) -> None:
    weigher = _Weigher()
    forms: dict[str, Any] = {
        "object": weigher,
        "method": weigher.method,
        "closure": lambda norms: weigher(norms),
        "partial": partial(lambda held, norms: held(norms), weigher),
    }
    step = Checked(Net(), ps.ClippedSum(weights=forms[form]))
    step(x())
    _change(weigher, what)
    step(x())
    step(x())
    assert len(step.step.builds) == (1 if what == "in place" else 2)


def test_globals_that_a_function_for_weights_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Checked(Net(), ps.ClippedSum(weights=lambda norms: NUMBER / (1 + norms)))
    step(x())
    monkeypatch.setitem(globals(), "NUMBER", 7.0)
    step(x())
    step(x())
    assert len(step.step.builds) == 2


def test_containers_of_parameters() -> None:
    a, b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def losses(x: Tensor) -> Tensor:
        return (x @ a).tanh() * (x @ b).sin()

    by_name = {"a": a}
    step = Checked(by_name, ps.Stack(), losses=losses)
    step(x())
    by_name["b"] = b
    step(x())
    del by_name["a"]
    step(x())
    assert step.step.refused is None
    assert len(step.step.builds) == 3
    listed = [a, b]
    step = Checked(listed, ps.Stack(), losses=losses)
    step(x())
    listed.reverse()
    step(x())
    step(x())
    assert step.step.refused is None


def test_hooks_are_refused_as_by_the_eager_verbs() -> None:
    model = Net()
    step = Checked(model, ps.Norms())
    step(x())
    hook = model.first.weight.register_hook(lambda g: g)
    with pytest.raises(ValueError, match="has hooks"):
        step.step(x())
    hook.remove()
    step(x())
    assert len(step.step.builds) == 1


def test_tied_later() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    step = Checked(model, ps.Norms(), ps.Stack())
    step(x())
    model[2].weight = model[0].weight
    step(x())
    step(x())
    model[2].weight = nn.Parameter(torch.randn(4, 4))
    step(x())
    assert step.step.refused is None


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
def test_arguments_with_a_past() -> None:
    """Gradients flow on from them, to parameters that the captured graph does not reach."""
    model = nn.ModuleDict({"table": nn.Embedding(5, 4), "last": nn.Linear(4, 3)})
    step = Checked(model, ps.Stack(), losses=lambda x: model["last"](x).square().sum(1))
    step(x(3).requires_grad_())
    before = model["table"](torch.tensor([1, 2, 3]))
    (got,) = step.step(before)
    assert got["table.weight"].any()
    assert step.step.refused is not None


@pytest.mark.parametrize(
    "size", [lambda n: n // 2 * 2, lambda n: n % 2 + 100, lambda n: min(n, 64), lambda n: -(-n // 8), lambda n: n**2]
)
def test_what_is_computed_of_the_batch_size(size: Callable[[int], int]) -> None:
    """Sizes that agree in three places need not agree in others, and a percent is within a comparison's tolerance."""
    model = Net()
    step = Checked(model, ps.ClippedSum(1e6), losses=lambda x: model(x).square().sum(1) * size(len(x)))
    for B in (3, 7, 100, 65):
        step(x(B))
        step(x(B))
    assert step.step.refused is None


class _Counting(ps.Reduction):
    """The number of samples, and one over it."""

    def start(self, call: Any) -> None:
        self._count = call.batch

    def add(self, name: str, factor: Any) -> None:
        pass

    def result(self) -> Any:
        return self._count, {"mean": 1 / self._count}


def test_numbers_in_results() -> None:
    step = Checked(Net(), ps.Norms(), _Counting())
    for B in (3, 5, 6, 6, 7):
        step(x(B))
        assert step.step(x(B))[1] == (B, {"mean": 1 / B})


def test_plain_parts() -> None:
    @dataclass
    class Record:
        sums: Any
        count: int

    t = torch.ones(2)
    same = [Record({"a": t}, 3), Record({"a": t + 1}, 3)]
    assert plain_parts(same[0]) == plain_parts(same[1])
    assert plain_parts(same[0]) != plain_parts(Record({"a": t}, 4))
    assert plain_parts(same[0]) != plain_parts(Record({"b": t}, 3))
    assert plain_parts((1,)) != plain_parts((1.0,))
    assert differing((t, 1), (t, 2)) is not None


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_changed_buffers_are_brought_back_at_all_batch_sizes(backend: str) -> None:
    model = Net()
    model.register_buffer("seen", torch.zeros(()))

    def losses(x: Tensor) -> Tensor:
        out: Tensor = model(x).square().sum(1)
        model.seen += 1  # after sizes and data, which come first among the inputs
        return out * model.seen

    step = ps.compile(losses, model, ps.ClippedSum(1.0, nonfinite="drop"), backend=backend, verbose=False)
    for B in (3, 5, 6, 6):
        step(x(B))
    bad = x(6)
    bad[1] = torch.inf
    step(bad)
    assert (step.doubts, float(model.seen), step.refused) == (1, 5.0, None)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_the_losses_do_outside_is_done_once(backend: str) -> None:
    """Whoever answers: the first call of a build, one with extreme numbers, or the compiled code."""
    model, state = Net(), {"mean": torch.zeros(4), "calls": torch.zeros(())}

    def losses(x: Tensor) -> Tensor:
        state["mean"] = 0.5 * state["mean"] + x.detach()[0]
        state["calls"] = state["calls"] + 1
        return model(x * state["mean"]).square().sum(1)

    reductions = ps.Norms(), ps.ClippedSum(1.0, nonfinite="drop")
    step = ps.compile(losses, model, *reductions, backend=backend, verbose=False)
    for calls, (B, number) in enumerate([(3, 1.0), (3, 1.0), (5, 1.0), (6, 1.0), (6, torch.inf), (6, 1.0)], 1):
        given, before = x(B), dict(state)
        given[1] *= number
        got, after = step(given), dict(state)
        state.update(before)
        assert differing(got, ps.reduce(losses(given), model, *reductions)) is None
        assert float(after["calls"]) == calls
        assert torch.allclose(after["mean"], state["mean"])
    assert (step.doubts, step.refused) == (1, None)


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
def test_losses_that_cannot_be_told_from_others() -> None:
    model, kept = Net(), {}

    def losses(x: Tensor) -> Tensor:
        out = model(x).square().sum(1)
        kept["copy"] = out.clone()
        return out

    step = Checked(model, ps.Norms(), losses=losses)
    step(x())
    step(x())
    assert "keeps a copy" in str(step.step.refused)


def test_a_build_is_used_after_it_was_compared() -> None:
    """Where the first numbers are extreme, there is nothing to compare, and wrong code would get away with it."""

    def off(graph: torch.fx.GraphModule, _: Any) -> Any:
        return lambda *given: [t * 1.1 if t.is_floating_point() else t for t in graph(*given)]

    model = Net()
    step = ps.compile(
        lambda x: model(x).sum(1), model, ps.ClippedSum(9.0, nonfinite="drop"), backend=off, verbose=False
    )
    bad = x()
    bad[0] = torch.nan
    step(bad)
    assert step.refused is None
    with pytest.warns(ps.PerformanceWarning, match="another answer"):
        step(x())
    assert len(step.builds) == 1


class Trainer:
    def __init__(self) -> None:
        self.model = Net()
        self.step = ps.compile(self.losses, self.model, ps.Norms(), backend="eager", verbose=False)

    def losses(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x).square().sum(1)
        return out


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_copies_are_of_the_copied_model(copied: Callable[[Trainer], Trainer]) -> None:
    given, trainer = x(), Trainer()
    trainer.step(given)
    other = copied(trainer)
    with torch.no_grad():
        other.model.first.weight.mul_(3)
    for _ in range(2):
        assert torch.allclose(other.step(given)[0], ps.norms(other.losses(given), other.model))
        assert torch.allclose(trainer.step(given)[0], ps.norms(trainer.losses(given), trainer.model))


def test_numbers_drawn_in_python() -> None:
    model = Net()
    step = ps.compile(
        lambda x: model(x).square().sum(1) * random.randint(1, 100), model, ps.Norms(), backend="eager", verbose=False
    )
    given = x()
    random.seed(0)
    with pytest.warns(ps.PerformanceWarning, match="Python's random"):
        got = [step(given)[0] for _ in range(3)]
    random.seed(0)
    want = [ps.norms(model(given).square().sum(1) * random.randint(1, 100), model) for _ in range(3)]
    assert torch.allclose(torch.stack(got), torch.stack(want))


def test_first_calls_in_several_threads() -> None:
    """Capturing and tracing change what all threads see of PyTorch: one must wait for another."""
    model = Net()

    def losses(x: Tensor) -> Tensor:
        out: Tensor = model(x).square().sum(1)
        return out

    step = ps.compile(losses, model, ps.Norms(), backend="aot_eager", verbose=False)

    def run(B: int) -> bool:
        given = [x(B) for _ in range(5)]
        return all(torch.allclose(step(g)[0], ps.norms(losses(g), model), rtol=1e-4) for g in given)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, (5, 5, 6, 7)))
    assert step.refused is None
    torch.compile(lambda x: x + 1, backend="eager")(x())  # nothing is left behind
