"""Options and arguments that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Spec = Annotated[
    str, typer.Argument(metavar="SPEC", help="package.module:factory, file.py:factory or file.py.", show_default=False)
]
Json = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="[FILE.json]", help="Write JSON to a file; without a name, to stdout and nothing else."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress; only one line of result.")]
BatchSize = Annotated[
    int | None,
    typer.Option("--batch-size", "-b", min=1, metavar="N", help="Given to the factory as its argument batch_size."),
]
Device = Annotated[str | None, typer.Option(metavar="DEVICE", help="Where model and batch are moved to, as cuda:0.")]
Seed = Annotated[int, typer.Option(metavar="N", help="Of all random numbers of torch, the factory's included.")]
