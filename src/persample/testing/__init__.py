"""What to run first on a new model, or on a new device.

`check` compares persample with the definition (compare.py); `count_work` says how much work a program gives to an
accelerator, and how often its host waits for it (counting.py); ``python -m persample.testing.device cuda`` does both,
and more, on a device (device/).

>>> import torch
>>> from persample.testing import check
>>> model, x = torch.nn.Linear(3, 2).double(), torch.randn(5, 3).double()
>>> check(lambda: model(x).square().sum(1), model).ok
True
"""

from .compare import Report, Row, check, definition
from .counting import Work, count_work

__all__ = ["Report", "Row", "Work", "check", "count_work", "definition"]
