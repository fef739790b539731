"""A part of a factor answers as the same samples do alone, and all parts of a whole are asked at once."""

from __future__ import annotations

import pytest
import torch

from persample.factors import Dense, Factor, Outer, Part, View, Workspace, bounded_sums, one_by_one, regroup, split
from persample.factors.bounded import bounded_sum
from persample.factors.rearrange import Permute
from tests.factors import FACTORS, numbers
from tests.factors.test_algebra import SPACES, assert_near, check, flat, precision
from tests.factors.test_rounding import cancelling, spoil

PARTS = 3
MADE_TOGETHER = """
dense dense-scalar dense-vector dense-empty outer-T0 outer-T1 outer-T2 outer-T40 outer-gram outer-scaled-T1
outer-scaled-gram outer-groups-T2 outer-groups-gram outer-no-elements convolution-1d-R1 convolution-2d-pad-R2
convolution-2d-groups-stride-R1 convolution-2d-transposed-stride-R1 convolution-gram-plain-R2
convolution-gram-groups-R1 view-permute view-of-outer
""".split()


def parts(name: str, B: int) -> tuple[list[Factor], torch.Tensor]:
    """Parts of B samples each, and the gradients of each."""
    whole, want = FACTORS[name](PARTS * B, torch.float64)
    return split(whole, PARTS), want.view(PARTS, B, *want.shape[1:])


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("B", [3, 1, 0])
@pytest.mark.parametrize("name", MADE_TOGETHER)
def test_every_question(name: str, B: int, space: str) -> None:
    group, wants = parts(name, B)
    for part, want in zip(group, wants, strict=True):
        check(part, want, SPACES[space]())
        assert isinstance(part, Part)
        assert (part.dtype, part.device) == (part.whole.dtype, part.whole.device)


@pytest.mark.parametrize("name", MADE_TOGETHER)
def test_some_samples_of_a_part(name: str) -> None:
    group, wants = parts(name, 4)
    group[0].norms()
    for some in (slice(1, 3), slice(0, 0), torch.tensor([3, 0]), torch.tensor([], dtype=torch.long)):
        check(group[1][some], wants[1][some])


@pytest.mark.parametrize("name", MADE_TOGETHER)
def test_ranges_of_elements(name: str) -> None:
    group, wants = parts(name, 2)
    for part, want in zip(group, wants, strict=True):
        got = part.elements(1, 3) if part.numel >= 3 else None
        if got is not None:
            assert_near(got, flat(want)[:, 1:3], 1 + flat(want).norm())


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1], [0, 0, 1, 1, 2, 2]])
@pytest.mark.parametrize("name", MADE_TOGETHER)
def test_norms_and_sums_of_a_group(name: str, order: list[int]) -> None:
    """All parts or some, in any order, also twice."""
    made, wants = parts(name, 4)
    group: list[Factor] = [made[place] for place in order]
    norms = norms_of(group)
    assert norms.shape == (len(order), 4)
    weights = numbers(torch.float64, 4).abs()
    sums = bounded_sums({str(i): part for i, part in enumerate(group)}, weights, Workspace())
    for i, place in enumerate(order):
        want = flat(wants[place]).norm(dim=1)
        assert_near(norms[i], want, 1 + want)
        total = torch.tensordot(weights.to(wants.dtype), wants[place], 1)
        assert_near(sums[str(i)], total, 10 + 10 * float(want.norm()))


def norms_of(group: list[Factor]) -> torch.Tensor:
    """(n, B): the norms of factors, of which those of one whole are asked at once."""
    found: dict[str, torch.Tensor] = {}
    for names, factor in regroup({str(i): f for i, f in enumerate(group)}):
        found.update(zip(names, factor.norms().view(len(names), group[0].batch), strict=True))
    return torch.stack([found[str(i)] for i in range(len(group))])


def test_wholes_are_found_again_if_all_of_their_parts_are_there() -> None:
    one, two, three = (Dense(numbers(torch.float64, 6, 5)) for _ in range(3))
    (a, b, c), (d, _, f) = split(one, 3), split(two, 3)
    given = {"a": a, "d": d, "b": b, "whole": three, "c": c, "f": f}
    assert [(names, factor) for names, factor in regroup(given)] == [
        (["a", "b", "c"], one),
        (["d"], d),
        (["f"], f),
        (["whole"], three),
    ]
    assert list(regroup({"b": b, "a": a, "c": c})) == [(["b"], b), (["a"], a), (["c"], c)]
    assert list(regroup({"x": three, "y": three})) == [(["x"], three), (["y"], three)]
    assert split(one, 1) == [one]


def test_every_parameter_of_a_factor_is_taken_by_its_name() -> None:
    taken: dict[str, Factor] = {}
    whole = Dense(numbers(torch.float64, 6, 5))
    one_by_one(taken.__setitem__)(["a", "b", "c"], whole)
    for k, name in enumerate("abc"):
        assert torch.equal(taken[name].stack(), whole.value[2 * k : 2 * k + 2])


def test_parts_share_the_norms_of_their_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    group, wants = parts("dense", 4)
    assert not any(part.has_norms for part in group)
    group[1].norms()
    assert all(part.has_norms for part in group)

    def computed(self: Dense, space: Workspace) -> torch.Tensor:
        raise AssertionError("norms are known")

    monkeypatch.setattr(Dense, "_compute_norms", computed)
    assert_near(norms_of(group), flat(wants.flatten(0, 1)).norm(dim=1).view(PARTS, 4), 10)


def test_norms_can_be_changed_by_those_who_asked() -> None:
    group, wants = parts("dense", 4)
    group[0].norms().zero_()
    assert_near(group[0].norms(), flat(wants[0]).norm(dim=1), 10)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", "dense outer-T1 outer-T2 outer-T40 outer-gram outer-groups-gram".split())
def test_what_is_not_finite_stays_in_its_sample(name: str, value: float) -> None:
    made, wants = parts(name, 3)
    assert isinstance(made[0], Part)
    spoil(made[0].whole, 4, value)  # the middle sample of the middle part
    group = split(made[0].whole, PARTS)
    norms = norms_of(group).flatten()
    others = torch.tensor([k for k in range(3 * PARTS) if k != 4])
    assert not bool(norms[4].isfinite())
    assert_near(norms[others], flat(wants.flatten(0, 1)).norm(dim=1)[others], 1 + flat(wants.flatten(0, 1)).norm())
    weights = torch.ones(3, dtype=torch.float64)
    sums = bounded_sums({str(k): part for k, part in enumerate(group)}, weights, Workspace())
    for k in (0, 2):
        assert_near(sums[str(k)], wants[k].sum(0), 100)
    kept = group[1][torch.tensor([0, 2])]
    assert_near(bounded_sum(kept, weights[:2]), wants[1, [0, 2]].sum(0), 100)


@pytest.mark.parametrize("big", [1.0, 1e4, 1e6])
@pytest.mark.parametrize("kind", ["outer", "outer-written-out", "groups"])
def test_samples_that_cancel_are_known_to_their_own_part(kind: str, big: float) -> None:
    factor, want = cancelling(kind, big, torch.float32)
    assert isinstance(factor, Outer)
    calm = [torch.randn(t.shape) for t in (factor.left, factor.right)]
    left, right = (torch.cat([a, b, a]) for a, b in zip(calm, (factor.left, factor.right), strict=True))
    group = split(Outer(left, right), 3)
    norms = flat(want).norm(dim=1)
    norms_of(group)
    allowed = torch.maximum(1e-6 * norms, 16 * torch.finfo(torch.float32).eps * factor.term_norms())
    assert bool(((group[1].norms() - norms).abs() <= allowed).all())
    assert torch.equal(group[1].cancelling_samples(), factor[:].cancelling_samples())
    assert not group[0].cancelling_samples().numel()
    assert not group[2].cancelling_samples().numel()
    for i in range(4):
        weights = torch.zeros(4, dtype=torch.float64).index_fill(0, torch.tensor(i), 1) / group[1].norms()
        sums = bounded_sums({str(k): part for k, part in enumerate(group)}, weights, Workspace())
        assert float(sums["1"].norm()) <= 1 + 1e-3
        assert_near(sums["0"], Outer(calm[0], calm[1]).weighted_sum(weights), 1 + float(sums["0"].norm()), 1e-5)


def test_weights_too_small_for_float32() -> None:
    group, wants = parts("outer-T2", 2)
    weights = torch.tensor([1e-40, 1.0], dtype=torch.float64)
    sums = bounded_sums({str(k): part for k, part in enumerate(group)}, weights, Workspace())
    for k in range(PARTS):
        assert_near(sums[str(k)], wants[k, 1], 10)


def test_sums_own_their_memory() -> None:
    """A sum that is kept keeps no other alive."""
    for name in ("dense", "outer-T1", "outer-T2"):
        group, _ = parts(name, 3)
        sums = bounded_sums({str(k): part for k, part in enumerate(group)}, torch.ones(3), Workspace())
        assert all(s.untyped_storage().nbytes() == s.nbytes for s in sums.values())


def test_parts_of_two_batches() -> None:
    """Inner products of parts with parts, with factors of their own, and the other way round."""
    (mine, wants), (theirs, others) = parts("outer-T2", 3), parts("outer-T1", 2)
    want = flat(wants[1]) @ flat(others[2]).t()
    for a in (mine[1], mine[1][:]):
        for b in (theirs[2], theirs[2][:]):
            assert_near(a.gram(b), want, 100)
            assert_near(b.gram(a), want.t(), 100)


def test_factors_of_every_kind_at_once() -> None:
    """Each is summed as it would be alone; tiny weights are written out; the mapping is emptied."""
    names = [name for name in FACTORS if "blocks" not in name]
    weights = torch.tensor([0.5, 1e-40, 2.0], dtype=torch.float64)
    for w in (weights.clamp(min=1e-3), weights):
        factors = {name: FACTORS[name](3, torch.float64)[0] for name in names}
        factors |= {f"{name} again": FACTORS[name](3, torch.float64)[0] for name in names}
        sums = bounded_sums(factors, w, Workspace())
        assert not factors
        for name in names:
            want = FACTORS[name](3, torch.float64)
            total = bounded_sum(want[0], w).to(want[0].dtype)
            assert torch.equal(sums[name], sums[f"{name} again"])
            assert_near(sums[name], total, 10 + 10 * float(flat(total.unsqueeze(0)).norm()), precision(want[0]))


def test_a_view_that_loses_nothing_goes_by_its_base() -> None:
    """Norms, samples that are imprecise, and norms that were computed elsewhere."""
    factor, want = cancelling("outer", 1e6, torch.float32)
    view = View(factor, (20, 30), Permute((1, 0)))
    assert_near(view.norms(), factor.norms(), 1.0)
    assert torch.equal(view.cancelling_samples(), factor.cancelling_samples())
    weights = 1 / view.norms()
    assert_near(bounded_sum(view, weights).t(), bounded_sum(factor, weights), 1.0, 1e-6)
    assert want.shape[1:] == (30, 20)
    again = View(factor[:], (20, 30), Permute((1, 0)))
    again.set_norms(view.norms())
    assert again.base.has_norms
    assert torch.equal(again.norms(), view.norms())
