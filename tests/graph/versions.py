"""The torch that the tests are run with, and those whose private names were checked."""

from __future__ import annotations

import torch

from persample._releases import OLDEST, TESTED, release

__all__ = ["HEADLESS", "NEWEST", "OLDEST", "TESTED", "VERSION"]

NEWEST = TESTED[-1]
VERSION = release(torch.__version__) or NEWEST
HEADLESS = (2, 13)  # from here on, attention without heads does not end the process; 2.11 and 2.12 were not looked at
