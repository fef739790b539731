"""What the audit refuses with."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

_OTHERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<frozen")


class AuditError(Exception):
    """The audit could not be run: what was given is no model with a batch and one loss per sample."""


def in_words(error: BaseException) -> str:
    """Type, message and the innermost line of the user's own code."""
    lines = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OTHERS)]
    at = f" ({Path(lines[-1].filename).name}, line {lines[-1].lineno})" if lines else ""
    text = str(error).strip()
    return f"{type(error).__name__}{': ' + text if text else ''}{at}"
