"""Expanded weights by themselves: what they are, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from persample.expanded import ExpandedWeight
from tests.expanded.helpers import both_reductions, r, squares
from tests.expanded.weights import Fn, expanded
from tests.reference import assert_same, definition

pytestmark = pytest.mark.usefixtures("float64")


class TestConstruction:
    @pytest.mark.parametrize("wrong", [None, 1.0, [1.0], "w"], ids=repr)
    def test_of_no_tensor(self, wrong: Any) -> None:
        with pytest.raises(RuntimeError, match=type(wrong).__name__):
            ExpandedWeight(wrong, 5, "sum")

    def test_of_a_tensor_without_grad(self) -> None:
        with pytest.raises(RuntimeError, match=r"require_grad.* \(2, 3\)"):
            ExpandedWeight(r(2, 3), 5, "sum")

    @pytest.mark.parametrize("wrong", ["none", "Sum", None, 3], ids=repr)
    def test_with_another_loss_reduction(self, wrong: Any) -> None:
        with pytest.raises(RuntimeError, match=rf"sum or mean, got {wrong!r}"):
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
