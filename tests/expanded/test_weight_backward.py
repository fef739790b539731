"""Backwards through functions of expanded weights, and what they keep."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from tests.expanded.helpers import r, squares
from tests.expanded.weights import Fn, check, expanded
from tests.reference import assert_same, definition

pytestmark = pytest.mark.usefixtures("float64")


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
    @pytest.mark.usefixtures("no_garbage_collector")
    @pytest.mark.parametrize("fn", [F.linear, torch.inner, lambda x, w: x @ (2 * w).t()], ids=["rule", "plain", "made"])
    def test_nothing_outlives_the_results(self, fn: Fn) -> None:
        """Without the help of the garbage collector."""
        w, x = r(3, 4, grad=True), r(5, 4)
        weight = expanded(w)
        out = fn(x, weight)
        kept = [StorageWeakRef(x.untyped_storage()), StorageWeakRef(out.untyped_storage())]
        seen = weakref.ref(weight)
        del x, out, weight
        assert [ref.expired() for ref in kept] == [True, True]
        assert seen() is None

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
