"""Values in words."""

from __future__ import annotations

from .._table import in_bytes


def number(value: float | None) -> str:
    """An error in words."""
    return "" if value is None else f"{value:.1e}" if value else "0"


def milliseconds(value: float) -> str:
    """A time in words."""
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def mark(ok: bool | None) -> str:
    """A verdict in words."""
    return {True: "ok", False: "WRONG", None: ""}[ok]


def megabytes(size: int | None) -> str:
    """A number of bytes in words."""
    return "" if size is None else f"{size / 2**20:,.1f} MB"


def size_in_words(size: int | None) -> str:
    """A number of bytes of any size in words."""
    return "" if size is None else in_bytes(size)
