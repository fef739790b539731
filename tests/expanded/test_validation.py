"""What call_for_per_sample_grads refuses, when, and what the message says."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import persample as ps
from persample import call_for_per_sample_grads
from tests.expanded.peer import Run, mlp, taken
from tests.reference import assert_same, definition


def says(*parts: object) -> str:
    """A pattern that finds all of these, in any order."""
    return "(?s)" + "".join(f"(?=.*{re.escape(str(part))})" for part in parts)


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture
def module() -> nn.Module:
    return mlp().double()


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
        module.get_parameter(name).grad_sample = data(4, 1)
        with pytest.raises(RuntimeError, match=says(name, "grad_sample")) as caught:
            call_for_per_sample_grads(module)
        assert re.search("clear|None|del", str(caught.value)), "the remedy"
        others = {n for n, _ in module.named_parameters()} - {name}
        assert not any(other in str(caught.value) for other in others)

    def test_grad_sample_that_is_none(self, module: nn.Module) -> None:
        for p in module.parameters():
            p.grad_sample = None
        x = data(4, 3)
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


class TestBatchSizeFromInputs:
    @pytest.mark.parametrize(
        ("args", "kwargs"),
        [
            ((data(4, 3), data(5, 3)), {}),
            ((data(4, 3),), {"y": data(5, 3)}),
            (([data(4, 3), data(5, 3)],), {}),
            (({"a": data(4, 3), "b": {"c": (data(5, 3),)}},), {}),
            ((data(4, 3), "text", None, {"mask": torch.ones(5, dtype=torch.bool)}), {}),
        ],
        ids=["args", "kwargs", "list", "nested", "mask"],
    )
    def test_tensors_disagree(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        called = Run(lambda m, *args, **kwargs: pytest.fail("the module was run"), inner=module)
        with pytest.raises(RuntimeError, match=says(4, 5, "batch_size=")):
            call_for_per_sample_grads(called)(*args, **kwargs)

    def test_tensors_disagree_in_dim_1(self, module: nn.Module) -> None:
        called = Run(lambda m, x, y: m.inner(x), inner=module)
        with pytest.raises(RuntimeError, match=says(4, 6, "batch_size=")):
            call_for_per_sample_grads(called, batch_first=False)(data(5, 4, 3), data(5, 6, 3))

    def test_tensors_agree_in_dim_1_alone(self, module: nn.Module) -> None:
        called, x, y = Run(lambda m, x, y: m.inner(x), inner=module), data(5, 4, 3), data(6, 4)
        call_for_per_sample_grads(called, batch_first=False)(x, y).square().sum().backward()
        assert_same(taken(called), definition(called(x, y).square().sum((0, 2)), called))

    @pytest.mark.parametrize("args", [(), (3, "a", None), ([{}, 1.5],)], ids=["none", "others", "nested"])
    def test_no_tensor(self, module: nn.Module, args: Any) -> None:
        called = Run(lambda m, *args: m.inner(data(4, 3)), inner=module)
        with pytest.raises(RuntimeError, match="batch_size"):
            call_for_per_sample_grads(called)(*args)

    def test_no_tensor_and_batch_size_given(self, module: nn.Module) -> None:
        x = data(4, 3)
        called = Run(lambda m, scale: m.inner(x) * scale, inner=module)
        call_for_per_sample_grads(called, batch_size=4)(2.0).square().sum().backward()
        assert_same(taken(called), definition(called(2.0).square().sum(1), called))

    def test_tensors_disagree_and_batch_size_given(self, module: nn.Module) -> None:
        """A mask (T, T) and positions (1, T) beside the data."""
        x, mask, places = data(4, 5, 3), torch.ones(5, 5).tril().double(), torch.arange(5)[None]
        called = Run(
            lambda m, x, mask, places: mask @ m.inner(x) + m.e(places), inner=module, e=nn.Embedding(5, 2).double()
        )
        call_for_per_sample_grads(called, batch_size=4)(x, mask, places=places).square().sum().backward()
        assert_same(taken(called), definition(called(x, mask, places).square().sum((1, 2)), called))

    @pytest.mark.parametrize("given", [3, 5, 8])
    def test_batch_size_given_is_not_the_inputs(self, module: nn.Module, given: int) -> None:
        """No later than in the backward, and before anything is written."""
        with pytest.raises(RuntimeError, match=says(given, 4)):
            call_for_per_sample_grads(module, batch_size=given)(data(4, 3)).square().sum().backward()
        assert not any(hasattr(p, "grad_sample") for p in module.parameters())

    def test_scalar_beside_the_data(self, module: nn.Module) -> None:
        """A tensor without dims has no place for samples, and says nothing about their number."""
        x, scale = data(4, 3), torch.tensor(2.0, dtype=torch.float64)
        called = Run(lambda m, x, scale: m.inner(x) * scale, inner=module)
        call_for_per_sample_grads(called)(x, scale).square().sum().backward()
        assert_same(taken(called), definition(called(x, scale).square().sum(1), called))

    def test_scalars_alone(self, module: nn.Module) -> None:
        called = Run(lambda m, scale: m.inner(data(4, 3)) * scale, inner=module)
        with pytest.raises(RuntimeError, match="batch_size"):
            call_for_per_sample_grads(called)(torch.tensor(2.0))

    def test_labels_beside_data_in_dim_1(self, module: nn.Module) -> None:
        """A vector has its samples in the only dim there is."""
        called, x, y = Run(lambda m, x, y: m.inner(x) * y[:, None], inner=module), data(5, 4, 3), data(4)
        call_for_per_sample_grads(called, batch_first=False)(x, y).square().sum().backward()
        assert_same(taken(called), definition(called(x, y).square().sum((0, 2)), called))

    def test_output_without_samples(self, module: nn.Module) -> None:
        out = call_for_per_sample_grads(module, batch_first=False)(data(3))
        with pytest.raises(RuntimeError, match=says(3)):
            out.sum().backward()
        assert not any(hasattr(p, "grad_sample") for p in module.parameters())

    @pytest.mark.parametrize("given", [1, 2, 3])
    def test_folded_inputs(self, module: nn.Module, given: int) -> None:
        """Positions of one sample after another, or two crops one after the other: nobody can know."""
        with pytest.raises(RuntimeError, match=says(given, 6)):
            call_for_per_sample_grads(module, batch_size=given)(data(6, 3)).square().sum().backward()
        assert not any(hasattr(p, "grad_sample") for p in module.parameters())

    def test_inputs_of_other_sizes(self, module: nn.Module) -> None:
        """One of them has the samples that were announced."""
        x, lengths, scale = data(4, 5, 3), torch.ones(4, 5), data(5)
        called = Run(lambda m, x, lengths, scale: m.inner(x) * (lengths * scale)[..., None], inner=module)
        call_for_per_sample_grads(called, batch_size=4)(x, lengths, scale).square().sum().backward()
        assert_same(taken(called), definition(called(x, lengths, scale).square().sum((1, 2)), called))

    def test_numpy_integer(self, module: nn.Module) -> None:
        """It is no Python int; the message says what it is."""
        with pytest.raises(RuntimeError, match="int64"):
            call_for_per_sample_grads(module, batch_size=np.int64(4))

    @pytest.mark.parametrize("batch_size", [None, 3])
    @pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
    @pytest.mark.parametrize("asked", ["output", "state"])
    def test_packed_sequence(self, kind: type[nn.Module], batch_size: int | None, asked: str) -> None:
        packed = pack_padded_sequence(data(3, 5, 2), torch.tensor([2, 5, 3]), batch_first=True, enforce_sorted=False)
        called = kind(2, 4, num_layers=3).double()

        def losses(out: tuple[PackedSequence, Any]) -> Tensor:
            if asked == "output":
                return pad_packed_sequence(out[0], batch_first=True)[0].square().sum((1, 2))
            return (out[1][0] if isinstance(out[1], tuple) else out[1]).square().sum((0, 2))

        losses(call_for_per_sample_grads(called, batch_size=batch_size)(packed)).sum().backward()
        assert_same(taken(called), definition(losses(called(packed)), called))


class TestStacksLeft:
    def test_at_call_time(self, module: nn.Module) -> None:
        call = call_for_per_sample_grads(module)
        call(data(4, 3)).sum().backward()
        with pytest.raises(RuntimeError, match=says("0.weight", "grad_sample")) as caught:
            call(data(4, 3))
        assert re.search("clear|None|del", str(caught.value)), "the remedy"

    def test_of_another_wrapper(self, module: nn.Module) -> None:
        one, two = call_for_per_sample_grads(module), call_for_per_sample_grads(module[2])
        one(data(4, 3)).sum().backward()
        with pytest.raises(RuntimeError, match=says("weight", "grad_sample")):
            two(data(4, 2))

    @pytest.mark.parametrize("clear", ["None", "del"])
    def test_cleared(self, module: nn.Module, clear: str) -> None:
        call = call_for_per_sample_grads(module)
        for x in data(3, 4, 3):
            call(x).sum().backward()
            want = definition(module(x).sum(1), module)
            assert_same({name: p.grad_sample for name, p in module.named_parameters()}, want)
            for p in module.parameters():
                if clear == "del":
                    del p.grad_sample
                else:
                    p.grad_sample = None

    def test_second_backward_of_one_call(self, module: nn.Module) -> None:
        x = data(4, 3)
        loss = call_for_per_sample_grads(module)(x).square().sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match=says("0.weight", "grad_sample")):
            loss.backward(retain_graph=True)
        assert_same(taken(module), definition(module(x).square().sum(1), module))

    def test_second_backward_after_clearing(self, module: nn.Module) -> None:
        loss = call_for_per_sample_grads(module)(data(4, 3)).square().sum()
        loss.backward(retain_graph=True)
        first = taken(module)
        loss.backward()
        assert_same(taken(module), first, rtol=1e-15)

    def test_second_backward_of_a_freed_graph(self, module: nn.Module) -> None:
        loss = call_for_per_sample_grads(module)(data(4, 3)).square().sum()
        loss.backward()
        taken(module)
        with pytest.raises(RuntimeError, match="retain_graph"):
            loss.backward()


class TestSecondDerivatives:
    def test_penalty_on_the_gradient_of_inputs(self, module: nn.Module) -> None:
        x = data(4, 3).requires_grad_()
        loss = call_for_per_sample_grads(module)(x).square().sum()
        with pytest.raises(RuntimeError, match="create_graph"):
            torch.autograd.grad(loss, x, create_graph=True)[0].square().sum().backward()
        assert not any(hasattr(p, "grad_sample") for p in module.parameters())


class TestInteraction:
    def test_batch_norm_at_call_time(self) -> None:
        module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
        with pytest.raises(RuntimeError, match=says("batch_norm", "1")) as caught:
            call_for_per_sample_grads(module)(data(4, 3))
        assert re.search(r"BatchNorm1d|'1'|\b1\b", str(caught.value)), "the module"

    def test_batch_norm_names_the_module(self) -> None:
        inner = nn.Sequential(nn.Conv2d(2, 3, 3))
        inner.add_module("my_norm", nn.BatchNorm2d(3))
        module = nn.Sequential()
        module.add_module("features", inner.double())
        with pytest.raises(RuntimeError, match=says("batch_norm", "features.my_norm")):
            call_for_per_sample_grads(module)(data(4, 2, 5, 5))

    def test_batch_norm_leaves_the_module_as_it_was(self) -> None:
        module = nn.BatchNorm1d(3).double()
        before = dict(module.named_parameters())
        with pytest.raises(RuntimeError, match="batch_norm"):
            call_for_per_sample_grads(module)(data(4, 3))
        assert all(p is before[name] for name, p in module.named_parameters())
        assert int(module.num_batches_tracked) <= 1
        x = data(4, 3)
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
        x = data(4, 3)
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
        loss = call(data(4, 3)).sum()
        with pytest.raises(RuntimeError, match="backward"):
            call.results()
        loss.backward()
        assert call.results()[0].shape == (4,)

    def test_twice(self, module: nn.Module) -> None:
        call = call_for_per_sample_grads(module, reductions=[ps.Norms()])
        call(data(4, 3)).sum().backward()
        call.results()
        with pytest.raises(RuntimeError, match="backward"):
            call.results()

    def test_unread(self, module: nn.Module) -> None:
        call = call_for_per_sample_grads(module, reductions=[ps.Norms()])
        call(data(4, 3)).sum().backward()
        with pytest.raises(RuntimeError, match="results"):
            call(data(5, 3))
        assert call.results()[0].shape == (4,)
        call(data(5, 3)).sum().backward()
        assert call.results()[0].shape == (5,)

    def test_unread_at_a_second_backward(self, module: nn.Module) -> None:
        call = call_for_per_sample_grads(module, reductions=[ps.Norms()])
        loss = call(data(4, 3)).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="results"):
            loss.backward()
