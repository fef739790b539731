"""`persample index build`, `fit` and `export`: what writes files."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from .._table import in_bytes
from ..influence import Index
from ..influence.study import load
from .facts import facts
from .options import (
    BlocksText,
    CurvatureName,
    Damping,
    Device,
    Folder,
    Json,
    Labels,
    Parameters,
    Quiet,
    Seed,
    Spec,
    blocks_of,
    names_of,
)
from .output import STDOUT, check_writable, working, write_json
from .refusals import UNWRITTEN, refusals


def build(
    spec: Spec,
    folder: Folder,
    blocks: BlocksText = None,
    dtype: Annotated[Literal["float32", "float16", "int8"], typer.Option(help="Of what is stored.")] = "float32",
    parameters: Parameters = None,
    device: Device = None,
    seed: Seed = 0,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Store a sketch of every training example's gradient; after an interruption, the same command goes on."""
    check_writable("index build", json)
    with refusals("index build"):
        sketch = None if blocks is None else blocks_of(blocks)
        study = load(spec, seed=seed, device=device)
        made = study.new_index(folder, sketch=sketch, dtype=dtype, params=names_of(parameters))
        begun = time.perf_counter()
        made.build(study.loader, study.checkpoints, ids_fn=study.ids_fn, progress=False if quiet else None)
        told = {**_about(spec, made), "seconds": time.perf_counter() - begun}
    if _is_first():
        text = f"{told['examples']:,} examples in {folder}: {told['numbers']:,} numbers each, {in_bytes(told['bytes'])}"
        _tell("index build", told, text, json)


def fit(
    spec: Spec,
    folder: Folder,
    curvature: Annotated[CurvatureName, typer.Option(help="What stands between gradients.")] = "shampoo",
    labels: Labels = "given",
    damping: Damping = None,
    device: Device = None,
    seed: Seed = 0,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Put the inverse of a curvature between the gradients, beside the index; none takes it away."""
    check_writable("index fit", json)
    with refusals("index fit"):
        study = load(spec, seed=seed, device=device)
        made = study.fit(study.open_index(folder), curvature, labels, damping, progress=False if quiet else None)
        told = {**_about(spec, made), "curvature": curvature, "labels": labels, "damping": damping}
    if _is_first():
        words = "no curvature" if curvature == "none" else f"curvature {curvature}, {labels} labels"
        _tell("index fit", told, f"{words}, for {told['examples']:,} examples in {folder}", json)


def export(
    spec: Spec,
    folder: Folder,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where all rows are written.", show_default=False)],
    format: Annotated[
        Literal["npy", "parquet", "faiss"] | None, typer.Option(help="By default, what FILE ends with.")
    ] = None,
    vectors: Annotated[
        Path | None, typer.Option(metavar="FILE.npy", help="Write what rows are multiplied by, one line per query.")
    ] = None,
    device: Device = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Write all rows for other tools; scores are inner products with the vectors of the queries."""
    check_writable("index export", str(out), None if vectors is None else str(vectors))
    with refusals("index export"):
        chosen = format or out.suffix.removeprefix(".")
        study = load(spec, seed=seed, device=device)
        made = study.open_index(folder)
        with working(2, quiet=quiet) as tell:
            tell("all rows")
            made.export(chosen, out)
            tell("queries")
            if vectors is not None:
                import numpy

                numpy.save(vectors, study.vectors(made).numpy())
    Console().print(f"{len(made):,} examples in {out}", highlight=False)


def _about(spec: str, made: Index) -> dict[str, Any]:
    plan = made.folder.plan
    size = sum(path.stat().st_size for path in made.folder.path.rglob("*") if path.is_file())
    numbers = sum(plan.encoding.widths) * len(plan.checkpoints)
    about = {"spec": spec, "folder": str(made.folder.path), "examples": len(made), "numbers": numbers, "bytes": size}
    return {**about, "dtype": plan.dtype, "sketch": plan.sketch, "per_token": plan.per_token}


def _is_first() -> bool:
    """Is this the process that prints, if torchrun has started several?"""
    return os.environ.get("RANK", "0") == "0"


def _tell(command: str, told: dict[str, Any], text: str, json: str | None) -> None:
    if json is not None:
        write_json(command, {**told, "environment": facts()}, json, UNWRITTEN)
    if json != STDOUT:
        Console().print(text, highlight=False, soft_wrap=True)
