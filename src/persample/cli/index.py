"""`persample index`: the commands that an index of gradients has."""

from __future__ import annotations

from collections.abc import Callable

import typer

from .index_files import build, export, fit
from .index_questions import check, query, select
from .refusals import EXIT_CODES

_CODES = "Exit codes:\n" + "\n".join(f"{code} = {meaning}" for code, meaning in EXIT_CODES.items())
_ABOUT = f"""Which training examples made a model what it is: an index of the gradients of all of them, on disk.

SPEC names a function without arguments that returns a mapping (or an object) with

model, losses_fn(model, batch), loader: batches in a fixed order;
queries: a batch to ask about, or a DataLoader of several;
show(id), show_query(i): an image, a text, a list of tokens, a mapping of these;
sketch, checkpoints, ids_fn, sample_losses_fn, optimizer, retrain: as needed.

A file may have the names at its top instead.

{_CODES}
"""
_EXAMPLE = "persample.influence.examples:digits --folder digits-index"

index = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help=_ABOUT)
COMMANDS: dict[Callable[..., None], str] = {
    build: "",
    fit: " --curvature shampoo",
    query: " --html hits.html",
    select: " --fraction 0.1",
    check: "",
    export: " --out rows.npy --vectors queries.npy",
}
for command, options in COMMANDS.items():
    index.command(epilog=f"Try it: persample index {command.__name__} {_EXAMPLE}{options}")(command)
