"""A report as one HTML file that asks nothing of the network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from ..audit import Report
from ..audit.estimate import ESTIMATED, estimated
from ..audit.words import mark, megabytes, milliseconds, number

_STYLE = """
:root { color-scheme: light dark; --good: #1a7f37; --bad: #cf222e; --unsure: #9a6700; --line: #8884; }
@media (prefers-color-scheme: dark) { :root { --good: #3fb950; --bad: #ff7b72; --unsure: #d29922; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { font-weight: 600; font-size: 1.1rem; } .good { color: var(--good); } .bad { color: var(--bad); }
.unsure { color: var(--unsure); }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.number { text-align: right; font-variant-numeric: tabular-nums; } td.number { white-space: nowrap; }
code { font-family: ui-monospace, monospace; font-size: .9em; overflow-wrap: anywhere; }
"""


def page(report: Report, environment: Mapping[str, Any]) -> str:
    """The whole page."""
    kind = "good" if report.ok else "unsure" if report.exit_code in (5, 6) else "bad"
    body = [
        f"<h1>persample audit: <code>{escape(report.name)}</code></h1>",
        f'<p class="verdict {kind}">{escape(report.verdict)}</p>',
        f"<p>{report.batch} samples, losses = <code>{escape(report.how)}</code></p>",
        "<h2>Answers</h2>",
        _table(("question", "answer", ""), _answers(report)),
        "<h2>Parameters</h2>",
        _table(("parameter", "shape", "handled by", "relative error", ""), _parameters(report), numbers=(3,)),
    ]
    if report.costs:
        header = ("step", "time", "to plain", "quartiles", "memory above forward")
        body += ["<h2>Costs</h2>", _table(header, _costs(report), numbers=(1, 2, 3, 4))]
        forward = f" The forward pass holds {megabytes(report.activations)}." if report.activations is not None else ""
        body.append(f"<p>All gradients written out take {megabytes(report.stack_bytes)}.{forward}</p>")
    if report.estimates:
        rows = [[escape(cell) for cell in row] for row in estimated(report.estimates)]
        body += ["<h2>Costs, from shapes alone</h2>", _table(ESTIMATED, rows, numbers=(1, 2, 3))]
        body.append(f"<p>{escape(report.sizes)}.</p>")
    if report.notes:
        body += ["<h2>Notes</h2>", "<ul>", *[f"<li>{escape(note)}</li>" for note in report.notes], "</ul>"]
    about = [(key, _shown(value)) for key, value in environment.items()]
    body += ["<h2>Environment</h2>", _table(("", ""), [(escape(k), escape(v)) for k, v in about])]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>persample audit: {escape(report.name)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


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


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Cells are HTML already."""

    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = [' class="number"' if i in numbers else "" for i in range(len(cells))]
        return "<tr>" + "".join(f"<{tag}{kind}>{c}</{tag}>" for c, kind in zip(cells, kinds, strict=True)) + "</tr>"

    head = f"<thead>{line('th', header)}</thead>" if any(header) else ""
    return f'<div class="wide"><table>{head}<tbody>{"".join(line("td", row) for row in rows)}</tbody></table></div>'


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {one}" for key, one in value.items() if one is not None)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
