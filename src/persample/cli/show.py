"""Reports as tables in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..audit import Cost, Parameter, Report, Seen
from ..audit.costs import PLAIN
from ..audit.words import mark, megabytes, milliseconds, number

_ROWS = 30  # parameters that are shown without being asked for all of them
_STYLES = {"independent": "green", "interacting": "bold red", "unknown": "yellow"}


def show(report: Report, console: Console, *, all_parameters: bool) -> None:
    """The whole report."""
    console.print(f"[bold]{escape(report.name)}[/]  {report.batch} samples, losses = {escape(report.how)}")
    console.print(_answers(report))
    console.print(_parameters(report, all_parameters))
    if report.costs:
        console.print(costs(report))
    for note in report.notes:
        console.print(f"[yellow]note:[/] {escape(note)}", highlight=False)
    verdict(report, console)


def verdict(report: Report, console: Console) -> None:
    """One line."""
    style = "bold green" if report.ok else "bold red" if report.exit_code != 5 else "bold yellow"
    console.print(Text(report.verdict, style), Text(f"(exit code {report.exit_code})", "dim"))


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def _answers(report: Report) -> Table:
    table = _table("question", "answer", "")
    table.add_row("does it work?", _yes(report.works), escape(report.refusal or ""))
    covered = ", ".join(f"{count} by {kind}" if kind != "zeros" else f"{count} unreached" for kind, count in
                        report.coverage().items())  # fmt: skip
    frozen = f"; {report.frozen} frozen, left out" if report.frozen else ""
    table.add_row("every parameter covered?", _yes("refused" not in report.coverage()), covered + frozen)
    error = report.max_error
    if error is not None:
        table.add_row("equal to the definition?", _yes(report.exact), f"largest relative error {number(error)}")
    for question, seen in (("independent by the graph?", report.graph), ("independent when re-run?", report.rerun)):
        table.add_row(question, _answer(seen), escape(seen.reason))
    return table


def _yes(fine: bool) -> Text:
    return Text("yes", "green") if fine else Text("no", "bold red")


def _answer(seen: Seen) -> Text:
    return Text({"independent": "yes", "interacting": "no", "unknown": "unknown"}[seen.answer], _STYLES[seen.answer])


def _parameters(report: Report, all_parameters: bool) -> Table:
    table = _table("parameter", "shape", "handled by", "relative error", right=["relative error"])
    shown = report.parameters if all_parameters else _most_telling(report.parameters)
    for p in shown:
        fallback = "yellow" if p.kind == "fallback" else "red" if p.kind == "refused" else ""
        error = Text(f"{number(p.error)} {mark(p.ok)}".strip(), "bold red" if p.ok is False else "")
        table.add_row(escape(p.name), str(p.shape), Text(", ".join(p.handled), fallback), error)
    hidden = len(report.parameters) - len(shown)
    if hidden:
        table.caption = f"{hidden} more with smaller errors, all by rule (--all shows them)"
    return table


def _most_telling(parameters: Sequence[Parameter]) -> Sequence[Parameter]:
    """Whatever is not exact by rule, then the largest errors; in the model's order."""
    if len(parameters) <= _ROWS:
        return parameters
    telling = [p for p in parameters if not p.ok or p.kind != "rule"]
    rest = sorted((p for p in parameters if p.ok and p.kind == "rule"), key=lambda p: -(p.error or 0.0))
    chosen = {p.name for p in [*telling, *rest[: max(0, _ROWS - len(telling))]]}
    return [p for p in parameters if p.name in chosen]


def costs(report: Report) -> Table:
    """Time and memory of every kind of step."""
    figures = ("time", "to plain", "quartiles", "memory")
    table = _table("step", *figures, right=figures)
    for cost in report.costs:
        table.add_row(cost.name, *_figures(cost), megabytes(cost.bytes_above))
    above = f" Memory is what comes on top of the forward pass, which holds {megabytes(report.activations)}."
    written = f"All gradients written out: {megabytes(report.stack_bytes)}."
    table.caption = written + (above if report.activations is not None else "")
    return table


def _figures(cost: Cost) -> tuple[str, str, str]:
    quartiles = f"{cost.low:.2f} - {cost.high:.2f}" if cost.rounds > 1 and cost.name != PLAIN else ""
    return milliseconds(cost.ms), f"{cost.ratio:.2f}", quartiles
