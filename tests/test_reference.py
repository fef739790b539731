"""The reference and the comparator themselves: every difference raises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.reference import assert_same, definition, named

WANT = {"w": torch.tensor([[1.0, 2.0], [3e-3, 0.0]], dtype=torch.float64)}


def test_definition_by_hand() -> None:
    w, unused, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3)), torch.ones(1)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    got = definition(x @ w, {"w": w, "unused": unused, "frozen": frozen})
    assert list(got) == ["w", "unused"]
    assert torch.equal(got["w"], x)
    assert torch.equal(got["unused"], torch.zeros(2, 3))


def test_definition_of_nothing() -> None:
    net = nn.Linear(2, 3)
    got = definition(net(torch.zeros(0, 2)).sum(1), net)
    assert {name: tuple(g.shape) for name, g in got.items()} == {"weight": (0, 3, 2), "bias": (0, 3)}


def test_names_of_a_sequence() -> None:
    assert list(named([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))])) == ["0", "1"]


@pytest.mark.parametrize(
    ("got", "match"),
    [
        ({"v": WANT["w"]}, "parameters differ"),
        ({"w": WANT["w"][:1]}, "w: shape"),
        ({"w": WANT["w"].float()}, "w: dtype"),
        (
            {"w": WANT["w"] + torch.tensor([[0.0, 0.0], [1e-9, 0.0]])},
            "w: largest error 1.000e-09 in sample 1",
        ),
        ({"w": WANT["w"] * torch.tensor([[1.0], [float("nan")]])}, "w: result not finite in sample 1"),
        ({"w": WANT["w"].clone().requires_grad_()}, "requires grad"),
    ],
)
def test_every_difference_raises(got: dict[str, Tensor], match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        assert_same(got, WANT)


def test_the_same_passes_also_as_a_tuple() -> None:
    assert_same({"w": WANT["w"] * (1 + 1e-12)}, WANT)
    assert_same((WANT["w"],), {"0": WANT["w"]})


def test_non_finite_values_only_when_asked() -> None:
    bad = {"w": torch.tensor([[1.0, float("nan")], [float("inf"), 0.0]])}
    with pytest.raises(AssertionError, match="not finite"):
        assert_same(bad, bad)
    assert_same(bad, bad, nan=True)
    with pytest.raises(AssertionError, match="not finite"):
        assert_same({"w": bad["w"].flip(1)}, bad, nan=True)
