"""Reductions that share a backward give what each gives alone, and nothing is left behind between calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import persample as ps
from tests import models
from tests.case_library.registry import score, shaken
from tests.models import Program
from tests.programs.generate import generate
from tests.programs.script import Invalid, Run, computed
from tests.reductions.expected import Ask, assert_result, questions
from tests.reference import definition


def mlp(B: int) -> Program:
    net, x = models.mlp(5, 8, 3), torch.randn(B, 5).double()
    return net, lambda: score(net(x))


def cnn(B: int) -> Program:
    """Early layers are best written out, late ones not; one is depthwise."""
    net = nn.Sequential(
        *(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.Tanh(),
            nn.Conv2d(4, 8, 3, stride=2, groups=4),
            nn.Tanh(),
        ),
        *(nn.Conv2d(8, 40, 3, stride=2), nn.Tanh(), nn.Conv2d(40, 40, 3, padding=1), nn.Flatten(), nn.Linear(360, 3)),
    )
    x = torch.randn(B, 2, 15, 15).double()
    return shaken(net.double()), lambda: score(net(x))


class Tied(nn.Module):
    """A table that is read by row and multiplied with; positions are read once for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.inner = nn.Embedding(60, 8, padding_idx=0), nn.Embedding(6, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.inner(self.words(ids) + self.places(torch.arange(6))).tanh()
        return h @ self.words.weight.t()


def tied(B: int) -> Program:
    net, ids = Tied().double(), torch.randint(0, 60, (B, 6))
    return net, lambda: F.cross_entropy(net(ids).mT, ids, reduction="none").sum(1)


def lstm(B: int) -> Program:
    net, x = nn.LSTM(4, 8, num_layers=2, batch_first=True).double(), torch.randn(B, 24, 4).double()
    return net, lambda: score(net(x)[0])


def fused_lstm(B: int) -> Program:
    net, x = nn.LSTM(4, 8, batch_first=True), torch.randn(B, 24, 4)
    return net, lambda: score(net(x)[0])


class Routed(nn.Module):
    """Every token goes to one of three experts: a sample may send any number of tokens to one, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(4, 3), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, 4)
        weight, chosen = self.router(tokens).softmax(1).max(1)
        out = torch.zeros_like(tokens)
        for k, expert in enumerate(self.experts):
            rows = (chosen == k).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(tokens[rows]).tanh() * weight[rows, None])
        return out.view(x.shape)


def routed(B: int) -> Program:
    net, x = Routed().double(), torch.randn(B, 7, 4).double()
    return net, lambda: score(net(x))


class SharedConvolution(nn.Module):
    """One kernel at two scales, and a parameter that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.unused = nn.Conv2d(3, 3, 3, padding=1), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).tanh()
        return self.conv(F.avg_pool2d(h, 2)).flatten(1)


def shared_convolution(B: int) -> Program:
    net, x = SharedConvolution().double(), torch.randn(B, 3, 8, 8).double()
    return net, lambda: score(net(x))


class Complex(nn.Module):
    """Parameters of complex numbers in every form, and real ones that are used as such."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"w": (3, 4), "t": (3, 3), "scale": (4,), "one": (), "table": (6, 3)}.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, dtype=torch.complex128)))
        self.pairs, self.real = (nn.Parameter(torch.randn(4, n).double()) for n in (2, 4))

    def forward(self, x: Tensor, sequence: Tensor, ids: Tensor) -> Tensor:
        h = (x @ self.w) * self.scale * self.one + torch.view_as_complex(self.pairs)
        g = (sequence + self.table[ids]) @ self.t
        return score((h @ self.real.to(h.dtype)).angle()) + score(g.abs())


def complex_numbers(B: int) -> Program:
    net = Complex()
    data = torch.randn(B, 3, dtype=torch.complex128), torch.randn(B, 5, 3, dtype=torch.complex128)
    ids = torch.randint(0, 6, (B, 5))
    return net, lambda: net(*data, ids)


MODELS = {f.__name__: f for f in (mlp, cnn, tied, lstm, fused_lstm, routed, shared_convolution, complex_numbers)}
BATCHES = {name: (5, 2, 1) if "lstm" in name else (5, 2, 1, 0) for name in MODELS}  # an LSTM refuses no samples
EACH = [(name, B) for name in MODELS for B in BATCHES[name]]
KINDS = list(questions({"p": torch.zeros(1, 1)}, {"p": torch.zeros(1, requires_grad=True)}))
RTOL = {name: 1e-4 if name == "fused_lstm" else 1e-10 for name in MODELS}


class Built(NamedTuple):
    """A model, its losses, what to ask, and what every reduction answers alone."""

    net: nn.Module
    losses: Callable[[], Tensor]
    asked: dict[str, Ask]
    alone: dict[str, Any]


@cache
def built(name: str, B: int) -> Built:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net, losses = MODELS[name](B)
    asked = questions(definition(losses(), net), net)
    return Built(net, losses, asked, {kind: ps.reduce(losses(), net, a.reduction)[0] for kind, a in asked.items()})


def tensors(result: Any) -> Iterator[Tensor]:
    """All tensors of a result, also of a clipped sum's report."""
    if isinstance(result, Tensor):
        yield result
        return
    for part in result.values() if isinstance(result, Mapping) else result:
        yield from tensors(part)
    if hasattr(result, "clipping"):
        yield from tensors(tuple(result.clipping))


def assert_equal(got: Any, want: Any, rtol: float) -> None:
    """The same containers of the same tensors, within ``rtol`` of the largest element of each."""
    assert type(got) is type(want)
    pairs = list(zip(tensors(got), tensors(want), strict=True))
    for a, b in pairs:
        scale = float(b.abs().max().nan_to_num()) if b.numel() else 0.0
        torch.testing.assert_close(a, b, rtol=0, atol=rtol * scale, equal_nan=True)


@pytest.mark.parametrize(("name", "B"), EACH)
def test_each_reduction_alone_is_the_definition(name: str, B: int) -> None:
    """Every reduction in a call of its own is what the definition's gradients give."""
    case = built(name, B)
    for kind, ask in case.asked.items():
        assert_result(case.alone[kind], ask.want, RTOL[name])


@settings(max_examples=150)
@given(
    st.sampled_from(EACH),
    st.lists(st.sampled_from(KINDS), max_size=6),
    st.sampled_from([None, 0, 1, 2000, 10**5, 10**9]),
)
def test_any_mix_equals_each_alone(which: tuple[str, int], kinds: list[str], max_memory: int | None) -> None:
    """In any order, repeated or not, with room for stacks or without."""
    name, B = which
    case = built(name, B)
    reductions = [case.asked[kind].reduction for kind in kinds]
    found = ps.reduce(case.losses(), case.net, *reductions, max_memory=max_memory)
    assert len(found) == len(kinds)
    for kind, got in zip(kinds, found, strict=True):
        assert_equal(got, case.alone[kind], RTOL[name])


@pytest.mark.parametrize("name", MODELS)
def test_inner_products_are_symmetric(name: str) -> None:
    """To the last digit, or eigenvalue routines take it amiss; and the diagonal agrees with the norms."""
    case = built(name, 5)
    gram, norms = case.alone["gram"], case.alone["norms"]
    assert torch.equal(gram, gram.t())
    assert_equal(gram.diagonal().sqrt(), norms, RTOL[name])


@pytest.mark.parametrize("name", MODELS)
def test_reductions_keep_nothing(name: str) -> None:
    """The same objects serve two batches of different sizes, and then give the first results again."""
    case = built(name, 5)
    reductions = {kind: case.asked[kind].reduction for kind in KINDS if kind != "weighted"}  # which has one per sample
    before = {kind: dict(vars(r)) for kind, r in reductions.items()}
    first = ps.reduce(case.losses(), case.net, *reductions.values())
    ps.reduce(case.losses()[1:3], case.net, *reductions.values())
    second = ps.reduce(case.losses(), case.net, *reductions.values())
    for a, b in zip(first, second, strict=True):
        assert_equal(a, b, 0.0)
    for kind, r in reductions.items():
        assert vars(r).keys() == before[kind].keys()
        assert all(vars(r)[key] is value for key, value in before[kind].items()), kind


@pytest.mark.parametrize("name", MODELS)
def test_results_share_no_memory(name: str) -> None:
    """What a user does to one result in place must not change another, nor the model."""
    case = built(name, 5)
    found = ps.reduce(case.losses(), case.net, *(a.reduction for a in case.asked.values()), ps.Norms(), ps.Stack())
    every = [t for result in found for t in tensors(result)] + list(case.net.parameters())
    places = [t.untyped_storage().data_ptr() for t in every if t.numel()]
    assert len(set(places)) == len(places)


def test_a_function_for_weights_may_overwrite_what_it_is_given() -> None:
    case = built("mlp", 5)
    careless = ps.ClippedSum(weights=lambda norms: norms.clamp_(min=1.0).reciprocal_())
    careful = ps.ClippedSum(weights=lambda norms: 1 / norms.clamp(min=1.0))
    norms, a, b, later = ps.reduce(case.losses(), case.net, ps.Norms(), careless, careful, ps.Norms())
    assert_equal(norms, case.alone["norms"], 1e-12)
    assert_equal(later, case.alone["norms"], 1e-12)
    assert_equal(a, b, 1e-12)
    assert_equal(tuple(a.clipping), tuple(b.clipping), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("B", [3, 7])
def test_variance_of_nearly_equal_samples(dtype: torch.dtype, B: int) -> None:
    """As from gradients that are written out: the mean must be right to the last digit, in float32 for bfloat16."""
    step = torch.finfo(dtype).eps * (2 if dtype == torch.bfloat16 else 64)
    x = 1 + step * torch.arange(B, dtype=torch.float64).view(B, 1)
    x = (x * torch.tensor([1.0, 2.0, 0.5, 4.0])).to(dtype)
    w, b = torch.ones(3, 4, dtype=dtype, requires_grad=True), torch.ones(4, dtype=dtype, requires_grad=True)
    stacks = {"linear": x.double().unsqueeze(1).expand(B, 3, 4), "product": x.double()}
    found = ps.variance(F.linear(x, w).sum(1) + (x * b).sum(1), {"linear": w, "product": b})
    for name, stack in stacks.items():
        torch.testing.assert_close(found[name].double(), stack.var(0), rtol=0.01, atol=0)


@settings(max_examples=60)
@given(st.sampled_from(EACH), st.data())
def test_part_of_the_parameters(which: tuple[str, int], data: st.DataObject) -> None:
    """Any of them, in any order: everything is about these alone, and in their order."""
    name, B = which
    case = built(name, B)
    every = dict(case.net.named_parameters())
    names = data.draw(st.permutations(list(every)))[: data.draw(st.integers(1, len(every)))]
    params = {n: every[n] for n in names}
    asked = questions({n: case.asked["stack"].want[n] for n in names}, params)
    found = ps.reduce(case.losses(), params, *(ask.reduction for ask in asked.values()))
    for got, ask in zip(found, asked.values(), strict=True):
        assert_result(got, ask.want, RTOL[name])


def random_programs(seeds: range) -> Iterator[tuple[str, Tensor, list[Tensor], dict[str, Tensor]]]:
    """The text, losses, parameters and gradients of every random program that has all of these."""
    for script in filter(None, map(generate, seeds)):
        with suppress(Invalid):
            _, losses, params, stacks = computed(script, Run(seed=0))
            yield script.program, losses, params, {str(i): stack for i, stack in enumerate(stacks)}


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore")  # of PyTorch about odd programs, and of ours about slow ones
@pytest.mark.parametrize(("first", "max_memory"), [(0, None), (1, 0), (2, 500), (3, 10**9)])
def test_all_reductions_of_random_programs(first: int, max_memory: int | None) -> None:
    for text, losses, params, stacks in random_programs(range(first, 120, 4)):
        asked = questions(stacks, params)
        found = ps.reduce(losses, params, *(ask.reduction for ask in asked.values()), max_memory=max_memory)
        for got, ask in zip(found, asked.values(), strict=True):
            try:
                assert_result(got, ask.want, 1e-8)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{text}") from error
