"""What holds for all tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

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


def pytest_collection_finish() -> None:
    """Tests by the ten thousand are not searched for garbage again and again."""
    gc.collect()
    gc.freeze()
