"""The ways that only some sizes, dtypes and data lead to, each with derivatives that are those of a loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import persample as ps
from persample.factors import Convolution
from persample.kernels.convolution import choose, use_costs
from persample.kernels.differentiable import carrying_mode, differentiable, is_differentiable
from tests.reference import Params, named
from tests.second.loop import assert_close, defined, derivatives, listed, loop, mixed, verbs

B = 4


def agrees(losses: Tensor, params: Params, others: Sequence[Tensor] = (), rtol: float = 1e-8, **options: Any) -> None:
    """All verbs answer as a loop does, and so do their derivatives by parameters and ``others``."""
    tensors = list(named(params).values())
    generator = torch.Generator().manual_seed(1)
    direction = [torch.randn(p.shape, generator=generator, dtype=p.dtype).requires_grad_() for p in tensors]
    leaves = [*tensors, *others, *direction]
    want = defined(loop(losses, params), losses, direction)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ps.PerformanceWarning)
        for name, found in verbs(losses, params, direction, **options):
            try:
                assert_close(derivatives(mixed(found), leaves), derivatives(mixed(want[name]), leaves), rtol)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


def score(h: Tensor) -> Tensor:
    """(B, ...) -> (B,): not linear, and another cotangent for every element."""
    flat = h.flatten(1)
    return (flat.tanh() * torch.linspace(-1, 1, flat.shape[1], dtype=h.dtype) + 0.3 * flat.square()).sum(1)


def data(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=dtype).requires_grad_()


@pytest.fixture(autouse=True)
def _fixed() -> None:
    torch.manual_seed(0)


class Tied(nn.Module):
    """A table that is read, and that is the last matrix."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).tanh() @ self.table.weight.t()


class Lora(nn.Module):
    """A frozen weight, and a product of two trained ones beside it, merged."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(6, 5), nn.Linear(6, 2, bias=False), nn.Linear(2, 5, bias=False)
        self.base.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight + 0.5 * self.up.weight @ self.down.weight, self.base.bias)


def masked() -> nn.Module:
    layer = nn.Linear(6, 5)
    prune.random_unstructured(layer, "weight", 0.4)
    return layer


def repeated(make: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(*[make() for _ in range(4)])


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Gram matrices": (lambda: nn.Linear(40, 48), (3, 40)),
    "written out": (lambda: nn.Linear(3, 2), (9, 3)),
    "several layers at once": (lambda: repeated(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh())), (6,)),
    "norms at once": (lambda: repeated(lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))), (6,)),
    "group norms at once": (lambda: repeated(lambda: nn.Sequential(nn.Linear(6, 6), nn.GroupNorm(2, 6))), (6,)),
    "LoRA": (Lora, (6,)),
    "mask": (masked, (6,)),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(6, 5)).eval(), (6,)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(5, 5)), (5,)),
    "PReLU": (lambda: nn.Sequential(nn.Linear(5, 4), nn.PReLU(4)), (5,)),
    "batch norm, eval": (lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).eval(), (5,)),
    "batch norm, training": (lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), (5,)),
    "reused": (lambda: nn.Sequential(*[nn.Linear(5, 5)] * 3), (5,)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_layers(layer: str) -> None:
    make, shape = LAYERS[layer]
    model, x = make().double(), data(B, *shape)
    agrees(score(model(x)), model, [x])
    agrees(score(model(x)), model, [x], max_memory=0)  # again, by a plan that is remembered


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_where_the_number_of_positions_is_that_of_samples(layer: str) -> None:
    make, shape = LAYERS[layer]
    if "batch norm" in layer or "group norm" in layer:
        pytest.skip("has no dim for positions")
    model, x = make().double(), data(B, B, shape[-1])
    agrees(score(model(x.transpose(0, 1)).transpose(0, 1)), model, [x])


@pytest.mark.parametrize("shape", [(6,), (2, 24)])
@pytest.mark.parametrize("keep", [1.0, 0.0])
def test_weight_norm(shape: tuple[int, ...], keep: float) -> None:
    """PyTorch's own double backward takes the norms of the weight for constants: it is written by hand here."""
    model, x = parametrizations.weight_norm(nn.Linear(shape[-1], 20)).double(), data(B, *shape)
    bias, g, v = model.parameters()
    by_hand = F.linear(x, g * v / torch.linalg.vector_norm(v, dim=1, keepdim=True), bias)
    weights = torch.tensor([1.0, keep, 2.0, keep], dtype=torch.float64)
    direction, leaves = [torch.randn_like(p).requires_grad_() for p in (bias, g, v)], [bias, g, v, x]
    want = defined(loop(score(by_hand) * weights, [bias, g, v]), x, direction)
    for name, found in verbs(score(model(x)) * weights, [bias, g, v], direction):
        if name != "moments":
            assert_close(derivatives(mixed(found), leaves), derivatives(mixed(want[name]), leaves), 1e-8)


@pytest.mark.parametrize("words", [5, 300])
def test_tied_tables(words: int) -> None:
    model, ids = Tied(words, 6).double(), torch.randint(words, (B, 3))
    agrees(score(model(ids)), model)


CONVOLUTIONS = {
    "stack": (nn.Conv2d(3, 4, 3, padding=1), (3, 9, 9)),
    "patches": (nn.Conv2d(64, 128, 3, stride=2, padding=1), (64, 7, 7)),
    "pixels": (nn.Conv2d(128, 128, 3, padding=1), (128, 5, 5)),
}


@pytest.mark.parametrize("way", CONVOLUTIONS)
def test_ways_to_norms_of_convolutions(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, shape = CONVOLUTIONS[way]
    model, x, taken = nn.Sequential(layer).double(), data(B, *shape), []

    def watched(self: Convolution, space: Any) -> Tensor:
        taken.append(choose(self._sizes, "norms"))
        return original(self, space)

    original = Convolution._differentiable_norms
    monkeypatch.setattr(Convolution, "_differentiable_norms", watched)
    with use_costs("AVX512"):
        losses = score(model(x))
        want = torch.linalg.vector_norm(torch.cat([g.flatten(1) for g in loop(losses, model).values()], 1), dim=1)
        got = ps.norms(losses, model, create_graph=True)
    leaves = [*model.parameters(), x]
    assert set(taken) == {way}
    assert_close(derivatives(mixed([got]), leaves), derivatives(mixed([want]), leaves), 1e-8)


@pytest.mark.parametrize("layer", ["Gram matrices", "written out", "LoRA", "mask", "several layers at once"])
def test_samples_whose_gradient_is_zero(layer: str) -> None:
    make, shape = LAYERS[layer]
    model, x = make().double(), data(B, *shape)
    agrees(score(model(x)) * torch.tensor([1.0, 0.0, 2.0, 0.0], dtype=torch.float64), model, [x])
    zero = score(model(x)) * 0
    norms = ps.norms(zero, model, create_graph=True)
    assert all(not g.any() for g in derivatives(norms.sum(), [*named(model).values(), x]))


def test_a_table_and_convolutions_whose_gradients_are_zero() -> None:
    model, ids = Tied(300, 6).double(), torch.randint(300, (B, 3))
    keep = torch.tensor([1.0, 0.0, 2.0, 0.0], dtype=torch.float64)
    agrees(score(model(ids)) * keep, model)
    for layer, shape in CONVOLUTIONS.values():
        images = data(B, *shape)
        losses = score(layer.double()(images)) * keep
        norms = ps.norms(losses, layer, create_graph=True)
        assert all(g.isfinite().all() for g in derivatives(norms.sum(), [*layer.parameters(), images]))


def test_terms_that_cancel() -> None:
    """Gram matrices have no digits left for the first sample, which is written out."""
    model = nn.Linear(40, 48).double()
    pair = torch.randn(1, 40, dtype=torch.float64)
    x = torch.cat([pair, pair + 1e-9, torch.randn(1, 40, dtype=torch.float64)]).expand(B, -1, -1).clone()
    x[1:] = torch.randn(B - 1, 3, 40, dtype=torch.float64)
    x.requires_grad_()
    sign = torch.tensor([1.0, -1.0, 1e-9], dtype=torch.float64)
    weights = torch.stack([sign, *[torch.ones(3, dtype=torch.float64)] * (B - 1)])
    agrees((score_by_position(model(x)) * weights).sum(1), model, [x], rtol=1e-5)


def score_by_position(h: Tensor) -> Tensor:
    return h.tanh().sum(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", ["Gram matrices", "written out", "reused", "mask", "LoRA", "norms at once"])
def test_other_dtypes(layer: str, dtype: torch.dtype) -> None:
    make, shape = LAYERS[layer]
    model, x = make().to(dtype), data(B, *shape, dtype=dtype)
    agrees(score(model(x)), model, [x], rtol=1e-3 if dtype == torch.float32 else 0.2)


def test_time_first_expanded_and_sliced() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x = data(6, 1, B)
    h = model(x.expand(6, 7, B)[:, ::2].permute(1, 2, 0))  # (positions, B, features)
    agrees(h.square().sum((0, 2)), model, [x])
    agrees(h[1:].sum((0, 2)) ** 2, {"one": model[0].weight, "two": model[2].bias}, [x])


def test_losses_per_user_and_a_learned_start() -> None:
    """Samples that are several rows, in any order."""
    model, x = nn.Linear(5, 3).double(), data(7, 5)
    rows = score(model(x))
    losses = rows.new_zeros(B).index_add(0, torch.tensor([0, 2, 2, 1, 0, 3, 2]), rows)
    agrees(losses, model, [x])


def test_one_sample_and_none() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x = data(1, 6)
    leaves = [*model.parameters(), x]
    got = ps.norms(score(model(x)), model, create_graph=True)
    want = torch.cat([g.flatten(1) for g in loop(score(model(x)), model).values()], 1).norm(dim=1)
    assert_close(derivatives(got.sum(), leaves), derivatives(want.sum(), leaves), 1e-10)
    assert ps.grad(score(model(x[:0])), model, create_graph=True)["0.weight"].shape == (0, 5, 6)
    assert ps.norms(score(model(x[:0])), model, create_graph=True).shape == (0,)


def test_gram_between_two_batches_of_one_graph() -> None:
    model, x = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double(), data(2 * B, 6)
    losses = score(model(x))
    rows = torch.cat([g.flatten(1) for g in loop(losses, model).values()], 1)
    got = ps.gram(losses[:B], model, losses[B:], create_graph=True)
    leaves = [*model.parameters(), x]
    want = rows[:B] @ rows[B:].t()
    assert_close(derivatives(mixed([got]), leaves), derivatives(mixed([want]), leaves), 1e-10)


@pytest.mark.parametrize("kind", ["rademacher", "gaussian", "kronecker"])
def test_projections(kind: Any) -> None:
    model, x = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double(), data(B, 6)
    projection, losses = ps.Projection(4, seed=0, kind=kind), score(model(x))
    got = ps.project(losses, model, projection, create_graph=True)
    leaves = [*model.parameters(), x]
    assert got.shape == (B, 4)
    found = derivatives(got.square().sum(), leaves)
    v = [torch.randn_like(t) for t in leaves]
    ends = []
    for sign in (1, -1):
        moved = [t.detach() + sign * 1e-6 * one for t, one in zip(leaves, v, strict=True)]
        with torch.no_grad():
            for t, one in zip(leaves, moved, strict=True):
                t.copy_(one)
        ends.append(ps.project(score(model(x)), model, projection).square().sum())
        with torch.no_grad():
            for t, one, way in zip(leaves, moved, v, strict=True):
                t.copy_(one - sign * 1e-6 * way)
    slope = sum((g * one).sum() for g, one in zip(found, v, strict=True))
    torch.testing.assert_close(slope, (ends[0] - ends[1]) / 2e-6, rtol=1e-5, atol=1e-6)


def test_third_derivatives() -> None:
    model, x = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double(), data(B, 6)
    losses, leaves = score(model(x)), [*model.parameters(), x]
    found = []
    for stacks in (listed(ps.grad(losses, model, create_graph=True)), list(loop(losses, model).values())):
        second = torch.autograd.grad(mixed(stacks), leaves, create_graph=True)
        found.append(derivatives(mixed(second), leaves))
    assert_close(*found, 1e-8)


def test_learned_clipping() -> None:
    """What a user's weights depend on is in the graph, too."""
    model, x = nn.Linear(6, 5).double(), data(B, 6)
    bound = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    losses, leaves = score(model(x)), [*model.parameters(), x, bound]
    rows = torch.cat([g.flatten(1) for g in loop(losses, model).values()], 1)
    reduction = ps.ClippedSum(weights=lambda norms: bound / norms.clamp(min=bound))
    (got,) = ps.reduce(losses, model, reduction, create_graph=True)
    want = (bound / rows.norm(dim=1).clamp(min=bound)) @ rows
    assert_close(derivatives(mixed(got.values()), leaves), derivatives(mixed(want.split([30, 5])), leaves), 1e-9)
    assert bool(derivatives(mixed(got.values()), [bound])[0])


def test_weights_of_a_weighted_sum_are_differentiated() -> None:
    model, x, weights = nn.Linear(6, 5).double(), data(B, 6), data(B)
    losses = score(model(x))
    (got,) = ps.reduce(losses, model, ps.WeightedSum(weights), create_graph=True)
    rows = torch.cat([g.flatten(1) for g in loop(losses, model).values()], 1)
    assert_close(
        derivatives(mixed(got.values()), [weights]),
        derivatives(mixed((weights @ rows).split([30, 5])), [weights]),
        1e-9,
    )


@pytest.mark.parametrize("clip", [{"per": "parameter"}, {"gamma": 0.1}, {"nonfinite": "drop"}])
def test_other_ways_to_clip(clip: dict[str, Any]) -> None:
    model, x = nn.Linear(6, 5).double(), data(B, 6)
    losses, leaves = score(model(x)), [*model.parameters(), x]
    (got,) = ps.reduce(losses, model, ps.ClippedSum(0.7, **clip), create_graph=True)
    stacks = [g.flatten(1) for g in loop(losses, model).values()]
    norms = [torch.cat(stacks, 1).norm(dim=1)] * 2 if clip.get("per") is None else [s.norm(dim=1) for s in stacks]
    weights = [0.7 / (n + 0.1) if "gamma" in clip else 0.7 / n.clamp(min=0.7) for n in norms]
    want = [w @ s for w, s in zip(weights, stacks, strict=True)]
    assert_close(derivatives(mixed(got.values()), leaves), derivatives(mixed(want), leaves), 1e-9)


def test_the_callers_grad_mode_does_not_matter_and_nothing_stays_behind() -> None:
    model, x = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double(), data(B, 6)
    losses = score(model(x))
    with torch.no_grad():
        assert ps.norms(losses, model, create_graph=True).requires_grad
        assert not torch.is_grad_enabled()
    assert not is_differentiable()
    assert not ps.norms(losses, model, retain_graph=True).requires_grad
    assert not any(g.requires_grad for g in ps.grad(losses, model).values())


def test_results_are_in_memory_of_their_own() -> None:
    """Both biases have the same cotangent."""
    a, b = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    x = data(B, 3)
    first, second = ps.grad(((x + a + b) ** 2).sum(1), [a, b], create_graph=True)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def test_a_taught_function() -> None:
    """Its rule is made of what can be differentiated."""
    from persample.factors import Dense
    from persample.graph import teach

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            x, weight = ctx.saved_tensors
            return g * weight, (g * x).sum(0)

    @teach(Scale)
    def scale(use: Any) -> Any:
        x, _ = use.site.node.saved_tensors
        return Dense(use.rows(1).sum(use.g * x)) if use.k == 1 and use.rows(1) else None

    weight, x = torch.randn(5, dtype=torch.float64, requires_grad=True), data(B, 5)
    agrees(score(Scale.apply(x, weight)), [weight], [x])


def test_hooks_of_other_threads_know_the_mode() -> None:
    seen: list[bool] = []

    def look() -> None:
        seen.append(is_differentiable() and torch.is_grad_enabled())

    with differentiable(True):
        functions = [carrying_mode(look), look]
    for function in functions:
        thread = Thread(target=function)
        thread.start()
        thread.join()
    assert seen == [True, False]


@pytest.mark.parametrize("layer", ["one position", "several", "convolution"])
def test_a_gradient_of_zero_beside_others_is_differentiated_twice(layer: str) -> None:
    """The norm of one parameter's gradient has no second derivative where it is zero; that of all of them has."""
    model = {
        "one position": nn.Linear(6, 5),
        "several": nn.Linear(32, 48, bias=False),
        "convolution": nn.Conv1d(8, 6, 3),
    }
    first, other, z = model[layer].double(), nn.Linear(4, 1).double(), data(3, 4)
    x = data(*{"one position": (3, 6), "several": (3, 4, 32), "convolution": (3, 8, 5)}[layer]).detach()
    x[0] = 0
    x.requires_grad_()
    params = [*first.parameters(), *other.parameters()]
    losses = first(x).tanh().flatten(1).sum(1) + other(z).square().sum(1)
    rows = torch.cat([g.flatten(1) for g in loop(losses, params).values()], 1)
    norms, gram, total = ps.reduce(losses, params, ps.Norms(), ps.Gram(), ps.ClippedSum(0.5), create_graph=True)
    weights = (0.5 / rows.norm(dim=1).clamp(min=0.5)).unsqueeze(1)
    pairs = [
        (norms, rows.norm(dim=1)),
        (gram, rows @ rows.t()),
        (torch.cat([t.flatten() for t in total]), (weights * rows).sum(0)),
    ]
    for got, want in pairs:
        once = [torch.autograd.grad(mixed([answer]), x, create_graph=True) for answer in (got, want)]
        twice = [derivatives(mixed(slopes), [x]) for slopes in once]
        assert bool(twice[1][0][0].any())
        assert_close(*twice, 1e-9)


@pytest.mark.parametrize("form", ["numbers", "rows of a table", "groups"])
def test_a_part_of_a_gradient_that_is_zero_is_differentiated_twice(form: str) -> None:
    u = data(3, 2).detach()
    u[0, 0] = 0
    u.requires_grad_()
    p = {"numbers": data(3, 2), "rows of a table": data(5, 3), "groups": data(2, 3, 4)}[form]
    if form == "numbers":
        losses = (u.sin() * p).sum(1)
    elif form == "groups":
        losses = torch.einsum("bg,gpd->b", u.sin(), p.tanh())
    else:
        read = F.embedding(torch.tensor([[0, 1], [2, 3], [4, 4]]), p)
        losses = (read * u.sin().unsqueeze(2)).sum((1, 2))
    rows = loop(losses, [p])
    want = torch.cat([g.flatten(1) for g in rows.values()], 1).norm(dim=1)
    got = ps.norms(losses, [p], create_graph=True)
    once = [torch.autograd.grad(mixed([answer]), u, create_graph=True) for answer in (got, want)]
    twice = [derivatives(mixed(slopes), [u]) for slopes in once]
    assert bool(twice[1][0][0, 0] != 0)
    assert_close(*twice, 1e-9)


def _tied_terms(u: Tensor, words: int) -> tuple[Tensor, Tensor]:
    table, ids = data(words, 4), torch.randint(words, (3, 6))
    read = (F.embedding(ids, table) * u[:, 0, None, None].sin()).tanh().sum((1, 2))
    return table, read + (u[:, 1, None, None].sin() * (torch.randn(3, 2, 4).double() @ table.t())).tanh().sum((1, 2))


def _outer_and_row_norms(u: Tensor, positions: int) -> tuple[Tensor, Tensor]:
    weight, x = data(40, 24), torch.randn(3, positions, 24).double()
    product = (u[:, :1].sin() * F.linear(x, weight).flatten(1)).tanh().sum(1)
    return weight, product + (u[:, 1:].sin() * weight.norm(dim=1)).tanh().sum(1)


def _grouped_convolution(u: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    weight, x = data(4, 2, 3), torch.randn(3, 4, 6).double() * u.sin().repeat_interleave(2, 1).unsqueeze(2)
    convolve = F.conv_transpose1d if transposed else F.conv1d
    return weight, convolve(x, weight, padding=1, groups=2).tanh().flatten(1).sum(1)


PARTS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "small tied table": lambda u: _tied_terms(u, 5),
    "large tied table": lambda u: _tied_terms(u, 300),
    "row norms": lambda u: _outer_and_row_norms(u, 1),
    "row norms, several positions": lambda u: _outer_and_row_norms(u, 2),
    "groups of channels": lambda u: _grouped_convolution(u, False),
    "groups of channels, transposed": lambda u: _grouped_convolution(u, True),
}


@pytest.mark.parametrize("verb", ["norms", "clipped_sum"])
@pytest.mark.parametrize(
    ("form", "way"),
    [(form, way) for form in PARTS for way in ("stack", "patches", "pixels") if way == "stack" or "channels" in form],
)
def test_one_of_the_parts_of_a_sum_is_zero(form: str, way: str, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two samples lacks another term, or group, of one parameter's gradient."""
    monkeypatch.setattr("persample.factors.convolution.choose", lambda sizes, what: way)
    u = data(3, 2).detach()
    u[0, 0] = u[1, 1] = 0
    u.requires_grad_()
    p, losses = PARTS[form](u)
    rows = loop(losses, [p])["0"].flatten(1)
    norms = rows.norm(dim=1)
    if verb == "norms":
        got, want = ps.norms(losses, [p], create_graph=True), norms
    else:
        got = ps.clipped_sum(losses, [p], 0.5, create_graph=True)[0].flatten()
        want = ((0.5 / norms.clamp(min=0.5)).unsqueeze(1) * rows).sum(0)
    once = [torch.autograd.grad(mixed([answer]), u, create_graph=True) for answer in (got, want)]
    twice = [derivatives(mixed(slopes), [u]) for slopes in once]
    assert bool(twice[1][0][0, 0] != 0)
    assert_close(*twice, 1e-8)
