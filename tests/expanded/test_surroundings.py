"""What a call through call_for_per_sample_grads leaves as it is, and what may be around it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import persample as ps
from persample import call_for_per_sample_grads
from tests.expanded.helpers import Run, check, r, squares, taken
from tests.models import mlp
from tests.reference import assert_same, definition


class Counting(nn.Module):
    """Counts its calls in a buffer, and keeps running statistics that its output does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 2), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(self.layer(x))


class TestModule:
    def test_without_gradients(self) -> None:
        module, x = mlp().double(), r(4, 3)
        with torch.no_grad():
            out = call_for_per_sample_grads(module)(x)
        assert not out.requires_grad
        assert torch.equal(out, module(x))
        check(module, x)

    def test_buffers_change_once(self) -> None:
        module, x = Counting().double(), r(5, 4, 3)
        plain = copy.deepcopy(module)
        plain(x)
        assert plain.norm.running_mean.any()
        call_for_per_sample_grads(module)(x).square().sum().backward()
        got, want = dict(module.named_buffers()), dict(plain.named_buffers())
        assert int(got["calls"]) == 1
        torch.testing.assert_close(got, want, rtol=0, atol=0)

    def test_forward_hooks(self) -> None:
        module, seen = mlp().double(), []
        for name, part in module.named_modules():
            part.register_forward_pre_hook(lambda m, a, name=name: seen.append(("before", name)))
            part.register_forward_hook(lambda m, a, out, name=name: seen.append(("after", name)))
        module(r(4, 3))
        want = seen.copy()
        seen.clear()
        call_for_per_sample_grads(module)(r(4, 3)).sum().backward()
        assert seen == want

    def test_forward_hook_that_changes_the_output(self) -> None:
        module = mlp().double()
        module[0].register_forward_hook(lambda m, a, out: 2 * out)
        module.register_forward_hook(lambda m, a, out: out.sin())
        check(module, r(4, 3))

    @pytest.mark.parametrize("wanted", [False, True], ids=["parameters", "inputs_too"])
    def test_backward_hooks(self, wanted: bool) -> None:
        """They run, and what they change is changed."""
        module, x, seen = mlp().double(), r(4, 3).requires_grad_(wanted), []

        def double(m: nn.Module, into: Any, out: Any) -> Any:
            seen.append(out[0])
            return (2 * into[0],)

        module[2].register_full_backward_hook(double)
        squares(module(x)).sum().backward()
        (want,) = seen
        seen.clear()
        for p in module.parameters():
            p.grad = None
        check(module, x)
        assert any(torch.allclose(g, want, rtol=1e-12, atol=0) for g in seen)

    def test_batch_norm_without_gradients(self) -> None:
        """There is nothing to refuse where no gradient is asked for."""
        module, x = nn.BatchNorm1d(3).double(), r(4, 3)
        with torch.no_grad():
            assert torch.equal(call_for_per_sample_grads(module)(x), module(x))

    def test_exception_in_the_forward(self) -> None:
        def fail(m: Run, x: Tensor) -> Tensor:
            m.a(x)
            raise ValueError("out of order")

        module, x = Run(fail, a=mlp()).double(), r(4, 3)
        before, call = dict(module.named_parameters()), call_for_per_sample_grads(module)
        with pytest.raises(ValueError, match="out of order"):
            call(x)
        assert [*module.named_parameters()] == [*before.items()]
        module.body = lambda m, x: m.a(x)
        call(x).square().sum().backward()
        assert_same(taken(module), definition(squares(module(x)), module))

    @pytest.mark.parametrize("options", [{}, {"reductions": [ps.Norms()]}], ids=["stacks", "reductions"])
    def test_exception_in_the_backward(self, options: dict[str, Any]) -> None:
        """Nothing is left of the call that failed."""
        module, x = Run(lambda m, x: m.a(x) - m.a(x).mean(0), a=mlp()).double(), r(4, 3)
        call = call_for_per_sample_grads(module, **options)
        loss = call(x).square().sum()
        with pytest.raises(ps.InteractionError):
            loss.backward()
        assert all(p.grad is None and not hasattr(p, "grad_sample") for p in module.parameters())
        module.body = lambda m, x: m.a(x)
        squares(call(x)).sum().backward()
        if options:
            torch.testing.assert_close(call.results()[0], ps.norms(squares(module(x)), module), rtol=1e-12, atol=0)
        else:
            assert_same(taken(module), definition(squares(module(x)), module))

    @pytest.mark.parametrize(
        ("forward", "backward"),
        [
            (torch.autograd.graph.save_on_cpu, nullcontext),
            (partial(torch.autograd.graph.saved_tensors_hooks, torch.clone, lambda t: t), nullcontext),
            (torch.enable_grad, torch.no_grad),
            (torch.enable_grad, torch.inference_mode),
            (torch.enable_grad, partial(torch.autocast, "cpu", torch.bfloat16)),
        ],
        ids=["save_on_cpu", "saved_tensors_hooks", "no_grad", "inference_mode", "autocast"],
    )
    def test_surroundings(self, forward: Callable[[], Any], backward: Callable[[], Any]) -> None:
        module, x = mlp().double(), r(4, 3)
        want = definition(squares(module(x)), module)
        with forward():
            loss = squares(call_for_per_sample_grads(module)(x)).sum()
        with backward():
            loss.backward()
        assert_same(taken(module), want)

    def test_parameters_during_and_after_the_call(self) -> None:
        module = mlp().double()
        before = {name: id(p) for name, p in module.named_parameters()}
        out = call_for_per_sample_grads(module)(r(4, 3))
        assert {name: id(p) for name, p in module.named_parameters()} == before
        assert all(type(p) is nn.Parameter and p.is_leaf and p.requires_grad for p in module.parameters())
        out.sum().backward()
        assert {name: id(p) for name, p in module.named_parameters()} == before

    def test_deepcopy_and_pickle(self) -> None:
        module, x = mlp().double(), r(4, 3)
        attributes = set(vars(module))
        copies = [copy.deepcopy(module)]
        check(module, x)
        copies += [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), _saved(module)]
        call_for_per_sample_grads(module)(x).square().sum().backward()
        copies += [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
        assert set(vars(module)) == attributes
        for other in copies:
            for p in other.parameters():
                p.grad_sample = None
            check(other, x)
        assert all(p.grad_sample is not None for p in module.parameters()), "the copies have their own"

    @pytest.mark.parametrize("rate", [0.5, 0.9])
    def test_dropout(self, rate: float) -> None:
        """The gradients are those of the batch as it was run."""
        check(nn.Sequential(nn.Linear(3, 8), nn.Dropout(rate), nn.Linear(8, 2)).double(), r(6, 3))

    def test_dropout_draws_the_same_numbers(self) -> None:
        module, x = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5)).double(), r(6, 3)
        torch.manual_seed(1)
        module(x)
        want = torch.rand(3)
        torch.manual_seed(1)
        call_for_per_sample_grads(module)(x).sum().backward()
        assert torch.equal(torch.rand(3), want)

    def test_layer_cast_inside(self) -> None:
        """To the dtype it has: nothing changes, as in routers that are kept in single precision."""
        check(Run(lambda m, x: m.a.to(x.dtype)(x), a=mlp()).double(), r(4, 3))

    def test_vmap_inside(self) -> None:
        check(Run(lambda m, x: torch.func.vmap(m.a)(x), a=mlp()).double(), r(4, 3))

    def test_gradients_inside(self) -> None:
        """As of an energy with respect to positions."""

        def forces(m: Run, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            return torch.autograd.grad(m.a(x).square().sum(), x, create_graph=True)[0]

        check(Run(forces, a=mlp()).double(), r(4, 3))

    def test_call_in_a_checkpoint(self) -> None:
        module, x = mlp().double(), r(4, 3).requires_grad_()
        want = definition(squares(module(x)), module)
        squares(checkpoint(call_for_per_sample_grads(module), x, use_reentrant=False)).sum().backward()
        assert_same(taken(module), want)

    @pytest.mark.parametrize("seed", range(8))
    def test_indices_in_a_checkpoint(self, seed: int) -> None:
        """They are read again for every guess where samples lie, of which some numbers need several."""
        torch.manual_seed(seed)
        module = Run(
            lambda m, x: checkpoint(lambda h: F.linear(h, m.v[[1, 0]].t()).relu(), x * m.w, use_reentrant=False).std(
                (1, 2, 3)
            ),
            w=nn.Parameter(r(1, 1, 1)),
            v=nn.Parameter(r(2, 2)),
        )
        x = r(2, 1, 1, 2)
        want = definition(module(x), module)
        call_for_per_sample_grads(module)(x).sum().backward()
        for name, p in module.named_parameters():
            torch.testing.assert_close(p.grad_sample, want[name], equal_nan=True)

    def test_autocast(self) -> None:
        """Forward and loss under autocast, backward outside, as PyTorch recommends."""
        module, x = mlp(dtype=torch.float32), torch.randn(4, 3)
        with torch.autocast("cpu", torch.bfloat16):
            want = definition(squares(module(x).float()), module)
            out = call_for_per_sample_grads(module)(x)
            loss = squares(out.float()).sum()
        assert out.dtype == torch.bfloat16
        loss.backward()
        stacks = taken(module)
        assert all(g.dtype == torch.float32 for g in stacks.values())
        assert_same(stacks, want, rtol=2e-2)


def _saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
