"""Reports as tables in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..audit import Cost, Parameter, Report, Seen
from ..audit.costs import PLAIN
from ..audit.estimate import ESTIMATED, estimated
from ..audit.words import mark, megabytes, milliseconds, number
from .tables import table

_ROWS = 30  # parameters that are shown without being asked for all of them
_STYLES = {"independent": "green", "interacting": "bold red", "unknown": "yellow"}


def show(report: Report, console: Console, *, all_parameters: bool) -> None:
    """The whole report."""
    console.print(
        f"[bold]{escape(report.name)}[/]  {report.batch} samples, losses = {escape(report.how)}", highlight=False
    )
    console.print(_answers(report))
    console.print(_parameters(report, all_parameters))
    if report.costs:
        console.print(costs(report))
    if report.estimates:
        console.print(_estimates(report))
    for note in report.notes:
        console.print(f"[yellow]note:[/] {escape(note)}", highlight=False)
    verdict(report, console)


def verdict(report: Report, console: Console) -> None:
    """Print the verdict, in one line."""
    style = "bold green" if report.ok else "bold red" if report.exit_code not in (5, 6) else "bold yellow"
    console.print(Text(report.verdict, style), Text(f"(exit code {report.exit_code})", "dim"))


def _answers(report: Report) -> Table:
    made = table("question", "answer", "")
    made.add_row("does it work?", _yes(report.works), escape(report.refusal or ""))
    made.add_row("every parameter covered?", _yes("refused" not in report.coverage()), report.covered)
    error = report.max_error
    if error is not None:
        made.add_row("equal to the definition?", _yes(report.exact), f"largest relative error {number(error)}")
    for question, seen in (("independent by the graph?", report.graph), ("independent when re-run?", report.rerun)):
        made.add_row(question, _answer(seen), escape(seen.reason))
    return made


def _yes(fine: bool) -> Text:
    return Text("yes", "green") if fine else Text("no", "bold red")


def _answer(seen: Seen) -> Text:
    return Text({"independent": "yes", "interacting": "no", "unknown": "unknown"}[seen.answer], _STYLES[seen.answer])


def _parameters(report: Report, all_parameters: bool) -> Table:
    made = table("parameter", "shape", "handled by", "relative error", right=["relative error"])
    shown = report.parameters if all_parameters else _most_telling(report.parameters, report.has_numbers)
    for p in shown:
        fallback = "yellow" if p.kind == "fallback" else "red" if p.kind == "refused" else ""
        error = Text(f"{number(p.error)} {mark(p.ok)}".strip(), "bold red" if p.ok is False else "")
        made.add_row(escape(p.name), str(p.shape), Text(", ".join(p.handled), fallback), error)
    hidden = len(report.parameters) - len(shown)
    if hidden:
        made.caption = f"{hidden} more, all {'exact and ' if report.has_numbers else ''}by rule (--all shows them)"
    return made


def _most_telling(parameters: Sequence[Parameter], has_numbers: bool) -> Sequence[Parameter]:
    """Whatever is not exact by rule, or not known to be by rule, then the largest errors; in the model's order."""
    if len(parameters) <= _ROWS:
        return parameters
    telling = [p for p in parameters if p.kind != "rule" or not (p.ok if has_numbers else p.is_sure)]
    rest = sorted((p for p in parameters if p not in telling), key=lambda p: -(p.error or 0.0))
    chosen = {p.name for p in [*telling, *rest[: max(0, _ROWS - len(telling))]]}
    return [p for p in parameters if p.name in chosen]


def costs(report: Report) -> Table:
    """Time and memory of every kind of step."""
    figures = ("time", "to plain", "quartiles", "memory")
    made = table("step", *figures, right=figures)
    for cost in report.costs:
        made.add_row(cost.name, *_figures(cost), megabytes(cost.bytes_above))
    above = f" Memory is what comes on top of the forward pass, which holds {megabytes(report.activations)}."
    written = f"All gradients written out: {megabytes(report.stack_bytes)}."
    made.caption = written + (above if report.activations is not None else "")
    return made


def _estimates(report: Report) -> Table:
    """Operations and memory of every kind of step, from shapes alone."""
    made = table(*ESTIMATED, right=ESTIMATED[1:])
    for row in estimated(report.estimates):
        made.add_row(*row)
    made.caption = f"From shapes alone: {report.sizes}."
    return made


def _figures(cost: Cost) -> tuple[str, str, str]:
    quartiles = f"{cost.low:.2f} - {cost.high:.2f}" if cost.rounds > 1 and cost.name != PLAIN else ""
    return milliseconds(cost.ms), f"{cost.ratio:.2f}", quartiles
