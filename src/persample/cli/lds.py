"""`persample lds`: do scores predict what training without some examples does?"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from torch import Tensor

from .._factories import FactoryError
from ..influence.lds import lds as measure
from ..influence.study import Retraining, Study, load
from .facts import facts
from .options import BlocksText, CurvatureName, Damping, Device, Json, Labels, Quiet, Seed, Spec, blocks_of
from .output import STDOUT, WRONG_USE, check_writable, fail, write_json
from .refusals import DIFFERS, EXIT_CODES, UNWRITTEN, refusals

HELP = f"""Train again on random subsets: do scores predict the losses of the queries (linear datamodelling score)?

SPEC is as for persample index, with queries and retrain(ids, seed), which trains on some examples and returns the
losses of the queries. Scores are those of an index, or of one that is made for this and removed afterwards.

Exit codes:
0 = {EXIT_CODES[0]}
{DIFFERS} = there is no score, as the losses of every query, or what is predicted of them, are the same for all subsets
{WRONG_USE} = {EXIT_CODES[WRONG_USE]}, or training failed
3 = {EXIT_CODES[3]}
"""
EPILOG = "Try it: persample lds persample.influence.examples:digits --subsets 20 --drop 0.2 --plot lds.png"


def lds(
    spec: Spec,
    subsets: Annotated[int, typer.Option(min=3, metavar="N", help="How many random subsets.")] = 60,
    drop: Annotated[float, typer.Option(metavar="X", help="Which part of the data each leaves out.")] = 0.05,
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Trainings of each, whose losses are averaged.")] = 1,
    workers: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Processes to train in, each of which calls the factory; 0: this one."),
    ] = 0,
    folder: Annotated[
        Path | None, typer.Option("--folder", "-f", metavar="DIR", help="Keep results, so as to train nothing twice.")
    ] = None,
    index: Annotated[Path | None, typer.Option(metavar="DIR", help="Scores of this index, as it is fitted.")] = None,
    curvature: Annotated[
        CurvatureName | None, typer.Option(help="Without --index; shampoo by default.", show_default=False)
    ] = None,
    labels: Labels = "given",
    damping: Damping = None,
    blocks: BlocksText = None,
    subset_seed: Annotated[int, typer.Option(metavar="N", help="Of the subsets.")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Predicted against actual losses.")] = None,
    device: Device = None,
    seed: Seed = 0,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Measure it."""
    check_writable("lds", json, None if plot is None else str(plot))
    if plot is not None and find_spec("matplotlib") is None:
        fail("lds", "--plot needs matplotlib, not installed here: pip install 'persample[bench]'")
    with refusals("lds"):
        if index is not None and (curvature is not None or blocks is not None or damping is not None):
            raise FactoryError("an index is as it was built and fitted: leave --curvature, --damping and --blocks out")
        if folder is not None and folder.is_file():
            raise FactoryError(f"{folder} is a file: name a folder for results")
        study = load(spec, seed=seed, device=device)
        settings = (curvature or "shampoo", labels, damping)
        if index is None:
            with TemporaryDirectory() as scratch:
                scores, ids = _scores(study, Path(scratch) / "index", settings, blocks, quiet)
        else:
            made = study.open_index(index)
            scores, ids = study.scores(made), made.ids()
        found = measure(
            scores,
            Retraining(study, spec, seed, device, ids),
            subsets=subsets,
            drop=drop,
            seeds=range(seeds),
            workers=workers,
            folder=folder,
            seed=subset_seed,
            progress=False if quiet else None,
        )
        if plot is not None and found.says_something:
            found.plot(plot)
    if json is not None:
        told = {"spec": spec, "score": found.score, "interval": found.interval, "subsets": subsets, "drop": drop}
        told |= {"seeds": seeds, "queries": len(scores), "examples": scores.shape[1]}
        write_json("lds", {**told, "per_query": found.per_query.tolist(), "environment": facts()}, json, UNWRITTEN)
    if not found.says_something:
        same = "what retrain returns" if bool(_is_constant(found.actual).all()) else "what scores predict"
        fail(
            "lds",
            f"there is no score: {same} for a query is the same for all subsets. Leave more examples out (--drop), "
            f"and see whether retrain(ids, seed) trains on ids alone",
            DIFFERS,
        )
    if json != STDOUT:
        size = f"{len(scores)} queries, {subsets} subsets without {drop:.0%} of {scores.shape[1]:,} examples"
        Console().print(f"{found}: {size}", highlight=False, soft_wrap=True)


def _is_constant(losses: Tensor) -> Tensor:
    """(Q,): are a query's the same for all subsets?"""
    return (losses == losses[:1]).all(0)


def _scores(
    study: Study, folder: Path, settings: tuple[CurvatureName, str, float | None], blocks: str | None, quiet: bool
) -> tuple[Tensor, Tensor]:
    """Of an index that is made for it: scores (Q, N) and ids (N,)."""
    made = study.new_index(folder, sketch=None if blocks is None else blocks_of(blocks))
    shown = False if quiet else None
    made.build(study.loader, study.checkpoints, ids_fn=study.ids_fn, progress=shown)
    study.fit(made, *settings, progress=shown)
    return study.scores(made), made.ids()
