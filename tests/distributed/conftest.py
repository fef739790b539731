"""Groups of processes for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.processes import Processes


@pytest.fixture(scope="package")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Two processes."""
    found = Processes(2, tmp_path_factory.mktemp("two"))
    yield found
    found.stop()


@pytest.fixture(scope="package")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Four processes."""
    found = Processes(4, tmp_path_factory.mktemp("four"))
    yield found
    found.stop()


@pytest.fixture(scope="package", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def several(request: pytest.FixtureRequest) -> Processes:
    """Two processes, and in slow runs four."""
    found: Processes = request.getfixturevalue({2: "two", 4: "four"}[request.param])
    return found
