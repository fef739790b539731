"""The torch that the tests are run with, and those whose private names were checked."""

from __future__ import annotations

import torch

from persample._releases import OLDEST, TESTED, release

__all__ = ["NEWEST", "OLDEST", "TESTED", "VERSION"]

NEWEST = TESTED[-1]
VERSION = release(torch.__version__) or NEWEST
