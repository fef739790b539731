"""What a module may return from a call through call_for_per_sample_grads, and what is done to it."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from persample import call_for_per_sample_grads
from tests.expanded.helpers import Object, Run, both_reductions, check, r, squares, taken
from tests.models import mlp
from tests.reference import assert_same, definition

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
        out = check(module, r(5, 3), losses=losses, loss_reduction=reduction)
        assert type(out) is type(module(r(5, 3)))

    def test_object_of_an_unknown_type(self) -> None:
        """Right, or an error at the backward: never stacks without what went through it."""
        module = Run(lambda m, x: Object(m.a(x), m.b(x)), a=nn.Linear(3, 2), b=nn.Linear(3, 2)).double()
        try:
            check(module, r(4, 3), losses=by_name)
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

        check(Run(lambda m, x: build(m.a(x)), a=mlp()).double(), r(4, 3), losses=losses)

    def test_input_returned(self) -> None:
        module, x = Run(lambda m, x: (x, m.a(x)), a=mlp()).double(), r(4, 3).requires_grad_()
        (want,) = torch.autograd.grad(by_index(module(x)).sum(), x)
        check(module, x, losses=by_index)
        torch.testing.assert_close(x.grad, want, rtol=1e-12, atol=0)

    @both_reductions
    def test_loss_inside(self, reduction: str) -> None:
        module = Run(lambda m, x, y: F.cross_entropy(m.a(x), y, reduction=reduction), a=mlp()).double()
        x, y = r(4, 3), torch.randint(2, (4,))
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
            "b": mlp(4, 2, 2),
        }
        module = Run(lambda m, x: squares(m.b(FIRSTS[first](m, x)).flatten(0, 1)).mean(), **parts).double()
        x = r(4, T, 4)
        want = definition(squares(module.b(FIRSTS[first](module, x))) / T, module)
        call_for_per_sample_grads(module, loss_reduction="mean")(x).backward()
        assert_same(taken(module), want)

    def test_loss_and_logits(self) -> None:
        module = Run(lambda m, x, y: (F.cross_entropy(m.a(x), y), m.a(x)), a=mlp()).double()
        x, y = r(4, 3), torch.randint(2, (4,))
        want = definition(F.cross_entropy(module.a(x), y, reduction="none") + squares(module.a(x)), module)
        loss, logits = call_for_per_sample_grads(module, loss_reduction="mean")(x, y)
        (loss + squares(logits).mean()).backward()
        assert_same(taken(module), want)

    def test_something_shared_by_all_samples(self) -> None:
        """A learned temperature: what each sample asks of it cannot be told from outside."""
        module = Run(lambda m, x: (m.a(x), m.t.exp()), a=mlp(), t=torch.zeros(())).double()
        logits, temperature = call_for_per_sample_grads(module)(r(4, 3))
        loss = (logits * temperature).square().sum()
        with pytest.raises(RuntimeError):
            loss.backward()
        assert not any(hasattr(p, "grad_sample") for p in module.parameters())

    def test_auxiliary_loss_on_the_module(self) -> None:
        module, x = Run(_with_aux, a=mlp()).double(), r(4, 3)
        loss = call_for_per_sample_grads(module)(x).square().sum() + module.aux
        with pytest.raises(RuntimeError):
            loss.backward()

    def test_auxiliary_loss_alone(self) -> None:
        module = Run(_with_aux, a=mlp()).double()
        call_for_per_sample_grads(module)(r(4, 3))
        with pytest.raises(RuntimeError):
            module.aux.backward()
        assert all(p.grad is None and not hasattr(p, "grad_sample") for p in module.parameters())

    def test_auxiliary_loss_not_used(self) -> None:
        check(Run(_with_aux, a=mlp()).double(), r(4, 3))


def _with_aux(m: Run, x: Tensor) -> Tensor:
    out = m.a(x)
    m.aux = out.abs().sum()
    return out
