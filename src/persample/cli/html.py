"""A report as one HTML file that asks nothing of the network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from .._html import document, in_line, table
from ..audit import Report
from ..audit.estimate import ESTIMATED, estimated
from ..audit.words import mark, megabytes, milliseconds, number


def page(report: Report, environment: Mapping[str, Any]) -> str:
    """The whole page."""
    kind = "good" if report.ok else "unsure" if report.exit_code in (5, 6) else "bad"
    body = [
        f"<h1>persample audit: <code>{escape(report.name)}</code></h1>",
        f'<p class="verdict {kind}">{escape(report.verdict)}</p>',
        f"<p>{report.batch} samples, losses = <code>{escape(report.how)}</code></p>",
        "<h2>Answers</h2>",
        table(("question", "answer", ""), _answers(report)),
        "<h2>Parameters</h2>",
        table(("parameter", "shape", "handled by", "relative error", ""), _parameters(report), numbers=(3,)),
    ]
    if report.costs:
        header = ("step", "time", "to plain", "quartiles", "memory above forward")
        body += ["<h2>Costs</h2>", table(header, _costs(report), numbers=(1, 2, 3, 4))]
        forward = f" The forward pass holds {megabytes(report.activations)}." if report.activations is not None else ""
        body.append(f"<p>All gradients written out take {megabytes(report.stack_bytes)}.{forward}</p>")
    if report.estimates:
        rows = [[escape(cell) for cell in row] for row in estimated(report.estimates)]
        body += ["<h2>Costs, from shapes alone</h2>", table(ESTIMATED, rows, numbers=(1, 2, 3))]
        body.append(f"<p>{escape(report.sizes)}.</p>")
    if report.notes:
        body += ["<h2>Notes</h2>", "<ul>", *[f"<li>{escape(note)}</li>" for note in report.notes], "</ul>"]
    about = [(key, in_line(value)) for key, value in environment.items()]
    body += ["<h2>Environment</h2>", table(("", ""), [(escape(k), escape(v)) for k, v in about])]
    return document(f"persample audit: {report.name}", body)


def _answers(report: Report) -> Iterable[tuple[str, str, str]]:
    yield "does it work?", _yes(report.works), escape(report.refusal or "")
    yield "is every parameter covered?", _yes("refused" not in report.coverage()), report.covered
    if report.max_error is not None:
        yield "is it equal to the definition?", _yes(report.exact), f"largest relative error {number(report.max_error)}"
    for question, seen in (("by the graph", report.graph), ("when parts of the batch run again", report.rerun)):
        answer = None if seen.answer == "unknown" else seen.answer == "independent"
        yield f"are samples independent {question}?", _yes(answer), escape(seen.reason)


def _yes(fine: bool | None) -> str:
    return {True: '<b class="good">yes</b>', False: '<b class="bad">no</b>', None: '<b class="unsure">unknown</b>'}[
        fine
    ]


def _parameters(report: Report) -> Iterable[Sequence[str]]:
    for p in report.parameters:
        verdict = f'<b class="{"good" if p.ok else "bad"}">{mark(p.ok)}</b>' if p.ok is not None else ""
        handled = escape(", ".join(p.handled))
        yield f"<code>{escape(p.name)}</code>", str(p.shape), handled, number(p.error), verdict


def _costs(report: Report) -> Iterable[Sequence[str]]:
    for c in report.costs:
        quartiles = f"{c.low:.2f} - {c.high:.2f}" if c.rounds > 1 else ""
        yield c.name, milliseconds(c.ms), f"{c.ratio:.2f}", quartiles, megabytes(c.bytes_above)
