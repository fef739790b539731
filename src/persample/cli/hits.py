"""What an index answers, as tables in a terminal and as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..influence import Check, Error, Hits, Selection
from ..influence.page import signed
from ..influence.showing import to_line
from ..influence.study import Study
from .tables import table

_QUERIES = 5  # that are shown without being asked for all of them
_CHOSEN = 20
_STYLES = {"helpful": "green", "harmful": "red"}


def as_json(hits: Mapping[str, Hits]) -> list[dict[str, Any]]:
    """For every query, its hits in plain values."""
    queries = len(next(iter(hits.values())).ids)
    return [{"query": i, **{which: _rows(found, i) for which, found in hits.items()}} for i in range(queries)]


def _rows(hits: Hits, i: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for place, (ident, score) in enumerate(zip(hits.ids[i].tolist(), hits.scores[i].tolist(), strict=True)):
        row = {"id": ident, "score": score}
        if hits.tokens is not None:
            row["token"] = int(hits.tokens[i, place])
        if hits.by_parameter is not None:
            row["by_parameter"] = {name: float(t[i, place]) for name, t in hits.by_parameter.items()}
        rows.append(row)
    return rows


def show_hits(hits: Mapping[str, Hits], study: Study, *, every: bool) -> list[RenderableType]:
    """A table for every query, or for the first ones."""
    queries = len(next(iter(hits.values())).ids)
    shown = queries if every else min(queries, _QUERIES)
    lines: list[RenderableType] = []
    for i in range(shown):
        said = to_line(study.show_query(i)) if study.show_query is not None else ""
        lines.append(Text.assemble((f"query {i}", "bold"), f"  {said}" if said else ""))
        lines.append(_table(hits, i, study))
    if queries > shown:
        lines.append(Text(f"{queries - shown} more queries (--all shows them; --html makes a page)", "dim"))
    return lines


def _table(hits: Mapping[str, Hits], i: int, study: Study) -> Table:
    first = next(iter(hits.values()))
    more = [*(["token"] if first.tokens is not None else []), *(["most by"] if first.by_parameter is not None else [])]
    made = table("", "id", "score", *more, "", right=["id", "score", "token"])
    for which, found in hits.items():
        for row in _rows(found, i):
            cells = [str(row["id"]), signed(row["score"])]
            cells += [str(row["token"])] if "token" in row else []
            cells += [_largest(row["by_parameter"])] if "by_parameter" in row else []
            said = escape(to_line(study.show(row["id"]))) if study.show is not None else ""
            made.add_row(Text(which, _STYLES[which]), *cells, said)
    return made


def _largest(shares: Mapping[str, float]) -> str:
    name = max(shares, key=lambda name: abs(shares[name]))
    return f"{escape(name)} {signed(shares[name])}"


def selection_table(chosen: Selection, study: Study) -> Table:
    """The first of the chosen examples."""
    weighted = chosen.weights is not None
    made = table("id", "score", *(["weight"] if weighted else []), "", right=["id", "score", "weight"])
    for place in range(min(len(chosen), _CHOSEN)):
        ident = int(chosen.ids[place])
        cells = [str(ident), signed(float(chosen.scores[place]))]
        cells += [f"{float(chosen.weights[place]):.3g}"] if chosen.weights is not None else []
        made.add_row(*cells, escape(to_line(study.show(ident))) if study.show is not None else "")
    if len(chosen) > _CHOSEN:
        made.caption = f"{len(chosen) - _CHOSEN:,} more (--ids FILE or --json has all of them)"
    return made


def check_table(found: Check) -> Table:
    """The error of every parameter's sketches."""
    made = table("parameter", "error of its sketches", right=["error of its sketches"])
    for name, error in found.sketch.items():
        made.add_row(escape(name), f"{error:.1e}")
    made.caption = f"{found.samples} losses beside one backward each; their inner products: {found.products:.1e}"
    return made


def error_table(stored: Mapping[str, Error]) -> Table:
    """What every dtype adds."""
    figures = ("mean error of a row", "largest", "of inner products")
    made = table("stored as", *figures, right=figures)
    for name, error in stored.items():
        made.add_row(name, f"{error.rows:.1e}", f"{error.largest:.1e}", f"{error.products:.1e}")
    return made
