"""What a call through call_for_per_sample_grads does and leaves alone, beside the gradients themselves."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import persample as ps
from persample import call_for_per_sample_grads
from tests.expanded.peer import Run, mlp, taken
from tests.reference import assert_same, definition, named

both_reductions = pytest.mark.parametrize("reduction", ["sum", "mean"])


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def total(losses: Tensor, reduction: str) -> Tensor:
    return losses.sum() if reduction == "sum" else losses.mean()


def squares(out: Tensor) -> Tensor:
    return out.square().sum(tuple(range(1, out.ndim)))


def check(module: nn.Module, *args: Any, losses: Callable[[Any], Tensor] = squares, **options: Any) -> Any:
    """Call, backward, and compare with the definition on the plain module; the output of the call."""
    torch.manual_seed(0)
    want = definition(losses(module(*args)), module)
    torch.manual_seed(0)
    out = call_for_per_sample_grads(module, **options)(*args)
    total(losses(out), options.get("loss_reduction", "sum")).backward()
    assert_same(taken(module), want)
    return out


class Documented(nn.Module):
    """A module with a forward to be recognised by."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """A scaled layer."""
        return self.layer(x) * scale


class TestCallable:
    def test_signature_and_docs(self) -> None:
        module = Documented()
        call = call_for_per_sample_grads(module)
        assert inspect.signature(call) == inspect.signature(module.forward)
        assert call.__doc__ == "A scaled layer."
        assert call.__name__ == "forward"

    def test_keywords_are_passed_on(self) -> None:
        module, x = Documented().double(), data(4, 3)
        call_for_per_sample_grads(module)(x, scale=3.0).square().sum().backward()
        assert_same(taken(module), definition(squares(module(x, scale=3.0)), module))

    def test_keywords_alone(self) -> None:
        module, x = Documented().double(), data(4, 3)
        call_for_per_sample_grads(module)(x=x).square().sum().backward()
        assert_same(taken(module), definition(squares(module(x)), module))

    def test_output_is_the_modules(self) -> None:
        module, x = mlp().double(), data(4, 3)
        torch.testing.assert_close(call_for_per_sample_grads(module)(x), module(x), rtol=0, atol=0)


class TestParameters:
    @both_reductions
    def test_grad_stays_none(self, reduction: str) -> None:
        module = mlp().double()
        check(module, data(4, 3), loss_reduction=reduction)
        assert all(p.grad is None for p in module.parameters())

    def test_grad_stays_what_it_was(self) -> None:
        module, x = mlp().double(), data(4, 3)
        before = {name: torch.randn_like(p) for name, p in module.named_parameters()}
        for name, p in module.named_parameters():
            p.grad = before[name].clone()
        held = {name: p.grad for name, p in module.named_parameters()}
        call_for_per_sample_grads(module)(x).square().sum().backward()
        for name, p in module.named_parameters():
            assert p.grad is held[name]
            assert torch.equal(p.grad, before[name])
            assert p.grad_sample.shape == (4, *p.shape)

    def test_frozen(self) -> None:
        module = mlp().double()
        module[0].weight.requires_grad_(False)
        module[2].bias.requires_grad_(False)
        check(module, data(4, 3))
        assert not hasattr(module[0].weight, "grad_sample")
        assert not hasattr(module[2].bias, "grad_sample")

    def test_all_frozen(self) -> None:
        module, x = mlp().double().requires_grad_(False), data(4, 3).requires_grad_()
        call_for_per_sample_grads(module)(x).sum().backward()
        assert x.grad is not None
        assert not any(hasattr(p, "grad_sample") for p in module.parameters())

    def test_frozen_and_thawed_after_wrapping(self) -> None:
        module, x = mlp().double(), data(4, 3)
        module[0].weight.requires_grad_(False)
        call = call_for_per_sample_grads(module)
        module[0].weight.requires_grad_(True)
        module[2].weight.requires_grad_(False)
        call(x).square().sum().backward()
        assert not hasattr(module[2].weight, "grad_sample")
        assert_same(taken(module), definition(squares(module(x)), module))

    def test_replaced_after_wrapping(self) -> None:
        module, x = mlp().double(), data(4, 3)
        call, old = call_for_per_sample_grads(module), module[0].weight
        module[0].weight = nn.Parameter(data(2, 3))
        call(x).square().sum().backward()
        assert not hasattr(old, "grad_sample")
        assert_same(taken(module), definition(squares(module(x)), module))

    def test_used_several_times(self) -> None:
        layer = nn.Linear(3, 3).double()
        check(Run(lambda m, x: m.a(m.a(x).tanh()) + F.linear(x, m.a.weight), a=layer), data(4, 3))

    def test_tied_under_two_names(self) -> None:
        module = nn.Sequential(nn.Embedding(6, 3), nn.Tanh(), nn.Linear(3, 6)).double()
        module[2].weight = module[0].weight
        check(module, torch.randint(6, (4, 5)))
        assert set(named(module)) == {"0.weight", "2.bias"}

    @pytest.mark.parametrize("B", [4, 1, 0])
    def test_unreached(self, B: int) -> None:
        module = Run(lambda m, x: (m.a(x), m.b(x)), a=nn.Linear(3, 2), b=nn.Linear(3, 2), c=nn.Linear(3, 2)).double()
        x = data(B, 3)
        call_for_per_sample_grads(module)(x)[0].square().sum().backward()
        stacks = taken(module)
        assert_same(stacks, definition(squares(module(x)[0]), module))
        for name in ("b.weight", "b.bias", "c.weight", "c.bias"):
            assert not stacks[name].any()

    @both_reductions
    @pytest.mark.parametrize("B", [1, 0])
    def test_few_samples(self, B: int, reduction: str) -> None:
        check(mlp().double(), data(B, 3), loss_reduction=reduction)

    def test_mean_is_sum(self) -> None:
        module, x = mlp().double(), data(4, 3)
        stacks = []
        for reduction in ("sum", "mean"):
            total(squares(call_for_per_sample_grads(module, loss_reduction=reduction)(x)), reduction).backward()
            stacks.append(taken(module))
        assert_same(*stacks, rtol=1e-14)

    def test_loss_that_mixes_samples_after_the_call(self) -> None:
        """What each sample's own path contributes, of which the sum is the plain gradient."""
        module, x = mlp().double(), data(4, 3)
        plain = module(x)
        (cotangent,) = torch.autograd.grad(_mixed(leaf := plain.detach().requires_grad_()), leaf)
        want = definition((plain * cotangent).sum(1), module)
        _mixed(call_for_per_sample_grads(module)(x)).backward()
        assert_same(taken(module), want)


def _mixed(out: Tensor) -> Tensor:
    return (out @ out.T).logsumexp(1).sum()


class TestGradientsElsewhere:
    @both_reductions
    def test_inputs(self, reduction: str) -> None:
        """Those of the user's loss: never multiplied by the batch size."""
        module = Run(lambda m, x, more: m.a(x) + m.b(more["y"][0]), a=nn.Linear(3, 2), b=nn.Linear(4, 2)).double()
        x, y = data(5, 3).requires_grad_(), data(5, 4).requires_grad_()
        want = torch.autograd.grad(total(squares(module(x, {"y": [y]})), reduction), (x, y))
        check(module, x, {"y": [y]}, loss_reduction=reduction)
        torch.testing.assert_close((x.grad, y.grad), want, rtol=1e-12, atol=0)

    def test_of_what_is_hidden_in_an_object(self) -> None:
        """Inputs where nobody looks for them have their gradients all the same."""
        before, module, x = nn.Linear(3, 3).double(), Run(lambda m, box: m.a(box.logits), a=mlp()).double(), data(4, 3)
        (want,) = torch.autograd.grad(squares(module(Object(before(x), x))).sum(), before.weight)
        squares(call_for_per_sample_grads(module, batch_size=4)(Object(before(x), x))).sum().backward()
        torch.testing.assert_close(before.weight.grad, want, rtol=1e-12, atol=0)

    def test_of_inputs_that_the_module_changes_in_place(self) -> None:
        before, module, x = nn.Linear(3, 3).double(), nn.Sequential(nn.ReLU(True), nn.Linear(3, 2)).double(), data(4, 3)
        (want,) = torch.autograd.grad(squares(module(before(x))).sum(), before.weight)
        check(module, before(x).detach())
        squares(call_for_per_sample_grads(module)(before(x))).sum().backward()
        torch.testing.assert_close(before.weight.grad, want, rtol=1e-12, atol=0)
        assert_same(taken(module), definition(squares(module(before(x))), module))

    def test_of_a_parameter_that_is_an_argument_too(self) -> None:
        module = Run(lambda m, x, w: m.a(x) @ w, a=nn.Linear(3, 2), w=torch.randn(2, 2)).double()
        check(module, data(4, 3), module.w, batch_size=4)

    def test_what_comes_before_and_after(self) -> None:
        """Other trainable modules have their ordinary gradients."""
        before, module, after = nn.Linear(3, 3).double(), mlp().double(), nn.Linear(2, 2).double()
        x, others = data(4, 3), [*before.parameters(), *after.parameters()]
        want = torch.autograd.grad(squares(after(module(before(x).tanh()))).sum(), others)
        stacks = definition(squares(after(module(before(x).tanh()))), module)
        squares(after(call_for_per_sample_grads(module)(before(x).tanh()))).sum().backward()
        assert_same(taken(module), stacks)
        torch.testing.assert_close(tuple(p.grad for p in others), want, rtol=1e-12, atol=0)
        assert not any(hasattr(p, "grad_sample") for p in others)


Pair = namedtuple("Pair", "logits hidden")


@dataclass
class Plain:
    logits: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class Frozen:
    logits: Tensor
    hidden: Tensor
    name: str = "frozen"


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """A mapping that is read by attribute, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def model_output(logits: Tensor, hidden: Tensor) -> ModelOutput:
    return ModelOutput(logits=logits, hidden=hidden)


class Object:
    def __init__(self, logits: Tensor, hidden: Tensor) -> None:
        self.logits, self.hidden = logits, hidden


def by_index(out: Any) -> Tensor:
    return squares(out[0]) + squares(out[1])


def by_name(out: Any) -> Tensor:
    return squares(out.logits) + squares(out.hidden)


def by_key(out: Any) -> Tensor:
    return squares(out["logits"]) + squares(out["hidden"])


STRUCTURES: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda a, b: (a, b), by_index),
    "list": (lambda a, b: [a, b], by_index),
    "dict": (lambda a, b: {"logits": a, "hidden": b}, by_key),
    "nested": (lambda a, b: ({"x": [a]}, (b, None, "text", 3)), lambda o: squares(o[0]["x"][0]) + squares(o[1][0])),
    "namedtuple": (Pair, by_name),
    "dataclass": (Plain, by_name),
    "frozen_dataclass": (Frozen, by_name),
    "model_output": (model_output, by_name),
    "dict_of_dataclass": (lambda a, b: {"out": Plain(a, b)}, lambda out: by_name(out["out"])),
    "twice": (lambda a, b: (a, b, a), lambda out: by_index(out) + squares(out[2])),
    "views": (lambda a, b: (a, b, b[:, :1], b.T), lambda o: by_index(o) + squares(o[2]) + o[3].square().sum(0)),
    "with_integers": (lambda a, b: (a, b, a.argmax(1), b.detach()), lambda out: by_index(out) * (1 + out[2])),
}


FIRSTS: dict[str, Callable[[Run, Tensor], Tensor]] = {
    "norm": lambda m, x: m.n(x),
    "gate": lambda m, x: x * m.g.sigmoid(),
    "positions": lambda m, x: x + m.p(torch.arange(x.shape[1])),
    "token": lambda m, x: x + m.e.expand(len(x), 1, 4),
    "all": lambda m, x: m.n(2 * x + m.p(torch.arange(x.shape[1]))) * m.g + m.e,
}


class TestOutputs:
    @both_reductions
    @pytest.mark.parametrize("structure", STRUCTURES)
    def test_structures(self, structure: str, reduction: str) -> None:
        build, losses = STRUCTURES[structure]
        parts = {"a": nn.Linear(3, 4), "b": nn.Linear(4, 2)}
        module = Run(lambda m, x: build(m.b(m.a(x).tanh()), m.a(x)), **parts).double()
        out = check(module, data(5, 3), losses=losses, loss_reduction=reduction)
        assert type(out) is type(module(data(5, 3)))

    def test_object_of_an_unknown_type(self) -> None:
        """Right, or an error at the backward: never stacks without what went through it."""
        module = Run(lambda m, x: Object(m.a(x), m.b(x)), a=nn.Linear(3, 2), b=nn.Linear(3, 2)).double()
        try:
            check(module, data(4, 3), losses=by_name)
        except RuntimeError:
            assert not any(hasattr(p, "grad_sample") for p in module.parameters())

    @pytest.mark.parametrize("change", [torch.relu_, lambda t: t.mul_(2), lambda t: t[:, 0].zero_()])
    @pytest.mark.parametrize("structure", ["tensor", "tuple", "dict"])
    def test_changed_in_place(self, structure: str, change: Callable[[Tensor], Any]) -> None:
        build = {"tensor": lambda t: t, "tuple": lambda t: (t, t + 1), "dict": lambda t: {0: t}}[structure]

        def losses(out: Any) -> Tensor:
            taken_out = out if isinstance(out, Tensor) else out[0]
            change(taken_out)
            return squares(taken_out)

        check(Run(lambda m, x: build(m.a(x)), a=mlp()).double(), data(4, 3), losses=losses)

    def test_input_returned(self) -> None:
        module, x = Run(lambda m, x: (x, m.a(x)), a=mlp()).double(), data(4, 3).requires_grad_()
        (want,) = torch.autograd.grad(by_index(module(x)).sum(), x)
        check(module, x, losses=by_index)
        torch.testing.assert_close(x.grad, want, rtol=1e-12, atol=0)

    @both_reductions
    def test_loss_inside(self, reduction: str) -> None:
        module = Run(lambda m, x, y: F.cross_entropy(m.a(x), y, reduction=reduction), a=mlp()).double()
        x, y = data(4, 3), torch.randint(2, (4,))
        want = definition(F.cross_entropy(module.a(x), y, reduction="none"), module)
        call_for_per_sample_grads(module, loss_reduction=reduction)(x, y).backward()
        assert_same(taken(module), want)

    @pytest.mark.parametrize("T", [4, 8, 5])
    @pytest.mark.parametrize("first", FIRSTS)
    def test_mean_loss_inside_after(self, first: str, T: int) -> None:
        """Something with parameters before the layers, as in every transformer that computes its own loss."""
        parts = {
            "g": torch.randn(4),
            "e": torch.randn(1, 1, 4),
            "n": nn.LayerNorm(4),
            "p": nn.Embedding(8, 4),
            "b": mlp(4),
        }
        module = Run(lambda m, x: squares(m.b(FIRSTS[first](m, x)).flatten(0, 1)).mean(), **parts).double()
        x = data(4, T, 4)
        want = definition(squares(module.b(FIRSTS[first](module, x))) / T, module)
        call_for_per_sample_grads(module, loss_reduction="mean")(x).backward()
        assert_same(taken(module), want)

    def test_loss_and_logits(self) -> None:
        module = Run(lambda m, x, y: (F.cross_entropy(m.a(x), y), m.a(x)), a=mlp()).double()
        x, y = data(4, 3), torch.randint(2, (4,))
        want = definition(F.cross_entropy(module.a(x), y, reduction="none") + squares(module.a(x)), module)
        loss, logits = call_for_per_sample_grads(module, loss_reduction="mean")(x, y)
        (loss + squares(logits).mean()).backward()
        assert_same(taken(module), want)

    def test_something_shared_by_all_samples(self) -> None:
        """A learned temperature: what each sample asks of it cannot be told from outside."""
        module = Run(lambda m, x: (m.a(x), m.t.exp()), a=mlp(), t=torch.zeros(())).double()
        logits, temperature = call_for_per_sample_grads(module)(data(4, 3))
        loss = (logits * temperature).square().sum()
        with pytest.raises(RuntimeError):
            loss.backward()
        assert not any(hasattr(p, "grad_sample") for p in module.parameters())

    def test_auxiliary_loss_on_the_module(self) -> None:
        module, x = Run(_with_aux, a=mlp()).double(), data(4, 3)
        loss = call_for_per_sample_grads(module)(x).square().sum() + module.aux
        with pytest.raises(RuntimeError):
            loss.backward()
        assert not any(hasattr(p, "grad_sample") for p in module.parameters())

    def test_auxiliary_loss_alone(self) -> None:
        module = Run(_with_aux, a=mlp()).double()
        call_for_per_sample_grads(module)(data(4, 3))
        with pytest.raises(RuntimeError):
            module.aux.backward()
        assert all(p.grad is None and not hasattr(p, "grad_sample") for p in module.parameters())

    def test_auxiliary_loss_not_used(self) -> None:
        check(Run(_with_aux, a=mlp()).double(), data(4, 3))


def _with_aux(m: Run, x: Tensor) -> Tensor:
    out = m.a(x)
    m.aux = out.abs().sum()
    return out


PREPARED: dict[str, Callable[[Tensor], Tensor]] = {
    "as_is": lambda x: x,
    "shifted": lambda x: x + 1,
    "padded": lambda x: F.pad(x, (0, 0, 1, 1))[:, 1:-1],
    "copied": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}
INSIDE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # mean losses, of logits (B, T, V) and labels (B, T)
    "plain": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()),
    "classes_second": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "time_major": lambda z, y: F.cross_entropy(z.transpose(0, 1).flatten(0, 1), y.T.flatten()),
    "mean_over_samples_first": lambda z, y: each(z, y).mean(0).mean(),
    "mean_over_positions_first": lambda z, y: each(z, y).mean(1).mean(),
    "turned": lambda z, y: each(z, y).T.mean(1).mean(),
}
OUTSIDE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, int], Tensor]]] = {  # and back to (B, T, V)
    "as_it_is": (lambda z: z, lambda z, B: z),
    "folded": (lambda z: z.flatten(0, 1), lambda z, B: z.unflatten(0, (B, -1))),
    "classes_second": (lambda z: z.transpose(1, 2), lambda z, B: z.transpose(1, 2)),
    "turned": (lambda z: z.transpose(0, 1), lambda z, B: z.transpose(0, 1)),
    "turned_and_folded": (
        lambda z: z.transpose(0, 1).flatten(0, 1),
        lambda z, B: z.unflatten(0, (-1, B)).transpose(0, 1),
    ),
}
PLAIN = ("plain", "classes_second", "mean_over_positions_first", "as_it_is", "folded")  # right, whatever comes before


def each(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


@pytest.mark.parametrize("T", [4, 8, 5])
@pytest.mark.parametrize("prepare", [*PREPARED, "ids"])
class TestWhereSamplesLie:
    """Four samples, four classes, and positions that are as many, twice as many, or something else."""

    def setup(self, T: int, prepare: str) -> tuple[nn.Module, Tensor, Tensor]:
        first, x = nn.Linear(3, 2), data(4, T, 3)
        if prepare == "ids":
            first, x = nn.Embedding(7, 2), torch.randint(6, (4, T))
        net, before = nn.Sequential(first, nn.Tanh(), nn.Linear(2, 4)).double(), PREPARED.get(prepare, lambda x: x + 1)
        return Run(lambda m, x: m.net(before(x)), net=net), x, torch.randint(4, (4, T))

    @pytest.mark.parametrize("inside", INSIDE)
    def test_mean_loss_inside(self, T: int, prepare: str, inside: str) -> None:
        """Right; where integers alone could tell, an error will do, and nothing else."""
        logits, x, y = self.setup(T, prepare)
        module = Run(lambda m, x, y: INSIDE[inside](m.logits(x), y), logits=logits)
        want = definition(each(module.logits(x), y).mean(1), module)
        loss = call_for_per_sample_grads(module, loss_reduction="mean")(x, y)
        if _backward(loss, needed=inside in PLAIN or prepare != "ids"):
            assert_same(taken(module), want)

    @pytest.mark.parametrize("outside", OUTSIDE)
    def test_output(self, T: int, prepare: str, outside: str) -> None:
        """Right; where the samples are not in dim 0, as promised, an error will do, and nothing else."""
        logits, x, y = self.setup(T, prepare)
        turn, back = OUTSIDE[outside]
        module = Run(lambda m, x: turn(m.logits(x)), logits=logits)
        want = definition(each(back(module(x), 4), y).sum(1), module)
        loss = each(back(call_for_per_sample_grads(module)(x), 4), y).sum()
        if _backward(loss, needed=outside in PLAIN):
            assert_same(taken(module), want)


def _backward(loss: Tensor, needed: bool) -> bool:
    """Whether the backward went through; when it is not needed, it may say that it cannot."""
    try:
        loss.backward()
    except RuntimeError:
        if needed:
            raise
        return False
    return True


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
        module, x = mlp().double(), data(4, 3)
        with torch.no_grad():
            out = call_for_per_sample_grads(module)(x)
        assert not out.requires_grad
        assert torch.equal(out, module(x))
        check(module, x)

    def test_buffers_change_once(self) -> None:
        module, x = Counting().double(), data(5, 4, 3)
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
        module(data(4, 3))
        want = seen.copy()
        seen.clear()
        call_for_per_sample_grads(module)(data(4, 3)).sum().backward()
        assert seen == want

    def test_forward_hook_that_changes_the_output(self) -> None:
        module = mlp().double()
        module[0].register_forward_hook(lambda m, a, out: 2 * out)
        module.register_forward_hook(lambda m, a, out: out.sin())
        check(module, data(4, 3))

    @pytest.mark.parametrize("wanted", [False, True], ids=["parameters", "inputs_too"])
    def test_backward_hooks(self, wanted: bool) -> None:
        """They run, and what they change is changed."""
        module, x, seen = mlp().double(), data(4, 3).requires_grad_(wanted), []

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
        module, x = nn.BatchNorm1d(3).double(), data(4, 3)
        with torch.no_grad():
            assert torch.equal(call_for_per_sample_grads(module)(x), module(x))

    def test_exception_in_the_forward(self) -> None:
        def fail(m: Run, x: Tensor) -> Tensor:
            m.a(x)
            raise ValueError("out of order")

        module, x = Run(fail, a=mlp()).double(), data(4, 3)
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
        module, x = Run(lambda m, x: m.a(x) - m.a(x).mean(0), a=mlp()).double(), data(4, 3)
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
        module, x = mlp().double(), data(4, 3)
        want = definition(squares(module(x)), module)
        with forward():
            loss = squares(call_for_per_sample_grads(module)(x)).sum()
        with backward():
            loss.backward()
        assert_same(taken(module), want)

    def test_parameters_during_and_after_the_call(self) -> None:
        module = mlp().double()
        before = {name: id(p) for name, p in module.named_parameters()}
        out = call_for_per_sample_grads(module)(data(4, 3))
        assert {name: id(p) for name, p in module.named_parameters()} == before
        assert all(type(p) is nn.Parameter and p.is_leaf and p.requires_grad for p in module.parameters())
        out.sum().backward()
        assert {name: id(p) for name, p in module.named_parameters()} == before

    def test_deepcopy_and_pickle(self) -> None:
        module, x = mlp().double(), data(4, 3)
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
        check(nn.Sequential(nn.Linear(3, 8), nn.Dropout(rate), nn.Linear(8, 2)).double(), data(6, 3))

    def test_dropout_draws_the_same_numbers(self) -> None:
        module, x = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5)).double(), data(6, 3)
        torch.manual_seed(1)
        module(x)
        want = torch.rand(3)
        torch.manual_seed(1)
        call_for_per_sample_grads(module)(x).sum().backward()
        assert torch.equal(torch.rand(3), want)

    def test_layer_cast_inside(self) -> None:
        """To the dtype it has: nothing changes, as in routers that are kept in single precision."""
        check(Run(lambda m, x: m.a.to(x.dtype)(x), a=mlp()).double(), data(4, 3))

    def test_vmap_inside(self) -> None:
        check(Run(lambda m, x: torch.func.vmap(m.a)(x), a=mlp()).double(), data(4, 3))

    def test_gradients_inside(self) -> None:
        """As of an energy with respect to positions."""

        def forces(m: Run, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            return torch.autograd.grad(m.a(x).square().sum(), x, create_graph=True)[0]

        check(Run(forces, a=mlp()).double(), data(4, 3))

    def test_call_in_a_checkpoint(self) -> None:
        module, x = mlp().double(), data(4, 3).requires_grad_()
        want = definition(squares(module(x)), module)
        squares(checkpoint(call_for_per_sample_grads(module), x, use_reentrant=False)).sum().backward()
        assert_same(taken(module), want)

    def test_autocast(self) -> None:
        """Forward and loss under autocast, backward outside, as PyTorch recommends."""
        module, x = mlp(), torch.randn(4, 3)
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


class TestReductions:
    many = (ps.Norms, lambda: ps.ClippedSum(1.0), ps.SecondMoment, ps.Gram, ps.Stack)

    @both_reductions
    @pytest.mark.parametrize("B", [4, 1, 0])
    def test_equal_those_of_reduce(self, B: int, reduction: str) -> None:
        module, x = mlp().double(), data(B, 3)
        want = ps.reduce(squares(module(x)), module, *(make() for make in self.many))
        call = call_for_per_sample_grads(module, loss_reduction=reduction, reductions=[make() for make in self.many])
        total(squares(call(x)), reduction).backward()
        got = call.results()
        assert isinstance(got, tuple)
        assert [type(a) for a in got] == [type(a) for a in want]
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14, equal_nan=not B)
        assert all(p.grad is None and not hasattr(p, "grad_sample") for p in module.parameters())

    def test_again_and_again(self) -> None:
        module = mlp().double()
        call = call_for_per_sample_grads(module, reductions=[ps.Norms(), ps.ClippedSum(1.0)])
        for B in (4, 1, 6):
            x = data(B, 3)
            squares(call(x)).sum().backward()
            want = ps.reduce(squares(module(x)), module, ps.Norms(), ps.ClippedSum(1.0))
            torch.testing.assert_close(call.results(), want, rtol=1e-12, atol=0)

    def test_max_memory(self) -> None:
        module, x = mlp().double(), data(7, 3)
        call = call_for_per_sample_grads(module, reductions=[ps.Norms(), ps.ClippedSum(1.0)], max_memory=0)
        squares(call(x)).sum().backward()
        want = ps.reduce(squares(module(x)), module, ps.Norms(), ps.ClippedSum(1.0))
        torch.testing.assert_close(call.results(), want, rtol=1e-12, atol=0)

    def test_inputs_have_their_gradient(self) -> None:
        module, x = mlp().double(), data(4, 3).requires_grad_()
        (want,) = torch.autograd.grad(squares(module(x)).mean(), x)
        call = call_for_per_sample_grads(module, loss_reduction="mean", reductions=[ps.Norms()])
        squares(call(x)).mean().backward()
        torch.testing.assert_close(x.grad, want, rtol=1e-12, atol=0)


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    """What is let go of must go at once, and not wait for a collection."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collector")
class TestMemory:
    def setup_method(self) -> None:
        self.module, self.kept = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 2)).double(), []
        self.module[1].register_forward_hook(lambda m, a, out: self.kept.append(StorageWeakRef(out.untyped_storage())))

    def _released(self) -> bool:
        assert self.kept
        return all(ref.expired() for ref in self.kept)

    @pytest.mark.parametrize("options", [{}, {"reductions": [ps.Norms()]}], ids=["stacks", "reductions"])
    def test_released_by_the_backward(self, options: dict[str, Any]) -> None:
        """Even while the loss, the outputs and the callable are held."""
        call = call_for_per_sample_grads(self.module, **options)
        out = call(data(4, 3))
        loss = out.square().sum()
        assert not self._released()
        loss.backward()
        assert self._released()

    def test_kept_when_asked(self) -> None:
        loss = call_for_per_sample_grads(self.module)(data(4, 3)).square().sum()
        loss.backward(retain_graph=True)
        assert not self._released()
        del loss
        assert self._released()

    @pytest.mark.parametrize("options", [{}, {"reductions": [ps.Norms()]}], ids=["stacks", "reductions"])
    def test_released_without_a_backward(self, options: dict[str, Any]) -> None:
        call = call_for_per_sample_grads(self.module, **options)
        out = call(data(4, 3))
        assert not self._released()
        del out
        assert self._released()

    def test_input_released(self) -> None:
        call, x = call_for_per_sample_grads(self.module), data(4, 3)
        ref = StorageWeakRef(x.untyped_storage())
        loss = call(x).square().sum()
        loss.backward()
        del x
        assert ref.expired()

    def test_stacks_share_nothing(self) -> None:
        """A stack that is changed, as clipping does, changes no other one and no gradient of the user's."""
        module = Run(lambda m, x: m.a(x) + m.b(x) + m.c, a=nn.Linear(3, 3), b=nn.Linear(3, 3), c=torch.ones(3)).double()
        x, added = data(4, 3), torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
        (call_for_per_sample_grads(module)(x) + added).square().sum().backward()
        tensors = [added.grad, *(p.grad_sample for p in module.parameters())]
        assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)
        assert all(t.is_contiguous() for t in tensors), "no element stands for several"


class TestTraining:
    @both_reductions
    @pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
    def test_summed_stacks_train_as_usual(self, optimizer: type[torch.optim.Optimizer], reduction: str) -> None:
        plain = mlp().double()
        ours = copy.deepcopy(plain)
        steps = [optimizer(m.parameters(), lr=0.05) for m in (plain, ours)]
        call = call_for_per_sample_grads(ours, loss_reduction=reduction)
        for B in (4, 1, 6):
            x = data(B, 3)
            squares(plain(x)).sum().backward()
            total(squares(call(x)), reduction).backward()
            for p in ours.parameters():
                p.grad = p.grad_sample.sum(0)
                p.grad_sample = None
            for step in steps:
                step.step()
                step.zero_grad()
            assert_same(_values(ours), _values(plain), rtol=1e-12)

    def test_step_between_call_and_backward(self) -> None:
        """The parameters that the graph holds have changed: PyTorch's own error, and nothing written."""
        module = mlp().double()
        loss = call_for_per_sample_grads(module)(data(4, 3)).square().sum()
        with torch.no_grad():
            module[2].weight.add_(1)
        with pytest.raises(RuntimeError, match="inplace"):
            loss.backward()
        assert not any(hasattr(p, "grad_sample") for p in module.parameters())


def _values(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters()}
