"""What is promised of any program: the definition, samples where plans say, and bad samples that keep to themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.programs.generate import generate
from tests.programs.hunt import Hunt, report
from tests.programs.script import Script


def check(seeds: range, *also: str, write: Callable[[int], Script | None] = generate) -> None:
    """Fail with the scripts of all programs that something is wrong with.

    Of each, `ps.grad` and one more verb are compared with the definition; `also` names further checks of checks.py.
    """
    hunt = Hunt(also=also, write=write, say=lambda text: None, seconds_to_shrink=10.0)
    hunt.run(seeds)
    assert hunt.counts["exact"] > len(seeds), hunt.counts
    if hunt.found:
        pytest.fail("\n".join(map(report, hunt.found)), pytrace=False)


def test_random_programs_are_exact_or_refused() -> None:
    check(range(300))


def test_samples_of_random_programs_lie_where_plans_say() -> None:
    check(range(300, 700), "claims")


# Products with zeros spread NaN in the forward pass already; rows that nobody reads belong to nobody in particular.
SPREADING = "matrix rows_by_matrix one_of_each_row order select_rows select_places gather_anywhere section".split()
tidy = partial(generate, apart=True, without=SPREADING)


def test_a_sample_of_nan_leaves_the_others_alone() -> None:
    check(range(200), "spoilt", write=tidy)


def test_graphs_of_random_programs_serve_other_numbers() -> None:
    check(range(2_000, 2_025), "traced")


@pytest.mark.slow
@pytest.mark.parametrize("start", range(20_000, 22_000, 500))
def test_graphs_of_thousands_of_random_programs_serve_other_numbers(start: int) -> None:
    check(range(start, start + 500), "traced")


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1_000, 9_000, 1_000))
def test_thousands_of_random_programs_are_exact_or_refused(start: int) -> None:
    check(range(start, start + 1_000))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(10_000, 17_000, 1_000))
def test_samples_of_thousands_of_random_programs_lie_where_plans_say(start: int) -> None:
    check(range(start, start + 1_000), "claims")
