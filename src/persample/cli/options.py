"""Options and arguments that several commands have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from .._factories import FactoryError
from ..influence import Blocks

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

# Of an index.

Folder = Annotated[Path, typer.Option("--folder", "-f", metavar="DIR", help="Of the index.", show_default=False)]
Normalise = Annotated[bool, typer.Option("--normalise", help="Cosines: long gradients count no more than others.")]
Parameters = Annotated[
    str | None, typer.Option(metavar="NAME,...", help="Go by these parameters alone, as 0.weight,0.bias.")
]
CurvatureName = Literal["shampoo", "kfac", "covariance", "adam", "none"]
Labels = Annotated[
    Literal["given", "sampled"],
    typer.Option(help="Of the data, or drawn from the model (sample_losses_fn of SPEC)."),
]
Damping = Annotated[
    float | None,
    typer.Option(min=0.0, metavar="X", help="Added to eigenvalues; chosen by default (for adam, its eps)."),
]
BlocksText = Annotated[
    str | None,
    typer.Option(
        "--blocks", metavar="16x16", help="Size of every parameter's sketch; all in place of a number keeps that side."
    ),
]


def blocks_of(text: str) -> Blocks:
    """A sketch from ``16x16``, or ``allx16``."""
    found = re.fullmatch(r"(\d+|all)x(\d+|all)", text.lower())
    sides = [None if side == "all" else int(side) for side in found.groups()] if found else [0]
    if 0 in sides:
        raise FactoryError(f"--blocks must be two positive numbers (or all) as in 16x16, not {text!r}")
    return Blocks(*sides)


def names_of(parameters: str | None) -> list[str] | None:
    """From names with commas between them."""
    return None if parameters is None else [name.strip() for name in parameters.split(",") if name.strip()]
