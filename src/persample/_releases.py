"""The releases of PyTorch that persample works with: older ones are refused at import, newer ones are told.

Capture reads names that PyTorch may change; ``tests/graph/test_saved.py`` and ``tests/distributed/test_names.py`` look
them up, and ``make test-torch TORCH=...`` runs all tests with a release.
"""

from __future__ import annotations

import re
import warnings
from typing import Final

import torch

__all__ = ["OLDEST", "TESTED", "check", "release"]

Release = tuple[int, int]

OLDEST: Final[Release] = (2, 13)
TESTED: Final[tuple[Release, ...]] = ((2, 13), (2, 14), (2, 15))


def release(version: str) -> Release | None:
    """The release that a version is of, or will be; None if it does not say.

    >>> release("2.13.0+cpu"), release("2.16.0a0+git123"), release("unknown")
    ((2, 13), (2, 16), None)
    """
    version_numbers = re.match(r"(\d+)\.(\d+)", version)
    return None if version_numbers is None else (int(version_numbers[1]), int(version_numbers[2]))


def check(version: str) -> None:
    """Raise if this torch is too old; warn if it is newer than what was tested, or says nothing of its age."""
    this, tested = release(version), ", ".join(map(_written, TESTED))
    if this is not None and this < OLDEST:
        raise ImportError(
            f"persample needs torch {_written(OLDEST)} or later, and this is torch {version}: "
            f"pip install 'torch>={_written(OLDEST)}'"
        )
    if this is None or this > TESTED[-1]:
        warnings.warn(
            f"persample was tested with torch {tested}, not yet with {version}: compare with persample.testing.check, "
            f"or run its tests by make test-torch",
            stacklevel=4,  # check, this module, the package, and then who imports it
        )


def _written(one: Release) -> str:
    return f"{one[0]}.{one[1]}"


check(torch.__version__)
