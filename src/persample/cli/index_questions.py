"""`persample index query`, `select` and `check`: what is asked of an index."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from .._factories import FactoryError
from ..influence import Check, Hits, Index, hits_page, loaders
from ..influence.search import Order
from ..influence.study import load
from ..testing.compare import tolerance_of
from .facts import facts
from .hits import as_json, check_table, error_table, selection_table, show_hits
from .options import BlocksText, Device, Folder, Json, Normalise, Parameters, Quiet, Seed, Spec, blocks_of, names_of
from .output import STDOUT, check_writable, working, write_json, write_text
from .refusals import DIFFERS, UNWRITTEN, refusals


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
        orders: tuple[Order, ...] = ("helpful", "harmful") if order == "both" else (order,)
        settings: dict[str, Any] = {"normalise": normalise, "per": per, "parameters": names_of(parameters)}
        hits: dict[str, Hits] = {}
        with working(len(orders), quiet=quiet) as tell:
            for which in orders:
                hits[which] = study.ask(made, count, which, **settings, tell=tell, progress=tell.share)
        about = {"spec": spec, "folder": str(folder), "examples": len(made), "k": count, **settings}
        about["curvature"] = made.folder.noted("curvature") is not None
        page = _page(hits, study.show, study.show_query, about) if html is not None else ""
        lines = [] if quiet or json == STDOUT else show_hits(hits, study, every=all_queries)
    if html is not None:
        write_text("index query", page, html, UNWRITTEN)
    if json is not None:
        write_json("index query", {**about, "queries": as_json(hits), "environment": facts()}, json, UNWRITTEN)
    if json != STDOUT:
        queries = len(next(iter(hits.values())).ids)
        last = f"{queries} queries, {count} of {len(made):,} examples each"
        Console().print(*lines, last, sep="\n", highlight=False)


def _how_many(k: int | None, examples: int, per: str) -> int:
    if k is not None and k > examples and per != "token":
        raise FactoryError(f"--k must be from 1 to {examples}, the number of examples, not {k}")
    return min(10, examples) if k is None else k


def _page(hits: dict[str, Hits], show: Any, show_query: Any, about: dict[str, Any]) -> str:
    said = {key: value for key, value in about.items() if value is not None}
    said["curvature"] = "fitted" if about["curvature"] else "none"
    title = f"persample index: {about['spec']}"
    helpful, harmful = hits.get("helpful"), hits.get("harmful")
    return hits_page(helpful, harmful, show=show, show_query=show_query, title=title, about={**said, **facts()})


def select(
    spec: Spec,
    folder: Folder,
    fraction: Annotated[
        float | None, typer.Option(metavar="X", help="How much of the data to choose; 0.05 by default.")
    ] = None,
    count: Annotated[int | None, typer.Option(min=1, metavar="N", help="Or how many examples.")] = None,
    method: Annotated[
        Literal["top", "diverse", "mislabelled"],
        typer.Option(help="By scores for the queries; by what adds up to their gradient; by the size of gradients."),
    ] = "top",
    normalise: Annotated[bool, typer.Option(help="Long gradients count no more than others.")] = True,
    queries: Annotated[bool, typer.Option(help="diverse: match the queries, or else all the data.")] = True,
    ids: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the ids, one on every line.")] = None,
    device: Device = None,
    seed: Seed = 0,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """The examples that are worth most to train on, or that are most likely mislabelled."""
    check_writable("index select", json, None if ids is None else str(ids))
    with refusals("index select"):
        if fraction is not None and count is not None:
            raise FactoryError("--fraction and --count both say how many to choose: give one of them")
        if fraction is None and count is None:
            fraction = 0.05
        study = load(spec, seed=seed, device=device)
        made = study.open_index(folder)
        with working(1, quiet=quiet) as tell:
            tell("choosing")
            chosen = study.select(
                made, fraction=fraction, count=count, method=method, normalise=normalise, target=queries
            )
        table = selection_table(chosen, study)
    numbers = chosen.ids.tolist()
    if ids is not None:
        write_text("index select", "".join(f"{ident}\n" for ident in numbers), ids, UNWRITTEN)
    if json is not None:
        weights = None if chosen.weights is None else chosen.weights.tolist()
        told = {"spec": spec, "folder": str(folder), "examples": len(made), "method": method, "ids": numbers}
        write_json(
            "index select",
            {**told, "scores": chosen.scores.tolist(), "weights": weights, "environment": facts()},
            json,
            UNWRITTEN,
        )
    if json != STDOUT:
        last = f"{len(chosen):,} of {len(made):,} examples, by {method}"
        Console().print(*([] if quiet else [table]), last, sep="\n", highlight=False)


def check(
    spec: Spec,
    folder: Annotated[
        Path | None, typer.Option("--folder", "-f", metavar="DIR", help="Of the index, whose every bit is compared.")
    ] = None,
    blocks: BlocksText = None,
    tolerance: Annotated[
        float | None, typer.Option(min=0.0, metavar="X", help="Allowed error relative to norms; by default by dtype.")
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
        sketch = study.sketch if blocks is None else blocks_of(blocks)
        made = Index("", study.model, study.losses_fn, sketch=sketch) if folder is None else study.open_index(folder)
        batch = loaders.first_batch(study.loader)
        if batch is None:
            raise FactoryError("the loader has no batches")
        with working(2, quiet=quiet) as tell:
            tell("one backward per sample")
            found, stored = made.check(batch), made.error(batch)
            tell("every chunk of the index")
            if folder is not None:
                made.verify(study.loader)
    allowed = max(tolerance_of(p.dtype) for p in made.subject.params.values()) if tolerance is None else tolerance
    exact = found.worst <= allowed
    if json is not None:
        dtypes = {name: vars(error) for name, error in stored.items()}
        about = {"spec": spec, "folder": None if folder is None else str(folder), "exact": exact}
        write_json(
            "index check",
            {**about, "tolerance": allowed, **_told(found), "dtypes": dtypes, "environment": facts()},
            json,
            UNWRITTEN,
        )
    if json != STDOUT:
        tables = [] if quiet else [check_table(found), error_table(stored)]
        last = f"{'exact' if exact else 'WRONG'}: largest error {found.worst:.1e}, allowed {allowed:.1e}"
        Console().print(*tables, last, sep="\n", highlight=False)
    raise typer.Exit(0 if exact else DIFFERS)


def _told(found: Check) -> dict[str, Any]:
    return {"samples": found.samples, "worst": found.worst, "sketch": found.sketch, "products": found.products}
