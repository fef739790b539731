"""What holds for all tests."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.modes import default_dtype

# The same examples on every machine, however slow it is.
settings.register_profile(
    "everywhere", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("everywhere")


@pytest.fixture
def float64() -> Iterator[None]:
    """The same random numbers in every test, in double precision."""
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        yield


# Tests that hold one statement against a whole library of cases: a quick run takes one case in so many, chosen by name.
QUICK_SHARES = {
    "tests/benchmarks/test_sensitivity.py": 2,
    "tests/compiled/test_cases.py::test_built_on_some_numbers_and_run_on_others": 2,
    "tests/compiled/test_changes.py": 2,
    "tests/compiled/test_step.py::test_reductions_at_several_batch_sizes": 2,
    "tests/device/test_cases.py": 2,
    "tests/device/test_without_looking.py": 2,
    "tests/dp/test_compiled.py": 2,
    "tests/dp/test_masters.py": 2,
    "tests/dp/test_ragged_users.py": 2,
    "tests/expanded/test_agreement.py::test_both_ways_in_agree": 3,
    "tests/expanded/test_interactions.py": 3,
    "tests/expanded/test_modules.py": 2,
    "tests/expanded/test_zoo.py": 2,
    "tests/distributed/test_private_kinds.py": 2,
    "tests/factors/test_algebra.py": 2,
    "tests/factors/test_convolution.py": 2,
    "tests/factors/test_convolution_graphs.py": 2,
    "tests/factors/test_exact.py::test_no_sample_adds_more_than_the_bound": 2,
    "tests/factors/test_interleaved.py": 4,
    "tests/factors/test_moments.py": 3,
    "tests/factors/test_rounding.py": 2,
    "tests/graph/compiled/test_entry.py": 2,
    "tests/graph/matrix/test_devices.py": 2,
    "tests/graph/matrix/test_rules.py": 2,
    "tests/graph/matrix/test_stacks.py": 2,
    "tests/graph/test_agreement.py::test_no_claim_is_refuted": 2,
    "tests/graph/test_fallback.py": 2,
    "tests/graph/test_device_recurrences.py": 3,
    "tests/graph/test_lookalike_functions.py": 3,
    "tests/graph/test_remember.py": 2,
    "tests/influence/test_sketches.py": 2,
    "tests/kernels/test_convolution.py": 2,
    "tests/reductions/test_cases.py::test_all_reductions_in_one_backward": 2,
    "tests/reductions/test_mixes.py": 2,
    "tests/reductions/test_projection.py": 2,
    "tests/reductions/test_several_cases.py": 2,
    "tests/second/test_cases.py::test_derivatives_are_those_of_a_loop": 3,
    "tests/test_compiled_programs.py": 2,
    "tests/test_computed_weights.py": 3,
    "tests/test_fused.py::test_numbers_of_all_sizes": 2,
    "tests/test_half.py": 2,
    "tests/test_loops.py": 2,
    "tests/test_numberless.py": 2,
    "tests/test_portions.py": 2,
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is left out of a quick run as slow."""
    for item in items:
        name = item.nodeid
        share = next((n for part, n in QUICK_SHARES.items() if name.startswith(part)), 1)
        if "[" in name and zlib.crc32(name.encode()) % share:
            item.add_marker(pytest.mark.slow)


DEVICE_TESTS = Path(__file__).parent / "device"


def pytest_configure(config: pytest.Config) -> None:
    """``tests/device`` is run by itself: its device, once known to PyTorch, changes what others see.

    The engine has a thread for it, with which autograd does not work in a fork, and there is one more random state.
    """
    if len(set(_asks_for_device(config))) > 1:
        raise pytest.UsageError("run pytest tests/device by itself: its device changes what other tests see")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """It is left out where it was not asked for."""
    return True if collection_path == DEVICE_TESTS and not any(_asks_for_device(config)) else None


def _asks_for_device(config: pytest.Config) -> list[bool]:
    """Of every argument, whether it lies in that folder."""
    asked = [(config.invocation_params.dir / arg.partition("::")[0]).resolve() for arg in config.args]
    return [DEVICE_TESTS in (path, *path.parents) for path in asked]


def pytest_collection_finish() -> None:
    """Tests by the ten thousand are not searched for garbage again and again."""
    gc.collect()
    gc.freeze()
