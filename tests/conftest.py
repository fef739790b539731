"""What holds for all tests."""

from __future__ import annotations

import gc
import subprocess
import sys
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


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests that go on with autograd in a fork are run in a process that knows of no device but the CPU.

    Another device has threads of its own in the engine, with which PyTorch refuses to work in a fork.
    """
    if pyfuncitem.get_closest_marker("forks") is None or "tests.device.backend" not in sys.modules:
        return None
    alone = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    done = subprocess.run(alone, cwd=pyfuncitem.config.rootpath, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return True


def pytest_collection_finish() -> None:
    """Tests by the ten thousand are not searched for garbage again and again."""
    gc.collect()
    gc.freeze()
