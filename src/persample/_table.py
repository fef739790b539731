"""Plain-text tables, and sizes in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def render(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Left-aligned columns under a header."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[c]) for line in lines) for c in range(len(header))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([text[0], "  ".join("-" * width for width in widths), *text[1:]])


def in_bytes(size: int) -> str:
    """A number of bytes in words."""
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    power = min((max(size, 1).bit_length() - 1) // 10, len(units) - 1)
    return f"{size / 1024**power:,.1f} {units[power]}" if power else f"{size} B"
