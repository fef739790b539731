"""What tests of expanded weights ask for by name."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.expanded.rules import registries_restored
from tests.models import mlp


@pytest.fixture
def registries() -> Iterator[None]:
    """The same numbers every time; what a test registers is forgotten after."""
    torch.manual_seed(0)
    with registries_restored():
        yield


@pytest.fixture
def module() -> nn.Module:
    """Two layers, which each test has to itself."""
    return mlp().double()


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    """What is let go of must go at once, and not wait for a collection."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
