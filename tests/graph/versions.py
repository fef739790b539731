"""The torch versions that the private names in use were checked on."""

from __future__ import annotations

import torch

OLDEST, NEWEST = (2, 9), (2, 13)
HOLDERS = (2, 10)  # from here on, saved tensors show what a checkpoint packed them into
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
