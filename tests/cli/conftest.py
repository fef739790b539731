"""What all tests of commands have around them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_module_of_another_test() -> Iterator[None]:
    """Many tests write a ``mine.py``, which Python keeps once it is imported."""
    sys.modules.pop("mine", None)
    yield
    sys.modules.pop("mine", None)
