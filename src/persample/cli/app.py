"""The commands and their options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ..audit import EXIT_CODES, STAGES, AuditError, audit_spec
from .bench import bench_all
from .facts import facts
from .html import page
from .index import index
from .lds import EPILOG as LDS_EPILOG
from .lds import HELP as LDS
from .lds import lds
from .options import BatchSize, Device, Json, Quiet, Seed, Spec
from .output import STDOUT, check_writable, fail, working, write_json, write_text
from .show import show, verdict
from .tables import bench_table, facts_table

_AUDIT = """Is persample exact on a model, do its samples keep apart, and what does it cost?

SPEC names a function that takes no arguments, or batch_size, and returns

(model, inputs): the model gives the losses, of shape (B,);
(model, inputs, loss): loss(output), or loss(model, inputs) if it takes two;
(model, inputs, targets, loss): loss(output, targets);

or a mapping with these names. A file may have the names at its top instead.
inputs is a tensor, a tuple of arguments or a mapping of keyword arguments.

Exit codes:
""" + "\n".join(f"{code} = {meaning}" for code, meaning in EXIT_CODES.items())

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    help="Exact per-sample gradients for any PyTorch program: does it work on your model, and at what price?",
)
app.add_typer(index, name="index")
app.command(name="lds", help=LDS, epilog=LDS_EPILOG)(lds)


def run(argv: Sequence[str]) -> None:
    """Run the command and leave Python with its exit code."""
    app(args=_with_stdout(argv), prog_name="persample")


def _with_stdout(argv: Sequence[str]) -> list[str]:
    """A ``--json`` that no name of a file follows means stdout."""
    arguments = list(argv)
    for i, word in enumerate(argv):
        if word == "--json" and not (i + 1 < len(argv) and (argv[i + 1].endswith(".json") or argv[i + 1] == STDOUT)):
            arguments[i] = f"--json={STDOUT}"
    return arguments


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"persample {facts()['persample']}")
        raise typer.Exit()


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """What all commands share."""


@app.command(help=_AUDIT, epilog="Try it: persample audit persample.audit.models:cnn")
def audit(
    spec: Spec,
    batch_size: BatchSize = None,
    device: Device = None,
    repeats: Annotated[
        int, typer.Option(min=0, metavar="N", help="Rounds of timing; 0 measures neither time nor memory.")
    ] = 10,
    seed: Seed = 0,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0, metavar="X", help="Allowed error relative to a sample's largest gradient; by default by dtype."
        ),
    ] = None,
    memory: Annotated[bool, typer.Option(help="Measure memory, in a process of its own (Linux, CPU).")] = True,
    json: Json = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as one HTML file.")] = None,
    all_parameters: Annotated[bool, typer.Option("--all", help="Show every parameter of a large model.")] = False,
    quiet: Quiet = False,
) -> None:
    """Audit one model."""
    check_writable("audit", json, None if html is None else str(html))
    try:
        with working(len(STAGES), quiet=quiet) as tell:
            report = audit_spec(
                spec,
                batch_size=batch_size,
                device=device,
                repeats=repeats,
                seed=seed,
                tolerance=tolerance,
                memory=memory,
                progress=tell,
            )
    except AuditError as error:
        fail("audit", error)
    environment = facts()
    if json is not None:
        write_json("audit", {**report.as_dict(), "environment": environment}, json)
    if html is not None:
        write_text("audit", page(report, environment), html)
    console = Console()
    if json != STDOUT:
        if quiet:
            verdict(report, console)
        else:
            show(report, console, all_parameters=all_parameters)
    raise typer.Exit(report.exit_code)


@app.command()
def bench(
    specs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SPEC]...", help="As for audit, or mlp, cnn, transformer, lstm; all of these if none."),
    ] = None,
    batch_size: BatchSize = None,
    device: Device = None,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Rounds of timing.")] = 20,
    seed: Seed = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Threads of torch; as it chooses by default.")
    ] = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Time norms, clipped sums and gradients, in turns with a plain step of the same model."""
    check_writable("bench", json)
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        timings = bench_all(specs or (), batch_size=batch_size, device=device, repeats=repeats, seed=seed, quiet=quiet)
    except AuditError as error:
        fail("bench", error)
    if json is not None:
        data: dict[str, Any] = {"models": [one.as_dict() for one in timings], "environment": facts()}
        write_json("bench", data, json)
    if json != STDOUT:
        Console().print(bench_table(timings))


@app.command()
def version(
    json: Json = None,
) -> None:
    """Versions of persample, torch and Python; devices, threads and the kind of CPU."""
    check_writable("version", json)
    if json is not None:
        write_json("version", facts(), json)
    if json != STDOUT:
        Console().print(facts_table(facts()))


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def demo(context: typer.Context) -> None:
    """Find wrong labels, train privately and measure gradient noise on real images: a minute, and a report in HTML."""
    try:
        from ..demo import main
    except ModuleNotFoundError as error:
        fail("demo", f"the demo needs {error.name}, not installed here: pip install 'persample[demo]'")
    raise typer.Exit(main(context.args))
