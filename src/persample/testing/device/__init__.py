"""``python -m persample.testing.device cuda``: is persample right on a device, and what does it ask of it?

Models of many kinds are built on the device. Gradients are compared with the definition, and what is computed from them
with gradients written out (answers.py); so are numbers that are hard to compute with (hard.py). Launches, waits, time
and memory are held against a plain step (work.py). The report names the machine and can be sent as it is (run.py).
"""

from .run import Findings, Line, examine, usable

__all__ = ["Findings", "Line", "examine", "usable"]
