"""A part of a factor answers as the same samples do alone, and all parts of a whole are asked at once."""

from __future__ import annotations

import pytest
import torch

from persample.factors import Dense, Factor, Outer, Part, Workspace, bounded_sums, family, find_norms
from tests.factors import FACTORS, numbers
from tests.factors.test_algebra import SPACES, assert_near, check, flat
from tests.factors.test_rounding import cancelling, spoil

PARTS = 3
MADE_TOGETHER = """
dense dense-scalar dense-vector dense-empty outer-T0 outer-T1 outer-T2 outer-T40 outer-gram outer-scaled-T1
outer-scaled-gram outer-groups-T2 outer-groups-gram outer-no-elements convolution-1d-R1 convolution-2d-pad-R2
convolution-2d-groups-stride-R1 convolution-2d-transposed-stride-R1 convolution-gram-plain-R2
convolution-gram-groups-R1 view-permute view-of-outer
""".split()


def parts(name: str, B: int) -> tuple[list[Part], torch.Tensor]:
    """Parts of B samples each, and the gradients of each."""
    whole, want = FACTORS[name](PARTS * B, torch.float64)
    return Part.all_of(whole, PARTS), want.view(PARTS, B, *want.shape[1:])


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("B", [3, 1, 0])
@pytest.mark.parametrize("name", MADE_TOGETHER)
def test_every_question(name: str, B: int, space: str) -> None:
    group, wants = parts(name, B)
    for part, want in zip(group, wants, strict=True):
        check(part, want, SPACES[space]())
        assert (part.dtype, part.device) == (part.whole.dtype, part.whole.device)


@pytest.mark.parametrize("name", MADE_TOGETHER)
def test_some_samples_of_a_part(name: str) -> None:
    group, wants = parts(name, 4)
    find_norms(group, Workspace())
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
    norms = find_norms(group, Workspace())
    assert norms.shape == (len(order), 4)
    weights = numbers(torch.float64, 4).abs()
    sums = bounded_sums({str(i): part for i, part in enumerate(group)}, weights, Workspace())
    for i, place in enumerate(order):
        want = flat(wants[place]).norm(dim=1)
        assert_near(norms[i], want, 1 + want)
        total = torch.tensordot(weights.to(wants.dtype), wants[place], 1)
        assert_near(sums[str(i)], total, 10 + 10 * float(want.norm()))


def test_parts_of_two_wholes_are_no_kin() -> None:
    one, two = (Part.all_of(Dense(numbers(torch.float64, 6, 5)), 3) for _ in range(2))
    assert len({family(part) for part in [*one, *two]}) == 2


def test_parts_share_the_norms_of_their_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    group, wants = parts("dense", 4)
    assert not any(part.knows_norms for part in group)
    group[1].norms()
    assert all(part.knows_norms for part in group)

    def computed(self: Dense, space: Workspace) -> torch.Tensor:
        raise AssertionError("norms are known")

    monkeypatch.setattr(Dense, "_compute_norms", computed)
    assert_near(find_norms(group, Workspace()), flat(wants.flatten(0, 1)).norm(dim=1).view(PARTS, 4), 10)


def test_norms_can_be_changed_by_those_who_asked() -> None:
    group, wants = parts("dense", 4)
    group[0].norms().zero_()
    assert_near(group[0].norms(), flat(wants[0]).norm(dim=1), 10)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", "dense outer-T1 outer-T2 outer-T40 outer-gram outer-groups-gram".split())
def test_what_is_not_finite_stays_in_its_sample(name: str, value: float) -> None:
    made, wants = parts(name, 3)
    spoil(made[0].whole, 4, value)  # the middle sample of the middle part
    group = Part.all_of(made[0].whole, PARTS)
    norms = find_norms(group, Workspace()).flatten()
    others = torch.tensor([k for k in range(3 * PARTS) if k != 4])
    assert not bool(norms[4].isfinite())
    assert_near(norms[others], flat(wants.flatten(0, 1)).norm(dim=1)[others], 1 + flat(wants.flatten(0, 1)).norm())
    weights = torch.ones(3, dtype=torch.float64)
    sums = bounded_sums({str(k): part for k, part in enumerate(group)}, weights, Workspace())
    for k in (0, 2):
        assert_near(sums[str(k)], wants[k].sum(0), 100)
    kept = group[1][torch.tensor([0, 2])]
    assert_near(kept.bounded_sum(weights[:2]), wants[1, [0, 2]].sum(0), 100)


@pytest.mark.parametrize("big", [1.0, 1e4, 1e6])
@pytest.mark.parametrize("kind", ["outer", "outer-written-out", "groups"])
def test_samples_that_cancel_are_known_to_their_own_part(kind: str, big: float) -> None:
    factor, want = cancelling(kind, big, torch.float32)
    assert isinstance(factor, Outer)
    calm = [torch.randn(t.shape) for t in (factor.left, factor.right)]
    left, right = (torch.cat([a, b, a]) for a, b in zip(calm, (factor.left, factor.right), strict=True))
    group = Part.all_of(Outer(left, right), 3)
    norms = flat(want).norm(dim=1)
    find_norms(group, Workspace())
    allowed = torch.maximum(1e-6 * norms, 16 * torch.finfo(torch.float32).eps * factor.sizes())
    assert bool(((group[1].norms() - norms).abs() <= allowed).all())
    assert torch.equal(group[1].doubtful(), factor[:].doubtful())
    assert not group[0].doubtful().numel()
    assert not group[2].doubtful().numel()
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
    for a in (mine[1], mine[1].alone):
        for b in (theirs[2], theirs[2].alone):
            assert_near(a.gram(b), want, 100)
            assert_near(b.gram(a), want.t(), 100)
