"""One node at a time: B cotangents in a loop or under vmap give what the engine gives for each."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from persample.graph.execute import fallback
from persample.graph.execute.fallback import push_masked, push_stacked
from persample.graph.layout import Block, Labels, Layout
from persample.graph.read.saved import metadata
from persample.graph.read.site import Site
from tests.graph.explicit import explicit
from tests.graph.names import NODES, SOME
from tests.graph.samples import SAMPLES, Sample
from tests.graph.samples.leaves import c, f, ids, mask, p, w, z
from tests.graph.sites import Row, by_edge, rows_by_engine, site_of, wanted
from tests.graph.table import having, plant

B = 3


def _listed(samples: dict[str, list[Sample]]) -> list[object]:
    return [
        pytest.param(name, sample, id=f"{name}-{i}")
        for name, listed in samples.items()
        for i, sample in enumerate(listed)
        if name in NODES or name not in SOME
    ]


# Not in the list, and why: vmap refuses them, gets them wrong, or has no batching rule and warns.
REFUSED: dict[str, list[Sample]] = {
    "Cdist": [  # wrong numbers
        lambda: torch.cdist(w(4, 3), w(5, 3)),
        lambda: torch.cdist(w(4, 4, 3), w(4, 3), p=1),  # as many rows as samples
        lambda: torch.cdist(w(4, 3), w(4, 4, 3), p=0.5),
        lambda: torch.cdist(w(2, 3, 4, 3), w(1, 1, 5, 3), p=torch.inf),
        lambda: torch.cdist(w(2, 1, 4, 3), w(4, 5, 3), p=3),
        lambda: torch.cdist(w(3, 4, 2), w(3, 4, 2), p=0),
        lambda: torch.cdist(w(4, 0), w(5, 0)),
        lambda: torch.cdist(w(4, 3), w(0, 3)),
    ],
    "MaskedSelect": [lambda: w(3).masked_select(mask(4, 3))],  # wrong shape where the mask broadcasts
    "AsStridedScatter": [lambda: torch.as_strided_scatter(w(3), w(2), (2,), (1,), 1)],  # wrong numbers
    "Roll": [lambda: w().roll(1), lambda: w(2, 3).roll(1, 0)],  # rolls the samples of a 0-dim tensor
    "Flip": [lambda: w().flip(0), lambda: w(2, 3).flip(-1)],  # refuses a 0-dim tensor
    "Gather": [lambda: w(4, 3).gather(0, ids(4, 2, 3), sparse_grad=True)],  # no sparse gradients under vmap
    "Embedding": [
        lambda: F.embedding(ids(5, 2, 2), w(5, 3), sparse=True),
        lambda: F.embedding(ids(5, 4), w(5, 3), padding_idx=2, scale_grad_by_freq=True),
    ],
    "NativeLayerNorm": [lambda: F.layer_norm(f(2, 3).bfloat16(), (3,), f(3), f(3))],  # refuses two dtypes
    "NativeGroupNorm": [lambda: F.group_norm(f(2, 4, 3).bfloat16(), 2, f(4), f(4))],  # refuses two dtypes
    "ViewAsReal": [lambda: torch.view_as_real(z(2, 3))],  # refuses odd strides (torch 2.9)
    "LinalgSvd": [lambda: torch.linalg.svd(w(3, 2), full_matrices=False)[1]],  # refuses complex matrices
    "LinalgEigh": [lambda: torch.linalg.eigh(w(3, 3))[0]],  # refuses complex matrices
    "WeightNormInterface": [lambda: torch._weight_norm(w(4, 3), w(4, 1), 0)],  # no batching rule: loops, and warns
    "Take": [lambda: w(4, 3).take(ids(12, 5))],  # no batching rule
    "Unfold": [lambda: w(2, 5).unfold(1, 3, 1)],  # no batching rule
    "Mish": [lambda: F.mish(w(2, 3))],  # no batching rule
    "Convolution": [lambda: F.conv1d(w(2, 3, 6), w(4, 3, 2), w(4), padding=1)],  # right, but slower than the loop
}


def test_every_listed_name_has_samples() -> None:
    """Those that are written here; PyTorch's own serve the matrix for others."""
    assert set(SAMPLES) <= having("vmap")
    assert having("vmap") & NODES <= set(SAMPLES)


def test_refused_names_are_not_listed() -> None:
    assert not having("vmap") & set(REFUSED)


@pytest.mark.parametrize(("name", "sample"), _listed(SAMPLES))
def test_vmap_gives_what_the_loop_gives(name: str, sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    site = _site(name, sample)
    for batch in (1, B):
        for stacks in _stacks(site, batch):
            plant(monkeypatch, name, vmap=False)
            loop = push_stacked(site, stacks, batch, wanted(site))
            plant(monkeypatch, name, vmap=True)
            monkeypatch.setattr(fallback, "_loop", None)  # anything but vmap would fail
            vmapped = push_stacked(site, stacks, batch, wanted(site))
            monkeypatch.undo()
            for k in wanted(site):
                _assert_close(vmapped[k], loop[k], stacks)
    _assert_is_the_engines(site, vmapped, _rows(stacks, B), stacks)


@pytest.mark.parametrize(("name", "sample"), _listed(REFUSED))
def test_the_loop_gives_what_the_engine_gives(name: str, sample: Sample) -> None:
    site = _site(name, sample)
    for batch in (1, B):
        for stacks in _stacks(site, batch):
            _assert_is_the_engines(site, push_stacked(site, stacks, batch, wanted(site)), _rows(stacks, batch), stacks)


# Ops with one or several results, broadcast, complex and sparse gradients, and two edges to one place.
MASKED: dict[str, list[Sample]] = {
    "Add": [lambda: w(6, 4) + w(4), lambda: w(6, 4) + z(6, 1)],
    "Mul": [lambda: w(6, 4) * z(6, 4), lambda: z(6, 4) * w(), lambda: (lambda x: x * x)(w(6, 4))],
    "Mm": [lambda: c(6, 3).mm(w(3, 4)), lambda: z(6, 3).mm(z(3, 4))],
    "Where": [lambda: torch.where(mask(6, 4), w(4), w(6, 1))],
    "Unbind": [lambda: w(6, 3, 4).unbind(1)[0]],
    "Split": [lambda: w(6, 12).split(4, 1)[2]],
    "VarMean": [lambda: torch.var_mean(w(6, 3, 4), 1)[0]],
    "Sort": [lambda: w(6, 4).sort(1).values],
    "LinalgQr": [lambda: torch.linalg.qr(w(4, 4))[0]],
    "Embedding": [lambda: F.embedding(ids(5, 6), w(5, 4), sparse=True), lambda: F.embedding(ids(5, 6), w(5, 4))],
    "Gather": [lambda: w(6, 8).gather(1, ids(8, 6, 4), sparse_grad=True)],
    "Convolution": [lambda: F.conv1d(w(6, 2, 4), w(4, 2, 2), w(4), padding=1)],
}


@pytest.mark.parametrize(("name", "sample"), _listed(MASKED))
def test_masked_cotangents_give_each_samples_own(name: str, sample: Sample) -> None:
    site = _site(name, sample)
    for present in _presences(len(site.shapes)):
        cotangents = [_random(site, nr) if live else None for nr, live in enumerate(present)]
        layouts = [_layout(site.shapes[nr], nr) if live else None for nr, live in enumerate(present)]
        rows = [[_only(g, lay, i) for g, lay in zip(cotangents, layouts, strict=True)] for i in range(2)]
        _assert_is_the_engines(site, push_masked(site, cotangents, layouts, 2, wanted(site)), rows, cotangents)


def test_bad_numbers_stay_with_their_sample() -> None:
    site = _site("Mm", lambda: c(6, 3).mm(w(3, 4)))
    g = torch.randn(6, 4, dtype=torch.float64)
    g[:2] = torch.tensor([float("nan"), float("inf"), 1.0, -float("inf")])
    found = push_masked(site, [g], [Block(3, 8)], 3, [1])[1]
    assert bool(found[0].isnan().any())
    _assert_is_the_engines(site, {1: found[1:]}, [[_only(g, Block(3, 8), i)] for i in (1, 2)], [g[2:]])


def test_elements_that_are_nobodys_go_nowhere() -> None:
    site = _site("Mul", lambda: w(4) * w(4))
    g = torch.randn(4, dtype=torch.float64)
    found = push_masked(site, [g], [Labels(2, torch.tensor([1, -1, -1, 1]))], 2, [0])[0]
    assert found[0].eq(0).all()
    assert found[1].ne(0).tolist() == [True, False, False, True]


class Mul(torch.autograd.Function):
    """Named like a listed op; not linear, and silent about its second operand."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        (g,) = grads
        return (g / g.norm() if float(g.sum()) > 0 else -g), None


def test_custom_functions_are_called_one_by_one_whatever_their_name() -> None:
    output = Mul.apply(w(3), w(3))
    site = site_of(output, "custom Mul")
    stacks = [torch.randn(B, 3, dtype=torch.float64)]
    found = push_stacked(site, stacks, B, wanted(site))
    assert wanted(site) == [0, 1]
    assert found[1].eq(0).all()  # None from the backward
    _assert_is_the_engines(site, found, _rows(stacks, B), stacks)


def test_checkpointed_nodes_are_called_one_by_one() -> None:
    site = _site("Tanh", lambda: checkpoint(lambda x: x.tanh(), w(2, 3), use_reentrant=False))
    stacks = [torch.randn(B, 2, 3, dtype=torch.float64)]
    _assert_is_the_engines(site, push_stacked(site, stacks, B, [0]), _rows(stacks, B), stacks)


@pytest.mark.parametrize(("name", "sample"), [("Mm", SAMPLES["Mm"][0]), ("Convolution", REFUSED["Convolution"][0])])
def test_a_backward_under_way_changes_nothing(name: str, sample: Sample) -> None:
    site = _site(name, sample)
    stacks = [_random(site, 0, B)]
    found: list[dict[int, Tensor]] = []
    other = w(3).exp()
    other.register_hook(lambda g: found.append(push_stacked(site, stacks, B, wanted(site))))
    other.sum().backward()
    _assert_is_the_engines(site, found[0], _rows(stacks, B), stacks)


def test_results_have_the_dtype_of_their_targets() -> None:
    site = _site("Mul", lambda: f(2, 3) * w(3))
    found = push_stacked(site, [torch.randn(B, 2, 3, dtype=torch.float64)], B, [0, 1])
    assert {k: (v.dtype, v.shape) for k, v in found.items()} == {
        0: (torch.float32, (B, 2, 3)),
        1: (torch.float64, (B, 3)),
    }
    site = _site("Div", lambda: z(3) / p(2, 3))
    found = push_stacked(site, [torch.randn(B, 2, 3, dtype=torch.complex128)], B, [0, 1])
    assert [v.dtype for v in found.values()] == [torch.complex128, torch.float64]


def _site(name: str, sample: Sample) -> Site:
    torch.manual_seed(0)
    return site_of(sample(), name)


def _random(site: Site, nr: int, *first: int) -> Tensor:
    meta = metadata(site.node)[nr]
    return torch.randn(*first, *meta.shape, dtype=meta.dtype)


def _presences(count: int) -> list[tuple[bool, ...]]:
    """All cotangents there, and for several of them, each alone."""
    alone = [tuple(i == j for j in range(count)) for i in range(count)]
    return [(True,) * count, *(alone if count > 1 else [])]


def _stacks(site: Site, batch: int) -> list[list[Tensor | None]]:
    """Stacks of cotangents: contiguous, with the samples innermost in memory, and some of them missing."""
    found: list[list[Tensor | None]] = []
    for present in _presences(len(site.shapes)):
        stacks = [_random(site, nr, batch) if live else None for nr, live in enumerate(present)]
        found.append(stacks)
        found.append([None if s is None else s.movedim(0, -1).contiguous().movedim(-1, 0) for s in stacks])
    return found


def _rows(stacks: Sequence[Tensor | None], batch: int) -> list[Row]:
    # With memory of their own: the backward of as_strided_scatter reads from the start of it.
    return [
        [None if s is None else s[i].clone(memory_format=torch.contiguous_format) for s in stacks] for i in range(batch)
    ]


def _layout(shape: tuple[int, ...], nr: int) -> Layout:
    """Two samples: in blocks where they fit, in any order along the last dim, nobody's among them, where not."""
    if shape and shape[0] % 2 == 0 and nr % 2 == 0:
        return Block(2, torch.Size(shape[1:]).numel())
    sizes = [1] * (len(shape) - 1) + [shape[-1]] if shape else []
    return Labels(2, torch.randint(-1, 2, sizes))


def _only(g: Tensor | None, layout: Layout | None, i: int) -> Tensor | None:
    """A cotangent's elements that belong to sample i."""
    if g is None or layout is None:
        return None
    return g.masked_fill(explicit(layout, tuple(g.shape)) != i, 0)


def _assert_is_the_engines(
    site: Site, got: dict[int, Tensor], rows: Sequence[Row], cotangents: Sequence[Tensor | None]
) -> None:
    want = rows_by_engine(site, rows)
    for edge, value in by_edge(site, got).items():
        _assert_close(value, want[edge], cotangents)


def _assert_close(got: Tensor, want: Tensor, cotangents: Sequence[Tensor | None]) -> None:
    """Equal, or to rounding: relative to the largest number that went in or came out."""
    sizes = [float(t.detach().abs().max()) for t in (*cotangents, want) if t is not None and t.numel()]
    largest = max([1.0, *[s for s in sizes if s < float("inf")]])
    precise = got.dtype in (torch.float64, torch.complex128) and all(
        g is None or g.dtype in (torch.float64, torch.complex128) for g in cotangents
    )
    rounding = 1e-12 if precise else 1e-5 if got.dtype != torch.bfloat16 else 1e-2
    torch.testing.assert_close(got, want, rtol=0, atol=rounding * largest, equal_nan=True)
