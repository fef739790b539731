"""Stating that a function keeps samples apart: what it opens, and what finds out if it is not true."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps
from persample.audit import audit
from persample.graph import COMPILED, keeps_samples_apart
from persample.graph.ops import custom
from tests.dp.helpers import CLASSES, WIDTH, dataset, flat, losses_of, private
from tests.reference import assert_same, definition

pytestmark = pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")


class Product(torch.autograd.Function):
    """x weight: data and weights go straight in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return g @ weight.t(), x.t() @ g


class Centred(Product):
    """Wrong, and its gradients do not show it: the mean of the batch is taken for a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x - x.mean(0), weight)
        return (x - x.mean(0)) @ weight


class Normalised(torch.autograd.Function):
    """Wrong, and its gradients show it: the sum over the batch is differentiated."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, scale: Tensor, data: Tensor) -> Tensor:
        ctx.save_for_backward(h, scale)
        return (h + h.sum(0)) * scale

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        h, scale = ctx.saved_tensors
        back = g * scale
        return back + back.sum(0), (g * (h + h.sum(0))).sum(0), None


@torch.library.custom_op("persample_tests::vouched", mutates_args=())
def vouched(x: Tensor, weight: Tensor) -> Tensor:
    """The product once more."""
    return x @ weight


vouched.register_autograd(
    lambda ctx, g: (g @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].t() @ g),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Net(nn.Module):
    """A linear layer after a function of data and a weight."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = getattr(function, "apply", function)
        self.weight, self.linear = nn.Parameter(torch.randn(WIDTH, 4)), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(self.function(x, self.weight).tanh())
        return found


@pytest.fixture(autouse=True)
def _withdrawn() -> Iterator[None]:
    """Statements are withdrawn after a test."""
    before = custom._APART.copy()
    yield
    custom._APART.clear()
    custom._APART.update(before)


def losses(model: nn.Module) -> Tensor:
    x, y = dataset(6).tensors
    return F.cross_entropy(model(x), y, reduction="none")


HIDDEN = {"Function": (Product, Product), "op": (vouched, "persample_tests::vouched")}


@pytest.mark.parametrize("kind", HIDDEN)
def test_one_line_is_enough(kind: str) -> None:
    function, stated = HIDDEN[kind]
    model = Net(function)
    name = "Product" if kind == "Function" else "persample_tests::vouched"
    remedy = "Product" if kind == "Function" else "'persample_tests::vouched'"
    with pytest.raises(ps.InteractionError, match=rf"inside custom {name},.*keeps_samples_apart\({remedy}\)"):
        ps.grad(losses(model), model, independent=True)
    assert keeps_samples_apart(stated) is stated
    found = losses(model)
    assert_same(ps.grad(found, model, retain_graph=True, independent=True), definition(found, model), rtol=1e-5)


def test_as_a_decorator() -> None:
    @keeps_samples_apart
    class Mine(Product):
        pass

    ps.norms(losses(model := Net(Mine)), model, independent=True)
    with pytest.raises(ps.InteractionError, match="inside custom Product"):  # what it inherits from is another matter
        ps.norms(losses(model := Net(Product)), model, independent=True)


@pytest.mark.parametrize(
    "form", [vouched, torch.ops.persample_tests.vouched, torch.ops.persample_tests.vouched.default]
)
def test_any_form_of_an_op(form: Any) -> None:
    keeps_samples_apart(form)
    ps.norms(losses(model := Net(vouched)), model, independent=True)


def test_compiled_regions() -> None:
    model = torch.compile(Net(torch.mm), backend="aot_eager")
    with pytest.raises(ps.InteractionError, match=r"CompiledFunction.*keeps_samples_apart\(persample.graph.COMPILED\)"):
        ps.grad(losses(model), model, independent=True)
    keeps_samples_apart(COMPILED)
    found = losses(model)
    assert_same(ps.grad(found, model, retain_graph=True, independent=True), definition(found, model), rtol=1e-5)
    with pytest.raises(ps.InteractionError, match="inside custom Product"):  # and nothing else
        ps.norms(losses(other := Net(Product)), other, independent=True)


def test_a_compiled_model_has_no_name_of_its_own() -> None:
    with pytest.raises(TypeError, match=r"which has no names, keeps_samples_apart\(persample.graph.COMPILED\)"):
        keeps_samples_apart(torch.compile(Net(torch.mm), backend="aot_eager"))  # type: ignore[type-var]


def test_private_training() -> None:
    model = Net(Product)
    trained = private(model)
    with pytest.raises(ps.InteractionError, match=r"keeps_samples_apart\(Product\)"):
        trained.step(losses_of(model, next(iter(trained.batches(dataset())))))
    keeps_samples_apart(Product)
    trained, before = private(model := Net(Product)), flat(model)
    for batch in trained.batches(dataset()):
        trained.step(losses_of(model, batch))
    assert trained.steps == 6
    assert not torch.equal(before, flat(model))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_guard_of_private_training_finds_a_wrong_statement(compiled: bool) -> None:
    """Before anything of it is released."""

    def centred(x: Tensor, weight: Tensor) -> Tensor:
        return (x - x.mean(0)) @ weight

    keeps_samples_apart(COMPILED if compiled else Centred)
    model: Any = torch.compile(Net(centred), backend="aot_eager") if compiled else Net(Centred)
    trained, before = private(model), flat(model)
    ps.norms(losses(model), model, independent=True)  # which cannot know
    with pytest.raises(ps.InteractionError, match="run again on a few samples"):
        trained.step(losses_of(model, next(iter(trained.batches(dataset())))))
    assert torch.equal(before, flat(model))


@pytest.mark.parametrize(("function", "answer"), [(Product, True), (Centred, False)])
def test_the_audit_checks_a_statement(function: Any, answer: bool) -> None:
    x, y = dataset(6).tensors
    keeps_samples_apart(function)
    loss = lambda output, target: F.cross_entropy(output, target, reduction="none")  # noqa: E731
    report = audit(Net(function), x, loss, targets=y, repeats=0)
    assert report.graph.answer == "independent"
    assert f"of custom {function.__name__}, somebody has said so" in report.graph.reason
    assert report.rerun.answer == ("independent" if answer else "interacting")
    assert report.independent is answer


def test_the_audit_of_what_nobody_vouches_for_tells_how() -> None:
    x, y = dataset(6).tensors
    loss = lambda output, target: F.cross_entropy(output, target, reduction="none")  # noqa: E731
    report = audit(Net(Product), x, loss, targets=y, repeats=0)
    assert report.graph.answer == "unknown"
    assert "keeps_samples_apart(Product)" in report.graph.reason


def test_a_gradient_that_shows_otherwise_is_refused_all_the_same() -> None:
    keeps_samples_apart(Normalised)
    x, w, scale = torch.randn(5, 3), torch.randn(3, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    found = Normalised.apply(x @ w, scale, x).square().sum(1)
    with pytest.raises(ps.InteractionError, match="samples interact in custom Normalised"):
        ps.grad(found, [w, scale], independent=True)
