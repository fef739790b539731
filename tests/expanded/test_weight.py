"""Expanded weights by themselves: what they are, and functions of them and data outside any recorded module."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import persample as ps
from persample.expanded import ExpandedWeight
from tests.expanded.peer import default_dtype
from tests.reference import assert_same, definition

Shape = tuple[int, ...]
Fn = Callable[..., Tensor]
both_reductions = pytest.mark.parametrize("reduction", ["sum", "mean"])


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        yield


def r(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(shape, requires_grad=grad)


def ids(*shape: int) -> Tensor:
    return torch.randint(0, 6, shape)


def squares(out: Tensor, dim: int = 0) -> Tensor:
    """Losses (B,)."""
    return out.square().movedim(dim, 0).unsqueeze(-1).flatten(1).sum(1)


def total(losses: Tensor, reduction: str = "sum") -> Tensor:
    return losses.sum() if reduction == "sum" else losses.mean()


def expanded(p: Tensor, batch: int = 5, reduction: str = "sum", dim: int = 0, smaller: bool = False) -> ExpandedWeight:
    ew = ExpandedWeight(p, batch, reduction)
    ew.set_batch_first(dim == 0)
    ew.set_allow_smaller_batches(smaller)
    return ew


def check(fn: Fn, x: Tensor, *shapes: Shape, reduction: str = "sum", dim: int = 0) -> None:
    """Per-sample gradients of weights, and the ordinary one of data that want it, are what the definition says."""
    params = [r(*shape, grad=True) for shape in shapes]
    x = x.clone().requires_grad_(x.is_floating_point())
    plain = squares(fn(x, *params), dim)
    want = definition(plain, params)
    weights = [expanded(p, x.shape[dim], reduction, dim) for p in params]
    total(squares(fn(x, *weights), dim), reduction).backward()
    assert_same([p.grad_sample for p in params], want)
    assert all(p.grad is None for p in params)
    if x.requires_grad:
        (dx,) = torch.autograd.grad(total(plain, reduction), x, allow_unused=True)
        if x.grad is None or dx is None:
            assert x.grad is dx
        else:
            torch.testing.assert_close(x.grad, dx, rtol=1e-9, atol=1e-12)


class TestConstruction:
    @pytest.mark.parametrize("wrong", [None, 1.0, [1.0], "w"], ids=repr)
    def test_of_no_tensor(self, wrong: Any) -> None:
        with pytest.raises(RuntimeError, match=type(wrong).__name__):
            ExpandedWeight(wrong, 5, "sum")

    def test_of_a_tensor_without_grad(self) -> None:
        with pytest.raises(RuntimeError, match=r"requires grad.* \(2, 3\)"):
            ExpandedWeight(r(2, 3), 5, "sum")

    @pytest.mark.parametrize("wrong", ["none", "Sum", None, 3], ids=repr)
    def test_with_another_loss_reduction(self, wrong: Any) -> None:
        with pytest.raises(RuntimeError, match=rf"'sum' or 'mean', not {wrong!r}"):
            ExpandedWeight(r(3, grad=True), 5, wrong)

    @pytest.mark.parametrize("wrong", [-1, "5", 2.0, None], ids=repr)
    def test_with_another_batch_size(self, wrong: Any) -> None:
        with pytest.raises(RuntimeError, match="batch_size"):
            ExpandedWeight(r(3, grad=True), wrong, "sum")

    def test_of_an_expanded_weight(self) -> None:
        with pytest.raises(RuntimeError, match="ExpandedWeight"):
            ExpandedWeight(expanded(r(3, grad=True)), 5, "sum")

    def test_of_a_computed_tensor(self) -> None:
        """Its grad_sample is per sample; the tensors below it hear nothing."""
        base = r(2, 4, grad=True)
        w, x = base * 2, r(5, 4)
        squares(F.linear(x, expanded(w))).sum().backward()
        assert_same([w.grad_sample], definition(squares(F.linear(x, w)), [w]))
        assert base.grad is None


class TestAttributes:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128], ids=str)
    def test_answers_as_the_original(self, dtype: torch.dtype) -> None:
        w = nn.Parameter(torch.randn(2, 3, dtype=dtype).t())
        ew = ExpandedWeight(w, 5, "mean")
        for name in "shape dtype device is_cuda layout ndim itemsize nbytes is_sparse is_quantized".split():
            assert getattr(ew, name) == getattr(w, name), name
        for name in "size dim numel stride is_contiguous data_ptr get_device is_floating_point element_size".split():
            assert getattr(ew, name)() == getattr(w, name)(), name
        assert len(ew) == 3
        assert ew.requires_grad
        assert ew.grad is None
        assert type(ew.data) is Tensor
        assert torch.equal(ew.data, w.data)
        assert (ew.orig_weight, ew.batch_size, ew.loss_reduction) == (w, 5, "mean")
        assert (ew.batch_first, ew.allow_smaller_batches) == (True, False)

    def test_follows_the_originals_data(self) -> None:
        w = r(3, grad=True)
        ew = expanded(w)
        with torch.no_grad():
            w.mul_(2)
        assert torch.equal(ew.detach(), w.detach())
        assert torch.equal(ew.data, w.data)

    def test_repr(self) -> None:
        w = torch.ones(2, requires_grad=True)
        text = repr(ExpandedWeight(w, 5, "mean"))
        assert "ExpandedWeight" in text
        assert "5" in text
        assert repr(w) in text
        assert "ExpandedWeight" in repr(ExpandedWeight(w, 5, "sum") * 2)

    def test_detached_is_a_tensor(self) -> None:
        w = r(3, grad=True)
        plain = expanded(w).detach()
        assert type(plain) is Tensor
        assert not plain.requires_grad


# --- functions of weights alone, and then of data --------------------------------------------------------------------

Case = tuple[Fn, Callable[[], Tensor], list[Shape]]
rows = lambda: r(5, 4)  # noqa: E731


def normalised(x: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return F.linear(x, g * v / v.norm(dim=1, keepdim=True))


WEIGHTS_ALONE: dict[str, Case] = {
    "t": (lambda x, w: x @ w.t(), rows, [(3, 4)]),
    "T": (lambda x, w: x @ w.T, rows, [(3, 4)]),
    "mT": (lambda x, w: x @ w.mT, rows, [(3, 4)]),
    "H": (lambda x, w: x @ w.H, rows, [(3, 4)]),
    "T-twice": (lambda x, w: x @ w.T.T, rows, [(4, 3)]),
    "view": (lambda x, w: x @ w.view(4, 3), rows, [(12,)]),
    "reshape": (lambda x, w: x * w.reshape(-1), rows, [(2, 2)]),
    "permute": (lambda x, w: F.conv1d(x[:, :, None], w.permute(2, 1, 0)), rows, [(1, 4, 3)]),
    "index": (lambda x, w: x @ w[1], rows, [(2, 4, 3)]),
    "slices": (lambda x, w: x[:, 1:] @ w[1:, ::2], rows, [(4, 3)]),
    "mask": (lambda x, w: x @ w[torch.tensor([True, False] * 4)], rows, [(8, 3)]),
    "list-index": (lambda x, w: x @ w[[3, 0, 0, 1]], rows, [(4, 3)]),
    "loop": (lambda x, w: sum(x * row for row in w), rows, [(3, 4)]),
    "unbind": (lambda x, w: x * w.unbind()[1] + w.unbind()[0], rows, [(2, 4)]),
    "chunk": (lambda x, w: x @ w.chunk(2, 1)[0] + x @ w.chunk(2, 1)[1], rows, [(4, 6)]),
    "float": (lambda x, w: x @ w.double(), rows, [(4, 3)]),
    "to": (lambda x, w: x @ w.to(torch.float64).to(w.device), rows, [(4, 3)]),
    "type_as": (lambda x, w: x @ w.type_as(x), rows, [(4, 3)]),
    "type_as-as-long-as-the-batch": (lambda x, w: F.linear(x, w.type_as(x)), rows, [(5, 4)]),
    "to-as": (lambda x, w: x @ w.to(x), rows, [(4, 3)]),
    "clone": (lambda x, w: x @ w.clone().contiguous(), rows, [(4, 3)]),
    "numbers": (lambda x, w: x @ (2 * w + 1 - w / 3), rows, [(4, 3)]),
    "reversed": (lambda x, w: x * (1 - w) / (2 + (1 / (w**2 + 1))), rows, [(4,)]),
    "two-weights": (lambda x, w, v: x @ (w * v + v), rows, [(4, 3), (4, 3)]),
    "product": (lambda x, w, v: x @ (w @ v), rows, [(4, 2), (2, 3)]),
    "constant": (lambda x, w: x @ (w * torch.arange(3.0)), rows, [(4, 3)]),
    "stack": (lambda x, w, v: x @ torch.stack([w, v]).sum(0), rows, [(4, 3), (4, 3)]),
    "cat": (lambda x, w, v: x @ torch.cat([w, v], 1), rows, [(4, 3), (4, 2)]),
    "cat-constant": (lambda x, w: x @ torch.cat([w, torch.ones(1, 3)]), rows, [(3, 3)]),
    "pad": (lambda x, w: x @ F.pad(w, (1, 0, 1, 0)), rows, [(3, 3)]),
    "softmax": (lambda x, w: x * w.softmax(0), rows, [(4,)]),
    "exp-sum": (lambda x, w: x * w.exp().sum(), rows, [(3,)]),
    "normalised": (normalised, rows, [(3, 4), (3, 1)]),
    "weight-norm": (lambda x, v, g: F.linear(x, torch._weight_norm(v, g, 0)), rows, [(3, 4), (3, 1)]),
    "tril": (lambda x, w: x @ w.tril(), rows, [(4, 4)]),
    "diag": (lambda x, w: x @ torch.diag(w), rows, [(4,)]),
    "bias": (lambda x, w, b: F.linear(x, w, b * 2), rows, [(3, 4), (3,)]),
    "low-rank": (lambda x, w, a, b: F.linear(x, w + b @ a), rows, [(3, 4), (2, 4), (3, 2)]),
    "kernel": (lambda x, w: F.conv2d(x[:, None, None], w.flip(3)), rows, [(2, 1, 1, 3)]),
    "table": (lambda x, w: F.embedding(x, w.t()), lambda: ids(5, 2), [(3, 6)]),
    "used-twice": (lambda x, w: (x @ w).tanh() @ w.t(), rows, [(4, 3)]),
    "computed-once-used-twice": (lambda x, w: (lambda v: (x @ v).tanh() @ v.t())(w * 2), rows, [(4, 3)]),
    "penalty-per-sample": (lambda x, w: squares(x @ w) + w.square().sum(), rows, [(4, 3)]),
}

# Functions without any rule of their own: the graph engine follows the samples.
WITH_DATA: dict[str, Case] = {
    "where-data": (lambda x, w: torch.where(x > 0, x, w), rows, [(4,)]),
    "where-weights": (lambda x, w, v: torch.where(x > 0, w, v), rows, [(4,), (4,)]),
    "maximum": (torch.maximum, rows, [(4,)]),
    "pow": (lambda x, w: x.square() ** w, rows, [(4,)]),
    "lerp": (lambda x, w: torch.lerp(x, 2 * x + 1, w), rows, [(4,)]),
    "addcmul": (lambda x, w: torch.addcmul(w, x, x), rows, [(4,)]),
    "atan2": (torch.atan2, rows, [(4,)]),
    "rsub": (lambda x, w: 1 - w * x, rows, [(4,)]),
    "expand": (lambda x, w: torch.cat([x, w.expand(len(x), 4)], 1), rows, [(4,)]),
    "expand_as": (lambda x, w: x * w.expand_as(x), rows, [(4,)]),
    "expand-token": (lambda x, w: torch.cat([w.expand(len(x), 1, 4), x], 1), lambda: r(5, 3, 4), [(4,)]),
    "repeat": (lambda x, w: torch.stack([x, w.repeat(len(x), 1)], 1), rows, [(4,)]),
    "bmm-expand": (lambda x, w: torch.bmm(x, w.expand(len(x), 4, 2)), lambda: r(5, 3, 4), [(4, 2)]),
    "mv": (torch.mv, rows, [(4,)]),
    "inner": (torch.inner, rows, [(3, 4)]),
    "tensordot": (lambda x, w: torch.tensordot(x, w, 1), rows, [(4, 3)]),
    "multi_dot": (lambda x, w, v: torch.linalg.multi_dot([x, w, v]), rows, [(4, 3), (3, 2)]),
    "left": (lambda x, w: w @ x[:, :, None], rows, [(3, 4)]),
    "outer": (torch.outer, lambda: r(5), [(3,)]),
    "cosine": (lambda x, w: F.cosine_similarity(x, w, dim=1), rows, [(1, 4)]),
    "distance": (F.pairwise_distance, rows, [(4,)]),
    "solve": (lambda x, w: torch.linalg.solve(w @ w.T + torch.eye(4), x[:, :, None]), rows, [(4, 4)]),
    "rows-of-a-weight": (lambda i, w: w[i], lambda: ids(5), [(6, 2)]),
    "more-rows": (lambda i, w: w[i], lambda: ids(5, 3), [(6, 2)]),
    "index_select": (lambda i, w: w.index_select(0, i), lambda: ids(5), [(6, 2)]),
    "gather": (lambda i, w: w.gather(0, i), lambda: ids(5, 3), [(6, 3)]),
    "take": (lambda i, w: w.take(i), lambda: ids(5, 3), [(6,)]),
    "masked": (lambda x, w: (x * w).masked_fill(x > 0, 0), rows, [(4,)]),
    "cdist-T=B": (torch.cdist, lambda: r(5, 5, 4), [(5, 4)]),
    "square-weight": (lambda x, w: x @ w, lambda: r(5, 5), [(5, 5)]),
    "weight-as-long-as-the-batch": (lambda x, w: x + w, lambda: r(5, 5), [(5,)]),
}
ALL = {**WEIGHTS_ALONE, **WITH_DATA}


@both_reductions
@pytest.mark.parametrize("name", ALL)
def test_functions(name: str, reduction: str) -> None:
    fn, data, shapes = ALL[name]
    check(fn, data(), *shapes, reduction=reduction)


@pytest.mark.parametrize("B", [1, 0])
@pytest.mark.parametrize("name", ALL)
def test_functions_of_few_samples(name: str, B: int) -> None:
    fn, data, shapes = ALL[name]
    check(fn, data()[:B], *shapes)


BATCH_SECOND: dict[str, tuple[Fn, list[Shape]]] = {
    "linear": (F.linear, [(3, 4), (3,)]),
    "matmul": (torch.matmul, [(4, 3)]),
    "mul": (torch.mul, [(4,)]),
    "layer_norm": (lambda x, w: F.layer_norm(x, (4,), w), [(4,)]),
    "where": (lambda x, w: torch.where(x > 0, x, w), [(4,)]),
    "einsum": (lambda x, w: torch.einsum("tbi,oi->tbo", x, w), [(3, 4)]),
}


@pytest.mark.parametrize("shape", [(3, 5, 4), (5, 5, 4), (3, 1, 4), (3, 0, 4)], ids=["T=3", "T=B", "B=1", "B=0"])
@pytest.mark.parametrize("name", BATCH_SECOND)
def test_batch_second(name: str, shape: Shape) -> None:
    fn, shapes = BATCH_SECOND[name]
    check(fn, r(*shape), *shapes, dim=1)


SLOW: dict[str, tuple[Fn, Callable[[int], Tensor], list[Shape], int]] = {
    "cdist": (torch.cdist, lambda B: r(B, 4), [(3, 4)], 0),
    "conv_tbc": (lambda x, w, b: torch.conv_tbc(x, w, b, 0), lambda B: r(3, B, 4), [(2, 4, 3), (3,)], 1),
    "conv_tbc-T=B": (lambda x, w, b: torch.conv_tbc(x, w, b, 0), lambda B: r(5, B, 4), [(2, 4, 3), (3,)], 1),
}


@pytest.mark.parametrize("B", [5, 1, 0])
@both_reductions
@pytest.mark.parametrize("name", SLOW)
def test_functions_without_a_rule(name: str, B: int, reduction: str) -> None:
    """The exact fallback, which says that it is slow."""
    fn, data, shapes, dim = SLOW[name]
    if B > 1:
        with pytest.warns(ps.PerformanceWarning, match=r"Cdist|ConvTbc"):
            check(fn, data(B), *shapes, reduction=reduction, dim=dim)
    else:
        check(fn, data(B), *shapes, reduction=reduction, dim=dim)


class TestSmallerBatches:
    """Data may hold the first samples only, where that is allowed."""

    FUNCTIONS = pytest.mark.parametrize("fn", [F.linear, torch.inner], ids=["rule", "followed"])

    @FUNCTIONS
    @both_reductions
    @pytest.mark.parametrize("n", [5, 2, 1])
    def test_first_samples(self, fn: Fn, n: int, reduction: str) -> None:
        w, x = r(3, 4, grad=True), r(n, 4)
        want = definition(F.pad(squares(fn(x, w)), (0, 5 - n)), [w])
        scale = 1 if reduction == "sum" else 1 / 5
        (squares(fn(x, expanded(w, 5, reduction, smaller=True))).sum() * scale).backward()
        assert_same([w.grad_sample], want)

    def test_shrinking_over_time(self) -> None:
        w, steps = r(3, 3, grad=True), [r(n, 3) for n in (5, 3, 3, 1)]

        def run(weight: Tensor) -> Tensor:
            h, losses = torch.zeros(5, 3), 0.0
            for x in steps:
                h = (x + F.linear(h[: len(x)], weight)).tanh()
                losses = losses + F.pad(squares(h), (0, 5 - len(h)))
            return losses

        want = definition(run(w), [w])
        run(expanded(w, smaller=True)).sum().backward()
        assert_same([w.grad_sample], want)

    @FUNCTIONS
    def test_more_are_refused(self, fn: Fn) -> None:
        with pytest.raises(RuntimeError, match=r"6.* 5"):
            squares(fn(r(6, 4, grad=True), expanded(r(3, 4, grad=True), smaller=True))).sum().backward()


class TestRefusals:
    @pytest.mark.parametrize("n", [4, 6, 10, 1])
    @pytest.mark.parametrize("fn", [F.linear, torch.inner, torch.cdist], ids=["linear", "inner", "cdist"])
    def test_data_of_another_batch_size(self, fn: Fn, n: int) -> None:
        w = r(3, 4, grad=True)
        with pytest.raises(RuntimeError, match=fn.__name__):
            squares(fn(r(n, 4, grad=True), expanded(w))).sum().backward()
        assert getattr(w, "grad_sample", None) is None

    @pytest.mark.parametrize("fn", [torch.inner, torch.mul, lambda x, w: x * w], ids=["inner", "mul", "times"])
    def test_constants_of_another_batch_size_are_no_samples(self, fn: Fn) -> None:
        w = r(3, 4, grad=True)
        out = fn(r(3, 4), expanded(w))
        with pytest.raises(RuntimeError, match="without passing any sample"):
            out.sum().backward()

    def test_data_without_a_batch(self) -> None:
        with pytest.raises(RuntimeError, match=r"linear.* \(4,\)"):
            F.linear(r(4), expanded(r(3, 4, grad=True)))

    @pytest.mark.parametrize(
        ("other", "said"),
        [
            (lambda p: expanded(p, 4), r"disagree: batch_size (5 and 4|4 and 5)"),
            (lambda p: expanded(p, reduction="mean"), r"loss_reduction ('sum' and 'mean'|'mean' and 'sum')"),
            (lambda p: expanded(p, dim=1), r"batch_first (True and False|False and True)"),
        ],
        ids=["batch_size", "loss_reduction", "batch_first"],
    )
    @pytest.mark.parametrize("fn", [F.linear, lambda x, w, b: torch.addmm(b, x, w.t())], ids=["linear", "addmm"])
    def test_weights_that_disagree(self, fn: Fn, other: Callable[[Tensor], Tensor], said: str) -> None:
        with pytest.raises(RuntimeError, match=said):
            fn(r(5, 4), expanded(r(3, 4, grad=True)), other(r(3, grad=True)))

    def test_weights_that_disagree_without_data(self) -> None:
        with pytest.raises(RuntimeError, match=r"add.* disagree"):
            expanded(r(3, grad=True)) + expanded(r(3, grad=True), 4)

    @pytest.mark.parametrize(
        "penalty",
        [lambda w: (w**2).sum(), lambda w: w.norm(), lambda w: w.sum() * 3, lambda w: (w * r(4)).sum()],
        ids=["square", "norm", "sum", "constant"],
    )
    def test_a_penalty_on_the_weight_alone(self, penalty: Fn) -> None:
        w = r(4, grad=True)
        with pytest.raises(RuntimeError, match="penalties on weights"):
            penalty(expanded(w)).backward()
        assert getattr(w, "grad_sample", None) is None

    def test_a_penalty_beside_a_loss(self) -> None:
        w = r(4, 3, grad=True)
        ew = expanded(w)
        loss = squares(r(5, 4) @ ew).sum()
        with pytest.raises(RuntimeError, match=r"add|penalties"):
            (loss + (ew**2).sum()).backward()
        assert getattr(w, "grad_sample", None) is None

    @pytest.mark.parametrize("fn", [lambda x, w: x * w, F.linear], ids=["mul", "linear"])
    def test_data_changed_in_place_after(self, fn: Fn) -> None:
        w, x = r(4, 4, grad=True), r(5, 1, 4)
        out = fn(x, expanded(w))
        x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    def test_a_weight_changed_in_place_after(self) -> None:
        w, x = r(3, 4, grad=True), r(5, 4, grad=True)
        out = F.linear(x, expanded(w))
        with torch.no_grad():
            w.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("mul_", lambda x, w: x.mul_(w)),
            ("add_", lambda x, w: x.add_(w)),
            ("__iadd__|iadd|add_", lambda x, w: x.__iadd__(w)),
            ("__setitem__", lambda x, w: x.__setitem__(0, w)),
            ("out", lambda x, w: torch.add(x, w, out=torch.empty(5, 4))),
        ],
        ids=["mul_", "add_", "iadd", "setitem", "out"],
    )
    @pytest.mark.parametrize("computed", [False, True], ids=["data", "computed-data"])
    def test_writing_into_data(self, name: str, change: Fn, computed: bool) -> None:
        x = r(5, 4, grad=True).tanh() if computed else r(5, 4)
        with pytest.raises(RuntimeError, match=name):
            change(x, expanded(r(4, grad=True)))

    def test_a_custom_function(self) -> None:
        """It does not offer itself, and so cannot be recorded: nothing is lost silently."""

        class Times(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
                ctx.save_for_backward(x)
                return x * w

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
                return None, (g * ctx.saved_tensors[0]).sum(0)

        w = r(4, grad=True)
        with pytest.raises(RuntimeError, match="gradient came to an expanded weight"):
            Times.apply(r(5, 4), expanded(w)).sum().backward()


class TestBackward:
    def test_the_same_weight_in_two_functions(self) -> None:
        w, x = r(4, 4, grad=True), r(5, 4)
        ew = expanded(w)
        squares(F.linear(F.linear(x, ew).tanh(), ew) + x @ ew).sum().backward()
        want = definition(squares(F.linear(F.linear(x, w).tanh(), w) + x @ w), [w])
        assert_same([w.grad_sample], want)

    def test_two_stand_ins_for_one_weight(self) -> None:
        w, x = r(4, 4, grad=True), r(5, 4)
        squares(F.linear(F.linear(x, expanded(w)).tanh(), expanded(w))).sum().backward()
        assert_same([w.grad_sample], definition(squares(F.linear(F.linear(x, w).tanh(), w)), [w]))

    def test_twice_in_one_function(self) -> None:
        check(lambda x, w: F.bilinear(x, x, torch.stack([w, w])), r(5, 4), (4, 4))
        check(lambda x, w: F.linear(x, w.t(), w[0]), r(5, 4), (4, 3))

    def test_two_backwards_add_up(self) -> None:
        w, x = r(3, 4, grad=True), r(5, 4)
        ew = expanded(w)
        squares(F.linear(x, ew)).sum().backward()
        squares(x @ ew.t() * 2).sum().backward()
        assert_same([w.grad_sample], definition(squares(F.linear(x, w)) + squares(x @ w.t() * 2), [w]))

    @pytest.mark.parametrize("fn", [F.linear, torch.inner, lambda x, w: x @ (2 * w).t()], ids=["rule", "plain", "made"])
    def test_the_same_backward_again(self, fn: Fn) -> None:
        w, x = r(3, 4, grad=True), r(5, 4)
        loss = squares(fn(x, expanded(w))).sum()
        loss.backward(retain_graph=True)
        first = w.grad_sample
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward(retain_graph=True)
        assert w.grad_sample is first
        w.grad_sample = None
        loss.backward()
        assert torch.equal(w.grad_sample, first)
        w.grad_sample = None
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        assert w.grad_sample is None

    def test_beside_a_frozen_weight(self) -> None:
        w, b, x = r(3, 4), r(3, grad=True), r(5, 4)
        squares(F.linear(x, w, expanded(b))).sum().backward()
        assert_same([b.grad_sample], definition(squares(F.linear(x, w, b)), [b]))
        assert not hasattr(w, "grad_sample")

    @pytest.mark.parametrize("B", [5, 3, 4, 1, 0])
    @pytest.mark.parametrize("fn", [F.linear, lambda x, w, b: x @ w.t() + b], ids=["linear", "matmul"])
    def test_beside_a_plain_parameter(self, fn: Fn, B: int) -> None:
        """A plain parameter has its ordinary gradient, also where it is as long as the batch."""
        for plain in (0, 1):
            given, x = [r(3, 4, grad=True), r(3, grad=True)], r(B, 4)
            losses = squares(fn(x, *given))
            want = definition(losses, [given[1 - plain]])
            (ordinary,) = torch.autograd.grad(losses.sum(), [given[plain]])
            args = [p if i == plain else expanded(p, B) for i, p in enumerate(given)]
            squares(fn(x, *args)).sum().backward()
            assert_same([given[1 - plain].grad_sample], want)
            torch.testing.assert_close(given[plain].grad, ordinary)
            assert getattr(given[plain], "grad_sample", None) is None

    def test_inputs_alone_leave_no_trace(self) -> None:
        w, x = r(3, 4, grad=True), r(5, 4, grad=True)
        loss = squares(F.linear(x, expanded(w))).sum()
        (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
        torch.testing.assert_close(dx, torch.autograd.grad(squares(F.linear(x, w)).sum(), x)[0])
        loss.backward(inputs=[x])
        assert getattr(w, "grad_sample", None) is None

    def test_no_grad(self) -> None:
        w, x = r(3, 4, grad=True), r(5, 4)
        ew = expanded(w)
        with torch.no_grad():
            for out, want in [(F.linear(x, ew), F.linear(x, w)), (x @ ew.t(), x @ w.t()), (torch.cdist(x, ew), None)]:
                assert type(out) is Tensor
                assert not out.requires_grad
                assert want is None or torch.equal(out, want)
            half = ew.t()
        squares(F.linear(x, ew) + x @ half).sum().backward()
        losses = squares(F.linear(x, w) + x @ w.t().detach())
        assert_same([w.grad_sample], definition(losses, [w]))

    def test_second_order_is_refused(self) -> None:
        w, x = r(3, 4, grad=True), r(5, 4, grad=True)
        loss = squares(F.linear(x, expanded(w))).sum()
        with pytest.raises(RuntimeError, match="create_graph"):
            torch.autograd.grad(loss, x, create_graph=True)

    def test_a_graph_of_per_sample_gradients_is_refused(self) -> None:
        """There is none, and a loss of them would lack a part."""
        w, x = r(3, 4, grad=True), r(5, 4)
        loss = squares(F.linear(x, expanded(w))).sum()
        with pytest.raises(RuntimeError, match="create_graph"):
            torch.autograd.backward(loss, create_graph=True)
        assert getattr(w, "grad_sample", None) is None

    def test_results_can_be_changed_in_place(self) -> None:
        w, x = r(3, 4, grad=True), r(5, 4)
        out = F.linear(x, expanded(w))
        out.mul_(2)
        squares(out).sum().backward()
        assert_same([w.grad_sample], definition(squares(2 * F.linear(x, w)), [w]))

    def test_several_results(self) -> None:
        check(lambda x, w: (lambda a, b: a * b.exp())(*(x * w).chunk(2, 1)), r(5, 4), (4,))
        w, x = r(4, grad=True), r(5, 4)
        top, _ = torch.max(x * w, 1)
        want = definition(top.square(), [w])
        torch.max(x * expanded(w), 1).values.square().sum().backward()
        assert_same([w.grad_sample], want)


class TestMemory:
    @pytest.mark.parametrize("fn", [F.linear, torch.inner, lambda x, w: x @ (2 * w).t()], ids=["rule", "plain", "made"])
    def test_nothing_outlives_the_results(self, fn: Fn) -> None:
        """Without the help of the garbage collector."""
        w = r(3, 4, grad=True)
        gc.collect()
        gc.disable()
        try:
            x = r(5, 4)
            weight = expanded(w)
            out = fn(x, weight)
            kept = [StorageWeakRef(x.untyped_storage()), StorageWeakRef(out.untyped_storage())]
            seen = weakref.ref(weight)
            del x, out, weight
            assert [ref.expired() for ref in kept] == [True, True]
            assert seen() is None
        finally:
            gc.enable()

    def test_a_backward_frees_what_was_kept(self) -> None:
        w, x = r(3, 4, grad=True), r(5, 4)
        loss = squares(F.linear(x, expanded(w))).sum()
        kept = StorageWeakRef(x.untyped_storage())
        del x
        assert not kept.expired()
        loss.backward()
        gc.collect()
        assert kept.expired()

    def test_the_weight_is_not_copied(self) -> None:
        w = r(3, 4, grad=True)
        assert expanded(w).untyped_storage().data_ptr() == w.untyped_storage().data_ptr()
