"""Every verb at its edges: no samples and one, odd containers, dtypes and modes, bad numbers, bad arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample as ps
from tests.models import EveryForm, every_form
from tests.reference import Params, definition, flat, named, real, vectors

C = 0.7
PROJECTION = ps.Projection(6, seed=2)


def build(batch: int) -> tuple[EveryForm, Tensor]:
    """A model with parameters of every form, and ids."""
    return every_form(), torch.randint(0, 6, (batch, 5), generator=torch.Generator().manual_seed(1))


def leaves(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    else:
        for part in found.values() if isinstance(found, Mapping) else found:
            yield from leaves(part)


def together(found: Any) -> Tensor:
    """A result as one tensor of real numbers: parameters' tensors one after another."""
    return real(found) if isinstance(found, Tensor) else torch.cat([real(t).flatten() for t in leaves(found)])


def ones_like(params: Params) -> Any:
    ones = {name: torch.ones_like(p, requires_grad=False) for name, p in named(params).items()}
    return ones if isinstance(params, (nn.Module, Mapping)) else list(ones.values())


def projected(stacks: Mapping[str, Tensor]) -> Tensor:
    matrices = {name: PROJECTION.rows(name, 0, flat(g).shape[1]).double() for name, g in stacks.items()}
    return vectors(stacks) @ torch.cat(list(matrices.values()))


def variance(g: Tensor) -> Tensor:
    return (g - g.mean(0)).square().sum(0) / max(len(g) - 1, 0)


Verb = Callable[..., Any]
VERBS: dict[str, Verb] = {
    "norms": ps.norms,
    "norms_each": lambda losses, params, **o: ps.norms(losses, params, per="parameter", **o),
    "clipped_sum": lambda losses, params, **o: ps.clipped_sum(losses, params, C, **o),
    "second_moment": ps.second_moment,
    "variance": ps.variance,
    "gram": ps.gram,
    "dot": lambda losses, params, **o: ps.dot(losses, params, ones_like(params), **o),
    "project": lambda losses, params, **o: ps.project(losses, params, PROJECTION, **o),
    "stack": lambda losses, params, **o: ps.reduce(losses, params, ps.Stack(), **o)[0],
    "weighted_sum": lambda losses, params, **o: ps.reduce(
        losses, params, ps.WeightedSum(torch.arange(len(losses))), **o
    )[0],
}
BACKWARD: Verb = lambda losses, params, **o: ps.backward(losses, params, ps.ClippedSum(C), **o)  # noqa: E731
EVERY = {**VERBS, "backward": BACKWARD}


def wanted(verb: str, stacks: Mapping[str, Tensor]) -> Tensor:
    """The same from gradients that were written out."""
    g = vectors(stacks)
    norms = g.norm(dim=1)
    answers: dict[str, Callable[[], Tensor]] = {
        "norms": lambda: norms,
        "norms_each": lambda: torch.cat([vectors({"": s}).norm(dim=1) for s in stacks.values()]),
        "clipped_sum": lambda: torch.where(norms > C, C / norms, 1.0) @ g,
        "second_moment": lambda: g.square().mean(0),
        "variance": lambda: variance(g),
        "gram": lambda: g @ g.t(),
        "dot": lambda: g @ vectors({n: s.new_ones(1, *s.shape[1:]) for n, s in stacks.items()})[0],
        "project": lambda: projected(stacks),
        "stack": lambda: torch.cat([real(s).flatten() for s in stacks.values()]),
        "weighted_sum": lambda: torch.arange(len(g), dtype=torch.float64) @ g,
    }
    return answers[verb]()


# --- how many samples, in which container


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("verb", VERBS)
def test_any_number_of_samples_in_any_container(verb: str, batch: int) -> None:
    """Unreached parameters count as zeros, frozen ones are left out, and the order is that of the parameters."""
    model, x = build(batch)
    params = named(model)
    containers = [model, {**params, "frozen": model.frozen.weight}, dict(reversed(params.items()))]
    for container in [*containers, list(params.values()), tuple(reversed(params.values()))]:
        if verb == "dot" and isinstance(container, nn.Module):
            assert ps.dot(model(x), model, model).shape == (batch,)
        stacks = definition(model(x), container)
        for memory in (None, 0):
            got = VERBS[verb](model(x), container, max_memory=memory)
            if not isinstance(got, Tensor):
                names = list(named(container))
                assert list(got) == names if isinstance(got, dict) else len(got) == len(names)
                assert isinstance(got, dict) == isinstance(container, nn.Module | Mapping)
            want = wanted(verb, stacks)
            torch.testing.assert_close(together(got), want, rtol=1e-10, atol=1e-12, equal_nan=True)
            assert not any(t.requires_grad or t.dtype != torch.float64 for t in leaves(got))


@pytest.mark.parametrize("sizes", [(3, 5), (5, 3), (0, 3), (3, 0), (0, 0), (1, 1), (1, 4), (4, 1)], ids=str)
def test_gram_of_two_batches(sizes: tuple[int, int]) -> None:
    model, x = build(sum(sizes))
    a, b = x.split(sizes)
    one, other = vectors(definition(model(a), model)), vectors(definition(model(b), model))
    for memory in (None, 0):
        got = ps.gram(model(a), model, model(b), max_memory=memory)
        torch.testing.assert_close(got, one @ other.t(), rtol=1e-10, atol=1e-12)


def test_gram_of_two_batches_that_reach_different_parameters_or_share_a_graph() -> None:
    a, b = nn.Linear(2, 2).double(), nn.Linear(2, 2).double()
    both, x = nn.ModuleList([a, b]), torch.randn(4, 2, dtype=torch.float64)
    assert not ps.gram(a(x).sum(1), both, b(x).sum(1)).any()
    mixed = ps.gram((a(x) * b(x)).sum(1), both, b(x[:3]).sum(1))
    want = vectors(definition((a(x) * b(x)).sum(1), both)) @ vectors(definition(b(x[:3]).sum(1), both)).t()
    torch.testing.assert_close(mixed, want)
    losses = b(a(x).tanh()).square().sum(1)
    want = vectors(definition(losses, both)) @ vectors(definition(losses, both)).t()
    torch.testing.assert_close(ps.gram(losses, both, losses, retain_graph=True), want)
    torch.testing.assert_close(ps.gram(losses[:1], both, losses[1:]), want[:1, 1:])  # one call, one graph
    with pytest.raises(RuntimeError, match="freed by an earlier backward"):
        ps.gram(losses, both, losses)


def test_dot_takes_any_number_of_directions_in_any_container() -> None:
    model, x = build(3)
    g, params = vectors(definition(model(x), model)), named(model)
    for k in (0, 1, 2, 5):
        many = {name: torch.randn(k, *p.shape, dtype=torch.float64) for name, p in params.items()}
        want = g @ vectors(many).t() if k else torch.zeros(3, 0, dtype=torch.float64)
        for direction in (many, dict(reversed(many.items())), list(many.values()), tuple(many.values())):
            torch.testing.assert_close(ps.dot(model(x), model, direction), want, rtol=1e-10, atol=1e-12)
    low = {name: torch.ones(p.shape, dtype=torch.float32) for name, p in params.items()}
    torch.testing.assert_close(ps.dot(model(x), model, low), g.sum(1))
    whole = {name: torch.ones(p.shape, dtype=torch.int64, requires_grad=False) for name, p in params.items()}
    torch.testing.assert_close(ps.dot(model(x), model, whole), g.sum(1))


def test_no_parameters_give_zeros_or_nothing() -> None:
    model, x = build(3)
    for verb, run in VERBS.items():
        found = run(model(x), {})
        assert (found.shape[0] == 3 and not found.any()) if isinstance(found, Tensor) else found == {}, verb
    for per in ("parameter", [], {}):
        assert ps.clipped_sum(model(x), {}, C, per=per) == {}


@pytest.mark.parametrize("form", ["vector", "one_position", "positions", "table"])
def test_variance_of_nearly_equal_gradients(form: str) -> None:
    """The mean must be as exact as the gradients: its error counts in squares."""
    torch.manual_seed(0)
    w, x = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True), torch.randn(7, 3, 4, dtype=torch.float64)
    x, ids = 1 + 1e-5 * x, torch.zeros(7, 3, dtype=torch.long)
    forward: dict[str, Callable[[], Tensor]] = {
        "vector": lambda: (w * x[:, :2]).sum((1, 2)),
        "one_position": lambda: (x[:, 0] @ w.t()).sum(1),
        "positions": lambda: (x @ w.t()).sum((1, 2)),
        "table": lambda: (F.embedding(ids, w) * x).sum((1, 2)),
    }
    want = definition(forward[form](), [w])["0"].var(0)
    torch.testing.assert_close(ps.variance(forward[form](), [w])[0], want, rtol=1e-5, atol=0)


# --- dtypes


@pytest.mark.parametrize("verb", [v for v in VERBS if v not in ("variance", "second_moment")])
def test_complex_parameters(verb: str) -> None:
    """Inner products are real: those of the real and imaginary parts."""
    torch.manual_seed(0)
    w, c = (torch.randn(s, dtype=torch.complex128, requires_grad=True) for s in ((3, 4), ()))
    r, x = torch.randn(3, dtype=torch.float64, requires_grad=True), torch.randn(4, 5, 4, dtype=torch.complex128)
    params = {"w": w, "c": c, "r": r}

    def forward() -> Tensor:
        return ((F.linear(x, w) * c).tanh() * r).abs().square().sum((1, 2))

    got = VERBS[verb](forward(), params)
    torch.testing.assert_close(together(got), wanted(verb, definition(forward(), params)), rtol=1e-10, atol=1e-12)
    if isinstance(got, dict) and verb != "norms_each":
        assert [t.dtype for t in got.values()] == [p.dtype for p in params.values()]


def test_moments_of_complex_parameters_are_real() -> None:
    w, x = torch.randn(3, dtype=torch.complex128, requires_grad=True), torch.randn(4, 3, dtype=torch.complex128)
    g = definition((x * w).abs().sum(1), [w])["0"]
    (got,) = ps.second_moment((x * w).abs().sum(1), [w])
    torch.testing.assert_close(got, g.abs().square().mean(0))
    (got,) = ps.variance((x * w).abs().sum(1), [w])
    torch.testing.assert_close(got, g.var(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_added_up_in_single(dtype: torch.dtype) -> None:
    """Sums of ones in bfloat16 would stop at 256, in float16 at 2048."""
    n = 3000
    w = torch.ones(n, dtype=dtype, requires_grad=True)
    x = torch.ones(2, n, dtype=dtype)
    got = ps.norms((x * w).sum(1), [w])
    torch.testing.assert_close(got, torch.full((2,), math.sqrt(n)))
    torch.testing.assert_close(ps.gram((x * w).sum(1), [w]), torch.full((2, 2), float(n)))
    torch.testing.assert_close(ps.dot((x * w).sum(1), [w], [torch.ones(n)]), torch.full((2,), float(n)))
    v = torch.ones(2, dtype=dtype, requires_grad=True)
    many = torch.ones(n, 2, dtype=dtype)
    results = ps.reduce(
        (many * v).sum(1), [v], ps.ClippedSum(10.0), ps.SecondMoment(), ps.WeightedSum(torch.ones(n)), ps.Variance()
    )
    for (found,), want, kept in zip(results, (n, 1, n, 0), (dtype, torch.float32) * 2, strict=True):
        torch.testing.assert_close(found, torch.full((2,), want, dtype=kept))
    layer = nn.Linear(200, 300).to(dtype)
    for data in (torch.randn(3, 200), torch.randn(3, 4, 200), torch.randn(3, 400, 200)):
        losses = layer(data.to(dtype)).tanh().flatten(1).sum(1)
        want = vectors(ps.grad(losses, layer, retain_graph=True)).norm(dim=1)
        torch.testing.assert_close(ps.norms(losses, layer).double(), want, rtol=5e-3, atol=0)


def test_mixed_dtypes_meet_in_the_widest() -> None:
    a, b, c = (torch.ones(3, dtype=d, requires_grad=True) for d in (torch.bfloat16, torch.float32, torch.float64))
    x = torch.randn(4, 3, dtype=torch.float64)
    for params in ([a, b, c], [a, b], [a]):
        dtype = torch.float64 if c is params[-1] else torch.float32

        def forward(params: list[Tensor] = params) -> Tensor:
            return sum((x * p.double()).sin().sum(1) for p in params)  # type: ignore[return-value]

        stacks = definition(forward(), params)
        for verb in ("norms", "gram", "dot", "project", "clipped_sum"):
            got = VERBS[verb](forward(), params)
            expected = [dtype] if isinstance(got, Tensor) else [p.dtype for p in params]
            assert [t.dtype for t in leaves(got)] == expected
            torch.testing.assert_close(together(got), wanted(verb, stacks), rtol=0.02, atol=0.02)


# --- around the call


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "enable_grad": torch.enable_grad,
}


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_modes_around_the_call_change_nothing(mode: str, batch: int) -> None:
    model, x = build(batch)
    stacks = definition(model(x), model)
    for verb, run in EVERY.items():
        losses = model(x)
        for _ in range(2 if verb == "backward" else 1):  # the second accumulates into what the first left
            with MODES[mode]():
                got = run(losses, model, retain_graph=True)
            assert not any(t.requires_grad or t.is_inference() for t in leaves(got)), verb
        if verb != "backward":
            torch.testing.assert_close(together(got), wanted(verb, stacks), rtol=1e-10, atol=1e-12, equal_nan=True)
    ps.backward(model(x), model, ps.ClippedSum(C))  # outside of the mode
    grads = {name: p.grad for name, p in named(model).items() if p.grad is not None}
    assert not any(g.requires_grad or g.is_inference() for g in grads.values())
    got = torch.cat([g.flatten() for g in grads.values()])
    reached = {name: stacks[name] for name in grads}
    torch.testing.assert_close(got, 3 * wanted("clipped_sum", reached), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("verb", EVERY)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_graph_is_freed_or_retained(verb: str, batch: int) -> None:
    model, x = build(batch)
    losses = model(x)
    first = EVERY[verb](losses, model, retain_graph=True)
    again = EVERY[verb](losses, model)
    torch.testing.assert_close(together(again), together(first), equal_nan=True)
    with pytest.raises(
        RuntimeError, match="was freed by an earlier backward: compute the losses again, or pass retain"
    ):
        EVERY[verb](losses, model)


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_gradients_are_left_alone(batch: int) -> None:
    model, x = build(batch)
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    before = [p.grad for p in model.parameters()]
    for run in VERBS.values():
        run(model(x), model)
    ps.gram(model(x), model, model(x))
    for p, grad in zip(model.parameters(), before, strict=True):
        assert p.grad is grad
        assert bool((grad == 7).all())


# --- bad numbers and samples that meet


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("positions", [(), (2,), (30,)], ids=str)
def test_a_bad_sample_spoils_its_own_answers_only(bad: float, positions: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 4)).double()
    x = torch.randn(5, *positions, 8, dtype=torch.float64)
    good, keep = x[[0, 1, 3, 4]], [0, 1, 3, 4]

    def forward(x: Tensor) -> Tensor:
        return model(x).flatten(1).square().sum(1)

    stacks = definition(forward(good), model)
    spoilt = x.clone()
    spoilt[2] = bad
    for memory in (None, 0):
        for verb in ("norms", "dot", "project"):
            got = VERBS[verb](forward(spoilt), model, max_memory=memory)
            torch.testing.assert_close(got[keep], wanted(verb, stacks), rtol=1e-10, atol=1e-12)
            assert not got[2].isfinite().any()
        for other in (None, good):
            against = None if other is None else forward(other)
            got = ps.gram(forward(spoilt), model, against, max_memory=memory)
            assert not got[2].isfinite().any()
            got = got[keep] if other is not None else got[keep][:, keep]
            torch.testing.assert_close(got, wanted("gram", stacks), rtol=1e-10, atol=1e-12)
        got = VERBS["stack"](forward(spoilt), model, max_memory=memory)
        torch.testing.assert_close(vectors(got)[keep], vectors(stacks), rtol=1e-10, atol=1e-12)
        for verb in ("second_moment", "variance"):
            assert not torch.cat([t.flatten() for t in VERBS[verb](forward(spoilt), model).values()]).isfinite().all()


@pytest.mark.parametrize("verb", [*EVERY, "gram_of_two"])
def test_samples_that_meet(verb: str) -> None:
    """Rows of the Jacobian by default, refused where independence is asked for."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64)

    def forward() -> Tensor:
        h = model(x).tanh()
        return (h - h.mean(0)).square().sum(1)

    run = EVERY.get(verb, lambda losses, params, **o: ps.gram(model(x).sum(1), params, losses, **o))
    with pytest.raises(ps.InteractionError):
        run(forward(), model, independent=True)
    assert all(p.grad is None for p in model.parameters())
    run(model(x).square().sum(1), model, independent=True)
    with pytest.warns(ps.PerformanceWarning):
        got = run(forward(), model)
    if verb in VERBS:
        torch.testing.assert_close(together(got), wanted(verb, definition(forward(), model)))


# --- wrong arguments


MODEL = nn.Linear(3, 2)
GOOD = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}


@pytest.mark.parametrize(
    ("run", "error", "match"),
    [
        (
            lambda y, m: ps.reduce(y, m, ps.Norms),
            TypeError,
            r"expected reductions such as ps.Norms\(\).*write Norms\(\)",
        ),
        (lambda y, m: ps.reduce(y, m, ps.Norms(), None), TypeError, "expected reductions such as .*, but got None"),
        (lambda y, m: ps.norms(y, m, max_memory=-1), ValueError, "max_memory must be a number of bytes, not -1"),
        (
            lambda y, m: ps.norms(y, m, max_memory=1e6),
            ValueError,
            "max_memory must be a number of bytes, not 1000000.0",
        ),
        (lambda y, m: ps.gram(y, m, y, max_memory=-1), ValueError, "max_memory must be a number of bytes, not -1"),
        (lambda y, m: ps.norms(y, m, per="layer"), ValueError, "per must be .*, not 'layer'"),
        (
            lambda y, m: ps.norms(y, m.weight),
            TypeError,
            r"params must be an nn.Module.*for one tensor write \[tensor\]",
        ),
        (lambda y, m: ps.norms(y, m.parameters()), TypeError, r"for a generator list\(...\)"),
        (lambda y, m: ps.norms(y.sum(), m), ValueError, r"shape \(B,\) or \(B, K…\), but have shape \(\)"),
        (lambda y, m: ps.norms(y.detach(), m), RuntimeError, "have no graph"),
        (lambda y, m: ps.gram(y, m, y.detach()), RuntimeError, "have no graph"),
        (lambda y, m: ps.gram(y, m, 3), TypeError, "losses must be a tensor"),
        (lambda y, m: ps.clipped_sum(y, m, -1.0), ValueError, "max_norm must be positive"),
        (
            lambda y, m: ps.dot(y, m, torch.ones(8)),
            TypeError,
            "direction must be a mapping or a sequence of tensors, not",
        ),
        (lambda y, m: ps.dot(y, m, GOOD["weight"]), TypeError, "direction must be a mapping or a sequence of tensors"),
        (lambda y, m: ps.dot(y, m, {"weight": GOOD["weight"]}), ValueError, r"expected \['weight', 'bias'\], got"),
        (lambda y, m: ps.dot(y, m, {**GOOD, "x": torch.ones(1)}), ValueError, "one tensor per parameter: expected"),
        (lambda y, m: ps.dot(y, m, [GOOD["weight"]]), ValueError, "one tensor per parameter: expected 2, 1 given"),
        (lambda y, m: ps.dot(y, m, {**GOOD, "bias": [1.0]}), TypeError, "direction 'bias' must be a tensor, not list"),
        (lambda y, m: ps.dot(y, m, {**GOOD, "bias": torch.ones(3)}), ValueError, r"'bias': \(\(3,\), \(2,\)\)"),
        (
            lambda y, m: ps.dot(y, m, {**GOOD, "bias": torch.ones(1, 2)}),
            ValueError,
            "a direction needs one tensor like",
        ),
        (lambda y, m: ps.dot(y, m, [torch.ones(2, 2, 3), torch.ones(3, 2)]), ValueError, "same number of directions"),
        (lambda y, m: ps.dot(y, m, [torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2)]), ValueError, "a direction needs one"),
        (lambda y, m: ps.reduce(y, m, ps.WeightedSum(torch.ones(3))), ValueError, r"weights must have shape \(4,\)"),
        (lambda y, m: ps.reduce(y, m, ps.WeightedSum(torch.ones(4, 1))), ValueError, r"not \(4, 1\)"),
        (lambda y, m: ps.reduce(y, m, ps.WeightedSum([1.0] * 4)), TypeError, "weights must be a tensor"),
    ],
)
def test_wrong_arguments_are_refused_before_the_backward(run: Verb, error: type[Exception], match: str) -> None:
    losses = MODEL(torch.ones(4, 3)).sin().sum(1)
    with pytest.raises(error, match=match):
        run(losses, MODEL)
    assert ps.norms(losses, MODEL).shape == (4,)  # the graph is still there


def test_moments_of_half_precision_keep_their_range() -> None:
    """The square of 1e-4 is zero in float16, that of 300 infinite."""
    w = torch.ones(2, dtype=torch.float16, requires_grad=True)
    x = torch.tensor([[1e-4, 300.0], [3e-4, 100.0]], dtype=torch.float16)
    moment, variance = ps.reduce((x * w).sum(1), [w], ps.SecondMoment(), ps.Variance())
    torch.testing.assert_close(moment[0], x.float().square().mean(0))
    torch.testing.assert_close(variance[0], x.float().var(0))


@pytest.mark.parametrize("nonfinite", ["raise", "drop"])
def test_a_cast_that_overflows_is_seen(nonfinite: str) -> None:
    """A float32 weight used in float64: what is finite there may be infinite in its gradient."""
    w = torch.randn(3, 4, requires_grad=True)
    x = torch.randn(5, 4, dtype=torch.float64)
    x[0] *= 1e60
    losses = (x @ w.double().t()).sum(1)
    if nonfinite == "raise":
        with pytest.raises(ps.NonFiniteError, match="1 of 5 samples are not finite: 0"):
            ps.clipped_sum(losses, [w], 1.0)
    else:
        total = ps.clipped_sum(losses, [w], 1.0, nonfinite="drop")
        assert total.clipping.dropped == [0]
        assert float(total[0].norm()) <= 4


def test_weights_functions_see_norms_beyond_single_precision() -> None:
    w = torch.ones(2, requires_grad=True)
    losses = (torch.tensor([[3e38, 3e38], [1.0, 0.0]]) * w).sum(1)
    clip = ps.ClippedSum(weights=lambda n: n.clamp(max=1) / n, sensitivity=1.0)
    (total,) = ps.reduce(losses, [w], clip)
    torch.testing.assert_close(total[0], torch.tensor([1 + 0.5**0.5, 0.5**0.5]))


def test_a_skipped_row_that_is_not_finite_stays_out() -> None:
    table = nn.Embedding(5, 3, padding_idx=0)
    scale = torch.ones(2, 4, 1)
    scale[0, 1] = math.inf
    losses = (table(torch.tensor([[1, 0, 2, 3], [4, 4, 1, 2]])) * scale).nan_to_num().sum((1, 2))
    z = ps.project(losses, table, ps.Projection(4, 0, "kronecker"))
    assert bool(z.isfinite().all())


def test_results_of_one_call_do_not_share_memory_with_what_others_read() -> None:
    class Rude(ps.Reduction):
        """Overwrites what it is given."""

        def start(self, call: ps.Call) -> None:
            pass

        def add(self, name: str, factor: ps.Factor) -> None:
            factor.norms().zero_()

        def result(self) -> None:
            return None

    layer = nn.Linear(3, 2)
    losses = layer(torch.ones(4, 3)).square().sum(1)
    want = ps.norms(losses, layer, retain_graph=True)
    torch.testing.assert_close(ps.reduce(losses, layer, Rude(), ps.Norms())[1], want)


def test_no_parameters_and_no_samples() -> None:
    layer = nn.Linear(3, 2)
    ps.backward(layer(torch.ones(0, 3)).sum(1), {}, ps.ClippedSum(1.0))
    assert layer.weight.grad is None


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_an_empty_batch_of_a_sparse_table_adds_zeros(layer: type[nn.Module]) -> None:
    """PyTorch's own gradient is sparse there; ours is dense, as for any other batch."""
    table = layer(5, 3, sparse=True)
    losses = table(torch.empty(0, 2, dtype=torch.long)).flatten(1).sum(1)
    ps.backward(losses, table, ps.ClippedSum(1.0))
    assert torch.equal(table.weight.grad, torch.zeros(5, 3))
