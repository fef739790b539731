"""The gate, attacked: interactions by name, in every place, must be refused; what keeps samples apart must pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample as ps
from persample import call_for_per_sample_grads
from tests.expanded.helpers import Run, both_reductions, ids, r, squares, total
from tests.expanded.helpers import check as check_rows
from tests.expanded.interactions import ALL, APART, MEETINGS, MOVES, WRITES, Function

pytestmark = pytest.mark.usefixtures("float64")
B, C = 4, 3


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def refused(
    module: nn.Module, *args: Any, op: str, losses: Callable[[Tensor], Tensor] = squares, **options: Any
) -> None:
    """The backward says that samples interact, names the op, and writes nothing."""
    out = call_for_per_sample_grads(module.double(), **options)(*args)
    loss = total(losses(out), options.get("loss_reduction", "sum"))
    with pytest.raises(ps.InteractionError, match=rf"samples interact in [\w, ]*({op})"):
        loss.backward()
    assert all(getattr(p, "grad_sample", None) is None for p in module.parameters())


def without_grad(f: Function) -> Function:
    return torch.no_grad()(f)


def chain(*parts: Callable[[Run, Tensor], Tensor]) -> Run:
    """Two layers, and a frozen one of the same width."""

    def body(m: Run, x: Tensor) -> Tensor:
        for part in parts:
            x = part(m, x)
        return x

    return Run(body, a=nn.Linear(C, C), b=nn.Linear(C, C), f=frozen(nn.Linear(C, C)))


def placed(where: str, f: Function) -> Run:
    g = without_grad(f)
    return {
        "first": lambda: chain(lambda m, x: m.a(f(x))),
        "first-without-grad": lambda: chain(lambda m, x: m.a(g(x))),
        "below-frozen": lambda: chain(lambda m, x: m.a(m.f(f(x)).tanh())),
        "above-frozen": lambda: chain(lambda m, x: m.a(f(m.f(x)))),
        "beside": lambda: chain(lambda m, x: m.b(m.a(x).tanh() + f(x))),
        "beside-last": lambda: chain(lambda m, x: m.a(x).tanh() * f(x)),
        "into-an-activation": lambda: chain(_written(f)),
    }[where]()


def _written(f: Function) -> Callable[[Run, Tensor], Tensor]:
    def body(m: Run, x: Tensor) -> Tensor:
        h = m.a(x) * 1
        h[:, :2] = f(x)[:, :2]
        return m.b(h)

    return body


DATA_PLACES = [
    *"first below-frozen beside into-an-activation".split(),
    *[pytest.param(where, marks=pytest.mark.slow) for where in ("first-without-grad", "above-frozen", "beside-last")],
]


@pytest.mark.parametrize("where", DATA_PLACES)
@pytest.mark.parametrize("name", [*ALL, *WRITES])
def test_functions_of_data(name: str, where: str) -> None:
    f, op = {**ALL, **WRITES}[name]
    for reduction in ("sum", "mean") if where == "first" else ("sum",):
        refused(placed(where, f), r(B, C), op=op, loss_reduction=reduction)


@pytest.mark.parametrize("where", ["first", "beside"])
@pytest.mark.parametrize("name", ALL)
def test_functions_of_data_that_want_gradients(name: str, where: str) -> None:
    """The graph shows the functions, too."""
    f, _ = ALL[name]
    if name == "by-data" and where == "first":
        where = "first-without-grad"
    refused(placed(where, f), r(B, C, grad=True), op=".*")


@pytest.mark.slow
@pytest.mark.parametrize("T", [2, B])
@pytest.mark.parametrize("name", ALL)
def test_functions_of_sequences(name: str, T: int) -> None:
    f, op = ALL[name]
    refused(chain(lambda m, x: m.a(f(x).reshape(x.shape))), r(B, T, C), op=op)


@pytest.mark.parametrize("T", [2, B])
@pytest.mark.parametrize("name", ALL)
def test_functions_of_sequences_with_the_batch_second(name: str, T: int) -> None:
    f, op = ALL[name]
    module = chain(lambda m, x: m.a(f(x.transpose(0, 1)).reshape(x.transpose(0, 1).shape).transpose(0, 1)))
    refused(module, r(T, B, C), op=op, batch_first=False, losses=lambda y: squares(y, 1))


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("where", DATA_PLACES)
def test_what_keeps_samples_apart_passes(name: str, where: str) -> None:
    check_rows(placed(where, APART[name]).double(), r(B, C))


@pytest.mark.parametrize("T", [2, B, 2 * B])
@pytest.mark.parametrize("name", APART)
def test_what_keeps_samples_of_sequences_apart_passes(name: str, T: int) -> None:
    f = APART[name]
    check_rows(chain(lambda m, x: m.a(f(x))).double(), r(B, T, C))


IDS: dict[str, tuple[Function, str]] = {
    "roll": (lambda i: i.roll(1, 0), "roll"),
    "flip": (lambda i: i.flip(0), "flip"),
    "permuted": (lambda i: i[torch.arange(len(i)).roll(1)], "__getitem__"),
    "sorted": (lambda i: i.sort(0).values, "sort"),
    "largest": (lambda i: (i - i.amax(0)).abs() % 6, "amax"),
    "cumsum": (lambda i: i.cumsum(0) % 6, "cumsum"),
    "first-replaced": (lambda i: torch.cat([i[1:2], i[1:]]), "cat|__getitem__"),
}


@both_reductions
@pytest.mark.parametrize("layer", ["embedding", "frozen"])
@pytest.mark.parametrize("name", IDS)
def test_functions_of_indices(name: str, layer: str, reduction: str) -> None:
    f, op = IDS[name]
    table = nn.Embedding(6, C)
    module = Run(lambda m, i: m.a(m.e(f(i))), e=frozen(table) if layer == "frozen" else table, a=nn.Linear(C, 2))
    refused(module, torch.arange(B * 5).reshape(B, 5) * 7 % 6, op=op, loss_reduction=reduction)


@pytest.mark.parametrize(
    "f",
    [lambda i: i, lambda i: i.flip(1), lambda i: i.sort(1).values, lambda i: (i + 1) % 6, lambda i: i.clamp(max=3)],
    ids=["itself", "flip", "sort", "shifted", "clamp"],
)
def test_indices_of_samples_apart_pass(f: Function) -> None:
    check_rows(Run(lambda m, i: m.a(m.e(f(i))), e=nn.Embedding(6, C), a=nn.Linear(C, 2)).double(), ids(B, 5))


class TestSeveralInputs:
    def body(self, f: Function) -> Run:
        return Run(lambda m, x, y: m.a(x) + m.b(f(y)), a=nn.Linear(C, 2), b=nn.Linear(C, 2))

    @pytest.mark.parametrize("name", ALL)
    def test_one_of_them_mixed(self, name: str) -> None:
        f, op = ALL[name]
        refused(self.body(f), r(B, C), r(B, C), op=op)

    def test_mixed_with_each_other(self) -> None:
        module = Run(lambda m, x, y: m.a(x + y.roll(1, 0)), a=nn.Linear(C, 2))
        refused(module, r(B, C), r(B, C), op="add|roll")

    def test_added_in_place(self) -> None:
        module = Run(lambda m, x, y: m.a(x.clone().add_(y, alpha=2)), a=nn.Linear(C, 2))
        check_rows(module.double(), r(B, C), r(B, C))

    def test_masks_of_other_samples(self) -> None:
        mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1]]).bool()
        module = Run(lambda m, x, mask: m.a(x.masked_fill(mask.roll(1, 0), 0.0)), a=nn.Linear(C, 2))
        refused(module, r(B, C), mask, op="masked_fill|roll")

    def test_masks_of_activations(self) -> None:
        mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1]]).bool()
        module = Run(
            lambda m, x, mask: m.b(m.a(x).masked_fill(mask.flip(0), 0.0)), a=nn.Linear(C, C), b=nn.Linear(C, 2)
        )
        refused(module, r(B, C), mask, op="masked_fill|flip")

    def test_masks_that_belong_to_their_samples(self) -> None:
        mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1]]).bool()
        module = Run(lambda m, x, mask: m.b(m.a(x).masked_fill(mask, 0.0)), a=nn.Linear(C, C), b=nn.Linear(C, 2))
        check_rows(module.double(), r(B, C), mask)

    @pytest.mark.parametrize("size", [None, B])
    def test_a_table_as_long_as_the_batch(self, size: int | None) -> None:
        """Positions given as an input are no samples."""
        module = Run(lambda m, x, p: m.a(x + p), a=nn.Linear(C, 2))
        check_rows(module.double(), r(B, B, C), r(B, C), batch_size=size)


@both_reductions
@pytest.mark.parametrize("layer", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("name", ["centred", "moved-roll", "moved-flip", "cumsum", "sort"])
def test_before_a_recurrent_layer(name: str, layer: str, reduction: str) -> None:
    f, op = ALL[name]
    module = Run(lambda m, x: m.l(f(x))[0], l=getattr(nn, layer)(C, 2, batch_first=True))
    refused(module, r(B, 5, C), op=op, loss_reduction=reduction)


@pytest.mark.parametrize("name", ["centred", "moved-roll", "sort"])
def test_before_a_convolution(name: str) -> None:
    f, op = ALL[name]
    refused(Run(lambda m, x: m.l(f(x)), l=nn.Conv1d(C, 2, 2)), r(B, C, 5), op=op)


def test_the_input_changed_in_place() -> None:
    refused(Run(lambda m, x: m.a(x.sub_(x.mean(0))), a=nn.Linear(C, 2)), r(B, C), op="mean")
    refused(Run(lambda m, x: (x.__setitem__(0, x[1]), m.a(x))[1], a=nn.Linear(C, 2)), r(B, C), op="__setitem__")


def test_a_second_backward_is_refused_as_the_first() -> None:
    module = Run(lambda m, x: m.a(x - x.mean(0)), a=nn.Linear(C, 2)).double()
    loss = call_for_per_sample_grads(module)(r(B, C)).square().sum()
    for _ in range(2):
        with pytest.raises(ps.InteractionError, match="samples interact in mean"):
            loss.backward(retain_graph=True)
    assert getattr(module.a.weight, "grad_sample", None) is None


def test_a_backward_of_another_result_is_refused_for_what_it_uses() -> None:
    def body(m: Run, x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        return m.a(x) * scale, m.b(x.flip(0)), m.b(x - x.mean(0))

    module = Run(body, a=nn.Linear(C, 2), b=nn.Linear(C, 2)).double()
    apart, *others = call_for_per_sample_grads(module)(r(B, C), r(B, 2, grad=True))
    apart.square().sum().backward(retain_graph=True)
    for out, op in zip(others, ["flip", "mean"], strict=True):
        for p in module.parameters():
            p.grad_sample = None
        with pytest.raises(ps.InteractionError, match=f"samples interact in {op}"):
            out.square().sum().backward(retain_graph=True)


def test_an_answer_of_another_call_is_not_taken() -> None:
    """The same functions of the same shapes, with other indices."""
    module = Run(lambda m, x, order: m.a(x[order[:, 0]]), a=nn.Linear(C, 2)).double()
    still, moved = torch.arange(B).reshape(B, 1), torch.arange(B).flip(0).reshape(B, 1)
    check_rows(module, r(B, C), still)
    refused(module, r(B, C), moved, op="__getitem__")
    check_rows(module, r(B, C), still)


def test_a_constant_that_decides() -> None:
    """A matrix that was the identity, and is not any more."""
    matrix = torch.eye(B)
    module = Run(lambda m, x: m.a(matrix @ x), a=nn.Linear(C, 2)).double()
    check_rows(module, r(B, C))
    matrix[0, 1] = 1e-6
    refused(module, r(B, C), op="matmul")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MEETINGS, *MOVES])
@pytest.mark.parametrize("B", [2, 3, 17])
def test_other_sizes_of_the_batch(name: str, B: int) -> None:
    f, op = {**MEETINGS, **MOVES}[name]
    refused(chain(lambda m, x: m.a(f(x))), r(B, C), op=op)


class TestLossesInside:
    """A mean over samples inside of the module has no batch, but data that went into it do."""

    def body(self, f: Function) -> Run:
        return Run(lambda m, x, y: torch.nn.functional.mse_loss(m.a(x), f(y)), a=nn.Linear(C, 2))

    def test_targets_apart(self) -> None:
        module, x, y = self.body(lambda y: y * 2).double(), r(B, C), r(B, 2)
        call_for_per_sample_grads(module, loss_reduction="mean")(x, y).backward()
        want = torch.stack(
            [torch.autograd.grad((module.a(x[i]) - 2 * y[i]).square().mean(), module.a.weight)[0] for i in range(B)]
        )
        torch.testing.assert_close(module.a.weight.grad_sample, want)

    @pytest.mark.parametrize("name", ["centred", "cumsum", "softmax", "gram"])
    def test_targets_mixed(self, name: str) -> None:
        f, op = ALL[name]
        refused(self.body(f), r(B, C), r(B, 2), op=op, losses=lambda loss: loss, loss_reduction="mean")


@pytest.mark.parametrize("where", ["between", "after", "under-frozen"])
@pytest.mark.parametrize(
    "name", [name for name in ALL if name not in ("by-data", "batch_norm", "where", "moved-sorted-by-norm")]
)
def test_functions_of_activations(name: str, where: str) -> None:
    """The graph shows these, and the engine refuses them; a threshold has no gradient, and is not seen."""
    f, _ = ALL[name]
    module = {
        "between": lambda: chain(lambda m, x: m.b(f(m.a(x).tanh()))),
        "after": lambda: chain(lambda m, x: f(m.a(x).tanh())),
        "under-frozen": lambda: chain(lambda m, x: m.f(f(m.a(x).tanh()))),
    }[where]()
    out = call_for_per_sample_grads(module.double())(r(B, C))
    with pytest.raises(
        (ps.InteractionError, ps.UnsupportedError), match=r"samples interact|cannot tell the samples apart"
    ):
        squares(out).sum().backward()
    assert all(getattr(p, "grad_sample", None) is None for p in module.parameters())


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: (x * m.w).sum().expand(B),
        lambda m, x: (x + m.w).sum() * torch.ones(B),
        lambda m, x: torch.where(x > 0, x, m.w).sum().expand(B),
        lambda m, x: torch.where(x > 0, x, m.w).sum() + x,
    ],
)
def test_data_and_a_weight_of_the_same_shape_summed_for_all(body: Callable[[Run, Tensor], Tensor]) -> None:
    """Shapes do not tell these data from a scale of the weight's elements, but they are known to be the samples'."""
    module = Run(body, w=torch.randn(B))
    out = call_for_per_sample_grads(module)(r(B))
    with pytest.raises(ps.UnsupportedError, match="cannot tell the samples apart"):
        out.sum().backward()
    assert getattr(module.w, "grad_sample", None) is None
