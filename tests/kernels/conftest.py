"""Whatever the CPU, these tests choose kernels by the costs of one kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from persample.kernels.convolution import use_costs


@pytest.fixture(autouse=True)
def _costs_of_one_cpu() -> Iterator[None]:
    with use_costs("AVX512"):
        yield
