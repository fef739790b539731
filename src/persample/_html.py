"""Pages of one HTML file that ask nothing of the network: their frame, their style, tables and pictures."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from torch import Tensor

STYLE = """
:root {
  color-scheme: light dark; --ground: #ffffff; --raised: #f4f5f7; --ink: #1b1f24; --quiet: #57606a; --line: #d4d8dd;
  --good: #1a7f37; --bad: #cf222e; --unsure: #9a6700;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --ground: #14171a; --raised: #1f2428; --ink: #e6e9ec; --quiet: #a3adb8; --line: #3a4149;
    --good: #3fb950; --bad: #ff7b72; --unsure: #d29922;
  }
}
* { box-sizing: border-box; }
body {
  font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 2rem 1rem;
  background: var(--ground); color: var(--ink); overflow-wrap: break-word;
}
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { font-weight: 600; font-size: 1.1rem; } .good { color: var(--good); } .bad { color: var(--bad); }
.unsure { color: var(--unsure); } .quiet { color: var(--quiet); }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.number { text-align: right; font-variant-numeric: tabular-nums; } td.number { white-space: nowrap; }
code { font-family: ui-monospace, monospace; font-size: .9em; overflow-wrap: anywhere; }
@media print { :root { color-scheme: light; } body { max-width: none; padding: 0; } .wide { overflow: visible; } }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def document(title: str, body: Iterable[str], style: str = "") -> str:
    """The whole page; the parts of its body are HTML already."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}{style}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Cells are HTML already. Wide tables scroll by themselves, not the page."""

    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = [' class="number"' if i in numbers else "" for i in range(len(cells))]
        return "<tr>" + "".join(f"<{tag}{kind}>{c}</{tag}>" for c, kind in zip(cells, kinds, strict=True)) + "</tr>"

    head = f"<thead>{line('th', header)}</thead>" if any(header) else ""
    return f'<div class="wide"><table>{head}<tbody>{"".join(line("td", row) for row in rows)}</tbody></table></div>'


def in_line(value: Any) -> str:
    """A fact, a list of facts or a mapping of them, as text that is not yet HTML."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {one}" for key, one in value.items() if one is not None)
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def png(pixels: Tensor) -> bytes:
    """An image of bytes (height, width, channels) with 1 (grey), 2, 3 (RGB) or 4 channels, the last one opacity."""
    height, width, channels = pixels.shape
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    rows = pixels.contiguous().cpu().reshape(height, width * channels)
    lines = b"".join(b"\0" + bytes(row) for row in rows.tolist())  # a filter of 0, none, before every row
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def picture(pixels: Tensor, alt: str) -> str:
    """An image of bytes as part of the page."""
    source = base64.b64encode(png(pixels)).decode()
    height, width, _ = pixels.shape
    return f'<img src="data:image/png;base64,{source}" alt="{escape(alt)}" width="{width}" height="{height}">'
