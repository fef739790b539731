"""Fitting the costs of convolution kernels: on made-up times, and once for real."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from benchmarks import fit_convolutions
from benchmarks.convolutions import GRID, square
from benchmarks.fit_convolutions import draw, fit, is_useful
from persample.kernels.conv_costs import TERMS
from persample.kernels.conv_rates import RATES
from persample.kernels.conv_select import counts_of


def test_costs_are_found_again() -> None:
    chance = random.Random(0)
    counts = [{"products": chance.uniform(1e3, 1e6), "calls": float(chance.randint(1, 50))} for _ in range(40)]
    assert fit([(c, 0.5 * c["products"] + 700 * c["calls"]) for c in counts]) == {"products": 0.5, "calls": 700.0}


def test_an_outlier_weighs_less() -> None:
    times = [3.0 * n for n in range(1, 30)] + [500.0]
    found = fit([({"n": float(n)}, time) for n, time in enumerate(times, start=1)])
    assert found["n"] == pytest.approx(3.0, rel=0.05)


def test_drawn_shapes_are_of_every_kind_and_not_those_of_the_test() -> None:
    chance = random.Random(0)
    drawn = [shape for shape in (draw(chance) for _ in range(600)) if is_useful(shape)]
    assert not set(drawn) & set(GRID)
    assert {len(shape.size) for shape in drawn} == {1, 2, 3}
    assert any(shape.groups == shape.cin > 1 for shape in drawn)
    assert not is_useful(GRID[0])
    assert not is_useful(square(1, 8, 8, 2, 7, padding=0))


def test_every_way_of_every_kernel_has_a_price() -> None:
    chance = random.Random(1)
    for _ in range(600):
        shape = draw(chance)
        counts = counts_of(*shape.key) if is_useful(shape) else None
        for terms, table in product(TERMS.values(), RATES) if counts is not None else ():
            way, found = terms(replace(counts, table=table))
            assert set(found) == set(RATES[table][way])
            assert all(count >= 0 for count in found.values())


def test_a_table_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(fit_convolutions, "draw", lambda chance: square(2, 3, 4, chance.randint(5, 9), 3))
    try:
        assert fit_convolutions.main(["--shapes", "3", "--threads", "1"]) == 0
    finally:
        torch.set_num_threads(threads)
    assert '"unfold": {"patches":' in capsys.readouterr().out
