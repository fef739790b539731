"""The device that the tests of this folder run on: the strict one, or PERSAMPLE_DEVICE=cuda chooses a real one.

From a checkout on a machine that has it: ``PERSAMPLE_DEVICE=cuda python -m pytest tests/device``.
"""

from __future__ import annotations

import os

import pytest
import torch

NAME = os.environ.get("PERSAMPLE_DEVICE", "strict:0")

if NAME.startswith("strict"):
    from tests.device.backend import DEVICE, raise_refused
else:
    DEVICE = torch.empty(0, device=NAME).device  # with its number

    def raise_refused() -> None:
        """A real device raises at once."""


ON_STRICT = DEVICE.type == "strict"
only_on_strict = pytest.mark.skipif(not ON_STRICT, reason="only the strict device counts alike everywhere")

__all__ = ["DEVICE", "ON_STRICT", "only_on_strict", "raise_refused"]
