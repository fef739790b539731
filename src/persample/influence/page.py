"""`hits_page`: the most helpful and the most harmful examples of every query, as one HTML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from .._html import document, in_line, table
from .search import Hits
from .showing import LEVELS, to_html

Show = Callable[[int], Any]
_SHARES = 5  # parameters of an example that are shown by name


def hits_page(
    helpful: Hits | None,
    harmful: Hits | None = None,
    *,
    show: Show | None = None,
    show_query: Show | None = None,
    title: str = "Influence",
    about: Mapping[str, Any] | None = None,
) -> str:
    """One HTML file, which asks nothing of the network, with the examples that each query owes its loss to.

    >>> import torch
    >>> from persample import influence as pi
    >>> hits = pi.Hits(ids=torch.tensor([[7, 2]]), scores=torch.tensor([[0.5, 0.25]]))
    >>> html = pi.hits_page(hits, show=lambda id: f"text {id} < 8", title="Mine")
    >>> "text 7 &lt; 8" in html, "+0.5" in html
    (True, True)

    Args:
        helpful: what ``index.query(batch)`` returned.
        harmful: what ``index.query(batch, order="harmful")`` returned.
        show: ``show(id)``, what to show of a training example: an image (a tensor (H, W), (C, H, W) or (H, W, C), an
            array or a PIL image), a text, a list of tokens (one for every loss), a mapping of names to any of these.
        show_query: ``show_query(i)``, the same of query i.
        title: of the page.
        about: more facts, which are listed at the end.

    Returns:
        The page as text. Hits per parameter have bars of the largest shares, hits per token have their tokens marked.
    """
    named = {("Most helpful", "good"): helpful, ("Most harmful", "bad"): harmful}
    given = {words: hits for words, hits in named.items() if hits is not None}
    if not given:
        raise ValueError("there are no hits: pass helpful=, harmful= or both")
    counts = {len(hits.ids) for hits in given.values()}
    if len(counts) > 1:
        raise ValueError(f"helpful and harmful must be of the same queries, not of {sorted(counts)}")
    queries = counts.pop()
    body = [f"<h1>{escape(title)}</h1>", f'<p class="quiet">{_INTRODUCTION}</p>', _contents(queries)]
    for i in range(queries):
        lists = [_list(hits, i, *words, show) for words, hits in given.items()]
        asked = to_html(show_query(i), f"query {i}") if show_query is not None else ""
        body += [f'<section class="query" id="query-{i}"><h2>Query {i}</h2>', f'<div class="asked">{asked}</div>']
        body += [f'<div class="lists">{"".join(lists)}</div></section>']
    if about:
        rows = [(escape(str(key)), escape(in_line(value))) for key, value in about.items()]
        body += ["<h2>How it was made</h2>", table(("", ""), rows)]
    made = document(title, body, (files(__package__) / "page.css").read_text(encoding="utf-8"))
    return made.encode("utf-8", "replace").decode("utf-8")  # a text may have halves of characters, which no file can


_INTRODUCTION = (
    "A positive score says that training on the example lowers the loss of the query, a negative one that it raises it."
)


def _contents(queries: int) -> str:
    """Links to the queries, if there are several."""
    links = "".join(f'<a href="#query-{i}">{i}</a>' for i in range(queries))
    return f'<nav aria-label="Queries"><span class="quiet">Queries</span>{links}</nav>' if queries > 1 else ""


def _list(hits: Hits, i: int, heading: str, kind: str, show: Show | None) -> str:
    if hits.tokens is not None:
        cards = _cards_of_tokens(hits, i, kind, show)
    else:
        cards = [_card(hits, i, place, show) for place in range(hits.ids.shape[1])]
    wide = " tables" if hits.by_parameter is not None else ""
    return f'<div class="hits{wide}"><h3 class="{kind}">{heading}</h3><ol>{"".join(cards)}</ol></div>'


def _card(hits: Hits, i: int, place: int, show: Show | None) -> str:
    ident, score = int(hits.ids[i, place]), float(hits.scores[i, place])
    largest = float(hits.scores[i].abs().max())
    shown = to_html(show(ident), f"example {ident}") if show is not None else ""
    shares = "" if hits.by_parameter is None else _shares({n: float(t[i, place]) for n, t in hits.by_parameter.items()})
    return f"<li>{_head(ident, score)}{_bar(score, largest)}{shown}{shares}</li>"


def _cards_of_tokens(hits: Hits, i: int, kind: str, show: Show | None) -> list[str]:
    """One for each example, with all of its tokens that are among the hits."""
    assert hits.tokens is not None
    by_id: dict[int, dict[int, float]] = {}
    for ident, token, score in zip(hits.ids[i].tolist(), hits.tokens[i].tolist(), hits.scores[i].tolist(), strict=True):
        by_id.setdefault(ident, {})[token] = score
    largest = float(hits.scores[i].abs().max())
    cards = []
    for ident, tokens in by_id.items():
        marks = {token: (_level(score, largest), f"{signed(score)}") for token, score in tokens.items()}
        shown = to_html(show(ident), f"example {ident}", marks, kind) if show is not None else ""
        first = next(iter(tokens.values()))
        said = ", ".join(f"{token} ({signed(score)})" for token, score in tokens.items())
        tail = f'<p class="quiet">token{"s" if len(tokens) > 1 else ""} {said}</p>'
        cards.append(f"<li>{_head(ident, first)}{_bar(first, largest)}{shown}{tail}</li>")
    return cards


def _level(score: float, largest: float) -> int:
    return max(1, min(LEVELS, 1 + int(LEVELS * abs(score) / largest))) if largest > 0 else 1


def _head(ident: int, score: float) -> str:
    return f'<p class="head"><b>{signed(score)}</b> <span class="quiet">id {ident}</span></p>'


def signed(score: float) -> str:
    """Three digits that tell, and no exponent for numbers of ordinary size."""
    return f"{score:+,.0f}" if 100 <= abs(score) < 1e7 else f"{score:+.3g}"


def _bar(value: float, largest: float) -> str:
    width = 100 * min(1.0, abs(value) / largest) if largest > 0 else 0.0
    kind = "good" if value >= 0 else "bad"
    return f'<span class="bar {kind}" aria-hidden="true"><span style="width:{width:.1f}%"></span></span>'


def _shares(shares: Mapping[str, float]) -> str:
    """What the parameters that matter most add to a score, and all others together."""
    ordered = sorted(shares.items(), key=lambda share: -abs(share[1]))
    largest = abs(ordered[0][1]) if ordered else 0.0
    rows = [_share(f"<code>{escape(name)}</code>", value, largest) for name, value in ordered[:_SHARES]]
    rest = ordered[_SHARES:]
    if rest:
        words = f"{len(rest)} other parameter{'s' if len(rest) > 1 else ''}"
        rows.append(_share(words, sum(value for _, value in rest), largest))
    return table(("parameter", "adds"), rows, numbers=(1,))


def _share(name: str, value: float, largest: float) -> Sequence[str]:
    return name + _bar(value, largest), signed(value)
