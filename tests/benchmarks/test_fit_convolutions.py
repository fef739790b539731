"""Fitting the costs of convolution kernels: on made-up times, and once for real."""

from __future__ import annotations

import json
import random
from importlib.resources import files
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks import fit_convolutions
from benchmarks.convolution_shapes import GRID, draw, is_useful, square
from benchmarks.fit_convolutions import as_text, fit, merged
from persample.kernels.convolution.costs import FORMULAS, RATES


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


def test_every_variant_of_every_way_has_rates() -> None:
    chance = random.Random(1)
    for _ in range(600):
        shape = draw(chance)
        for formula, cpu in product(FORMULAS.values(), RATES) if is_useful(shape) else ():
            variant, counts = formula(shape.sizes, cpu)
            assert set(counts) == set(RATES[cpu][variant])
            assert all(count >= 0 for count in counts.values())


def test_no_rates_without_a_variant() -> None:
    """What a way that was removed has left behind."""
    chance, variants = random.Random(0), set()
    for shape in (draw(chance) for _ in range(3000)):
        if is_useful(shape):
            variants |= {formula(shape.sizes, cpu)[0] for formula in FORMULAS.values() for cpu in RATES}
    assert [set(rates) for rates in RATES.values()] == [variants] * len(RATES)


def rates_file() -> Path:
    return Path(str(files("persample.kernels.convolution").joinpath("rates.json")))


def test_the_file_of_rates_is_as_a_fit_writes_it() -> None:
    text = rates_file().read_text()
    assert as_text(json.loads(text)) == text


def test_a_fit_replaces_the_rates_of_its_cpu_alone() -> None:
    others = {"about": "another one", "nanoseconds": {"unfold": {"call": 3.0}}}
    mine = {"about": "before", "nanoseconds": {"unfold": {"call": 1.0}, "pixel gram": {"call": 2.0}}}
    file = merged({"OTHER": others, fit_convolutions.CPU: mine}, "now", {"unfold": {"call": 7.0}})
    kept = {"about": "now", "nanoseconds": {"unfold": {"call": 7.0}, "pixel gram": {"call": 2.0}}}
    assert file == {"OTHER": others, fit_convolutions.CPU: kept}


@pytest.mark.parametrize("into", [False, True])
def test_a_table_is_written(
    into: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, path = torch.get_num_threads(), tmp_path / "rates.json"
    path.write_text(rates_file().read_text())
    monkeypatch.setattr(fit_convolutions, "draw", lambda chance: square(2, 3, 4, chance.randint(5, 9), 3))
    try:
        assert fit_convolutions.main(["--shapes", "3", "--threads", "1", *(["--into", str(path)] if into else [])]) == 0
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr()
    table = json.loads(path.read_text() if into else printed.out)[fit_convolutions.CPU]
    assert table["about"] == "1 threads, 3 shapes, seed 0"
    assert set(table["nanoseconds"]["unfold"]) == set(RATES["AVX2"]["unfold"])
    assert "unfold: 3 shapes, half within" in printed.err
