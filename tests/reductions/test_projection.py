"""Random projections: reproducible, linear, never held whole, and as exact as they say."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample as ps
from persample.reductions import projection as module
from tests.models import mlp
from tests.reference import definition, flat, named, vectors

KINDS = ("rademacher", "gaussian", "kronecker")
B = 5


class Net(nn.Module):
    """Matrices, vectors, a number, a table, a kernel and complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv, self.linear = nn.Embedding(7, 4), nn.Conv1d(4, 6, 2), nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.turn = nn.Parameter(torch.randn(5, 2, dtype=torch.complex64))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.linear(self.conv(self.table(ids).mT).mT.tanh()).sin() * self.scale
        turned = h.to(self.turn.dtype) @ self.turn
        return turned.abs().square().sum((1, 2)) + h.sum((1, 2))


def model_and_data() -> tuple[Net, Tensor]:
    torch.manual_seed(1)
    model = Net()
    for p in model.parameters():
        p.data = p.data.to(torch.complex128 if p.is_complex() else torch.float64)
    return model, torch.randint(0, 7, (B, 4))


def by_hand(stacks: Mapping[str, Tensor], projection: ps.Projection) -> Tensor:
    """Gradients that were written out, multiplied with the whole matrices."""
    total = torch.zeros(len(next(iter(stacks.values()))), projection.dim, dtype=torch.float64)
    for name, stack in stacks.items():
        rows, shape = flat(stack), stack.shape[1:]
        n, m = shape[0] if shape else 1, rows.shape[1] // (shape[0] if shape else 1)
        if projection.kind == "kronecker" and min(n, m) > 1:
            left, right = (t.double() for t in projection.two_sides(name, n, m))
            total += torch.einsum("bnm,nk,ml->bkl", rows.view(-1, n, m), left, right).flatten(1)
        else:
            blocks = [projection.rows(name, start, stop) for start, stop in projection.blocks(rows.shape[1])]
            total += rows @ torch.cat(blocks).double()
    return total


@pytest.mark.parametrize("dim", [1, 7, 12, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_is_the_product_with_its_matrices(kind: str, dim: int) -> None:
    model, x = model_and_data()
    projection = ps.Projection(dim, 3, kind)
    want = by_hand(definition(model(x), model), projection)
    got = ps.project(model(x), model, projection)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("elements", [None, 12, 60, 144])
@pytest.mark.parametrize("kind", KINDS)
def test_many_forms_of_gradients(kind: str, elements: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors have short cuts of their own: recurrence, groups, tied tables, transposes, several positions.

    Matrices of all sizes are generated whole, or row by row, or in blocks that do not fit their shapes.
    """
    if elements is not None:
        monkeypatch.setattr(module, "_ELEMENTS", elements)
    torch.manual_seed(0)
    tied, gru = nn.Embedding(9, 3), nn.GRU(3, 4, batch_first=True)
    convs = nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.ConvTranspose2d(4, 6, 2, groups=2), nn.BatchNorm2d(6).eval())
    layers = nn.ModuleDict({"tied": tied, "gru": gru, "convs": convs, "bilinear": nn.Bilinear(3, 3, 2)}).double()
    flipped, turn = (nn.Parameter(torch.randn(4, 3, dtype=d)) for d in (torch.float64, torch.complex128))
    ids, images = torch.randint(0, 9, (B, 3)), torch.randn(B, 2, 4, 4, dtype=torch.float64)

    def forward() -> Tensor:
        h = tied(ids)
        out = layers["bilinear"](h, h).sin().sum((1, 2)) + (gru(h)[0] @ flipped).sin().sum((1, 2))
        out = out + (gru(h)[0].to(turn.dtype) @ turn).abs().sum((1, 2))
        return out + (h.tanh() @ tied.weight.t()).sin().sum((1, 2)) + convs(images).tanh().sum((1, 2, 3))

    params = {**named(layers), "flipped": flipped, "turn": turn}
    projection = ps.Projection(12, 5, kind)
    want = by_hand(definition(forward(), params), projection)
    for memory in (None, 0, 500):
        got = ps.project(forward(), params, projection, max_memory=memory)
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_in_parts_of_the_batch_and_of_memory(kind: str) -> None:
    model, x = model_and_data()
    projection = ps.Projection(12, 3, kind)
    whole = ps.project(model(x), model, projection)
    for cuts in ([0, 1, 5], [0, 2, 5], [0, 1, 2, 3, 4, 5], [0, 0, 5]):
        parts = [ps.project(model(x[a:b]), model, projection) for a, b in pairwise(cuts)]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)
    for memory in (0, 1, 1000, 2**30):
        got = ps.project(model(x), model, projection, max_memory=memory)
        torch.testing.assert_close(got, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_add_up_whatever_their_order(kind: str) -> None:
    """A parameter's matrix depends on its name and shape alone."""
    model, x = model_and_data()
    projection, params = ps.Projection(12, 3, kind), named(model)
    whole = ps.project(model(x), params, projection)
    alone = [ps.project(model(x), {name: p}, projection) for name, p in params.items()]
    assert all(z.norm() > 0 for z in alone)
    torch.testing.assert_close(sum(alone), whole, rtol=1e-12, atol=1e-12)
    backwards = ps.project(model(x), dict(reversed(params.items())), projection)
    torch.testing.assert_close(backwards, whole, rtol=1e-12, atol=1e-12)
    other = ps.project(model(x), {f"other.{name}": p for name, p in params.items()}, projection)
    assert float((other - whole).norm()) > 0.1 * float(whole.norm())


@pytest.mark.parametrize("kind", KINDS)
def test_linear_in_the_gradient(kind: str) -> None:
    model, x = model_and_data()
    projection, scale = ps.Projection(12, 3, kind), torch.tensor([2.0, -1, 0, 1e-3, 5], dtype=torch.float64)
    z = ps.project(model(x), model, projection)
    torch.testing.assert_close(ps.project(model(x) * scale, model, projection), z * scale.unsqueeze(1))
    mixed = ps.project(torch.stack([model(x).sum(), 2 * model(x)[1] - model(x)[0]]), model, projection)
    torch.testing.assert_close(mixed, torch.stack([z.sum(0), 2 * z[1] - z[0]]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)], ids=str)
def test_the_same_map_for_every_dtype(kind: str, dtype: torch.dtype, rtol: float) -> None:
    torch.manual_seed(0)
    model, x = mlp(4, 6, 3, dtype=dtype), torch.randn(B, 4).to(dtype)
    projection = ps.Projection(12, 3, kind)
    got = ps.project(model(x).square().sum(1), model, projection)
    assert got.dtype == torch.float32
    model, x = model.double(), x.double()
    want = ps.project(model(x).square().sum(1), model, projection)
    assert float((got.double() - want).norm()) <= rtol * float(want.norm())


SCRIPT = """
import torch, persample as ps
from tests.reductions.test_projection import KINDS, model_and_data
torch.manual_seed(99), torch.randn(3)
model, x = model_and_data()
torch.save([ps.project(model(x), model, ps.Projection(12, 3, kind)) for kind in KINDS], {path!r})
"""


def test_the_same_in_another_process(tmp_path: object) -> None:
    path, (model, x) = f"{tmp_path}/z.pt", model_and_data()
    subprocess.run([sys.executable, "-c", SCRIPT.format(path=path)], check=True, env=None)
    for kind, there in zip(KINDS, torch.load(path), strict=True):
        here = ps.project(model(x), model, ps.Projection(12, 3, kind))
        torch.testing.assert_close(there, here, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_entries_are_independent_with_mean_0_and_variance_1(kind: str) -> None:
    """Up to the scale 1/√dim; all within five standard deviations, also the products of any two rows or columns."""
    matrix = ps.Projection(128, 4, kind).rows("a", 0, 256).double() * math.sqrt(128)
    if kind != "gaussian":
        assert matrix.abs().sub(1).abs().max() < 1e-6
    assert abs(float(matrix.mean())) < 5 / math.sqrt(matrix.numel())
    for rows in (matrix, matrix.t()):
        n = rows.shape[1]
        products = rows @ rows.t() / n - torch.eye(len(rows))
        assert float(products.abs().max()) < (5 * math.sqrt(2) if kind == "gaussian" else 5.5) / math.sqrt(n)
        assert float(products.square().mean()) == pytest.approx(1 / n, rel=0.1)


def test_neither_uses_nor_changes_the_global_generator() -> None:
    model, x = model_and_data()
    state = torch.get_rng_state()
    a = ps.project(model(x), model, ps.Projection(12))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    torch.testing.assert_close(ps.project(model(x), model, ps.Projection(12)), a)


def test_seeds_and_names_give_different_matrices() -> None:
    for kind in KINDS:
        ways = [ps.Projection(64, seed, kind).rows(name, 0, 9) for seed in (0, 1, -1, 10**30) for name in ("a", "b")]
        for i, a in enumerate(ways):
            for b in ways[:i]:
                assert abs(float((a * b).sum())) < 5 * math.sqrt(a.numel()) / 64


def test_blocks_are_independent_and_make_one_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements in different blocks must not share random numbers, or their products would not be kept."""
    monkeypatch.setattr(module, "_ELEMENTS", 64)
    projection = ps.Projection(16, 0, "gaussian")
    blocks = projection.blocks(10)
    assert blocks == [(0, 4), (4, 8), (8, 10)]
    a, b, _ = (projection.rows("a", *block) for block in blocks)
    assert not torch.isclose(a, b).any()
    w, x = torch.ones(10, dtype=torch.float64, requires_grad=True), torch.randn(3, 10, dtype=torch.float64)
    got = ps.project((x * w).sum(1), {"w": w}, projection)
    torch.testing.assert_close(got, by_hand({"w": x}, projection), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_are_never_held_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    random = ps.Projection._random

    def recorded(self: ps.Projection, what: str, rows: int, columns: int) -> Tensor:
        sizes.append(rows * columns)
        return random(self, what, rows, columns)

    monkeypatch.setattr(ps.Projection, "_random", recorded)
    model, dim = nn.Linear(100, 90), 512
    numel = sum(p.numel() for p in model.parameters())
    ps.project(model(torch.randn(3, 100)).square().sum(1), model, ps.Projection(dim, 0, kind))
    assert max(sizes) <= 2**20
    if kind == "kronecker":
        assert sum(sizes) < 90 * dim + 100 * 100
    else:
        assert sum(sizes) == numel * dim > 4 * 2**20
    sizes.clear()
    w = torch.ones(3, requires_grad=True)
    ps.project((torch.randn(2, 3) * w).sum(1), [w], ps.Projection(2**20 + 1, 0, kind))
    assert sizes == [2**20 + 1] * 3  # one row at least


# --- how exact


def deviations(forward: Callable[[], Tensor], params: object, kind: str, dim: int, seeds: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over seeds of <z_i, z_j> - <g_i, g_j>, relative to both norms."""
    losses = forward()
    rows = vectors(definition(losses, params))
    norms, products = rows.norm(dim=1), rows @ rows.t()
    found = []
    for seed in range(seeds):
        z = ps.project(losses, params, ps.Projection(dim, seed, kind), retain_graph=True)  # type: ignore[arg-type]
        found.append((z.double() @ z.double().t() - products) / (norms.unsqueeze(1) * norms))
    return torch.stack(found).mean(0), torch.stack(found).square().mean(0).sqrt()


@pytest.mark.parametrize(
    ("kind", "dim"), [*((kind, 16) for kind in KINDS), pytest.param("kronecker", 36, marks=pytest.mark.slow)]
)
def test_inner_products_are_kept_within_the_stated_error(kind: str, dim: int) -> None:
    model, x = mlp(6, 8, 5), torch.randn(4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    seeds = 300
    error = ps.Projection(dim, 0, kind).error
    mean, deviation = deviations(lambda: model(x).square().sum(1), model, kind, dim, seeds)
    assert float(mean.abs().max()) <= 4 * error / math.sqrt(seeds)
    assert float(deviation.max()) <= error * 1.15
    if kind != "kronecker":  # norms of gradients with many elements attain it
        assert float(deviation.diagonal().min()) >= error * 0.8


@pytest.mark.parametrize("dim", [16, pytest.param(36, marks=pytest.mark.slow)])
def test_rank_one_gradients_attain_the_kronecker_error(dim: int) -> None:
    torch.manual_seed(4)
    w, x, g = (torch.randn(*s, dtype=torch.float64) for s in ((40, 40), (3, 40), (3, 40)))
    w.requires_grad_()
    g[0] = x[0]  # would be seen if both sides were the same
    mean, deviation = deviations(lambda: (F.linear(x, w) * g).sum(1), [w], "kronecker", dim, 400)
    error = ps.Projection(dim, 0, "kronecker").error
    assert float(mean.abs().max()) <= 4 * error / math.sqrt(400)
    assert 0.75 * error <= float(deviation.diagonal().mean()) <= 1.15 * error


def test_the_stated_errors() -> None:
    assert ps.Projection(50).error == ps.Projection(50, kind="gaussian").error == pytest.approx(0.2)
    assert ps.Projection(16, kind="kronecker").error == pytest.approx(math.sqrt(1.5 * 1.5 - 1))
    assert [ps.Projection(d).sides for d in (1, 7, 12, 16, 512)] == [(1, 1), (1, 7), (3, 4), (4, 4), (16, 32)]


# --- wrong arguments


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((0,), "dim must be a positive integer, not 0"),
        ((-3,), "dim must be a positive integer, not -3"),
        ((2.0,), "dim must be a positive integer, not 2.0"),
        (("8",), "dim must be a positive integer, not '8'"),
        ((8, 0, "sparse"), "kind must be 'rademacher', 'gaussian' or 'kronecker', not 'sparse'"),
        ((8, 0.5), "seed must be an integer, not 0.5"),
        ((8, None), "seed must be an integer, not None"),
    ],
)
def test_wrong_arguments(arguments: Sequence[object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ps.Projection(*arguments)  # type: ignore[arg-type]


def test_something_else_than_a_projection() -> None:
    model, x = mlp(6, 8, 5), torch.randn(4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for wrong in (512, ps.Projection):
        with pytest.raises(TypeError, match=r"expected a ps\.Projection\(dim, seed\), not"):
            ps.project(model(x).sum(1), model, wrong)  # type: ignore[arg-type]
