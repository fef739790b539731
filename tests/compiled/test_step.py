"""Compiled steps: what builds, what rebuilds, what is left to the eager engine, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps
from persample.reductions.answers import differing

BACKENDS = [
    "aot_eager",
    pytest.param("eager", marks=pytest.mark.slow),
    pytest.param("inductor", marks=pytest.mark.slow),
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)
        self.register_buffer("shift", torch.zeros(6))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.drop(torch.tanh(self.first(x) + self.shift)))
        return out


def batch(B: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(B, 4), torch.randint(3, (B,))


class Step:
    """A compiled step, and what the eager engine says."""

    def __init__(self, *reductions: ps.Reduction, backend: Any = "eager", **options: Any) -> None:
        self.model = Net().eval()
        self.reductions = reductions or (ps.Norms(), ps.ClippedSum(0.1))
        self.run = ps.compile(self.losses, self.model, *self.reductions, backend=backend, verbose=False, **options)

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y, reduction="none")

    def check(self, *given: Tensor) -> None:
        """The step gives what the eager engine does, with the same random numbers."""
        state = torch.get_rng_state()
        got = self.run(*given)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        want = ps.reduce(self.losses(*given), self.model, *self.reductions)
        assert differing(got, want) is None
        assert torch.equal(after, torch.get_rng_state())


def test_other_data_and_weights_need_no_build(backend: str) -> None:
    step = Step(backend=backend)
    for _ in range(3):
        step.check(*batch())
        with torch.no_grad():
            step.model.first.weight.mul_(1.3)
            step.model.shift.add_(0.5)
    assert len(step.run.builds) == 1


def test_modes_and_dropout(backend: str) -> None:
    step = Step(backend=backend)
    given = batch()
    step.check(*given)
    step.model.train()
    step.check(*given)
    step.check(*given)
    first, second = step.run(*given)[0], step.run(*given)[0]
    assert not torch.equal(first, second)  # drawn anew
    step.model.eval()
    step.check(*given)
    assert len(step.run.builds) == 2
    assert "training mode" in step.run.builds[1]


def test_one_build_for_all_batch_sizes(backend: str) -> None:
    step = Step(backend=backend)
    for B in (5, 4, 7, 2, 31, 4, 5, 1, 0, 13):
        step.check(*batch(B))
        step.check(*batch(B))
    assert len(step.run.builds) <= 4  # the first size, all sizes, one sample, none
    assert any("all batch sizes" in built for built in step.run.builds)


@pytest.mark.parametrize(
    "reduction",
    [
        lambda m: ps.Norms("parameter"),
        lambda m: ps.Norms([m.first, [m.last.weight, "last.bias"]]),
        lambda m: ps.ClippedSum(0.1, per={"a": m.first, "b": m.last, "c": ["unused"]}),
        lambda m: ps.ClippedSum(0.1, gamma=0.01),
        lambda m: ps.ClippedSum(weights=lambda norms: 1 / (1 + norms)),
        lambda m: ps.ClippedSum(0.1, nonfinite="drop"),
        lambda m: ps.SecondMoment(),
        lambda m: ps.Variance(),
        lambda m: ps.Gram(),
        lambda m: ps.Dot(m),
        lambda m: ps.Project(ps.Projection(8)),
        lambda m: ps.Project(ps.Projection(8, kind="kronecker")),
        lambda m: ps.Stack(),
    ],
    ids=lambda fn: "",
)
def test_reductions_at_several_batch_sizes(reduction: Callable[[nn.Module], ps.Reduction]) -> None:
    step = Step()
    step.reductions = (reduction(step.model),)
    step.run = ps.compile(step.losses, step.model, *step.reductions, backend="aot_eager", verbose=False)
    for B in (5, 6, 9, 4):
        step.check(*batch(B))
        step.check(*batch(B))
    assert step.run.refused is None
    assert len(step.run.builds) == 2


def test_stacks_that_are_small_for_some_batch_sizes_alone() -> None:
    """What is copied together, or kept, is chosen for the batch size of the first call."""
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))
    losses = lambda x: model(x).square().mean((1, 2, 3))  # noqa: E731
    step = ps.compile(losses, model, ps.ClippedSum(1e-3), backend="eager", verbose=False)
    for B in (19, 22, 45):  # 147 kB for each sample: below and above 4 MB
        x = torch.randn(B, 64, 16, 16)
        (got,) = step(x)
        want = ps.clipped_sum(losses(x), model, max_norm=1e-3)
        for name, total in want.items():
            torch.testing.assert_close(got[name], total, rtol=1e-4, atol=1e-7)
    assert step.refused is None
    assert [" all batch sizes" in made for made in step.builds] == [False, True]


def test_tensors_of_reductions_may_change() -> None:
    weights = torch.ones(5)
    step = Step(ps.WeightedSum(weights))
    step.check(*batch())
    weights.mul_(3)
    step.check(*batch())
    step.reductions[0].weights = torch.arange(5.0)  # type: ignore[attr-defined]
    step.check(*batch())
    assert len(step.run.builds) == 1
    step.reductions[0].weights = torch.arange(5.0, dtype=torch.float64)  # type: ignore[attr-defined]
    step.check(*batch())
    assert len(step.run.builds) == 2


def test_parameters_may_be_replaced() -> None:
    step = Step()
    step.check(*batch())
    step.model.first.weight = nn.Parameter(torch.randn(6, 4))
    step.check(*batch())
    step.check(*batch())
    assert len(step.run.builds) == 1


def test_frozen_parameters() -> None:
    step = Step()
    step.check(*batch())
    step.model.first.weight.requires_grad_(False)
    step.check(*batch())
    step.check(*batch())
    assert "trained parameters" in step.run.builds[-1]


@pytest.mark.parametrize("kind", ["mapping", "sequence"])
def test_containers(kind: str) -> None:
    model = Net().eval()
    params = dict(model.named_parameters()) if kind == "mapping" else list(model.parameters())
    step = ps.compile(lambda x: model(x).sum(1), params, ps.Stack(), ps.ClippedSum(1.0), backend="eager", verbose=False)
    x = torch.randn(3, 4)
    step(x)
    got, want = step(x), ps.reduce(model(x).sum(1), params, ps.Stack(), ps.ClippedSum(1.0))
    assert [type(a) for a in got] == [type(b) for b in want]
    assert differing(got, want) is None
    assert got[1].clipping.sensitivity == 1.0


def test_in_other_modes_of_pytorch(backend: str) -> None:
    step = Step(backend=backend)
    given = batch()
    want = step.run(*given)
    with torch.no_grad():
        assert differing(step.run(*given), want) is None
    with torch.inference_mode():
        assert differing(step.run(*given), want) is None
        inside = batch()
        first, second = step.run(*inside), step.run(*inside)
    assert differing(first, second) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first, second = step.run(*given), step.run(*given)
        assert differing(first, ps.reduce(step.losses(*given), step.model, *step.reductions), torch.bfloat16) is None
    assert differing(first, second, torch.bfloat16) is None
    assert not torch.allclose(first[0], want[0], rtol=1e-5)
    assert step.run.refused is None


def test_buffers_that_the_losses_change() -> None:
    model = Net().eval()
    model.register_buffer("seen", torch.zeros(()))

    def losses(x: Tensor) -> Tensor:
        model.seen += 1
        return model(x).square().sum(1) * model.seen

    step = ps.compile(losses, model, ps.ClippedSum(1.0), backend="aot_eager", verbose=False)
    for count in range(1, 5):
        step(torch.randn(3, 4))
        assert model.seen == count
    bad = torch.randn(3, 4)
    bad[1] = torch.inf
    with pytest.raises(ps.NonFiniteError):
        step(bad)
    assert model.seen == 5
    assert step.refused is None


@pytest.mark.parametrize("number", [torch.inf, torch.nan, 1e30, 1e-30])
def test_extreme_numbers_are_left_to_the_eager_engine(number: float, backend: str) -> None:
    step = Step(ps.ClippedSum(0.1, nonfinite="drop"), backend=backend)
    step.check(*batch())
    x, y = batch()
    x[2] = number
    got = step.run(x, y)
    want = ps.reduce(step.losses(x, y), step.model, *step.reductions)
    assert differing(got, want) is None
    assert got[0].clipping.dropped == want[0].clipping.dropped
    step.check(*batch())


def test_errors_are_the_eager_verbs() -> None:
    model = Net().eval()
    x = torch.randn(3, 4)

    def step(losses: Callable[..., Any], params: Any = model) -> ps.CompiledStep:
        return ps.compile(losses, params, ps.Norms(), backend="eager", verbose=False)

    with pytest.raises(ValueError, match="must have shape"):
        step(lambda x: model(x).sum())(x)
    with pytest.raises(TypeError, match="must be a tensor"):
        step(lambda x: (model(x).sum(1), 1))(x)
    with pytest.raises(RuntimeError, match="no graph"):
        step(lambda x: x.sum(1))(x)
    with pytest.raises(RuntimeError, match="no graph"):
        step(lambda x: model(x).sum(1).detach())(x)
    with pytest.raises(RuntimeError):
        step(lambda x: model(x).sum(1))(torch.randn(3, 5))
    with pytest.raises(TypeError):
        step(lambda x: model(x).sum(1))()
    with pytest.raises(ZeroDivisionError):
        step(lambda x: model(x).sum(1) * (1 / 0))(x)
    mixing = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    apart = ps.compile(lambda x: mixing(x).sum(1), mixing, ps.Norms(), backend="eager", independent=True, verbose=False)
    with pytest.raises(ps.InteractionError):
        apart(x)


def test_bad_arguments() -> None:
    model = Net()
    with pytest.raises(TypeError, match="losses_fn"):
        ps.compile(torch.ones(3), model, ps.Norms())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="something to compute"):
        ps.compile(lambda x: x, model)
    with pytest.raises(TypeError, match="reductions such as"):
        ps.compile(lambda x: x, model, ps.Norms)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="params must be"):
        ps.compile(lambda x: x, 3, ps.Norms())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="out="):
        ps.compile(lambda x: x, model, ps.Stack(out={}))
    with pytest.raises(ValueError, match="max_builds"):
        ps.compile(lambda x: x, model, ps.Norms(), max_builds=0)
    with pytest.raises(ValueError, match="backend"):
        ps.compile(lambda x: x, model, ps.Norms(), backend="no such thing")


@pytest.mark.filterwarnings("ignore:samples interact", "ignore:persample has no fast rule")
def test_what_cannot_be_compiled_is_said_once() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    step = ps.compile(lambda x: model(x).sum(1), model, ps.Norms(), backend="eager", verbose=False)
    x = torch.randn(3, 4)
    with pytest.warns(ps.PerformanceWarning, match="eager engine: .*samples interact in NativeBatchNorm"):
        step(x)
    assert step.refused is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (got,) = step(x)
    assert not any("ps.compile" in str(w.message) for w in caught)
    assert torch.allclose(got, ps.norms(model(x).sum(1), model))


def test_graph_breaks_are_refused_with_the_reason() -> None:
    model = Net().eval()

    def losses(x: Tensor) -> Tensor:
        if model(x).sum().item() > 0:
            return model(x).sum(1)
        return model(x).square().sum(1)

    step = ps.compile(losses, model, ps.Norms(), backend="eager", verbose=False)
    x = torch.randn(3, 4)
    with pytest.warns(ps.PerformanceWarning, match="cannot be captured"):
        (got,) = step(x)
    assert torch.allclose(got, ps.norms(losses(x), model))


def test_builds_are_bounded() -> None:
    model = Net().eval()
    step = ps.compile(
        lambda x, k: model(x).sum(1) * k, model, ps.Norms(), backend="eager", max_builds=2, dynamic=False, verbose=False
    )
    x = torch.randn(3, 4)
    for k in (1, 2):
        step(x, k)
    with pytest.warns(ps.PerformanceWarning, match="max_builds=2"):
        step(x, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (got,) = step(x, 4)
        (built,) = step(x, 1)
    assert torch.allclose(got, 4 * built)
    assert len(step.builds) == 2


def test_messages(capsys: pytest.CaptureFixture[str]) -> None:
    model = Net().eval()
    step = ps.compile(lambda x: model(x).sum(1), model, ps.Norms(), backend="eager")
    step(torch.randn(3, 4))
    step(torch.randn(5, 4))
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "persample: compiling Norms (first call)"
    assert said[1].startswith("persample: compiled for 3 samples in ")
    assert said[2] == "persample: compiling Norms (argument 0 was float32 (3, 4), is float32 (5, 4))"
    assert said[3].startswith("persample: compiled for all batch sizes in ")
    assert repr(step) == "CompiledStep(Norms; 2 builds, 0 doubts)"


def test_code_that_fails_when_it_runs_is_left_to_the_eager_engine() -> None:
    """As where PyTorch foretells other strides than a kernel has."""

    def failing(graph: torch.fx.GraphModule, _: Any) -> Any:
        def run(*given: Tensor) -> Any:
            raise RuntimeError("view size is not compatible with input tensor's size and stride")

        return run

    step = Step(backend=failing)
    with pytest.warns(ps.PerformanceWarning, match="what was compiled failed when it ran: RuntimeError: view size"):
        step.check(*batch())
    step.check(*batch())
    assert "failed when it ran" in str(step.run.refused)


def test_a_wrong_backend_is_found_out() -> None:
    """The first answer of every build is compared with the eager engine's."""

    def off(graph: torch.fx.GraphModule, _: Any) -> Any:
        return lambda *given: [t * 1.1 if t.is_floating_point() else t for t in graph(*given)]

    model = Net().eval()
    step = ps.compile(lambda x: model(x).sum(1), model, ps.Norms(), backend=off, verbose=False)
    x = torch.randn(3, 4)
    with pytest.warns(ps.PerformanceWarning, match="another answer than the eager engine"):
        step(x)
    assert torch.allclose(step(x)[0], ps.norms(model(x).sum(1), model))
