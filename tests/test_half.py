"""Half precision, by autocast and by parameters: every case, and numbers at the ends of its range."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps
from tests.case_library.registry import in_half
from tests.cases import CASES, Case
from tests.reductions.expected import Stacks, Want, WantClipped, WantEach, assert_result, questions
from tests.reference import Params, definition, flat, nodes_behind, vectors

HALVES = (torch.float16, torch.bfloat16)
MODES = {f"{'autocast' if cast else 'parameters'} {dtype}": (dtype, cast) for cast in (True, False) for dtype in HALVES}
SCALES = (1.0, 2.0**-12, 2.0**13)  # of the losses: gradients in the middle, at the lower and the upper end of float16
SUBNORMAL = 2.0**-24  # the smallest float16

# PyTorch adds up gradients of hundreds of uses in half precision, or rounds in hundreds of ops: it ends up elsewhere.
DRIFTS = {"deep_chain_of_small_layers", "deep_chain_on_the_weight", "long_scan_with_weights"}
# Of a parameter that is subtracted again, the gradient is rounding noise beside that of the others.
CANCELS = {"mixing-standardised"}
# Where PyTorch's partial sums leave float16 (layer norms), or NaN spreads from one sample to all.
OVERFLOWS_IN_PYTORCH = {"checkpointed_blocks", "checkpointed_transformer", "large_and_small_samples"}
PARTS = 8


@pytest.fixture(autouse=True)
def _quick_seeds() -> Iterator[None]:
    """For devices that are absent, each seed would format a stack trace."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)
        yield


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("mode", MODES)
def test_every_case_in_one_mode(mode: str, part: int) -> None:
    """Every case in one of the four modes, with one of the scales; all reductions for every second case."""
    turn = list(MODES).index(mode)
    wrong, compared = [], 0
    cases = CASES[turn :: len(MODES)][part::PARTS]
    for place, case in enumerate(cases):
        compared += check_case(case, *MODES[mode], SCALES[place % 3], wrong, reductions=place % 2 == 0)
    assert not wrong, "\n".join(wrong)
    assert compared > 0.85 * len(cases)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", SCALES)
def test_every_case_in_every_mode(scale: float, mode: str, part: int) -> None:
    wrong: list[str] = []
    compared = [check_case(case, *MODES[mode], scale, wrong, reductions=True) for case in CASES[part::PARTS]]
    assert not wrong, "\n".join(wrong)
    assert sum(compared) > 0.85 * len(compared)


def check_case(
    case: Case, dtype: torch.dtype, autocast: bool, scale: float, wrong: list[str], *, reductions: bool
) -> bool:
    """Compare gradients and reductions of a case, and tell what is wrong; False if PyTorch has no such gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            params, forward = in_half(case, dtype, autocast=autocast)(case.batches[0])
            losses = forward().float() * scale
            want = definition(losses, params)
        except (RuntimeError, TypeError):  # an op without a kernel for this dtype
            return False
        try:
            check_gradients(case, losses, params, want, dtype)
            if reductions and str(case) not in DRIFTS | CANCELS:
                check_reductions(case, losses, params, want, dtype)
        except AssertionError as error:
            wrong.append(f"{case}: {error}")
    return True


def check_gradients(case: Case, losses: Tensor, params: Params, want: Stacks, dtype: torch.dtype) -> None:
    """Gradients that are finite are autograd's; norms are infinite for those that are not."""
    finite = vectors(want).isfinite().all(1)
    if not finite.all():
        found = ps.norms(losses, params, retain_graph=True).isfinite()
        if not torch.equal(found, finite) and str(case) not in OVERFLOWS_IN_PYTORCH:
            raise AssertionError(f"norms are finite: {found.tolist()}, gradients: {finite.tolist()}")
    got = ps.grad(losses, params, retain_graph=True)
    stacks = got if isinstance(got, Mapping) else dict(zip(want, got, strict=True))
    if str(case) not in DRIFTS:
        units = 16 if case.interacts else 4  # where samples meet, terms of all of them are rounded on the way
        assert_near({n: g[finite] for n, g in stacks.items()}, {n: g[finite] for n, g in want.items()}, dtype, units)


def check_reductions(case: Case, losses: Tensor, params: Params, want: Stacks, dtype: torch.dtype) -> None:
    """Each reduction of gradients that are finite and not rounding noise alone."""
    if case.zeros or not vectors(want).isfinite().all():
        return
    asked = questions(want, params, variants=False)
    results = ps.reduce(losses, params, *(ask.reduction for ask in asked.values()))
    for (name, ask), got in zip(asked.items(), results, strict=True):
        if name != "stack" and not beyond_range(ask.want):
            try:
                assert_result(got, ask.want, 16 * torch.finfo(dtype).eps)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


def beyond_range(want: object) -> bool:
    """May the result be infinite? Sums of float16 gradients are given in float16."""
    want = want.sums if isinstance(want, WantClipped) else want
    in_float16 = isinstance(want, WantEach) and torch.float16 in {dtype for dtype, _ in want.like.values()}
    overflows = in_float16 and isinstance(want, Want) and bool((want.value.abs() > 65000).any())
    return overflows or (isinstance(want, Want) and want.beyond_range())


def assert_near(got: Stacks, want: Stacks, dtype: torch.dtype, units: int = 4) -> None:
    """A few units in the last place of the largest elements: a parameter's own, and all parameters, as terms cancel."""
    eps = torch.finfo(dtype).eps
    assert list(got) == list(want)
    whole = vectors(want).abs().amax(1)
    for name in want:
        assert (got[name].dtype, got[name].shape) == (want[name].dtype, want[name].shape)
        if not want[name].numel():
            continue
        error, size = (flat(got[name]) - flat(want[name])).abs().amax(1), flat(want[name]).abs().amax(1)
        allowed = units * (eps * (size + whole) + SUBNORMAL)
        assert bool((error <= allowed).all()), f"{name}: {error.tolist()} for {size.tolist()}"


# --- numbers at the ends of the range


def ones(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.ones(shape, dtype=dtype, requires_grad=True)


def one_use(form: str, dtype: torch.dtype, element: float) -> tuple[Tensor, Tensor]:
    """A parameter with a million elements or so, and losses whose gradients have this in all of them."""
    if form == "raw":
        w = ones(2**20, dtype=dtype)
        return w, (w.float() * torch.full((2, 2**20), element)).sum(1)
    if form == "convolution":
        w = ones(256, 128, 1, 1, dtype=dtype)
        return w, F.conv2d(torch.ones(2, 128, 4, 4, dtype=dtype), w).float().sum((1, 2, 3)) * (element / 16)
    if form == "embedding":
        w = ones(2, 2**16, dtype=dtype)
        return w, F.embedding(torch.tensor([[0, 1, 0]] * 2), w).float().sum((1, 2)) * (element / 2)
    w, positions = ones(512, 1024, dtype=dtype), int(form.split()[-1])
    x = torch.ones(2, positions, 1024, dtype=dtype)
    return w, F.linear(x, w).float().sum((1, 2)) * (element / positions)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("element", [6e4, 1e-4, 2.0**-14])
@pytest.mark.parametrize("form", ["raw", "linear 1", "linear 4", "linear 32", "convolution", "embedding"])
def test_norms_of_many_elements(form: str, element: float, dtype: torch.dtype) -> None:
    """No overflow at 65504, no underflow, no drift, however norms are computed: as in float64 of the gradients."""
    w, losses = one_use(form, dtype, element)
    want = vectors(definition(losses, [w])).norm(dim=1)
    got = ps.norms(losses, [w], retain_graph=True)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=0)
    total = ps.clipped_sum(losses, [w], 1e-3)
    assert total[0].dtype == dtype
    torch.testing.assert_close(total[0].double().norm(), torch.tensor(2e-3).double(), rtol=0.02, atol=0)


READS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "index_select": lambda w, n: w.index_select(0, torch.zeros(2 * n, dtype=torch.long)).view(2, n),
    "take": lambda w, n: w.take(torch.zeros(2, n, dtype=torch.long)),
    "gather": lambda w, n: w.expand(2, -1).gather(1, torch.zeros(2, n, dtype=torch.long)),
    "embedding": lambda w, n: F.embedding(torch.zeros(2, n, dtype=torch.long), w.unsqueeze(0)),
    "repeat": lambda w, n: w[:1].repeat(2, n),
    "broadcast": lambda w, n: w[:1] * torch.ones(2, n, dtype=w.dtype),
    "many uses": lambda w, n: sum((w[:1] * torch.ones(2, 4, dtype=w.dtype) for _ in range(n // 4)), torch.zeros(2, 4)),
    "ragged": lambda w, n: w[:1] * torch.ones(2 * n, dtype=w.dtype),
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("read", READS)
def test_what_is_read_often_is_added_up_in_single(read: str, dtype: torch.dtype) -> None:
    """In bfloat16, 256 + 1 is 256; in float16, 2048 + 1 is 2048. PyTorch's own sums stop there for some of these."""
    n, w = 3000, ones(1, dtype=dtype)

    def forward() -> Tensor:
        out = READS[read](w, n).float()
        return torch.zeros(2).index_add(0, torch.arange(2 * n) % 2, out) if read == "ragged" else out.flatten(1).sum(1)

    eps = torch.finfo(dtype).eps
    (got,) = ps.grad(forward(), [w])
    torch.testing.assert_close(got, torch.full((2, 1), n, dtype=dtype), rtol=eps, atol=0)
    norms, gram, total = ps.reduce(forward(), [w], ps.Norms(), ps.Gram(), ps.WeightedSum(torch.ones(2)))
    torch.testing.assert_close(norms, torch.full((2,), float(n)), rtol=eps, atol=0)
    torch.testing.assert_close(gram, torch.full((2, 2), float(n) ** 2), rtol=2 * eps, atol=0)
    torch.testing.assert_close(total[0], torch.full((1,), 2 * n, dtype=dtype), rtol=eps, atol=0)
    clipped = ps.clipped_sum(forward()[:1], [w], 1.0, max_memory=1)[0]
    assert float(clipped) <= 1 + eps


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_small_samples_are_not_lost_in_sums(dtype: torch.dtype) -> None:
    """One sample of 1 and 4096 of 1/1024: added up in half precision, the small ones would vanish."""
    w, x = ones(3, dtype=dtype), torch.full((4097, 3), 2.0**-10, dtype=dtype)
    x[0] = 1
    layer = nn.Linear(3, 1, bias=False).to(dtype)
    for losses, params in ((x * w).float().sum(1), [w]), (layer(x).float().sum(1), list(layer.parameters())):
        for (total,) in ps.reduce(losses, params, ps.WeightedSum(torch.ones(4097)), ps.ClippedSum(10.0)):
            assert total.dtype == dtype
            torch.testing.assert_close(total, torch.full_like(total, 5), rtol=0, atol=0)


def norm_layers(dtype: torch.dtype, x: Tensor) -> dict[str, tuple[list[Tensor], Callable[..., Tensor]]]:
    """Layers whose own backward computes in float32, for x (B, T, 8)."""
    g, b, v = ones(8, dtype=dtype), ones(8, dtype=dtype), x[0, :4].clone().requires_grad_()
    var = x.float().var((0, 1)).to(dtype)
    return {
        "layer norm": ([g, b], lambda p, x: F.layer_norm(x, (8,), *p, 1e-12)),
        "rms norm": ([g], lambda p, x: F.rms_norm(x, (8,), *p, 1e-12)),
        "group norm": ([g, b], lambda p, x: F.group_norm(x.mT, 2, *p, 1e-12).mT),
        "batch norm": (
            [g, b],
            lambda p, x: F.batch_norm(x.mT, torch.zeros_like(var).to(x), var.to(x), *p, eps=1e-5).mT,
        ),
        "vector": ([g], lambda p, x: (x.flatten(0, 1) @ p[0]).view(x.shape[:2]).unsqueeze(2)),
        "weight norm": (
            [v, ones(4, 1, dtype=dtype)],
            lambda p, x: F.linear(torch.ones_like(x), torch._weight_norm(*p, 0)),
        ),
    }


@pytest.mark.parametrize("size", [(1e-3, 1e-4), (100.0, 200.0), (1.0, 1e-5)], ids=str)
@pytest.mark.parametrize("name", norm_layers(torch.float16, torch.ones(2, 4, 8)))
def test_rules_compute_in_single(name: str, size: tuple[float, float]) -> None:
    """Terms that leave float16's range or its digits, in sums that do not; against the same numbers in float64."""
    torch.manual_seed(0)
    x, c = (torch.randn(3, 20, 8) * size[0]).half(), (torch.randn(3, 20, 8) * size[1]).half()
    params, layer = norm_layers(torch.float16, x)[name]
    if name == "vector" and size[0] == 100.0:
        x = x / 10  # the sums themselves would overflow
    exact = [p.detach().double().requires_grad_() for p in params]
    want = definition((layer(exact, x.double()) * c[..., : layer(exact, x.double()).shape[2]]).sum((1, 2)), exact)
    y = layer(params, x)
    got = ps.grad((y.float() * c[..., : y.shape[2]]).sum((1, 2)), params)
    for g, w in zip(got, want.values(), strict=True):
        assert bool(((flat(g) - flat(w)).abs() <= 4e-3 * flat(w).abs().amax(1, keepdim=True) + 2 * SUBNORMAL).all())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_means_of_large_bags(dtype: torch.dtype) -> None:
    table = ones(4, 3, dtype=dtype)
    losses = F.embedding_bag(torch.zeros(2, 3000, dtype=torch.long), table, mode="mean").float().sum(1)
    torch.testing.assert_close(ps.grad(losses, [table])[0][:, 0], torch.ones(2, 3, dtype=dtype), rtol=0.01, atol=0)


def test_a_float16_parameter_among_float32_activations() -> None:
    """Terms too small for float16 are added up before they are rounded, as in PyTorch."""
    w, x = ones(4, dtype=torch.float16), torch.full((2, 5000, 4), 1e-8)
    losses = lambda: (w * x + w).sum((1, 2)) * 1e-3  # noqa: E731
    small = lambda: (w * x).sum((1, 2))  # noqa: E731
    for forward in (losses, small):
        want = definition(forward(), [w])
        assert want["0"].all()
        assert_near({"0": ps.grad(forward(), [w])[0]}, want, torch.float16)


# --- autocast


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("cached", [True, False])
def test_weights_that_autocast_casts_once_or_twice(cached: bool, dtype: torch.dtype) -> None:
    """A layer used twice has one cast of its weight in the graph if autocast keeps it, else two."""
    torch.manual_seed(0)
    net, other, x = nn.Linear(6, 6), nn.Linear(6, 6), torch.randn(5, 6)
    with torch.autocast("cpu", dtype=dtype, cache_enabled=cached):
        losses = net(other(net(x).tanh()).tanh()).float().square().sum(1)
    assert casts_to(losses, net.weight) == (1 if cached else 2)
    params = {"weight": net.weight, "bias": net.bias, "other": other.weight}
    want = definition(losses, params)
    assert_near(ps.grad(losses, params, retain_graph=True), want, dtype)
    asked = questions(want, params)
    results = ps.reduce(losses, params, *(ask.reduction for ask in asked.values()), independent=True)
    for (name, ask), got in zip(asked.items(), results, strict=True):
        assert_result(got, ask.want, (16 if name != "stack" else 32) * torch.finfo(dtype).eps)


def casts_to(losses: Tensor, p: Tensor) -> int:
    """How many casts of a parameter are in a graph."""
    return len(
        [n for n in nodes_behind(losses) if any(getattr(child, "variable", None) is p for child, _ in n.next_functions)]
    )


class Mixed(nn.Module):
    """Layers of three dtypes, one of them under autocast."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8).to(dtype), nn.LayerNorm(8), nn.Linear(8, 3).double()
        self.cast, self.table, self.dtype = nn.Linear(8, 8), nn.Embedding(5, 4).to(dtype), dtype

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(self.first(self.table(ids)).float())
        with torch.autocast("cpu", dtype=self.dtype):
            h = self.cast(h).relu()
        return self.last(h.double()).square().mean((1, 2))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_mixed_models(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, ids = Mixed(dtype), torch.randint(5, (6, 7))
    want = definition(model(ids), model)
    got = ps.grad(model(ids), model)
    assert {g.dtype for g in got.values()} == {dtype, torch.float32, torch.float64}
    assert_near(got, want, dtype)
    asked = questions(want, model)
    results = ps.reduce(model(ids), model, *(ask.reduction for ask in asked.values()))
    for (name, ask), result in zip(asked.items(), results, strict=True):
        if name != "stack":
            assert_result(result, ask.want, 16 * torch.finfo(dtype).eps)
    assert math.isclose(float(results[0][0]), float(vectors(want)[0].norm()), rel_tol=4 * torch.finfo(dtype).eps)
