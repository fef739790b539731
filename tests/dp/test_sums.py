"""Sums that come one by one or on a line are the same sums, and become gradients of the parameters' shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from persample.dp import sums as module
from persample.dp.noise import Sum
from persample.dp.sums import Joined, Line, Shape, Sums
from persample.factors.limits import Unit
from persample.reductions import Clipping

PARAMS = {
    "a": torch.zeros(2, 3),
    "none": torch.zeros(0, 2),
    "b": torch.zeros(()),
    "c": torch.zeros(2, dtype=torch.cfloat),
}
SHAPES = {"a": (2, 3), "none": (0, 2), "b": (), "c": (2, 2)}
NOTHING = Clipping(torch.ones(1), torch.ones(1), [], 1.0)


@dataclass
class Part:
    """What a part of a batch gives."""

    sums: dict[str, Tensor]
    line: Joined | None = None
    clipping: Clipping = field(default_factory=lambda: NOTHING)
    asked: Clipping = field(default_factory=lambda: NOTHING)
    weighed_down: float = 0.0

    def take(self, name: str) -> Tensor | None:
        return self.sums.get(name)


def one_by_one(names: str = "a none b c") -> Part:
    return Part({name: torch.randint(100, SHAPES[name]).double() for name in names.split()})


def on_a_line(names: str = "a none b c") -> Part:
    part = one_by_one(names)
    part.line = Joined(tuple(part.sums), torch.cat([t.flatten() for t in part.sums.values()]))
    return part


CASES: dict[str, Callable[[], list[Part]]] = {
    "one by one": lambda: [one_by_one(), one_by_one()],
    "on lines": lambda: [on_a_line(), on_a_line(), on_a_line()],
    "first on a line": lambda: [on_a_line(), one_by_one("b")],
    "then on a line": lambda: [one_by_one("a c"), on_a_line()],
    "not all": lambda: [on_a_line("a c")],
    "others": lambda: [on_a_line("a c"), on_a_line("b c")],
}


@pytest.mark.parametrize("exponents", [(-3, -3, -3, -3), (-3, -2, -1, 0)], ids=["one unit", "units"])
@pytest.mark.parametrize("parts", CASES.values(), ids=CASES)
@pytest.mark.parametrize("large", [2**16, 4, 1])  # from which size on sums stay where they are
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_means(
    parts: Callable[[], list[Part]],
    exponents: tuple[int, ...],
    large: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(module, "_LARGE", large)
    sums, given = Sums(PARAMS), parts()
    want = {name: torch.zeros(SHAPES[name], dtype=torch.float64) for name in PARAMS}
    units = {name: Unit(exponent, torch.float64) for name, exponent in zip(PARAMS, exponents, strict=True)}
    for part in given:
        for name, t in part.sums.items():
            want[name] += t * units[name].size / 5
        sums.add(part, torch.ones(1, dtype=torch.int64))
    assert not sums.are_empty
    wholes = sums.take(units, Unit(0))
    assert sums.are_empty
    line = Line.of(wholes, None)
    assert float(line.tensors[-1][-1]) == len(given)
    got = line.divided(5, sums.shapes, dtype)
    for mean, (name, expected) in zip(got, want.items(), strict=True):
        torch.testing.assert_close(mean, expected.to(dtype), msg=name)
        assert mean.shape == SHAPES[name]


def test_a_line_keeps_no_sums_without_noise() -> None:
    def fail(sums: Sequence[Sum]) -> None:
        raise MemoryError("no room for noise")

    for add_noise in (lambda sums: [each.goal.fill_(7) for each in sums], fail):
        for ask in (lambda line: line.divided(2.0, [Shape((3,), (1,), 3)], torch.float32), lambda line: line.tensors):
            line = Line([Sum(torch.ones(3, dtype=torch.float64))], add_noise)
            with nullcontext() if add_noise is not fail else pytest.raises(MemoryError):
                assert ask(line)[0].tolist() == [7, 7, 7]
            assert all(t.tolist() == [7, 7, 7] for t in line.tensors)
