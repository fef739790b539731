"""The torch versions that the private names in use were checked on."""

from __future__ import annotations

import torch

OLDEST, NEWEST = (2, 9), (2, 13)
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
