"""Fused recurrent layers: the recurrence is replayed once for all samples."""

from __future__ import annotations

from ...factors import Factor
from .registry import Use, rule


@rule("MkldnnRnnLayer")
def fused_lstm(use: Use) -> Factor | None:
    """The CPU's fused LSTM layer."""
    return None
