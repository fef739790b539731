"""Clipped sums: what one sample can add is bounded as stated, whatever its gradient is."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import persample as ps
from tests.reference import Params, definition, named, vectors

B, C = 4, 0.7
SLACK = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Program:
    """Parameters, data with the sample in front, and the losses of any part of the data, scaled per sample."""

    params: Params
    data: tuple[Tensor, ...]
    forward: Callable[..., Tensor]

    def losses(self, samples: Sequence[int] | None = None, scale: Sequence[float] | None = None) -> Tensor:
        chosen = list(range(len(self.data[0])) if samples is None else samples)
        losses = self.forward(*(d[chosen] for d in self.data))
        return losses if scale is None else losses * torch.tensor(scale, dtype=losses.dtype)[chosen]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.shift = nn.Embedding(40, 16), nn.Parameter(torch.zeros(40))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).tanh() @ self.table.weight.t() + self.shift


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.scale = nn.GRU(3, 4, batch_first=True), nn.Parameter(torch.tensor(0.8))

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0] * self.scale


# Layers by the form of their gradients; with few positions and many elements norms come from Gram matrices.
KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "one_position": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), (5,)),
    "many_positions": (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), (30, 3)),
    "few_positions": (lambda: nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 24)), (3, 24)),
    "conv": (lambda: nn.Sequential(nn.Conv1d(2, 8, 3), nn.Tanh(), nn.Conv1d(8, 16, 3, groups=2)), (2, 6)),
    "tied": (Tied, (3,)),
    "recurrent": (Recurrent, (5, 3)),
}


def program(kind: str, dtype: torch.dtype = torch.float64, batch: int = B) -> Program:
    torch.manual_seed(3)
    build, shape = KINDS[kind]
    model = build().to(dtype)
    ids = kind == "tied"
    x = torch.randint(0, 40, (batch, *shape)) if ids else torch.randn(batch, *shape, dtype=dtype)
    weight = torch.randn(model(x[:1])[0].numel(), dtype=dtype)
    return Program(model, (x,), lambda x: (model(x).sin().flatten(1) * weight).sum(1))


@dataclass(frozen=True)
class Variant:
    """A way to clip, its weights from norms and bound, its groups of names, and what one sample adds at most."""

    reduction: ps.ClippedSum
    weigh: Callable[[Tensor, float], Tensor]
    groups: dict[str, tuple[str, ...]]
    bounds: tuple[float, ...]
    sensitivity: float


def clip(norms: Tensor, bound: float) -> Tensor:
    return torch.where(norms > bound, bound / norms, 1.0)


def normalise(norms: Tensor, bound: float) -> Tensor:
    return bound / (norms + 0.01)


def soften(norms: Tensor, bound: float = C) -> Tensor:
    return bound / torch.hypot(norms, torch.ones_like(norms))


def variants(params: Params) -> dict[str, Variant]:
    names = list(named(params))
    n = len(names)
    halves = {"first": tuple(names[: n // 2]), "rest": tuple(names[n // 2 :])}
    single = {name: (name,) for name in names}
    own = {name: C / (k + 1) for k, name in enumerate(names)}
    whole = {"all": tuple(names)}
    every = ps.ClippedSum(C, per="parameter")
    lists = [list(group) for group in halves.values()]
    by_name = ps.ClippedSum(own, per="parameter")
    listed, mapped = ps.ClippedSum([C, 0.2], per=lists), ps.ClippedSum(C, per=dict(halves))
    found = {
        "flat": (flat := ps.ClippedSum(C), clip, whole, (C,), flat.sensitivity),
        "parameter": (every, clip, single, (C,) * n, every.sensitivity_for(n)),
        "parameter_bounds": (by_name, clip, single, tuple(own.values()), by_name.sensitivity),
        "list_bounds": (listed, clip, halves, (C, 0.2), listed.sensitivity),
        "dict_groups": (mapped, clip, halves, (C, C), mapped.sensitivity),
        "gamma": (auto := ps.ClippedSum(C, gamma=0.01), normalise, whole, (C,), auto.sensitivity),
        "gamma_groups": (
            (auto := ps.ClippedSum({"first": C, "rest": 0.2}, per=dict(halves), gamma=0.01)),
            *(normalise, halves, (C, 0.2), auto.sensitivity),
        ),
        "callable": (
            (own_weights := ps.ClippedSum(weights=soften, sensitivity=C)),
            *(soften, whole, (C,), own_weights.sensitivity),
        ),
    }
    return {name: Variant(*fields) for name, fields in found.items()}


def flat(sums: Mapping[str, Tensor] | Sequence[Tensor]) -> Tensor:
    """All parameters' sums as one vector in float64."""
    return torch.cat([t.double().flatten() for t in (sums.values() if isinstance(sums, Mapping) else sums)])


def wanted(stacks: Mapping[str, Tensor], variant: Variant) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The sum, and every group's norms and weights, from gradients that were written out."""
    rows = {name: g.double().reshape(len(g), -1) for name, g in stacks.items()}
    sums, norms, weights = dict(rows), [], []
    for names, bound in zip(variant.groups.values(), variant.bounds, strict=True):
        norms.append(torch.cat([rows[n] for n in names], 1).norm(dim=1))
        weights.append(variant.weigh(norms[-1], bound))
        sums.update({n: weights[-1] @ rows[n] for n in names})
    return flat(sums), norms, weights


def as_list(found: Tensor | Mapping[str, Tensor] | Sequence[Tensor]) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found.values() if isinstance(found, Mapping) else found)


def test_the_stated_sensitivities() -> None:
    """Groups are orthogonal, so their bounds add in squares."""
    names = len(named(program("one_position").params))
    found = {name: v.sensitivity for name, v in variants(program("one_position").params).items()}
    every = math.sqrt(sum((C / k) ** 2 for k in range(1, names + 1)))
    two = math.hypot(C, 0.2)
    assert found == pytest.approx(
        {"flat": C, "parameter": C * math.sqrt(names), "parameter_bounds": every, "list_bounds": two}
        | {"dict_groups": C * math.sqrt(2), "gamma": C, "gamma_groups": two, "callable": C}
    )
    assert ps.ClippedSum(weights=soften).sensitivity == math.inf
    assert ps.ClippedSum(C).sensitivity_for(names) == C


@pytest.mark.parametrize("max_memory", [None, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_sum_norms_and_weights_are_the_loops(kind: str, max_memory: int | None) -> None:
    p, scale = program(kind), [0.1, 30.0, 1.0, 0.0]
    stacks, every = definition(p.losses(scale=scale), p.params), variants(p.params)
    results = ps.reduce(p.losses(scale=scale), p.params, *(v.reduction for v in every.values()), max_memory=max_memory)
    for (name, variant), got in zip(every.items(), results, strict=True):
        total, norms, weights = wanted(stacks, variant)
        torch.testing.assert_close(flat(got), total, rtol=1e-10, atol=1e-12, msg=name)
        torch.testing.assert_close(as_list(got.clipping.norms), norms, rtol=1e-10, atol=1e-14, msg=name)
        torch.testing.assert_close(as_list(got.clipping.weights), weights, rtol=1e-10, atol=1e-14, msg=name)
        assert got.clipping.dropped == []


SCALES = {
    "huge": [1e30, -1e30, 1e30, 2e30],
    "one_huge": [1.0, 1.0, 1e30, 1.0],
    "tiny": [1e-35, 1e-35, 1e-35, -1e-35],
    "zero": [0.0, 0.0, 0.0, 0.0],
    "everything": [1e30, 1e-35, 0.0, 1.0],
    "not_finite": [math.inf, 1.0, math.nan, 1e30],
}
DTYPES = [(kind, dtype) for kind in KINDS for dtype in (torch.float64, torch.float32)]
DTYPES += [(kind, torch.bfloat16) for kind in ("one_position", "many_positions")]


def rounding(sums: Tensor, dtype: torch.dtype) -> float:
    """Sums of bfloat16 gradients are rounded to bfloat16."""
    return float(sums.norm()) * 2**-8 if dtype == torch.bfloat16 else 0.0


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(("kind", "dtype"), DTYPES, ids=str)
def test_one_sample_adds_at_most_the_sensitivity(kind: str, dtype: torch.dtype, scales: str) -> None:
    p, scale = program(kind, dtype), SCALES[scales]
    every = variants(p.params)
    for variant in every.values():
        variant.reduction.nonfinite = "drop"

    def sums(samples: list[int]) -> list[Tensor]:
        found = ps.reduce(p.losses(samples, scale), p.params, *(v.reduction for v in every.values()))
        return [flat(f) for f in found]

    whole = sums(list(range(B)))
    for i in range(B) if scales in ("everything", "not_finite") else [2]:
        rest = sums([j for j in range(B) if j != i])
        for k, (name, v) in enumerate(every.items()):
            change = float((whole[k] - rest[k]).norm())
            slack = SLACK[dtype] * v.sensitivity + rounding(whole[k], dtype) + rounding(rest[k], dtype)
            assert change <= v.sensitivity + slack, f"{name}: sample {i} adds {change}, more than {v.sensitivity}"
            if not math.isfinite(scale[i]):
                assert change <= slack, f"{name}: sample {i} was not dropped"
            elif abs(scale[i]) >= 1e30:
                assert change >= v.sensitivity - 20 * slack, f"{name}: the bound is not reached"


def cancelling(kind: str, big: float, nearly: float, dtype: torch.dtype) -> Program:
    """Twelve alike samples, but the last one's gradient is a sum of huge terms that cancel, exactly or nearly."""
    torch.manual_seed(0)
    n, (T, d, p) = 12, {"stack": (24, 4, 3), "gram": (4, 48, 40), "two": (2, 2, 3)}.get(kind, (6, 4, 3))
    x, g = torch.full((n, T, d), 0.3, dtype=dtype), torch.ones(n, T, p, dtype=dtype)
    x[-1], g[-1, 1::2] = torch.randn(d, dtype=dtype) * big, -1
    g[-1, 0] += nearly
    ids, w = torch.zeros(n, T, dtype=torch.long), torch.zeros(p, d, dtype=dtype, requires_grad=True)
    if kind == "conv":
        kernel, g = torch.zeros(p, d, 2, dtype=dtype, requires_grad=True), g[:, :-1]
        g[:, -1] = 0  # an even number of places
        return Program([kernel], (x, g), lambda x, g: (F.conv1d(x.mT, kernel).mT * g).sum((1, 2)))
    if kind == "table":
        return Program([w], (ids, x * g[..., :1]), lambda ids, g: (F.embedding(ids, w) * g).sum((1, 2)))
    if kind == "tied":
        return Program(
            *([w], (ids[:, :2], x[:, :2], g[:, :2])),
            lambda i, e, g: (
                (F.embedding(i[:, :1], w) * (e * g[..., :1])[:, :1]).sum((1, 2))
                + ((e * g[..., :1])[:, 1:] @ w[0]).sum(1)
            ),
        )
    return Program([w], (x, g), lambda x, g: ((x @ w.t()) * g).sum((1, 2)))


def recurrent(big: float, nearly: float, dtype: torch.dtype) -> Program:
    """The same in a recurrence: states that soon stay as they are, asked for with opposite signs."""
    rnn, x, g = nn.RNNCell(4, 3).to(dtype), torch.full((12, 8, 4), 0.3, dtype=dtype), torch.ones(12, 8, 3, dtype=dtype)
    x[-1], g[-1, ::2], g[-1, 1::2] = 3.0, big * (1 + nearly), -big

    def forward(x: Tensor, g: Tensor) -> Tensor:
        h, total = x.new_zeros(len(x), 3), x.new_zeros(len(x))
        for t in range(8):
            h = rnn(x[:, t], h)
            total = total + (h * g[:, t]).sum(1)
        return total

    return Program(rnn, (x, g), forward)


CANCEL = [(torch.float32, big, nearly) for big in (1e3, 1e6, 1e12) for nearly in (0.0, 1e-3)]
CANCEL += [(torch.float64, 1e6, 1e-4), (torch.float64, 1e10, 0.0), (torch.float64, 1e10, 1e-9)]


@pytest.mark.parametrize(("dtype", "big", "nearly"), CANCEL, ids=str)
@pytest.mark.parametrize("kind", ["stack", "gram", "two", "conv", "table", "tied", "recurrent"])
def test_terms_that_cancel_do_not_wipe_out_other_samples(
    kind: str, dtype: torch.dtype, big: float, nearly: float
) -> None:
    """A running sum over samples and positions would forget everything before a term of 1e12 in float32."""
    p = recurrent(big, nearly, dtype) if kind == "recurrent" else cancelling(kind, big, nearly, dtype)
    (without,) = ps.reduce(p.losses(range(11)), p.params, ps.ClippedSum(C))
    assert float(flat(without).norm()) > 2 * C  # there is something to forget
    for order, memory in (([*range(12)], None), ([*range(12)], 0), ([11, *range(11)], 0)):
        (got,) = ps.reduce(p.losses(order), p.params, ps.ClippedSum(C), max_memory=memory)
        assert float((flat(got) - flat(without)).norm()) <= C * (1 + SLACK[dtype])


@pytest.mark.parametrize(("T", "d", "p"), [(2, 1, 1), (2, 2, 3), (4, 8, 8), (3, 24, 32), (2, 200, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_norms_of_terms_that_half_cancel(T: int, d: int, p: int, dtype: torch.dtype) -> None:
    """A norm that comes out too small makes a weight too large: digits lost in Gram matrices count."""
    torch.manual_seed(1)
    signs, w = torch.ones(T, 1, dtype=dtype), torch.zeros(p, d, dtype=dtype, requires_grad=True)
    signs[1::2], signs[T - T % 2 :] = -1, 0
    left = torch.exp(torch.empty(1500, 1, 1).uniform_(*((-5, -1) if dtype == torch.float32 else (-11, -4)))).to(dtype)
    x = torch.randn(len(left), 1, d, dtype=dtype) + left * torch.randn(len(left), T, d, dtype=dtype)
    g = torch.randn(len(left), 1, p, dtype=dtype) * signs
    losses = ((x @ w.t()) * g).sum((1, 2))
    written_out = ps.grad(losses, [w], retain_graph=True)[0].double().flatten(1).norm(dim=1)
    norms = ps.norms(losses, [w]).double()
    assert float((written_out / norms).max()) <= 1 + SLACK[dtype]


# --- gradients that are not finite


def spoilt(kind: str, bad: Mapping[int, float], batch: int = 6) -> Program:
    """Some samples' data are infinite or NaN; where data are ids, their losses are."""
    p = program(kind, batch=batch)
    scale = torch.ones(batch, dtype=torch.float64)
    for i, value in bad.items():
        (scale if kind == "tied" else p.data[0])[i] = value
    return Program(p.params, (*p.data, scale), lambda x, scale: p.forward(x) * scale)


BAD = {1: math.nan, 4: math.inf}


@pytest.mark.parametrize("kind", KINDS)
def test_raise_names_exactly_the_samples(kind: str) -> None:
    p = spoilt(kind, BAD)
    for name, v in variants(p.params).items():
        with pytest.raises(
            ps.NonFiniteError, match=r"2 of 6 samples are not finite: 1, 4\. .*nonfinite='drop'"
        ) as info:
            ps.reduce(p.losses(), p.params, v.reduction)
        assert info.value.samples == [1, 4], name
    params = named(p.params)
    with pytest.raises(ps.NonFiniteError):
        ps.backward(p.losses(), p.params, ps.ClippedSum(C))
    assert all(q.grad is None for q in params.values())  # nothing is accumulated before the check


def test_raise_lists_only_the_first_of_many() -> None:
    w = torch.ones(2, dtype=torch.float64, requires_grad=True)
    x = torch.full((50, 2), math.nan, dtype=torch.float64)
    x[7] = 1
    with pytest.raises(ps.NonFiniteError, match=r"49 of 50 samples are not finite: 0, .*, 20, …\.") as info:
        ps.clipped_sum((x * w).sum(1), [w], C)
    assert info.value.samples == [i for i in range(50) if i != 7]


@pytest.mark.parametrize("memory", [None, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_drop_is_the_batch_without_them(kind: str, memory: int | None) -> None:
    p = spoilt(kind, BAD)
    for name, v in variants(p.params).items():
        v.reduction.nonfinite = "drop"
        (got,) = ps.reduce(p.losses(), p.params, v.reduction, max_memory=memory)
        (want,) = ps.reduce(p.losses([0, 2, 3, 5]), p.params, v.reduction, max_memory=memory)
        assert flat(got).isfinite().all(), name
        torch.testing.assert_close(flat(got), flat(want), rtol=1e-12, atol=1e-14, msg=name)
        assert got.clipping.dropped == [1, 4]
        assert want.clipping.dropped == []
        for n, w, kept in zip(*map(as_list, (*got.clipping, want.clipping.weights)), strict=True):
            assert (~n.isfinite()).nonzero().flatten().tolist() in ([1, 4], [])
            assert w[[1, 4]].tolist() == [0, 0]
            torch.testing.assert_close(w[[0, 2, 3, 5]], kept)


def test_results_and_errors_can_be_copied_and_sent() -> None:
    p = spoilt("one_position", BAD)
    with pytest.raises(ps.NonFiniteError) as info:
        ps.clipped_sum(p.losses(), p.params, C)
    error = pickle.loads(pickle.dumps(info.value))
    assert (error.samples, str(error)) == (info.value.samples, str(info.value))
    for container in (p.params, list(named(p.params).values())):
        got = ps.clipped_sum(p.losses(), container, C, nonfinite="drop")
        for copied in (deepcopy(got), pickle.loads(pickle.dumps(got))):
            assert type(copied) is type(got)
            assert copied.clipping.dropped == [1, 4]
            torch.testing.assert_close(copied.clipping.weights, got.clipping.weights)
            torch.testing.assert_close(flat(copied), flat(got))
        assert copy(got.clipping).dropped == [1, 4]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
def test_all_samples_dropped(kind: str, batch: int) -> None:
    p = spoilt(kind, dict.fromkeys(range(batch), math.nan), batch)
    got = ps.clipped_sum(p.losses(), p.params, C, nonfinite="drop")
    assert not flat(got).any()
    assert got.clipping.dropped == list(range(batch))
    clipping = ps.backward(p.losses(), p.params, ps.ClippedSum(C, nonfinite="drop"))
    assert clipping.dropped == list(range(batch))
    for q in named(p.params).values():
        torch.testing.assert_close(q.grad, torch.zeros_like(q), rtol=0, atol=0)


def two_branches() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Sample 2's gradient is infinite for b only."""
    params = {k: torch.ones(2, dtype=torch.float64, requires_grad=True) for k in "ab"}
    x, y = torch.ones(4, 2, dtype=torch.float64), torch.ones(4, 2, dtype=torch.float64)
    y[2, 1] = -math.inf
    return params, x, y


def test_one_bad_group_makes_a_bad_sample() -> None:
    params, x, y = two_branches()

    def losses() -> Tensor:
        return (params["a"] * x).sum(1) + (params["b"] * y).sum(1)

    for per in ("parameter", [["a"], ["b"]]):
        with pytest.raises(ps.NonFiniteError, match="1 of 4 samples are not finite: 2") as info:
            ps.clipped_sum(losses(), params, C, per=per)
        assert info.value.samples == [2]
        got = ps.clipped_sum(losses(), params, C, per=per, nonfinite="drop")
        want = math.sqrt(2) / 2 * C * 3  # three alike samples, the fourth adds to neither group
        torch.testing.assert_close(flat(got), torch.full((4,), want, dtype=torch.float64))
        assert got.clipping.dropped == [2]
        assert [w[2] for w in as_list(got.clipping.weights)] == [0, 0]


def test_a_product_beyond_float32_is_not_finite() -> None:
    """The norm of an outer product is known in float64, but the gradient itself is infinite."""
    model, x, scale = nn.Linear(3, 2), torch.ones(4, 3), torch.tensor([1, 1e30, 1, 1])
    x[1] = 1e30
    assert not ps.grad(model(x).sum(1) * scale, model)["weight"][1].isfinite().any()
    with pytest.raises(ps.NonFiniteError) as info:
        ps.clipped_sum(model(x).sum(1) * scale, model, C)
    assert info.value.samples == [1]
    assert ps.clipped_sum(model(x).sum(1) * scale, model, C, nonfinite="drop").clipping.dropped == [1]


def test_a_finite_gradient_with_a_norm_beyond_float32_is_clipped_not_dropped() -> None:
    model, scale = nn.Linear(30, 20), torch.tensor([0.0, 2e38, 0.0])
    got = ps.clipped_sum(model(torch.ones(3, 30)).sum(1) * scale, model, C)
    assert got.clipping.dropped == []
    assert float(flat(got).norm()) == pytest.approx(C, rel=1e-4)


def test_a_small_bound_on_huge_gradients() -> None:
    """Weights below 1e-38 have few digits in float32."""
    for bound in (1e-2, 1e-4, 1e-6):
        for T, size in ((1, 3), (3, 3), (3, 40)):
            w, x = torch.zeros(size, size, requires_grad=True), torch.ones(2, T, size)
            x[0] = 1e38

            def sums(samples: list[int], w: Tensor = w, x: Tensor = x, bound: float = bound) -> Tensor:
                return flat(ps.clipped_sum((x[samples] @ w.t()).sum((1, 2)), [w], bound))

            assert float((sums([0, 1]) - sums([1])).norm()) <= bound * (1 + 1e-4)


def test_drop_shows_the_weights_function_what_is_kept() -> None:
    """Weights that are relative to the batch are those of the batch without the dropped samples."""
    p = spoilt("one_position", BAD)
    reduction = ps.ClippedSum(weights=lambda n: n.mean() / (n + n.mean()), nonfinite="drop")
    (got,), (want,) = (ps.reduce(p.losses(s), p.params, reduction) for s in (range(6), [0, 2, 3, 5]))
    torch.testing.assert_close(flat(got), flat(want), rtol=1e-12, atol=1e-14)
    assert got.clipping.weights[[1, 4]].tolist() == [0, 0]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    scales=st.lists(st.floats(-35, 30).map(lambda e: 10**e) | st.just(0.0), min_size=1, max_size=5),
    shape=st.tuples(st.integers(0, 6), st.integers(1, 5), st.integers(1, 5)),
    bound=st.floats(-3, 3).map(lambda e: 10**e),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    memory=st.sampled_from([None, 0, 100]),
    seed=st.integers(0, 2**16),
)
def test_any_shapes_and_scales(
    scales: list[float], shape: tuple[int, int, int], bound: float, dtype: torch.dtype, memory: int | None, seed: int
) -> None:
    (T, d, p), n = shape, len(scales)
    draw = torch.Generator().manual_seed(seed)
    x, g = (torch.randn(n, T, k, generator=draw, dtype=torch.float64).to(dtype) for k in (d, p))
    w, b = torch.zeros(p, d, dtype=dtype, requires_grad=True), torch.zeros(p, dtype=dtype, requires_grad=True)

    def sums(samples: list[int]) -> Tensor:
        losses = (F.linear(x[samples], w, b) * g[samples]).sum((1, 2)) * torch.tensor(scales, dtype=dtype)[samples]
        return flat(ps.clipped_sum(losses, [w, b], bound, max_memory=memory))

    ones = torch.ones(n, T, 1)
    rows = g.double().mT @ torch.cat([x.double(), ones], 2) * torch.tensor(scales, dtype=torch.float64).view(-1, 1, 1)
    weighted = rows * clip(rows.flatten(1).norm(dim=1), bound).view(-1, 1, 1)
    whole, total = sums([*range(n)]), weighted.sum(0)
    want = torch.cat([total[:, :d].flatten(), total[:, d]])
    assert float((whole - want).norm()) <= SLACK[dtype] * bound * n
    for i in range(n):
        assert float((whole - sums([j for j in range(n) if j != i])).norm()) <= bound * (1 + SLACK[dtype])


# --- wrong arguments


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: ps.ClippedSum(), "needs max_norm, or a function for weights"),
        (lambda: ps.ClippedSum(0.0), "max_norm must be positive and finite, not 0.0"),
        (lambda: ps.ClippedSum(-1.0), "max_norm must be positive and finite, not -1.0"),
        (lambda: ps.ClippedSum(math.inf), "max_norm must be positive and finite, not inf"),
        (lambda: ps.ClippedSum(math.nan), "max_norm must be positive and finite, not nan"),
        (lambda: ps.ClippedSum([1.0, 0.0], per=[["a"], ["b"]]), "max_norm must be positive and finite, not .*0.0"),
        (
            lambda: ps.ClippedSum({"a": 1.0, "b": "2"}, per="parameter"),
            "max_norm must be positive and finite, not .*'2'",
        ),
        (lambda: ps.ClippedSum([]), "max_norm must be positive and finite, not"),
        (lambda: ps.ClippedSum(True), "max_norm must be positive and finite, not True"),
        (lambda: ps.ClippedSum(1.0, gamma=0.0), "gamma must be positive, .*not 0.0"),
        (lambda: ps.ClippedSum(1.0, gamma="1"), "gamma must be positive, .*not '1'"),
        (lambda: ps.ClippedSum(1.0, gamma=math.nan), "gamma must be positive, .*not nan"),
        (lambda: ps.ClippedSum(1.0, gamma=math.inf), "gamma must be positive, .*not inf"),
        (lambda: ps.ClippedSum(1.0, gamma=1e-39), "gamma must be positive, .*not vanishing beside max_norm"),
        (lambda: ps.ClippedSum(1.0, weights=soften), "either weights, or max_norm and gamma"),
        (lambda: ps.ClippedSum(gamma=1.0, weights=soften), "either weights, or max_norm and gamma"),
        (lambda: ps.ClippedSum(1.0, sensitivity=1.0), "sensitivity follows from max_norm"),
        (lambda: ps.ClippedSum(weights=soften, sensitivity=-1.0), "sensitivity must"),
        (lambda: ps.ClippedSum(1.0, nonfinite="ignore"), "nonfinite must be 'raise' or 'drop', not 'ignore'"),
        (lambda: ps.ClippedSum(1.0, per="parameter").sensitivity, "sensitivity_for"),
    ],
)
def test_wrong_arguments_are_refused_at_once(build: Callable[[], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        build()


def test_weights_that_cannot_be_called_are_refused_at_once() -> None:
    with pytest.raises(TypeError, match="weights"):
        ps.ClippedSum(weights=torch.ones(3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reduction", "match"),
    [
        (ps.ClippedSum([1.0, 2.0]), "one bound per group: expected 1, got 2"),
        (ps.ClippedSum([1.0], per="parameter"), "one bound per group: expected 2, got 1"),
        (ps.ClippedSum({"weight": 1.0}, per="parameter"), r"expected \['weight', 'bias'\], got \['weight'\]"),
        (ps.ClippedSum({"x": 1.0}, per={"y": ["weight", "bias"]}), r"expected \['y'\], got \['x'\]"),
        (ps.ClippedSum(weights=lambda n: n.mean()), r"one weight per sample, \(4,\), but returned \(\)"),
        (ps.ClippedSum(weights=lambda n: 1.0), r"one weight per sample, \(4,\), but returned float"),
        (ps.ClippedSum(weights=lambda n: n[:2]), r"one weight per sample, \(4,\), but returned \(2,\)"),
    ],
)
def test_bounds_and_weights_must_fit(reduction: ps.ClippedSum, match: str) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=match):
        ps.reduce(model(torch.ones(4, 3)).sum(1), model, reduction)


def test_bounds_by_groups_whose_keys_are_numbers() -> None:
    model = nn.Linear(3, 2)
    per = {0: ["weight"], 1: ["bias"]}
    got = ps.clipped_sum(model(torch.ones(4, 3)).sum(1), model, {0: 1.0, 1: 0.5}, per=per)  # type: ignore[arg-type]
    assert float(got["bias"].norm()) == pytest.approx(4 * 0.5)
    assert float(got["weight"].norm()) == pytest.approx(4 * 1.0)


# --- backward


@pytest.mark.parametrize("kind", KINDS)
def test_backward_accumulates_what_reduce_gives(kind: str) -> None:
    p = program(kind)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    params = {**named(p.params), "unreached": torch.ones(3, requires_grad=True), "frozen": frozen.weight}
    *reached, unreached, _ = params.values()
    not_asked = torch.ones((), dtype=torch.float64, requires_grad=True)
    calls: list[int] = []
    for q in (*reached, unreached):
        q.register_post_accumulate_grad_hook(lambda q: calls.append(id(q)))
    for container in (params, [*reached, unreached]):
        (want,) = ps.reduce(p.losses(), container, ps.ClippedSum(C))
        for factor in (1, 2):
            clipping = ps.backward(p.losses() * not_asked, container, ps.ClippedSum(C))
            assert isinstance(clipping, ps.Clipping)
            for got, expected in zip(clipping, want.clipping, strict=True):
                torch.testing.assert_close(got, expected)
            for q, total in zip(reached, as_list(want), strict=False):
                assert not q.grad.requires_grad
                torch.testing.assert_close(q.grad, factor * total, rtol=1e-12, atol=1e-14)
            assert unreached.grad is frozen.weight.grad is not_asked.grad is None
            assert sorted(calls) == sorted(map(id, reached))
            calls.clear()
        for q in reached:
            q.grad = None


def test_backward_of_tied_parameters_and_tensors_given_twice() -> None:
    a, b = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    b.weight = a.weight
    model, x = nn.Sequential(a, nn.Tanh(), b), torch.randn(5, 3, dtype=torch.float64)
    model(x).sum().backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    for params in (model, [*model.parameters(), a.weight]):
        model.zero_grad()
        ps.backward(model(x).sum(1), params, ps.ClippedSum(1e6))
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, want[name])


def test_backward_of_no_samples() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
    clipping = ps.backward(model["used"](torch.ones(0, 3)).sum(1), model, ps.ClippedSum(C))
    assert [tuple(t.shape) for t in clipping] == [(0,), (0,)]
    assert all(p.grad is not None and not p.grad.any() for p in model["used"].parameters())
    assert all(p.grad is None for p in model["unused"].parameters())


def test_a_step_of_sgd() -> None:
    p = program("one_position")
    model = p.params
    assert isinstance(model, nn.Module)
    before = {name: q.detach().clone() for name, q in model.named_parameters()}
    stacks = definition(p.losses(), model)
    norms = vectors(stacks).norm(dim=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    got, weights = ps.backward(p.losses(), model, ps.ClippedSum(0.5 * float(norms.mean())))
    optimizer.step()
    torch.testing.assert_close(got, norms)
    assert (weights < 1).any()
    for name, q in model.named_parameters():
        step = torch.einsum("b,b...->...", clip(norms, 0.5 * float(norms.mean())), stacks[name])
        torch.testing.assert_close(q.detach(), before[name] - 0.1 * step)


def test_backward_takes_clipped_sums_only() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(TypeError, match="accumulates a ClippedSum, not a Norms"):
        ps.backward(model(torch.ones(4, 3)).sum(1), model, ps.Norms())  # type: ignore[arg-type]


def test_a_sum_states_its_own_sensitivity() -> None:
    """Also where the reduction alone cannot know it: one bound for every parameter."""
    layer = nn.Linear(3, 2)
    for clip, want in (
        (ps.ClippedSum(2.0), 2.0),
        (ps.ClippedSum(2.0, per="parameter"), 2.0 * math.sqrt(2)),
        (ps.ClippedSum({"weight": 3.0, "bias": 4.0}, per="parameter"), 5.0),
        (ps.ClippedSum(weights=lambda n: 1 / (1 + n), sensitivity=1.0), 1.0),
        (ps.ClippedSum(weights=torch.ones_like), math.inf),
    ):
        (total,) = ps.reduce(layer(torch.ones(4, 3)).sum(1), layer, clip)
        assert total.clipping.sensitivity == pytest.approx(want)
        assert "sensitivity" in repr(total.clipping)


def test_a_tensor_is_no_bound() -> None:
    with pytest.raises(TypeError, match=r"a Python number, not a tensor: use \.item\(\)"):
        ps.ClippedSum(torch.tensor(1.0))  # type: ignore[arg-type]


def test_backward_of_no_samples_through_statistics() -> None:
    """PyTorch's own gradient of the scale is NaN: of a group without elements."""
    norm, x = nn.GroupNorm(1, 1).double(), torch.zeros(1, 1, 3, 0, dtype=torch.float64, requires_grad=True)
    losses = norm(x).sum(2).flatten()
    ps.backward(losses, norm, ps.ClippedSum(1.0))
    assert norm.weight.grad is not None
    assert norm.weight.grad.tolist() == [0.0]
