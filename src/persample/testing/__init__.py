"""What to run first on a new model, or on a new device.

`check` compares persample with the definition (compare.py); `count_work` says how often a program keeps an accelerator
or its host waiting (counting.py); ``python -m persample.testing.device cuda`` does both on a device (device/).
"""

from .compare import Report, Row, check, definition
from .counting import Work, count_work

__all__ = ["Report", "Row", "Work", "check", "count_work", "definition"]
