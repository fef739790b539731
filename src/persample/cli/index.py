"""`persample index`: build, fit, query, select, check and export."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from .._factories import FactoryError
from .._table import in_bytes
from ..influence import Blocks, Index, hits_page, loaders
from ..influence.study import Study, load
from ..testing.compare import tolerance_of
from .facts import facts
from .hits import as_json, check_table, error_table, selection_table, show_hits
from .options import Device, Json, Quiet, Seed, Spec
from .output import STDOUT, check_writable, working, write_json
from .refusals import DIFFERS, EXIT_CODES, refusals

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


@index.command(epilog=f"Try it: persample index build {_EXAMPLE}")
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
        _tell(told, text, json)


@index.command(epilog=f"Try it: persample index fit {_EXAMPLE} --curvature shampoo")
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
        made = fitted(study, study.open_index(folder), curvature, labels, damping, quiet=quiet)
        told = {**_about(spec, made), "curvature": curvature, "labels": labels, "damping": damping}
    if _is_first():
        words = "no curvature" if curvature == "none" else f"curvature {curvature}, {labels} labels"
        _tell(told, f"{words}, for {told['examples']:,} examples in {folder}", json)


@index.command(epilog=f"Try it: persample index query {_EXAMPLE} --html hits.html")
def query(
    spec: Spec,
    folder: Folder,
    k: Annotated[int | None, typer.Option("--k", "-k", min=1, metavar="N", help="How many; 10 by default.")] = None,
    order: Annotated[Literal["both", "helpful", "harmful"], typer.Option(help="Which examples.")] = "both",
    normalise: Normalise = False,
    per: Annotated[
        Literal["sample", "parameter", "token"],
        typer.Option(help="parameter: what each adds to the scores; token: single tokens of losses (B, T)."),
    ] = "sample",
    parameters: Parameters = None,
    device: Device = None,
    seed: Seed = 0,
    json: Json = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with all hits.")] = None,
    all_queries: Annotated[bool, typer.Option("--all", help="Print the hits of every query.")] = False,
    quiet: Quiet = False,
) -> None:
    """The training examples that helped or harmed every query most."""
    check_writable("index query", json, None if html is None else str(html))
    with refusals("index query"):
        study = load(spec, seed=seed, device=device)
        made = study.open_index(folder)
        count = _how_many(k, len(made), per)
        orders: tuple[Literal["helpful", "harmful"], ...] = ("helpful", "harmful") if order == "both" else (order,)
        settings: dict[str, Any] = {"normalise": normalise, "per": per, "parameters": names_of(parameters)}
        with working(len(orders), quiet=quiet) as tell:
            hits = {which: study.ask(made, count, which, **settings, tell=tell) for which in orders}
        about = {"spec": spec, "folder": str(folder), "examples": len(made), "k": count, **settings}
        about["curvature"] = made.folder.noted("curvature") is not None
        if json is not None:
            write_json({**about, "queries": as_json(hits), "environment": facts()}, json)
        if html is not None:
            facts_of_page = {**about, "curvature": "fitted" if about["curvature"] else "none", **facts()}
            shown = {"show": study.show, "show_query": study.show_query}
            text = hits_page(
                hits.get("helpful"), hits.get("harmful"), **shown, title=f"persample index: {spec}", about=facts_of_page
            )
            html.write_text(text, encoding="utf-8")
        lines = show_hits(hits, study, every=all_queries) if json != STDOUT and not quiet else None
    if lines is not None:
        Console().print(*lines, sep="\n")
    elif json != STDOUT:
        queries = len(next(iter(hits.values())).ids)
        Console().print(f"{queries} queries, {count} of {len(made):,} examples each", highlight=False)


@index.command(epilog=f"Try it: persample index select {_EXAMPLE} --fraction 0.1")
def select(
    spec: Spec,
    folder: Folder,
    fraction: Annotated[float | None, typer.Option(metavar="X", help="How much of the data to choose.")] = None,
    count: Annotated[int | None, typer.Option(min=1, metavar="N", help="Or how many examples.")] = None,
    method: Annotated[
        Literal["top", "diverse", "mislabelled"],
        typer.Option(help="By scores for the queries; by what adds up to their gradient; by the size of gradients."),
    ] = "top",
    normalise: Annotated[bool, typer.Option(help="Long gradients count no more than others.")] = True,
    queries: Annotated[
        bool, typer.Option(help="diverse: match the queries' gradient, or that of all the data.")
    ] = True,
    ids: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the ids, one on every line.")] = None,
    device: Device = None,
    seed: Seed = 0,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """The examples that are worth most to train on, or that are most likely mislabelled."""
    check_writable("index select", json, None if ids is None else str(ids))
    with refusals("index select"):
        if fraction is None and count is None:
            fraction = 0.05
        study = load(spec, seed=seed, device=device)
        made = study.open_index(folder)
        chosen = study.select(made, fraction=fraction, count=count, method=method, normalise=normalise, target=queries)
        told = {"spec": spec, "folder": str(folder), "examples": len(made), "method": method}
        told |= {"ids": chosen.ids.tolist(), "scores": chosen.scores.tolist()}
        told["weights"] = None if chosen.weights is None else chosen.weights.tolist()
        if ids is not None:
            ids.write_text("".join(f"{ident}\n" for ident in told["ids"]), encoding="utf-8")
        if json is not None:
            write_json(told, json)
        lines = [f"{len(chosen):,} of {len(made):,} examples, by {method}"]
        table = selection_table(chosen, study)
    if json != STDOUT:
        Console().print(*lines, *([] if quiet else [table]), sep="\n", highlight=False)


@index.command(epilog=f"Try it: persample index check {_EXAMPLE}")
def check(
    spec: Spec,
    folder: Annotated[
        Path | None, typer.Option("--folder", "-f", metavar="DIR", help="Of the index, whose every bit is compared.")
    ] = None,
    blocks: BlocksText = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="X", help="Allowed error relative to the norm; by default by dtype."),
    ] = None,
    device: Device = None,
    seed: Seed = 0,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Compare sketches of the first batch with one backward per sample, and an index with what was written."""
    check_writable("index check", json)
    with refusals("index check"):
        if folder is not None and blocks is not None:
            raise FactoryError("--blocks is known of an index: leave it out, or leave --folder out")
        study = load(spec, seed=seed, device=device)
        sketch = {"sketch": study.sketch} if study.sketch is not None else {}
        sketch = sketch if blocks is None else {"sketch": blocks_of(blocks)}
        made = Index("", study.model, study.losses_fn, **sketch) if folder is None else study.open_index(folder)
        batch = loaders.first_batch(study.loader)
        if batch is None:
            raise FactoryError("the loader has no batches")
        with working(2, quiet=quiet) as tell:
            tell("one backward per sample")
            found, stored = made.check(batch), made.error(batch)
            tell("every chunk of the index")
            if folder is not None:
                made.verify(study.loader)
        allowed = (
            max(map(tolerance_of, {p.dtype for p in made.subject.params.values()})) if tolerance is None else tolerance
        )
    exact = found.worst <= allowed
    told = {
        "samples": found.samples,
        "worst": found.worst,
        "tolerance": allowed,
        "exact": exact,
        "sketch": found.sketch,
    }
    told |= {"products": found.products, "dtypes": {name: vars(error) for name, error in stored.items()}}
    words = f"largest error {found.worst:.1e}, {'at most' if exact else 'above'} {allowed:.1e}"
    if json is not None:
        write_json({"spec": spec, "folder": None if folder is None else str(folder), **told}, json)
    if json != STDOUT:
        tables = [] if quiet else [check_table(found), error_table(stored)]
        Console().print(*tables, f"{'exact' if exact else 'WRONG'}: {words}", sep="\n", highlight=False)
    raise typer.Exit(0 if exact else DIFFERS)


@index.command(epilog=f"Try it: persample index export {_EXAMPLE} --out rows.npy --vectors queries.npy")
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


def fitted(
    study: Study, made: Index, curvature: CurvatureName, labels: str, damping: float | None, *, quiet: bool
) -> Index:
    """An index after `Index.fit`, by the names of options."""
    if labels == "sampled" and curvature not in ("adam", "none") and study.sample_losses_fn is None:
        raise FactoryError("--labels sampled needs sample_losses_fn: let the factory return it (see pi.categorical)")
    return made.fit(
        study.curvature(curvature, labels),
        study.loader,
        damping=damping,
        sample_losses_fn=study.sample_losses_fn,
        progress=False if quiet else None,
    )


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


def _how_many(k: int | None, examples: int, per: str) -> int:
    if k is not None and k > examples and per != "token":
        raise FactoryError(f"--k must be from 1 to {examples}, the number of examples, not {k}")
    return min(10, examples) if k is None else k


def _about(spec: str, made: Index) -> dict[str, Any]:
    plan = made.folder.plan
    size = sum(path.stat().st_size for path in made.folder.path.rglob("*") if path.is_file())
    numbers = sum(plan.encoding.widths) * len(plan.checkpoints)
    about = {"spec": spec, "folder": str(made.folder.path), "examples": len(made), "numbers": numbers, "bytes": size}
    return {**about, "dtype": plan.dtype, "sketch": plan.sketch, "per_token": plan.per_token}


def _is_first() -> bool:
    """Is this the process that prints, if torchrun has started several?"""
    return os.environ.get("RANK", "0") == "0"


def _tell(told: dict[str, Any], text: str, json: str | None) -> None:
    if json is not None:
        write_json({**told, "environment": facts()}, json)
    if json != STDOUT:
        Console().print(text, highlight=False, soft_wrap=True)
