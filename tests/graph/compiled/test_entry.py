"""Compiled models by their backward graphs: exact without a warning where they can be read, with one where not."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import persample as ps
from persample.graph.compiled import entry
from persample.graph.read.compiled import Unreadable, backward_of
from tests.case_library.registry import compiled
from tests.cases import CASES, Case
from tests.models import mlp, squares
from tests.reference import Params, assert_same, definition

# Compiling says what it likes.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    torch.compiler.reset()
    yield request.param
    torch.compiler.reset()


def said_of(caught: list[warnings.WarningMessage]) -> list[str]:
    """What is said of slow paths."""
    return [str(w.message) for w in caught if issubclass(w.category, ps.PerformanceWarning)]


def warned(losses: Callable[[], Tensor], params: Params, want: dict[str, Tensor], **options: Any) -> list[str]:
    """What is said of slow paths while the answer is exact, three times over."""
    said: list[str] = []
    for _ in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = ps.grad(losses(), params, **options)
        assert_same(got, want)
        said = said_of(caught)
    return said


def exact_and_fast(
    backend: str, model: nn.Module, run: Callable[[Any], Tensor], params: Params | None = None, **options: Any
) -> None:
    """``run(model)`` are losses; those of the compiled model have the same gradients, and no slow path is taken."""
    want = definition(run(model), model if params is None else params)
    fast = torch.compile(model, backend=backend, **options)
    assert warned(lambda: run(fast), model if params is None else params, want) == []


def run(model: Any, x: Tensor) -> Tensor:
    return squares(model(x))


class Tied(nn.Module):
    """A table that is the head, too; padding, positions, attention and a norm between."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(7, 8, padding_idx=2), nn.Parameter(torch.randn(5, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.block(self.table(ids) + self.positions) @ self.table.weight.t()


class Lora(nn.Module):
    """A weight that is merged with a product of two others."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.a, self.b = (nn.Parameter(torch.randn(*s)) for s in ((4, 3), (4, 2), (2, 3)))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w + 0.5 * self.a @ self.b).tanh()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(3, 4), mlp(4, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, self.first(x).tanh(), use_reentrant=False)  # type: ignore[no-any-return]


class Broken(nn.Module):
    """Two compiled regions, with a break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(3, 4, 4), mlp(4, 4, 2, seed=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        torch._dynamo.graph_break()
        return self.second(h)


def images(*shape: int) -> Tensor:
    return torch.randn(5, *shape, generator=torch.Generator().manual_seed(0)).double()


def cnn() -> nn.Module:
    layers = [
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 2, groups=2),
    ]
    return nn.Sequential(*layers, nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).double()


IDS = torch.tensor([[1, 2, 3, 0, 6], [4, 4, 5, 6, 1], [0, 2, 2, 3, 3]])
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "mlp": (lambda: mlp(3, 4, 4, 4, 2), images(3)),
    "cnn": (lambda: cnn().eval(), images(2, 9, 9)),
    "tied": (lambda: Tied().double(), IDS),
    "lora": (lambda: Lora().double(), images(3)),
    "checkpointed": (lambda: Checkpointed().double(), images(3)),
    "graph break": (lambda: Broken().double(), images(3)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)).double(), images(3)),
    "time": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2)).double(),
        images(5, 3),
    ),
    "convolution in time": (
        lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.SiLU(), nn.ConvTranspose1d(4, 2, 2)).double(),
        images(3, 7),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, backend: str) -> None:
    torch.manual_seed(0)
    build, x = MODELS[name]
    exact_and_fast(backend, build(), lambda model: squares(model(x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_in_other_precisions(dtype: torch.dtype, backend: str) -> None:
    model, x = mlp(3, 8, 8, 2, dtype=dtype), images(3).to(dtype)
    fast = torch.compile(model, backend=backend)
    want = ps.norms(squares(model(x).float()), model)
    torch.testing.assert_close(
        ps.norms(squares(fast(x).float()), model), want, rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=0
    )


def test_autocast(backend: str) -> None:
    """Casts are part of what was traced; the caller's autocast adds none."""
    model, x = mlp(3, 8, 8, 2, dtype=torch.float32), images(3).float()
    fast = torch.compile(model, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch._functorch.config.patch(donated_buffer=False):
        want = definition(squares(fast(x).float()), model)
        assert_same(ps.grad(squares(fast(x).float()), model), want, rtol=2e-2)
    plain = lambda: squares(fast(x))  # noqa: E731
    want = definition(squares(model(x)), model)
    losses = [plain() for _ in range(3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for one in losses:
            assert_same(ps.grad(one, model), want, rtol=1e-5)


def test_dynamic_shapes(backend: str) -> None:
    model = mlp(3, 4, 4, 2)
    fast = torch.compile(model, backend=backend, dynamic=True)
    for B in (5, 2, 9, 1, 5):
        x = torch.randn(B, 3).double()
        assert warned(partial(run, fast, x), model, definition(run(model, x), model)) == []


def test_an_empty_batch(backend: str) -> None:
    model = mlp()
    got = ps.grad(squares(torch.compile(model, backend=backend)(torch.zeros(0, 3).double())), model)
    assert {name: tuple(g.shape) for name, g in got.items()} == {n: (0, *p.shape) for n, p in model.named_parameters()}


def test_the_loss_inside(backend: str) -> None:
    model, x, y = mlp(3, 4, 4, 3), images(3), torch.tensor([0, 2, 1, 1, 0])
    losses = lambda: F.cross_entropy(model(x), y, reduction="none")  # noqa: E731
    fast = torch.compile(losses, backend=backend, fullgraph=True)
    assert warned(fast, model, definition(losses(), model)) == []


def test_dropout_is_the_one_that_was_drawn(backend: str) -> None:
    model, x = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)).double(), images(3)
    fast = torch.compile(model, backend=backend)
    with torch._functorch.config.patch(donated_buffer=False):
        losses = squares(fast(x))
        want = definition(losses, model)
        assert_same(ps.grad(losses, model), want)


def test_a_part_of_the_parameters(backend: str) -> None:
    model, x = mlp(3, 4, 4, 4, 2), images(3)
    some = {name: p for name, p in model.named_parameters() if name in ("2.weight", "4.bias")}
    exact_and_fast(backend, model, lambda m: squares(m(x)), some)


class Several(nn.Module):
    """Results that are views of one another, of an input, or not used."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.a, self.b, self.detached = nn.Linear(3, 4), nn.Linear(3, 4), detached

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h, unused = self.a(x), self.b(x)
        return h.t(), h[:, 1:], unused, x, self.b(x).sum(1), h.detach() if self.detached else unused


def test_several_results(backend: str) -> None:
    # With a detached view among the results, Inductor returns the other views as leaves: PyTorch loses their gradients.
    model, x = Several(detached=backend != "inductor").double(), images(3)

    def losses(m: Any) -> Tensor:
        turned, part, _, same, sums, _ = m(x)
        return (turned.t() ** 2).sum(1) + part.prod(1) + same.sum(1) * sums

    exact_and_fast(backend, model, losses)


def test_dropout_that_a_checkpoint_draws_again(backend: str) -> None:
    """Inductor's code draws the forward pass's numbers again, from a seed; its graph, run by others, draws new ones."""
    model, x = mlp(), images(3)
    block = nn.Sequential(model, nn.Dropout(0.5))
    fast = torch.compile(lambda h: checkpoint(block, h, use_reentrant=False).sin(), backend=backend)
    with torch._functorch.config.patch(donated_buffer=False):
        losses = squares(fast(x))
        want = definition(losses, model)
        for _ in range(2):
            assert_same(ps.grad(losses, model, retain_graph=True), want)
            assert_same(
                ps.grad(losses, {"0.weight": model[0].weight}, retain_graph=True), {"0.weight": want["0.weight"]}
            )


def test_an_input_that_is_changed(backend: str) -> None:
    layer = nn.Linear(3, 3).double()

    def inside(h: Tensor) -> Tensor:
        h.mul_(2)
        return layer(h).tanh()

    def losses(run: Callable[[Tensor], Tensor]) -> Tensor:
        h = layer(images(3))
        return squares(run(h)) + squares(h)

    want = definition(losses(inside), layer)
    fast = torch.compile(inside, backend=backend)
    warned(lambda: losses(fast), layer, want)


def test_inputs_that_are_not_contiguous(backend: str) -> None:
    """The compiled region sees other strides than it was traced with, in results and cotangents."""
    model = mlp(3, 4, 2)
    x = images(3, 5).transpose(1, 2)[:, ::2]
    exact_and_fast(
        backend, model, lambda m: (m(x).permute(2, 0, 1) * torch.ones(()).expand(2, 5, 3)).square().sum((0, 2))
    )


def test_a_backward_that_is_not_linear_takes_the_slow_way(backend: str) -> None:
    class Clipped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            return h.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g.clamp(-0.1, 0.1) + 0.01

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            return Clipped.apply(self.layer(x)).tanh()  # type: ignore[no-any-return]

    model, x = Model(), images(3)
    fast = torch.compile(model, backend=backend)
    with torch._functorch.config.patch(donated_buffer=False):
        want = definition(squares(fast(x)), model)
        said = warned(lambda: squares(fast(x)), model, want)
    assert "aten.clamp" in said[0] or "aten.add" in said[0]


def test_batch_norm_in_training_takes_the_slow_way(backend: str) -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double(), images(3)
    fast = torch.compile(model, backend=backend)
    said = warned(lambda: squares(fast(x)), model, definition(squares(model(x)), model))
    assert any("where a sum over samples comes back to samples (in a compiled region)" in words for words in said)


def test_warnings_name_the_op(backend: str) -> None:
    weight, x = nn.Parameter(torch.rand(5).double() + 0.5), images(5)
    losses = lambda: squares(torch.cumprod(x * weight, 1).logcumsumexp(1))  # noqa: E731
    said = warned(torch.compile(losses, backend=backend), [weight], definition(losses(), [weight]))
    assert all("aten." in words and "(in a compiled region)" in words for words in said)


def test_independence_is_not_promised_by_what_is_read(backend: str) -> None:
    """Gradients that can be told apart do not show of which samples saved values were made."""
    layer, x = nn.Linear(3, 4).double(), images(3)
    fast = torch.compile(lambda x: layer(x - x.mean(0)).tanh(), backend=backend)
    with pytest.raises(ps.InteractionError, match="cannot see inside CompiledFunction"):
        ps.norms(squares(fast(x)), layer, independent=True)


def test_programs_go_with_their_regions() -> None:
    torch.compiler.reset()
    before = len(entry._REGIONS)
    model = mlp(3, 4, 2)
    ps.norms(squares(torch.compile(model, backend="aot_eager")(images(3))), model)
    assert len(entry._REGIONS) == before + 1
    torch.compiler.reset()
    gc.collect()
    assert len(entry._REGIONS) <= before


def test_few_programs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(entry, "_MOST", 3)
    model = mlp(3, 4, 2)
    fast = torch.compile(model, backend="aot_eager", dynamic=True)
    for B in range(2, 9):
        x = torch.randn(B, 3).double()
        assert warned(partial(run, fast, x), model, definition(run(model, x), model)) == []
    assert all(len(region._programs) <= 3 for region in entry._REGIONS.values())


def node_of(model: nn.Module) -> Any:
    torch.compiler.reset()
    return torch.compile(model, backend="aot_eager")(images(3)).grad_fn


def test_what_the_backward_is_kept_in() -> None:
    """The private names of AOTAutograd, as of this release of PyTorch."""
    backward = backward_of(node_of(mlp()))
    inputs = [n.name for n in backward.graph.graph.nodes if n.op == "placeholder"]
    assert backward.cotangents == (0,)
    assert inputs[-1].startswith("tangents")
    assert not backward.inductor


def test_a_release_that_keeps_it_otherwise_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    node = node_of(mlp())
    monkeypatch.setattr(node._forward_cls, "metadata", SimpleNamespace())
    with pytest.raises(Unreadable, match=r"torch .* upgrade persample, or pass the model without torch.compile"):
        backward_of(node)


def test_such_a_release_gets_the_slow_exact_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    torch.compiler.reset()
    losses = squares(torch.compile(model, backend="aot_eager")(images(3)))
    monkeypatch.setattr(entry, "backward_of", _unreadable)
    with pytest.warns(ps.PerformanceWarning, match="upgrade persample"):
        assert_same(ps.grad(losses, model), definition(squares(model(images(3))), model))


def _unreadable(node: Any) -> Any:
    raise Unreadable("a backward that torch 9.9 keeps in a way: upgrade persample")


@pytest.mark.slow
def test_a_second_process_that_finds_all_in_a_cache(tmp_path: Any) -> None:
    code = """
import torch, persample as ps, warnings
warnings.simplefilter("error", ps.PerformanceWarning)
torch.manual_seed(0)
from torch import nn
model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 2))
x = torch.randint(9, (5, 3))
fast = torch.compile(model)
fast(x).sum().backward()  # what is compiled for it goes into the cache
for _ in range(3):
    torch.testing.assert_close(ps.norms(fast(x).square().sum(1), model), ps.norms(model(x).square().sum(1), model))
print(type(fast(x).grad_fn._forward_cls._lazy_backward_info).__name__)
"""
    surroundings = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    call = partial(subprocess.run, [sys.executable, "-c", code], env=surroundings, capture_output=True, text=True)
    said = [call(check=True).stdout.strip() for _ in range(2)]
    assert said == ["AutogradLazyBackwardCompileInfo", "CachedAutogradLazyBackwardCompileInfo"]


def read_case(case: Case, backend: str) -> None:
    """A case compiled as a whole: the answer is exact, whether its backward can be read or not."""
    torch.compiler.reset()
    params, losses = compiled(case, backend)(max(case.batches))
    with torch._functorch.config.patch(donated_buffer=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = losses()  # once: compiled code draws other random numbers in every call
        assert_same(ps.grad(found, params, retain_graph=True), definition(found, params), rtol=max(case.rtol, 1e-7))


# What PyTorch cannot compile: a gradient within the losses; by Inductor, the padding of channels-last images.
NOT_COMPILED = {"gradient_inside_the_losses": ("aot_eager", "inductor"), "image-pad-replicate": ("inductor",)}
LIBRARY = [case for case in CASES if max(case.batches) > 1]


@pytest.mark.parametrize("case", LIBRARY[3::60], ids=str)
def test_cases_of_the_library(case: Case) -> None:
    read_case(case, "aot_eager")


# Inductor takes seconds for a case: one in ten has to do.
BY_BACKEND = {"aot_eager": LIBRARY, "inductor": LIBRARY[7::10]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "backend"),
    [(case, b) for b, cases in BY_BACKEND.items() for case in cases if b not in NOT_COMPILED.get(case.name, ())],
    ids=str,
)
def test_all_cases_of_the_library(case: Case, backend: str) -> None:
    read_case(case, backend)
