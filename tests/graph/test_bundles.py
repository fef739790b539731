"""Uses that are turned into factors together give what each gives alone.

Every program is run twice, with a new plan and with one that is recalled, and must have the bundles that it states.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import persample as ps
from persample.factors import Factor, Part
from persample.graph.entry import planned
from persample.graph.execute.capture import Capture
from persample.graph.read.roots import Roots
from tests.graph.look_alikes import Program, data, nothing_remembered  # noqa: F401
from tests.reference import Params, assert_same, definition, named

Losses = Callable[[Tensor], Tensor]  # of a model's output


def leaves(count: int, *shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Parameters."""
    return [(data(*shape, seed=seed, dtype=dtype) / 2).requires_grad_() for seed in range(1, count + 1)]


def each(y: Tensor) -> Tensor:
    """A loss per sample, where samples come first."""
    return y.flatten(1).square().mean(1)


def bundles(losses: Tensor, params: Params) -> list[int]:
    """How many uses each bundle has."""
    plan, *_ = planned(Roots.of_losses(losses), named(params), (), None, None)
    return sorted([len(use.nodes) for use in plan.uses if len(use.nodes) > 1])


def rows(stacks: Mapping[str, Tensor]) -> Tensor:
    """(B, n): whole gradients."""
    return torch.cat([g.detach().double().reshape(len(g), -1) for g in stacks.values()], 1)


def check(program: Program, sizes: list[int], rtol: float = 1e-8) -> None:
    """Compare gradients, norms and sums with the definition."""
    for _ in range(2):
        params, losses = program()
        want = definition(losses, params)
        assert bundles(losses, params) == sizes
        assert_same(ps.grad(losses, params, retain_graph=True), want, rtol)
        whole = rows(want)
        norms, squares, gram = ps.reduce(losses, params, ps.Norms(), ps.SecondMoment(), ps.Gram(), retain_graph=True)
        near(norms, whole.norm(dim=1), rtol)
        near(gram, whole @ whole.t(), rtol)
        near(joined(squares), whole.square().mean(0), rtol)
        weights = (0.1 / whole.norm(dim=1)).clamp(max=1)
        near(joined(ps.clipped_sum(losses, params, max_norm=0.1)), weights @ whole, rtol)


def near(got: Tensor, want: Tensor, rtol: float = 1e-8) -> None:
    assert got.shape == want.shape
    assert bool(((got.double() - want).abs() <= rtol * want.abs().max().clamp_min(1e-4)).all())


def joined(sums: Mapping[str, Tensor] | Sequence[Tensor]) -> Tensor:
    """One vector."""
    return torch.cat([t.double().reshape(-1) for t in (sums.values() if isinstance(sums, Mapping) else sums)])


def stacked(count: int, *layers: Callable[[], nn.Module]) -> nn.Module:
    """The same layers again and again."""
    torch.manual_seed(0)
    return nn.Sequential(*[make() for _ in range(count) for make in layers]).double()


def mlp(width: int = 4) -> nn.Module:
    return stacked(4, lambda: nn.Linear(width, width), lambda: nn.LayerNorm(width), nn.Tanh)


def cnn() -> nn.Module:
    return stacked(4, lambda: nn.Conv2d(4, 4, 3, padding=1), lambda: nn.GroupNorm(2, 4), nn.Tanh)


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).double()


def in_pairs(y: Tensor) -> Tensor:
    """Samples of two rows each."""
    return each(y).view(-1, 2).sum(1)


def time_first(y: Tensor) -> Tensor:
    return y.square().mean((0, 2))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Losses, list[int]]] = {
    "mlp": (mlp, (3, 4), each, [3, 4]),
    "mlp-two-samples": (mlp, (2, 4), each, [3, 4]),
    "mlp-one-sample": (mlp, (1, 4), each, []),
    "mlp-positions": (mlp, (3, 5, 4), each, [3, 4]),
    "mlp-many-positions": (lambda: stacked(3, lambda: nn.Linear(3, 3, bias=False), nn.Tanh), (3, 40, 3), each, [2]),
    "mlp-wide": (lambda: mlp(40), (4, 2, 40), each, [3, 4]),
    "mlp-pairs": (mlp, (6, 4), in_pairs, [3, 4]),
    "mlp-time-first": (mlp, (5, 3, 4), time_first, [3]),
    "mlp-one-position-first": (mlp, (1, 3, 4), time_first, [3]),
    "mlp-shuffled": (mlp, (4, 4), lambda y: each(y)[torch.tensor([2, 0, 3, 1])], []),
    "widths": (lambda: stacked(3, lambda: nn.Linear(4, 6), nn.Tanh, lambda: nn.Linear(6, 4)), (3, 4), each, [2, 3]),
    "no-biases": (lambda: stacked(4, lambda: nn.Linear(4, 4, bias=False)), (3, 4), lambda y: y.sum(1), [3]),
    "norms-of-matrices": (
        lambda: stacked(3, lambda: nn.Linear(4, 4), lambda: nn.LayerNorm((5, 4))),
        (3, 5, 4),
        each,
        [2, 3],
    ),
    "norms-of-pairs": (lambda: stacked(3, lambda: nn.LayerNorm(4, bias=False), nn.Tanh), (4, 3, 2, 4), in_pairs, [2]),
    "cnn": (cnn, (3, 4, 5, 5), each, [3, 4]),
    "cnn-pairs": (cnn, (4, 4, 4, 4), in_pairs, [3, 4]),
    "depthwise": (lambda: stacked(3, lambda: nn.Conv1d(4, 4, 3, padding=1, groups=4), nn.Tanh), (3, 4, 7), each, [2]),
    "up-and-down": (
        lambda: stacked(3, lambda: nn.Conv2d(2, 2, 3, 2), nn.Tanh, lambda: nn.ConvTranspose2d(2, 2, 3, 2)),
        (3, 2, 7, 7),
        each,
        [2, 3],
    ),
    "encoder": (encoder, (3, 4, 8), each, [2, 3, 3, 3, 6]),
    "encoder-as-many-positions": (encoder, (4, 4, 8), each, [2, 3, 3, 3, 6]),
    "in-place": (lambda: stacked(4, lambda: nn.Linear(4, 4), lambda: nn.ReLU(inplace=True)), (3, 4), each, [3]),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    make, shape, losses, sizes = MODELS[name]

    def program() -> tuple[Params, Tensor]:
        model = make()
        return model, losses(model(data(*shape)))

    check(program, sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_less_precision(dtype: torch.dtype) -> None:
    def program() -> tuple[Params, Tensor]:
        model = mlp(16).to(dtype)
        return model, each(model(data(3, 5, 16).to(dtype))).float()

    check(program, [3, 4], 1e-4 if dtype == torch.float32 else 6e-2)


def chain(step: Callable[[int, Tensor, Tensor], Tensor], count: int = 6) -> tuple[list[Tensor], Tensor]:
    """Weights, and losses after a step with each."""
    weights, h = leaves(count, 4, 4), data(3, 4)
    for i, w in enumerate(weights):
        h = step(i, h, w)
    return weights, each(h)


def scaled(i: int, h: Tensor, w: Tensor) -> Tensor:
    return torch.addmm(torch.ones(4, dtype=w.dtype), h, w, alpha=2 + i % 2).tanh()


def hooked(i: int, h: Tensor, w: Tensor) -> Tensor:
    h = (h @ w).tanh()
    h.register_hook(lambda g: g * (i + 1))
    return h


def reused(i: int, h: Tensor, w: Tensor) -> Tensor:
    return ((h @ w).tanh() @ w).tanh() if i % 2 else (h @ w).tanh()


class Reversed(torch.autograd.Function):
    """Turns gradients round in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].neg_()


def halved(g: Tensor) -> None:
    g.mul_(0.5)


def hooked_in_place(i: int, h: Tensor, w: Tensor) -> Tensor:
    """The sum gives one cotangent to both of its terms."""
    other = h * 1
    if i:
        other.register_hook(halved)
    return other + h.tanh() @ w


CHAINS: dict[str, tuple[Callable[[int, Tensor, Tensor], Tensor], list[int]]] = {
    "products": (lambda i, h, w: (h @ w).tanh(), [5]),
    "residual": (lambda i, h, w: h + h.tanh() @ w, [5]),
    "scaled": (scaled, [2, 3]),
    "transposed-or-not": (lambda i, h, w: (h @ (w.t() if i % 2 else w)).tanh(), [2, 3]),
    "twice-transposed": (lambda i, h, w: (h @ w.t().t()).tanh(), [5]),
    "cast": (lambda i, h, w: (h.to(torch.float32) @ w.to(torch.float32)).double().tanh(), []),
    "hooks": (hooked, [5]),
    "some-used-twice": (reused, [2]),
    "changed-by-a-function": (lambda i, h, w: Reversed.apply(h) + h.tanh() @ w, [5]),  # type: ignore[no-untyped-call]
    "changed-by-a-hook": (hooked_in_place, [5]),
}


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
@pytest.mark.parametrize("name", CHAINS)
def test_chains(name: str) -> None:
    step, sizes = CHAINS[name]
    check(lambda: chain(step), sizes, 1e-4 if name == "cast" else 1e-8)


def test_convolutions_of_inputs_of_other_sizes() -> None:
    """Strides give outputs of one size to inputs of two."""

    def program() -> tuple[Params, Tensor]:
        weights, (first,) = leaves(4, 2, 2, 3), leaves(1, 8, 8)
        h = (data(3, 2, 8) @ first).tanh()
        given = [h, h[..., :7], h.cos(), h[..., 1:].cos()]
        found = [torch.conv1d(x, w, stride=2) for x, w in zip(given, weights, strict=True)]
        return [*weights, first], each(torch.stack(found, 1))

    check(program, [2, 2])


@pytest.mark.parametrize("frozen", ["weight", "bias", "some"])
def test_frozen_parameters(frozen: str) -> None:
    def program() -> tuple[Params, Tensor]:
        model = stacked(6, lambda: nn.Linear(4, 4), nn.Tanh)
        for i, (name, p) in enumerate(model.named_parameters()):
            p.requires_grad_(i % 3 != 0 if frozen == "some" else frozen not in name)
        return model, each(model(data(3, 4)))

    check(program, [2, 2] if frozen == "some" else [5])


@pytest.mark.parametrize("silent", [{0}, {3}, {1, 2}, {0, 2, 3}, {0, 1, 2, 3}], ids=str)
def test_uses_that_get_no_cotangent(silent: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One, some, or all of a bundle: their parameters get zeros."""
    quiet = False

    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return None if quiet else grads[0]

    run = Capture._backward

    def backward(self: Capture, *args: Any) -> Any:
        nonlocal quiet
        quiet = True
        return run(self, *args)

    monkeypatch.setattr(Capture, "_backward", backward)
    first, *weights = leaves(5, 4, 4)
    h = data(3, 4) @ first
    ends = [((h * (i + 1)).cos() @ w).tanh() for i, w in enumerate(weights)]
    gated = [Gate.apply(y) if i in silent else y for i, y in enumerate(ends)]  # type: ignore[no-untyped-call]
    losses = each(torch.stack(gated, 1))
    assert bundles(losses, [first, *weights]) == [4]
    got = ps.grad(losses, [first, *weights], retain_graph=True)
    quiet = True
    assert_same(got, definition(losses, [first, *weights]))
    assert {i for i, g in enumerate(got[1:]) if not bool(g.any())} == silent


@pytest.mark.parametrize("region", [{2}, {1, 3, 5}, {0, 1}, set(range(6))], ids=str)
def test_checkpoints(region: set[int]) -> None:
    def program() -> tuple[Params, Tensor]:
        model, h = stacked(6, lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())), data(3, 4)
        for i, layer in enumerate(model.children()):
            h = checkpoint(layer, h, use_reentrant=False) if i in region else layer(h)
        return model, each(h)

    outside = len(set(range(1, 6)) - region)
    check(program, [outside] if outside > 1 else [])


@pytest.mark.parametrize("kind", ["cpu", "copies"])
def test_saved_tensors_that_are_packed(kind: str) -> None:
    def program() -> tuple[Params, Tensor]:
        model = mlp()
        packed = saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone())
        with save_on_cpu() if kind == "cpu" else packed:
            return model, each(model(data(3, 4)))

    check(program, [3, 4])


@pytest.mark.parametrize("again", [False, True])
def test_what_cannot_be_read(again: bool) -> None:
    """A graph that was freed, and a saved activation that was changed: PyTorch's own errors."""
    model = mlp()
    if again:
        ps.grad(each(model(data(3, 4))), model)
    freed = each(model(data(3, 4)))
    ps.norms(freed, model)
    with pytest.raises(RuntimeError, match="was freed by an earlier backward"):
        ps.norms(freed, model)
    h, kept = data(3, 4), []
    for layer in model.children():
        h = layer(h)
        kept.append(h)
    losses = each(h)
    with torch.no_grad():
        kept[5].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ps.norms(losses, model)


@pytest.mark.parametrize("again", [False, True])
def test_what_changes_during_the_backward(again: bool) -> None:
    """An activation that every node has read by then, but the bundle has not."""
    if again:
        weights, losses = chain(CHAINS["products"][0])
        ps.grad(losses, weights)
    seen: list[Tensor] = []

    def spoiled(g: Tensor) -> None:
        seen[3].add_(1)

    def step(i: int, h: Tensor, w: Tensor) -> Tensor:
        seen.append((h @ w).tanh())
        return seen[-1]

    weights, losses = chain(step)
    seen[1].register_hook(spoiled)
    assert bundles(losses, weights) == [5]
    with pytest.raises(ps.UnsupportedError, match=r"saved tensor .* was changed in place.*work on a copy"):
        ps.grad(losses, weights)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("shape", [(4, 4), (4, 5, 4)], ids=str)
def test_a_sample_that_is_not_finite(shape: tuple[int, ...], value: float) -> None:
    model, good = stacked(5, lambda: nn.Linear(4, 4)), torch.tensor([0, 1, 3])
    x = data(*shape)
    want = definition(each(model(x[good])), model)
    x[2] = value
    for _ in range(2):
        losses = each(model(x))
        assert bundles(losses, model) == [4]
        assert_same({name: g[good] for name, g in ps.grad(losses, model, retain_graph=True).items()}, want)
        norms = rows(want).norm(dim=1)
        near(ps.norms(losses, model, retain_graph=True)[good], norms)
        total = ps.clipped_sum(losses, model, max_norm=0.1, nonfinite="drop", retain_graph=True)
        assert total.clipping.dropped == [2]
        near(joined(total), (0.1 / norms).clamp(max=1) @ rows(want))
        with pytest.raises(ps.NonFiniteError):
            ps.clipped_sum(losses, model, max_norm=0.1)


class Kept(ps.Reduction):
    """Keeps factors, and writes them out at the end."""

    passes, keeps_factors = 2, True
    fails = False

    def start(self, call: Any) -> None:
        self.factors: dict[str, Factor] = {}

    def add(self, name: str, factor: Factor) -> None:
        if self.fails and len(self.factors) == 3:
            raise ValueError("enough")
        self.factors[name] = factor

    def result(self) -> dict[str, Tensor]:
        assert any(isinstance(factor, Part) for factor in self.factors.values())
        return {name: factor.stack() for name, factor in self.factors.items()}


@pytest.mark.parametrize("max_memory", [None, 0, 2000])
@pytest.mark.parametrize("name", ["mlp", "mlp-wide", "cnn", "encoder"])
def test_other_questions(name: str, max_memory: int | None) -> None:
    make, shape, _, _ = MODELS[name]
    model = make()
    for _ in range(2):
        losses, other = each(model(data(*shape))), each(model(data(5, *shape[1:], seed=5)))
        want, theirs = definition(losses, model), definition(other, model)
        names = list(want)
        direction = {key: torch.randn_like(g[0]) for key, g in want.items()}
        per = [names[::2], names[1::2]]
        asked = [
            ps.Norms(per="parameter"),
            ps.ClippedSum([0.1, 0.2], per=per),
            ps.Variance(),
            ps.Dot(direction),
            Kept(),
        ]
        apart, clipped, variance, dot, kept = ps.reduce(losses, model, *asked, retain_graph=True, max_memory=max_memory)
        assert_same({key: kept[key] for key in names}, want)
        near(torch.stack([apart[key] for key in names]), torch.stack([g.flatten(1).norm(dim=1) for g in want.values()]))
        near(joined(variance), rows(want).var(0))
        near(dot, rows(want) @ joined(direction))
        for bound, group in zip((0.1, 0.2), per, strict=True):
            part = rows({key: want[key] for key in group})
            near(joined({key: clipped[key] for key in group}), (bound / part.norm(dim=1)).clamp(max=1) @ part)
        near(ps.gram(losses, model, other, max_memory=max_memory), rows(want) @ rows(theirs).t())


def some(w: list[Tensor]) -> Params:
    return [w[4], w[1], w[3]]


def repeated(w: list[Tensor]) -> Params:
    return {f"{name} {i}": p for name in "ab" for i, p in enumerate(w)}


@pytest.mark.parametrize(("chosen", "sizes"), [(some, [2]), (repeated, [5])])
def test_names_of_parameters(chosen: Callable[[list[Tensor]], Params], sizes: list[int]) -> None:
    """Some of them, in another order; all of them under two names."""

    def program() -> tuple[Params, Tensor]:
        weights, losses = chain(CHAINS["products"][0])
        return chosen(weights), losses

    check(program, sizes)


@pytest.mark.parametrize("name", ["mlp", "cnn", "encoder"])
def test_modules_that_are_called(name: str) -> None:
    """By an ordinary backward, which also gives the input its gradient."""
    make, shape, _, _ = MODELS[name]
    for _ in range(2):
        model, x = make(), data(*shape).requires_grad_()
        want = definition(each(model(x)), model)
        (plain,) = torch.autograd.grad(each(model(x)).sum(), x)
        each(ps.call_for_per_sample_grads(model)(x)).sum().backward()
        assert_same({key: p.grad_sample for key, p in model.named_parameters()}, want)  # type: ignore[attr-defined]
        assert x.grad is not None
        near(x.grad, plain)


def test_nothing_stays_behind() -> None:
    """Neither tensors, nor hooks of a call that failed."""
    for _ in range(2):
        model, h, seen = mlp(), data(3, 4), []
        for layer in model.children():
            h = layer(h)
            seen.append(weakref.ref(h))
        losses = each(h)
        del h
        want, failing = definition(losses, model), Kept()
        failing.fails = True
        with pytest.raises(ValueError, match="enough"):
            ps.reduce(losses, model, failing, retain_graph=True)
        assert_same(ps.grad(losses, model), want)
        del losses
        gc.collect()
        assert not any(ref() is not None for ref in seen)


def test_results_own_their_memory() -> None:
    model = mlp()
    losses = each(model(data(3, 4)))
    stacks, norms = ps.reduce(losses, model, ps.Stack(), ps.Norms(per="parameter"), retain_graph=True)
    for found in (stacks, norms, ps.grad(losses, model, retain_graph=True), ps.clipped_sum(losses, model, max_norm=1)):
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in found.values())


def test_threads() -> None:
    model, wrong = mlp(), []

    def work(seed: int) -> None:
        for _ in range(4):
            losses = each(model(data(3, 4, seed=seed)))
            want = definition(losses, model)
            try:
                assert_same(ps.grad(losses, model), want)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
