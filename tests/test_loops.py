"""Loops over samples and over chunks of a batch: what one call for all samples gives, for every case there is."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import persample as ps
from persample.factors import Part
from persample.graph.entry import capture
from tests.cases import CASES, Case
from tests.reference import assert_same, definition

# What PyTorch has compiled, it cannot run backwards a second time, as the definition does.
CASES_IN_LOOPS = [case for case in CASES if not case.interacts and case.name != "compiled_model"]
SIZES = {case: {min(b for b in case.batches if b), max(case.batches)} for case in CASES_IN_LOOPS}
LOOPED = [pytest.param(case, B, id=f"{case}-B{B}") for case, sizes in SIZES.items() for B in sorted(sizes)]
FEW = LOOPED[::9]


def in_a_loop(case: Case, B: int) -> None:
    """Three passes of a program, whose losses are put together in another order."""
    params, forward = case.build(B)
    order = torch.randperm(3 * B, generator=torch.Generator().manual_seed(B))

    def losses() -> Tensor:
        return torch.cat([forward(), forward() * 2, forward() * -3])[order]

    want = definition(losses(), params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ps.PerformanceWarning)
        assert_same(ps.grad(losses(), params), want, rtol=case.rtol)
        norms = ps.norms(losses(), params)
    rows = [g.reshape(len(g), -1).to(torch.complex128 if g.is_complex() else torch.float64) for g in want.values()]
    whole = torch.cat(rows, 1)
    near(norms, whole.norm(dim=1), case.rtol)


def near(got: Tensor, want: Tensor, rtol: float) -> None:
    assert bool(((got.double() - want).abs() <= 10 * rtol * want.abs().max().clamp_min(1e-6)).all())


@pytest.mark.parametrize(("case", "B"), FEW)
def test_every_ninth_case_in_a_loop(case: Case, B: int) -> None:
    in_a_loop(case, B)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "B"), [one for one in LOOPED if one not in FEW])
def test_other_cases_in_a_loop(case: Case, B: int) -> None:
    in_a_loop(case, B)


def test_one_long_sequence_takes_no_memory_for_the_others() -> None:
    """Padded to the longest, 33 sequences would have 16,500 rows; there are 532."""
    lengths, net = torch.tensor([1] * 32 + [500]), nn.GRU(6, 4, batch_first=True)
    x = torch.randn(33, 500, 6)
    out, _ = net(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
    owners = pack_padded_sequence(torch.arange(33).unsqueeze(1).expand(33, 500), lengths, True, False).data
    losses = torch.zeros(33).index_add(0, owners, out.data.square().sum(1))
    factors = capture(losses, dict(net.named_parameters()), retain_graph=True)
    rows = factors["weight_ih_l0"].nbytes // (4 * (6 + 12))
    assert 532 <= rows <= 544
    want = definition(losses, net)
    assert_same(ps.grad(losses, net), want, rtol=1e-4)


def test_uses_by_single_samples_are_made_into_one_factor() -> None:
    """Each weight of a loop has one factor with all samples, of the form that one call for all would give it."""
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3)
    loop = torch.stack([net(x[i : i + 1]).square().sum() for i in range(5)])
    at_once = net(x).square().sum(1)
    ours, theirs = (capture(losses, dict(net.named_parameters()), retain_graph=False) for losses in (loop, at_once))
    assert {name: (type(f), f.nbytes) for name, f in ours.items()} == {
        name: (type(f.standalone if isinstance(f, Part) else f), f.nbytes) for name, f in theirs.items()
    }


@pytest.mark.parametrize("shape", [(6,), (1, 6), (4, 6)])
def test_norms_of_samples_without_a_dim_of_rows(shape: tuple[int, ...]) -> None:
    """All dims of a sample are the norm's own: samples cannot be put together along one of them."""
    norm, x = nn.LayerNorm(shape).double(), torch.randn(5, *shape, dtype=torch.float64)

    def losses() -> Tensor:
        return torch.stack([(norm(one) * one).pow(3).sum() for one in x])

    for params in ([norm.weight], [norm.bias], [norm.weight, norm.bias]):
        assert_same(ps.grad(losses(), params), definition(losses(), params))


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_bias_for_every_row_of_a_sample(rows: int) -> None:
    """Rows of several samples cannot be put together where each has a parameter of its own."""
    w, bias = (nn.Parameter(torch.randn(*size, dtype=torch.float64)) for size in ((6, 3), (rows, 3)))
    x = torch.randn(5, rows, 6, dtype=torch.float64)

    def losses() -> Tensor:
        return torch.stack([torch.addmm(bias, one, w).tanh().sum() for one in x])

    assert_same(ps.grad(losses(), [w, bias]), definition(losses(), [w, bias]))
    assert_same(ps.grad(losses(), [bias]), definition(losses(), [bias]))
