"""Weights computed from parameters: gradients keep their form on the way, and are those of the definition."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import persample as ps
from persample.graph.execute import pullback
from tests.reference import assert_same, definition, vectors

# A constant that a table is computed with could be data: then samples would meet where the table is read.
pytestmark = pytest.mark.filterwarnings("ignore:samples interact in")

P, D, R = 4, 6, 2
Params = Mapping[str, Tensor]
MASK = (torch.arange(P * D).reshape(P, D) % 3 != 0).double()


def spectral(p: Params) -> Tensor:
    u, v = F.normalize(torch.arange(1.0, P + 1).double(), dim=0), F.normalize(torch.ones(D).double(), dim=0)
    return p["w"] / torch.dot(u, torch.mv(p["w"], v))


def dora(p: Params) -> Tensor:
    w = p["w"] + p["a"] @ p["b"]
    return p["m"] * w / w.norm(dim=1, keepdim=True)


# Those of which nothing is written out, whatever the factor is; all are (P, D).
KEPT: dict[str, Callable[[Params], Tensor]] = {
    "number": lambda p: p["w"] * 0.5,
    "number first": lambda p: 0.5 * p["w"],
    "quotient": lambda p: p["w"] / 3,
    "negative": lambda p: -p["w"],
    "mask": lambda p: p["w"] * MASK,
    "mask and number": lambda p: (p["w"] * MASK) * 2,
    "rows": lambda p: p["w"] * torch.arange(1.0, P + 1).double().unsqueeze(1),
    "columns": lambda p: p["w"] * torch.arange(1.0, D + 1).double(),
    "lora": lambda p: p["a"] @ p["b"],
    "lora beside": lambda p: p["w"] + p["a"] @ p["b"] * 0.1,
    "lora less": lambda p: p["w"] - p["a"] @ p["b"],
    "alpha": lambda p: torch.add(p["w"], p["a"] @ p["b"], alpha=0.3),
    "addmm": lambda p: torch.addmm(p["w"], p["a"], p["b"], beta=0.5, alpha=2.0),
    "three products": lambda p: p["a"] @ (torch.eye(R).double() * 2) @ p["b"],
    "transposed": lambda p: (p["b"].t() @ p["a"].t()).t() * 0.5,
    "tanh": lambda p: p["w"].tanh(),
    "cubed and scaled": lambda p: 0.3 * p["w"] ** 3,
    "masked and exponential": lambda p: (p["w"] * MASK).exp() * MASK,
}
# And where, of linear layers, too.
ALSO: dict[str, Callable[[Params], Tensor]] = {
    "learned rows": lambda p: p["w"] * p["m"],
    "learned columns": lambda p: p["w"] * p["c"],
    "learned number": lambda p: p["w"] * p["s"],
    "divided by learned rows": lambda p: p["w"] / p["m"],
    "twice": lambda p: p["w"] * p["w"],
    "spectral": spectral,
    "weight norm": lambda p: p["m"] * p["w"] / p["w"].norm(dim=1, keepdim=True),
    "weight norm of torch": lambda p: torch._weight_norm(p["w"], p["m"], 0),
    "weight norm of columns": lambda p: p["w"] * (p["c"] / p["w"].norm(dim=0)),
    "weight norm of torch, of columns": lambda p: torch._weight_norm(p["w"], p["c"].unsqueeze(0), 1),
    "normalised columns": lambda p: p["w"] / p["w"].norm(dim=0, keepdim=True),
    "dora": dora,
}
WRITTEN: dict[str, Callable[[Params], Tensor]] = {
    "rounded quotient": lambda p: torch.div(p["w"], 0.3, rounding_mode="floor") * p["m"] + p["w"],
    "softmax": lambda p: p["w"].softmax(0),
    "clamped": lambda p: p["w"].clamp(max=2),
}


def params(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"w": (P, D), "a": (P, R), "b": (R, D), "m": (P, 1), "c": (D,), "s": ()}
    return {
        name: torch.randn(shape, dtype=torch.float64).add_(2).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def linear(w: Tensor, B: int, T: int) -> Tensor:
    x = torch.randn(B, T, D, dtype=torch.float64).to(w.dtype)
    x = x.squeeze(1) if T == 1 else x
    return F.linear(x, w).tanh().flatten(1).sum(1)


def kernels(w: Tensor, B: int, T: int) -> Tensor:
    x = torch.randn(B, 2, 5 + T, dtype=torch.float64).to(w.dtype)
    return F.conv1d(x, w.view(P, 2, 3)).tanh().flatten(1).sum(1)


def grouped(w: Tensor, B: int, T: int) -> Tensor:
    x = torch.randn(B, 4, 5 + T, dtype=torch.float64).to(w.dtype)
    return F.conv1d(x, w.view(P, 2, 3), groups=2).tanh().flatten(1).sum(1)


def opened(w: Tensor, B: int, T: int) -> Tensor:
    x = torch.randn(B, P, 5 + T, dtype=torch.float64).to(w.dtype)
    return F.conv_transpose1d(x, w.view(P, 2, 3)).tanh().flatten(1).sum(1)


def table(w: Tensor, B: int, T: int) -> Tensor:
    return F.embedding(torch.randint(P, (B, T)), w).tanh().flatten(1).sum(1)


def padded_table(w: Tensor, B: int, T: int) -> Tensor:
    return F.embedding(torch.randint(P, (B, T)), w, padding_idx=1).tanh().flatten(1).sum(1)


def both(w: Tensor, B: int, T: int) -> Tensor:
    return linear(w, B, T) + table(w, B, T)


LAYERS = {f.__name__: f for f in (linear, kernels, grouped, opened, table, padded_table, both)}


def check(weight: Callable[[Params], Tensor], layer: Callable[[Tensor, int, int], Tensor], B: int, T: int) -> None:
    p = params()
    used = {
        name: t for name, t in p.items() if torch.autograd.grad(weight(p).sum(), t, allow_unused=True)[0] is not None
    }
    torch.manual_seed(1)
    losses = layer(weight(p), B, T)
    want = definition(losses, used)
    flat = vectors(want)
    direction = {name: torch.randn_like(t) for name, t in used.items()}
    asked = ps.Stack(), ps.Norms(), ps.ClippedSum(0.3), ps.SecondMoment(), ps.Variance(), ps.Gram(), ps.Dot(direction)
    for reduction in [asked, *[(one,) for one in asked]]:
        torch.manual_seed(1)
        for one, got in zip(reduction, ps.reduce(layer(weight(p), B, T), used, *reduction), strict=True):
            compare(one, got, want, flat, direction)


def compare(
    one: ps.Reduction, got: object, want: Mapping[str, Tensor], flat: Tensor, direction: Mapping[str, Tensor]
) -> None:
    norms = flat.norm(dim=1)
    if isinstance(one, ps.Stack):
        assert_same(got, want)  # type: ignore[arg-type]
    elif isinstance(one, ps.Norms):
        torch.testing.assert_close(got, norms)
    elif isinstance(one, ps.ClippedSum):
        weights = (0.3 / norms).clamp(max=1)
        for name, total in got.items():  # type: ignore[attr-defined]
            torch.testing.assert_close(total, torch.einsum("b,b...->...", weights, want[name]))
    elif isinstance(one, ps.SecondMoment):
        for name, total in got.items():  # type: ignore[attr-defined]
            torch.testing.assert_close(total, want[name].square().mean(0) if len(norms) else torch.zeros_like(total))
    elif isinstance(one, ps.Variance):
        for name, total in got.items():  # type: ignore[attr-defined]
            if len(norms) > 1:
                torch.testing.assert_close(total, want[name].var(0, correction=one.correction))
    elif isinstance(one, ps.Gram):
        torch.testing.assert_close(got, flat @ flat.t())
    else:
        expected = flat @ torch.cat([direction[name].flatten() for name in want])
        torch.testing.assert_close(got.flatten(), expected)  # type: ignore[attr-defined]


@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("weight", [*KEPT, *ALSO, *WRITTEN])
def test_the_definition(weight: str, layer: str, T: int) -> None:
    every = {**KEPT, **ALSO, **WRITTEN}
    check(every[weight], LAYERS[layer], 3, T)


@pytest.mark.parametrize("B", [0, 1, 2, P, D])
@pytest.mark.parametrize("weight", [*KEPT, *ALSO])
def test_any_number_of_samples(weight: str, B: int) -> None:
    check({**KEPT, **ALSO}[weight], linear, B, 2) if B else check_empty({**KEPT, **ALSO}[weight])


def check_empty(weight: Callable[[Params], Tensor]) -> None:
    p = params()
    (stacks,) = ps.reduce(linear(weight(p), 0, 2), p, ps.Stack())
    assert all(t.shape == (0, *p[name].shape) for name, t in stacks.items())


def watch(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of all stacks that go through ops from now on."""
    largest: list[torch.Size] = []
    push = pullback.push_stacked

    def watched(site, stacks, batch, wanted):  # type: ignore[no-untyped-def]
        largest.extend([s.shape for s in stacks if s is not None])
        return push(site, stacks, batch, wanted)

    monkeypatch.setattr(pullback, "push_stacked", watched)
    return largest


@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("weight", [*KEPT, *ALSO])
def test_nothing_is_written_out(weight: str, layer: str, T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if weight in ALSO and layer != "linear":
        pytest.skip("small numbers for each row or column are taken from what is written out")
    if weight == "three products" and layer in ("table", "padded_table", "both"):
        pytest.skip("a table that is computed with a constant")
    if layer in ("grouped", "opened") and (
        "lora" in weight or weight in ("alpha", "addmm", "three products", "transposed")
    ):
        pytest.skip("these kernels are no matrices with a row for each channel out")
    largest = watch(monkeypatch)
    p = params()
    losses = LAYERS[layer]({**KEPT, **ALSO}[weight](p), 3, T)
    ps.norms(losses, p)
    assert all(shape[1:].numel() < P * D for shape in largest), largest


@pytest.mark.parametrize("around", ["the weight", "the layer"])
@pytest.mark.parametrize("weight", [*KEPT, *ALSO])
def test_in_a_checkpoint(weight: str, around: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved tensors are read where they can be unpacked again, and nothing is written out."""
    largest = watch(monkeypatch)
    made, p = {**KEPT, **ALSO}[weight], params()
    torch.manual_seed(1)
    x = torch.randn(3, 4, D, dtype=torch.float64)
    names = list(p)

    def layer(*tensors: Tensor) -> Tensor:
        w = made(dict(zip(names, tensors, strict=True)))
        return w if around == "the weight" else F.linear(x, w).tanh()

    out = checkpoint(layer, *p.values(), use_reentrant=False)
    out = F.linear(x, out).tanh() if around == "the weight" else out
    losses = out.flatten(1).sum(1)
    used = {n: t for n, t in p.items() if torch.autograd.grad(made(p).sum(), t, allow_unused=True)[0] is not None}
    want = definition(losses, used)
    norms, clipped, stacks = ps.reduce(losses, used, ps.Norms(), ps.ClippedSum(0.3), ps.Stack(), retain_graph=True)
    torch.testing.assert_close(norms, vectors(want).norm(dim=1))
    assert_same(stacks, want)
    weights = (0.3 / norms).clamp(max=1)
    for name, total in clipped.items():
        torch.testing.assert_close(total, torch.einsum("b,b...->...", weights, want[name]))
    assert all(shape[1:].numel() < P * D for shape in largest), largest


@pytest.mark.parametrize("name", ["w", "a", "b", "m"])
def test_one_parameter_alone(name: str) -> None:
    p = params()
    for weight in (dora, KEPT["lora beside"], ALSO["learned rows"]):
        if torch.autograd.grad(weight(p).sum(), p[name], allow_unused=True)[0] is not None:
            torch.manual_seed(1)
            losses = linear(weight(p), 3, 2)
            assert_same(ps.grad(losses, {name: p[name]}, retain_graph=True), definition(losses, {name: p[name]}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight", [*KEPT, *ALSO])
def test_other_dtypes(weight: str, dtype: torch.dtype) -> None:
    p = params(dtype)
    torch.manual_seed(1)
    made = {**KEPT, **ALSO}[weight]
    try:
        losses = linear(made(p), 3, 4)
    except RuntimeError:
        pytest.skip("constants of another dtype")
    got, want = ps.grad(losses, p, retain_graph=True), definition(losses, p)
    assert_same(got, want, 1e-4 if dtype == torch.float32 else 0.2)


def test_modules_of_pytorch() -> None:
    torch.manual_seed(0)
    pruned = nn.utils.prune.random_unstructured(nn.Linear(5, 4), "weight", 0.4).double()
    for layer in (
        nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4)).double(),
        nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)).double(),
        nn.utils.parametrizations.weight_norm(nn.Conv1d(5, 4, 1)).double(),
        pruned,
    ):
        layer.eval()
        x = torch.randn(3, 5, 6).double()
        losses = layer(x if isinstance(layer, nn.Conv1d) else x.transpose(1, 2)).tanh().flatten(1).sum(1)
        want = definition(losses, layer)
        assert_same(ps.grad(losses, layer, retain_graph=True), want)
        torch.testing.assert_close(ps.norms(losses, layer), vectors(want).norm(dim=1))
