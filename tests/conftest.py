"""What holds for all tests."""

from __future__ import annotations

import gc

from hypothesis import HealthCheck, settings

# The same examples on every machine, however slow it is.
settings.register_profile(
    "everywhere", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("everywhere")


def pytest_collection_finish() -> None:
    """Tests by the ten thousand are not searched for garbage again and again."""
    gc.collect()
    gc.freeze()
