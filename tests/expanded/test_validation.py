"""What call_for_per_sample_grads refuses, when, and what the message says."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import persample as ps
from persample import call_for_per_sample_grads
from tests.expanded.helpers import Run, r, says, taken
from tests.reference import assert_same, definition


class TestAtWrapTime:
    @pytest.mark.parametrize("given", ["median", "Sum", "none", None, True])
    def test_loss_reduction(self, module: nn.Module, given: Any) -> None:
        with pytest.raises(RuntimeError, match=says("sum", "mean", given)):
            call_for_per_sample_grads(module, loss_reduction=given)

    @pytest.mark.parametrize(
        ("given", "kind"),
        [
            (lambda x: x, "function"),
            (nn.Linear, "type"),
            (None, "NoneType"),
            (torch.zeros(3), "Tensor"),
            (sum, "builtin"),
        ],
        ids=["function", "class", "None", "tensor", "builtin"],
    )
    def test_not_a_module(self, given: Any, kind: str) -> None:
        with pytest.raises(RuntimeError, match=says("Module", kind)):
            call_for_per_sample_grads(given)

    @pytest.mark.parametrize(
        ("given", "kind"),
        [(4.0, "float"), ("4", "str"), ((4,), "tuple"), (torch.tensor(4), "Tensor"), (True, "bool"), (False, "bool")],
        ids=["float", "str", "tuple", "tensor", "True", "False"],
    )
    def test_type_of_batch_size(self, module: nn.Module, given: Any, kind: str) -> None:
        with pytest.raises(RuntimeError, match=says("batch_size", kind)):
            call_for_per_sample_grads(module, batch_size=given)

    @pytest.mark.parametrize("given", [0, -1, -37])
    def test_value_of_batch_size(self, module: nn.Module, given: int) -> None:
        with pytest.raises(RuntimeError, match=says("batch_size", given)):
            call_for_per_sample_grads(module, batch_size=given)

    @pytest.mark.parametrize("name", ["0.weight", "2.bias"])
    def test_grad_sample_left(self, module: nn.Module, name: str) -> None:
        module.get_parameter(name).grad_sample = r(4, 1)
        with pytest.raises(RuntimeError, match=says(name, "grad_sample")) as caught:
            call_for_per_sample_grads(module)
        assert re.search("clear|None|del", str(caught.value)), "the remedy"
        others = {n for n, _ in module.named_parameters()} - {name}
        assert not any(other in str(caught.value) for other in others)

    def test_grad_sample_that_is_none(self, module: nn.Module) -> None:
        for p in module.parameters():
            p.grad_sample = None
        x = r(4, 3)
        call_for_per_sample_grads(module)(x).sum().backward()
        assert_same(taken(module), definition(module(x).sum(1), module))

    @pytest.mark.parametrize("given", [ps.Norms, "norms", lambda: None], ids=["class", "str", "function"])
    def test_reductions_that_are_none(self, module: nn.Module, given: Any) -> None:
        name = getattr(given, "__name__", given)
        with pytest.raises((TypeError, RuntimeError), match=says(name)):
            call_for_per_sample_grads(module, reductions=[ps.ClippedSum(1.0), given])

    def test_reduction_without_a_list(self, module: nn.Module) -> None:
        with pytest.raises((TypeError, RuntimeError), match=says("reductions")):
            call_for_per_sample_grads(module, reductions=ps.Norms())

    @pytest.mark.parametrize("given", [-1, "1GB", 1.5])
    def test_max_memory(self, module: nn.Module, given: Any) -> None:
        with pytest.raises((TypeError, ValueError, RuntimeError), match=says("max_memory", given)):
            call_for_per_sample_grads(module, reductions=[ps.Norms()], max_memory=given)

    def test_options_are_keywords(self, module: nn.Module) -> None:
        with pytest.raises(TypeError):
            call_for_per_sample_grads(module, 4)


class TestStacksLeft:
    def test_at_call_time(self, module: nn.Module) -> None:
        call = call_for_per_sample_grads(module)
        call(r(4, 3)).sum().backward()
        with pytest.raises(RuntimeError, match=says("0.weight", "grad_sample")) as caught:
            call(r(4, 3))
        assert re.search("clear|None|del", str(caught.value)), "the remedy"

    def test_of_another_wrapper(self, module: nn.Module) -> None:
        one, two = call_for_per_sample_grads(module), call_for_per_sample_grads(module[2])
        one(r(4, 3)).sum().backward()
        with pytest.raises(RuntimeError, match=says("weight", "grad_sample")):
            two(r(4, 2))

    @pytest.mark.parametrize("clear", ["None", "del"])
    def test_cleared(self, module: nn.Module, clear: str) -> None:
        call = call_for_per_sample_grads(module)
        for x in r(3, 4, 3):
            call(x).sum().backward()
            want = definition(module(x).sum(1), module)
            assert_same({name: p.grad_sample for name, p in module.named_parameters()}, want)
            for p in module.parameters():
                if clear == "del":
                    del p.grad_sample
                else:
                    p.grad_sample = None

    def test_second_backward_of_one_call(self, module: nn.Module) -> None:
        x = r(4, 3)
        loss = call_for_per_sample_grads(module)(x).square().sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match=says("0.weight", "grad_sample")):
            loss.backward(retain_graph=True)
        assert_same(taken(module), definition(module(x).square().sum(1), module))

    def test_second_backward_after_clearing(self, module: nn.Module) -> None:
        loss = call_for_per_sample_grads(module)(r(4, 3)).square().sum()
        loss.backward(retain_graph=True)
        first = taken(module)
        loss.backward()
        assert_same(taken(module), first, rtol=1e-15)

    def test_second_backward_of_a_freed_graph(self, module: nn.Module) -> None:
        loss = call_for_per_sample_grads(module)(r(4, 3)).square().sum()
        loss.backward()
        taken(module)
        with pytest.raises(RuntimeError, match="retain_graph"):
            loss.backward()


class TestSecondDerivatives:
    def test_penalty_on_the_gradient_of_inputs(self, module: nn.Module) -> None:
        x = r(4, 3).requires_grad_()
        loss = call_for_per_sample_grads(module)(x).square().sum()
        with pytest.raises(RuntimeError, match="create_graph"):
            torch.autograd.grad(loss, x, create_graph=True)[0].square().sum().backward()
        assert not any(hasattr(p, "grad_sample") for p in module.parameters())


class TestInteraction:
    def test_batch_norm_at_call_time(self) -> None:
        module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
        with pytest.raises(RuntimeError, match=says("batch_norm", "1")) as caught:
            call_for_per_sample_grads(module)(r(4, 3))
        assert re.search(r"BatchNorm1d|'1'|\b1\b", str(caught.value)), "the module"

    def test_batch_norm_names_the_module(self) -> None:
        inner = nn.Sequential(nn.Conv2d(2, 3, 3))
        inner.add_module("my_norm", nn.BatchNorm2d(3))
        module = nn.Sequential()
        module.add_module("features", inner.double())
        with pytest.raises(RuntimeError, match=says("batch_norm", "features.my_norm")):
            call_for_per_sample_grads(module)(r(4, 2, 5, 5))

    def test_batch_norm_leaves_the_module_as_it_was(self) -> None:
        module = nn.BatchNorm1d(3).double()
        before = dict(module.named_parameters())
        with pytest.raises(RuntimeError, match="batch_norm"):
            call_for_per_sample_grads(module)(r(4, 3))
        assert all(p is before[name] for name, p in module.named_parameters())
        assert int(module.num_batches_tracked) <= 1
        x = r(4, 3)
        call_for_per_sample_grads(module.eval())(x).square().sum().backward()
        assert_same(taken(module), definition(module(x).square().sum(1), module))

    @pytest.mark.parametrize(
        "mix",
        [
            lambda x: x - x.mean(0),
            lambda x: x @ x.T,
            lambda x: x.flip(0) * x,
            lambda x: x.cumsum(0),
            lambda x: x.softmax(0),
        ],
        ids=["mean", "product", "flip", "cumsum", "softmax"],
    )
    @pytest.mark.parametrize("where", ["last", "between"])
    def test_other_ways_at_backward(self, module: nn.Module, mix: Any, where: str) -> None:
        x = r(4, 3)
        width = mix(module(x)).shape[1]
        after = nn.Linear(width, 2).double() if where == "between" else nn.Identity()
        called = Run(lambda m, x: m.after(mix(m.inner(x))), inner=module, after=after)
        loss = call_for_per_sample_grads(called)(x).square().sum()
        with pytest.raises(ps.InteractionError):
            loss.backward()
        assert not any(hasattr(p, "grad_sample") for p in called.parameters())


class TestResults:
    def test_before_any_call(self, module: nn.Module) -> None:
        with pytest.raises(RuntimeError, match="backward"):
            call_for_per_sample_grads(module, reductions=[ps.Norms()]).results()

    def test_before_the_backward(self, module: nn.Module) -> None:
        call = call_for_per_sample_grads(module, reductions=[ps.Norms()])
        loss = call(r(4, 3)).sum()
        with pytest.raises(RuntimeError, match="backward"):
            call.results()
        loss.backward()
        assert call.results()[0].shape == (4,)

    def test_twice(self, module: nn.Module) -> None:
        call = call_for_per_sample_grads(module, reductions=[ps.Norms()])
        call(r(4, 3)).sum().backward()
        call.results()
        with pytest.raises(RuntimeError, match="backward"):
            call.results()

    def test_unread(self, module: nn.Module) -> None:
        call = call_for_per_sample_grads(module, reductions=[ps.Norms()])
        call(r(4, 3)).sum().backward()
        with pytest.raises(RuntimeError, match="results"):
            call(r(5, 3))
        assert call.results()[0].shape == (4,)
        call(r(5, 3)).sum().backward()
        assert call.results()[0].shape == (5,)

    def test_unread_at_a_second_backward(self, module: nn.Module) -> None:
        call = call_for_per_sample_grads(module, reductions=[ps.Norms()])
        loss = call(r(4, 3)).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="results"):
            loss.backward()
