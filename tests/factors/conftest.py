"""Whatever the CPU, these tests go the ways that are cheapest on one kind."""

from __future__ import annotations

from tests.kernels.conftest import _costs_of_one_cpu

__all__ = ["_costs_of_one_cpu"]
