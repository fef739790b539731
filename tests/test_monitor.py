"""`ps.Monitor` against the definition of all that it logs, and what it leaves alone."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import persample as ps
from tests import models
from tests.models import Program, mlp_and_losses
from tests.reference import definition, vectors


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def checkpointed(B: int = 6) -> Program:
    model, x = models.mlp(3, 3, 3), torch.randn(B, 3).double()
    return model, lambda: checkpoint(model, x, use_reentrant=False).square().sum(1)


def dropout(B: int = 6) -> Program:
    model, x = nn.Sequential(nn.Linear(3, 8), nn.Dropout(), nn.Linear(8, 2)).double(), torch.randn(B, 3).double()
    return model, lambda: model(x).square().sum(1)


def unreached(B: int = 6) -> Program:
    model, x = nn.ModuleDict({"used": nn.Linear(3, 2), "spare": nn.Linear(3, 2)}).double(), torch.randn(B, 3).double()
    return model, lambda: model["used"](x).square().sum(1)


def mixed(B: int = 6) -> Program:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4).double(), nn.Linear(4, 2).bfloat16())
    x = torch.randn(B, 3)
    return model, lambda: model[2](model[1](model[0](x).double()).tanh().bfloat16()).double().square().sum(1)


PROGRAMS: dict[str, Callable[..., Program]] = {
    "mlp": mlp_and_losses,
    "cnn": models.cnn_and_losses,
    "tied": models.tied_and_losses,
    "checkpointed": checkpointed,
    "dropout": dropout,
    "unreached": unreached,
}
every_program = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)


def spread(g: Tensor) -> tuple[float, float]:
    """The trace of the covariance and the squared norm of the expectation, both unbiased."""
    trace = g.var(0, correction=1).sum()
    return trace.item(), (g.mean(0).square().sum() - trace / len(g)).item()


def expected(
    stacks: dict[str, Tensor], quantiles: tuple[float, ...] = (0, 0.25, 0.5, 0.75, 0.95, 1)
) -> dict[str, float]:
    """What one step logs, from gradients that are written out."""
    g = vectors(stacks)
    norms, (trace, signal) = g.norm(dim=1), spread(g)
    values = {"batch": len(g), "nonfinite": 0, "norms/mean": norms.mean(), "gradient/norm": g.mean(0).norm()}
    values |= {"gradient/variance": trace, "gradient/signal": signal}
    values |= {f"norms/q{q:g}": norms.quantile(q) for q in quantiles}
    if signal > 0:
        values["noise_scale"] = trace / signal
    layers = {name.rpartition(".")[0] or name for name in stacks}
    for layer in layers:
        trace, signal = spread(vectors({n: s for n, s in stacks.items() if (n.rpartition(".")[0] or n) == layer}))
        if trace > 0:
            values[f"snr/{layer}"] = signal / trace
    for rank, i in enumerate(norms.argsort(descending=True)[:5].tolist()):
        values |= {f"unusual/{rank}/norm": norms[i], f"unusual/{rank}/sample": i}
    return {name: float(value) for name, value in values.items()}


# ------------------------------------------------------------------------------------------------ what is logged


@every_program
@pytest.mark.parametrize("B", [2, 6])
@pytest.mark.parametrize("way", ["beside", "backward"])
def test_one_step_is_what_the_definition_gives(program: Callable[..., Program], B: int, way: str) -> None:
    model, forward = program(B)
    logged: list[dict[str, float]] = []
    monitor = ps.Monitor(model, log=logged.append, prefix="p/")
    losses = forward()
    want = expected(definition(losses, model))
    record = monitor(losses) if way == "beside" else monitor.backward(losses)
    assert record is monitor.last
    assert record is not None
    assert record.values == pytest.approx(want, rel=1e-9, abs=1e-12)
    assert logged == [{"step": 0.0} | {f"p/{name}": value for name, value in record.values.items()}]
    assert all(type(value) is float for value in logged[0].values())


def test_a_model_of_several_dtypes_is_monitored() -> None:
    model, forward = mixed()
    losses = forward()
    stacks = definition(losses, model)
    record = ps.Monitor(model)(losses)
    assert record is not None
    want = expected(stacks)
    assert set(record.values) == set(want)
    for name in ("norms/mean", "gradient/norm", "gradient/variance", "noise_scale"):
        assert record.values[name] == pytest.approx(want[name], rel=1e-2)
    monitor, other = ps.Monitor(model), copy.deepcopy(model)
    monitor.backward(forward())
    got = [p.grad for p in model.parameters()]
    model.load_state_dict(other.state_dict())
    model.zero_grad()
    forward().mean().backward()
    for p, g in zip(model.parameters(), got, strict=True):
        assert g is not None
        assert g.dtype == p.dtype
        torch.testing.assert_close(g, p.grad, rtol=2e-2, atol=1e-3)


def test_the_parts_of_the_noise_scale_are_unbiased() -> None:
    """Batches of four gradients from a known distribution: means within six standard errors (false alarm < 1e-8)."""
    d, sigma, found = 5, 2.0, []
    w, center = torch.zeros(d, dtype=torch.float64, requires_grad=True), torch.arange(d).double() / 2
    monitor = ps.Monitor([w], every=1, smoothing=0.0, unusual=0)
    for _ in range(400):
        record = monitor((center + sigma * torch.randn(4, d, dtype=torch.float64)) @ w)
        assert record is not None
        found.append([record.values["gradient/variance"], record.values["gradient/signal"]])
    got = torch.tensor(found, dtype=torch.float64)
    truth = torch.tensor([d * sigma**2, center.square().sum()], dtype=torch.float64)
    error = got.std(0) / math.sqrt(len(got))
    assert ((got.mean(0) - truth).abs() < 6 * error).all()
    assert (6 * error < truth[0] / 4).all(), "what a biased estimate would be off by"


def test_ratios_are_of_averages_that_go_by_pairs_of_samples() -> None:
    w, sizes = torch.zeros(3, requires_grad=True, dtype=torch.float64), (5, 2, 1, 7)
    batches = [torch.randn(B, 3).double() + 1 for B in sizes]
    monitor = ps.Monitor({"w": w}, every=1, smoothing=0.75)
    for batch in batches:
        monitor(batch @ w)
    told = [batch for batch in batches if len(batch) > 1]  # one sample says nothing about variance
    weights = torch.tensor([0.75 ** (2 - k) * len(b) * (len(b) - 1) for k, b in enumerate(told)]).double()
    trace, signal = weights @ torch.tensor([spread(batch) for batch in told]).double()
    assert monitor.last is not None
    assert monitor.last.values["noise_scale"] == pytest.approx((trace / signal).item())
    assert monitor.last.values["snr/w"] == pytest.approx((signal / trace).item())


def test_equal_gradients_have_no_noise() -> None:
    w = torch.zeros(3, requires_grad=True)
    record = ps.Monitor([w])(torch.full((4, 3), 0.1) @ w)
    assert record is not None
    assert record.values["gradient/variance"] == pytest.approx(0, abs=1e-8)
    assert record.values["noise_scale"] == pytest.approx(0, abs=1e-6)


def test_a_signal_that_drowns_has_no_noise_scale() -> None:
    w = torch.zeros(1, requires_grad=True)
    record = ps.Monitor([w])(torch.tensor([[1.0], [-1.0]]) @ w)
    assert record is not None
    assert record.values["gradient/signal"] == pytest.approx(-1)
    assert "noise_scale" not in record.values
    assert record.values["snr/0"] == pytest.approx(-0.5)


# ------------------------------------------------------------------------------------------------ edges


@pytest.mark.parametrize("way", ["beside", "backward"])
@pytest.mark.parametrize("B", [0, 1])
def test_batches_without_a_variance(B: int, way: str) -> None:
    model, forward = mlp_and_losses(B)
    monitor = ps.Monitor(model)
    losses = forward()
    if way == "beside":
        monitor(losses)
        losses.mean().backward()
    else:
        monitor.backward(losses)
    assert monitor.last is not None
    assert monitor.last.values["batch"] == B
    assert len(monitor.last.norms) == len(monitor.last.unusual) == B
    assert ("norms/mean" in monitor.last.values) == (B == 1)
    assert not {"noise_scale", "gradient/variance", "snr/0"} & set(monitor.last.values)
    got = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    forward().mean().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.grad, equal_nan=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("way", ["beside", "backward"])
def test_samples_that_are_not_finite_are_named_and_left_out(bad: float, way: str) -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double(), torch.randn(6, 3).double()
    want = expected(definition(model(x[[0, 1, 3, 4]]).square().sum(1), model))
    x[2] = x[5] = bad
    losses, monitor = model(x).square().sum(1), ps.Monitor(model, unusual=0)
    record = monitor(losses, ids=list("abcdef")) if way == "beside" else monitor.backward(losses, ids=list("abcdef"))
    assert record is not None
    assert record.nonfinite == ["c", "f"]
    want = {n: v for n, v in want.items() if not n.startswith("unusual")} | {"batch": 6.0, "nonfinite": 2.0}
    assert record.values == pytest.approx(want, rel=1e-9)
    if way == "backward":
        assert all(not p.grad.isfinite().any() for p in model.parameters() if p.grad is not None)
        assert all(p.grad is not None for p in model.parameters())


def test_nothing_but_nonsense() -> None:
    model, x = nn.Linear(3, 2), torch.full((4, 3), math.nan)
    record = ps.Monitor(model)(model(x).square().sum(1))
    assert record is not None
    assert record.values == {"batch": 4.0, "nonfinite": 4.0, "gradient/norm": 0.0}
    assert record.nonfinite == [0, 1, 2, 3]


def test_one_layer_of_a_sample_that_overflows() -> None:
    """The first weight's gradient is finite in all samples, the second's is not: each layer has its own samples."""
    a, b = (torch.ones(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    x = torch.tensor([1.0, 2.0, 4.0]).double()
    losses = x * a + torch.tensor([1.0, 3.0, math.inf]).double() * b
    record = ps.Monitor({"a": a, "b": b}, every=1)(losses)
    assert record is not None
    assert record.nonfinite == [2]
    assert record.values["gradient/variance"] == pytest.approx(x.var().item() + 2.0)
    assert record.values["snr/a"] == pytest.approx((x.mean() ** 2 - x.var() / 3).item() / x.var().item())


# ------------------------------------------------------------------------------------------------ what is left alone


@every_program
@pytest.mark.parametrize("B", [1, 6])
def test_backward_gives_the_gradients_of_a_plain_one(program: Callable[..., Program], B: int) -> None:
    model, forward = program(B)
    got, want = [], []
    for into, backward in [
        (got, lambda losses: ps.Monitor(model).backward(losses, scale=0.5)),
        (want, lambda losses: (0.5 * losses.mean()).backward()),
    ]:
        torch.manual_seed(1)
        model.zero_grad()
        for _ in range(2):  # accumulates
            backward(forward())
        into += [p.grad for p in model.parameters()]
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_beside_a_loop_training_is_the_same_to_the_last_bit() -> None:
    """Weights, generators and momenta, with dropout."""

    def train(every: int | None) -> tuple[dict[str, Tensor], Tensor]:
        torch.manual_seed(3)
        model, forward = dropout()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        monitor = None if every is None else ps.Monitor(model, every=every)
        for _ in range(5):
            losses = forward()
            if monitor is not None:
                monitor(losses)
            losses.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict(), torch.get_rng_state()

    (plain, state), (watched, state_too) = train(None), train(2)
    assert torch.equal(state, state_too)
    for name, value in plain.items():
        assert torch.equal(value, watched[name])


@every_program
def test_no_hook_and_no_gradient_stays(program: Callable[..., Program]) -> None:
    model, forward = program()
    losses, state = forward(), torch.get_rng_state()
    ps.Monitor(model)(losses)
    assert torch.equal(torch.get_rng_state(), state)
    for p in model.parameters():
        assert p.grad is None
        assert not p._backward_hooks
        assert not p._post_accumulate_grad_hooks
    losses.mean().backward()


def test_leaves_that_are_not_watched_get_their_gradients() -> None:
    """The input's, and those of a second model behind the first."""
    first, second = nn.Linear(3, 4), nn.Linear(4, 2)
    x = torch.randn(5, 3, requires_grad=True)
    record = ps.Monitor(first).backward(second(first(x).tanh()).square().sum(1))
    assert record is not None
    got = [t.grad for t in (x, *first.parameters(), *second.parameters())]
    for t in (x, *first.parameters(), *second.parameters()):
        t.grad = None
    second(first(x).tanh()).square().sum(1).mean().backward()
    for a, t in zip(got, (x, *first.parameters(), *second.parameters()), strict=True):
        torch.testing.assert_close(a, t.grad)


def test_hooks_for_after_see_the_gradient() -> None:
    model, forward = mlp_and_losses()
    seen: list[Tensor] = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))  # type: ignore[union-attr]
    ps.Monitor(model).backward(forward())
    forward().mean().backward()
    torch.testing.assert_close(seen[1] - seen[0], seen[0])


def test_a_parameter_given_twice_gets_its_gradient_once() -> None:
    w = torch.ones(3, requires_grad=True)
    ps.Monitor([w, w]).backward(torch.eye(3) @ w)
    assert w.grad is not None
    torch.testing.assert_close(w.grad, torch.full((3,), 1 / 3))


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_ddp_reduces_as_ever() -> None:
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    wrapped, reduced = DistributedDataParallel(model), list[int]()

    def note(_: object, bucket: Any) -> Any:
        reduced.append(bucket.index())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    note.__annotations__ |= {"bucket": torch.distributed.GradBucket, "return": torch.futures.Future[Tensor]}
    wrapped.register_comm_hook(None, note)
    found = []
    for backward in (lambda losses: losses.mean().backward(), ps.Monitor(wrapped).backward):
        backward(wrapped(x).square().sum(1))
        found.append([p.grad for p in model.parameters()])
        model.zero_grad()
    assert len(reduced) == 2
    torch.testing.assert_close(found[1], found[0])


# ------------------------------------------------------------------------------------------------ steps and logs


def test_one_step_in_so_many() -> None:
    model, forward = mlp_and_losses()
    seen: list[float] = []
    monitor = ps.Monitor(model, log=lambda values: seen.append(values["step"]), every=3)
    records = [monitor.backward(forward()) if k % 2 else monitor(forward()) for k in range(8)]
    assert [k for k, record in enumerate(records) if record is not None] == seen == [0, 3, 6]
    monitor(forward(), step=300)
    monitor(forward())
    assert seen[3:] == [300]
    assert monitor.step == 302


@pytest.mark.parametrize("ids", [torch.tensor([10, 20, 30, 40, 50, 60]), ["a", "b", "c", "d", "e", "f"], range(6)])
def test_samples_have_names(ids: Any) -> None:
    model, forward = mlp_and_losses(B=6)
    monitor = ps.Monitor(model, unusual=2)
    record = monitor(forward(), ids=ids)
    assert record is not None
    order = record.norms.argsort(descending=True)[:2].tolist()
    names = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    assert record.unusual == [(names[i], record.norms[i].item()) for i in order]
    assert ("unusual/0/sample" in record.values) == (not isinstance(names[0], str))


def test_no_log_keeps_the_record() -> None:
    model, forward = mlp_and_losses()
    monitor = ps.Monitor(model)
    assert monitor.last is None
    assert monitor(forward()) is monitor.last


class FakeWriter:
    """What a `SummaryWriter` is told."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}
        self.texts: dict[tuple[str, int], str] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars[tag, global_step] = scalar_value

    def add_text(self, tag: str, text_string: str, global_step: int) -> None:
        self.texts[tag, global_step] = text_string


def test_a_summary_writer_is_told_every_number() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    x[3] = math.nan
    writer = FakeWriter()
    record = ps.Monitor(model, log=writer)(model(x).square().sum(1), ids=list("abcd"), step=20)
    assert record is not None
    named = {name: value for name, value in record.values.items() if not name.startswith("unusual/")}
    assert writer.scalars == {(f"persample/{name}", 20): value for name, value in named.items()}
    text = writer.texts["persample/unusual", 20]
    assert f"| {record.unusual[0][0]} | {record.unusual[0][1]:.4g} |" in text
    assert "| d | not finite |" in text


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model, forward = mlp_and_losses()
    monitor = ps.Monitor(model, log=tmp_path / "runs", every=2)
    for _ in range(3):
        monitor(forward())
    monitor.close()
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    assert [e.step for e in events.Scalars("persample/norms/q0.5")] == [0, 2]
    assert monitor.last is not None
    assert events.Scalars("persample/noise_scale")[-1].value == pytest.approx(monitor.last.values["noise_scale"])


def test_without_tensorboard_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"is a folder for TensorBoard, which is not installed: `pip install tensorb"):
        ps.Monitor(nn.Linear(2, 2), log=tmp_path)


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every": 0}, ValueError, "every must be a number of steps, 1 or more, not 0"),
        ({"every": 2.5}, ValueError, r"every must be a number of steps, 1 or more, not 2\.5"),
        ({"unusual": -1}, ValueError, "unusual must be a number of samples, 0 or more, not -1"),
        ({"quantiles": [0.5, 50]}, ValueError, r"quantiles must lie between 0 and 1, but are \[0\.5, 50\]"),
        ({"smoothing": 1.0}, ValueError, r"smoothing must be at least 0 and less than 1, not 1\.0"),
        ({"log": 3}, TypeError, "log must be a SummaryWriter, a folder for one, or a function .*, not int"),
        ({"params": 3}, TypeError, "params must be an nn.Module"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ps.Monitor(**{"params": nn.Linear(2, 2), **arguments})


@pytest.mark.parametrize("step", [0, 1])
def test_losses_and_ids_are_checked_in_every_step(step: int) -> None:
    model, forward = mlp_and_losses(B=6)
    monitor = ps.Monitor(model)
    with pytest.raises(ValueError, match="ids must name every sample: there are 6 losses and 2 ids"):
        monitor(forward(), ids=[1, 2], step=step)
    with pytest.raises(ValueError, match=r"losses must have shape \(B,\), but have shape \(\): .*reduction='none'"):
        monitor.backward(forward().mean(), step=step)


def test_a_training_loop_finds_the_odd_one_out() -> None:
    """The sample with the wrong label has the largest gradient by the end."""
    x = torch.cat([torch.randn(20, 2) - 3, torch.randn(20, 2) + 3])
    y = torch.tensor([0] * 20 + [1] * 20)
    y[7] = 1
    model = nn.Linear(2, 2)
    optimizer, monitor = torch.optim.SGD(model.parameters(), lr=0.1), ps.Monitor(model, every=5)
    for _ in range(21):
        monitor.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
        optimizer.zero_grad()
    assert monitor.last is not None
    assert monitor.last.unusual[0][0] == 7


@pytest.mark.slow
def test_the_example_runs_and_draws(tmp_path: Path) -> None:
    script, plot = Path(__file__).parents[1] / "examples" / "monitored_digits.py", tmp_path / "monitor.svg"
    done = subprocess.run([sys.executable, script, "--plot", plot], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "were mislabelled" in done.stdout
    text = plot.read_text()
    assert all(title in text for title in ("norms of the gradients", "gradient noise scale", "signal to noise"))
