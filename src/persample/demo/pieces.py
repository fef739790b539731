"""Pieces of HTML: everything that comes from outside is escaped here."""

from __future__ import annotations

import base64
import inspect
import io
import textwrap
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

import matplotlib.image
from torch import Tensor


def paragraph(text: str) -> str:
    """Line breaks in the text are spaces."""
    return f"<p>{escape(text)}</p>"


def section(ident: str, title: str, *parts: str) -> str:
    """A heading of the second level, and what is below it."""
    heading = f'<h2 id="{ident}-title">{escape(title)}</h2>'
    return "\n".join([f'<section id="{ident}" aria-labelledby="{ident}-title">', heading, *parts, "</section>"])


def heading(title: str) -> str:
    """Of the third level."""
    return f"<h3>{escape(title)}</h3>"


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column names the row. Wide tables scroll by themselves, not the page."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "\n".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    return (
        f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0"><table>\n'
        f"<caption>{escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def listing(items: Iterable[tuple[str, str]]) -> str:
    """Names, and what they are."""
    return "<ul>\n" + "\n".join(f"<li><b>{escape(name)}</b>: {escape(what)}</li>" for name, what in items) + "\n</ul>"


def figure(svg: str, alt: str, caption: str) -> str:
    """A drawing that is part of the page, so that it has the page's colours."""
    labelled = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(alt)}" ', 1)
    return f"<figure>{labelled}<figcaption>{escape(caption)}</figcaption></figure>"


def code(*functions: Callable[..., Any]) -> str:
    """The source of functions, as it was run."""
    sources = "\n\n".join(textwrap.dedent(inspect.getsource(f)).strip() for f in functions)
    names = ", ".join(f.__name__ for f in functions)
    return f'<pre tabindex="0" aria-label="source of {escape(names)}"><code>{escape(sources)}</code></pre>'


def thumbnail(image: Tensor, alt: str, lines: Sequence[str], mark: str = "") -> str:
    """An image of a few pixels, each of them sharp, and what there is to say about it; ``mark`` is a CSS class."""
    data = io.BytesIO()
    image = image.repeat_interleave(8, 0).repeat_interleave(8, 1)  # not left to whoever prints it, who would smooth it
    matplotlib.image.imsave(
        data, image.numpy(), cmap="gray_r", vmin=0, vmax=1, format="png", metadata={"Software": "persample"}
    )
    source = base64.b64encode(data.getvalue()).decode()
    said = "".join(f"<span>{escape(line) or '&nbsp;'}</span>" for line in lines)
    picture = f'<img src="data:image/png;base64,{source}" alt="{escape(alt)}" width="64" height="64">'
    return f'<li class="{mark}">{picture}{said}</li>'


def gallery(title: str, thumbnails: Iterable[str]) -> str:
    """Thumbnails in as many columns as there is room for."""
    return f'{heading(title)}\n<ol class="gallery">\n' + "\n".join(thumbnails) + "\n</ol>"


def strip(title: str, thumbnails: Iterable[str]) -> str:
    """A few thumbnails under a word."""
    items = "\n".join(thumbnails)
    return f'<div class="strip"><p>{escape(title)}</p>\n<ol class="gallery">\n{items}\n</ol></div>'


def cards(figures: Iterable[tuple[str, str]]) -> str:
    """The figures to remember: value and what it is."""
    items = "\n".join(f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd></div>" for value, what in figures)
    return f'<dl class="cards">\n{items}\n</dl>'
