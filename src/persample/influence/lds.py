"""How good scores are: what they predict for models trained on other subsets, and what such models do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from .retraining import Retrain, outcomes


@dataclass(frozen=True)
class DataModelScore:
    """The linear datamodelling score: rank correlations of predicted and actual losses over random subsets.

    ``score`` is the mean over queries, ``interval`` its confidence interval, by drawing subsets again (bootstrap),
    ``per_query`` (Q,) the correlation of each; NaN for a query whose loss is the same for all subsets, which does not
    count. ``predicted`` and ``actual`` are (subsets, Q).
    """

    score: float
    interval: tuple[float, float]
    per_query: Tensor
    predicted: Tensor
    actual: Tensor

    @property
    def says_something(self) -> bool:
        """Is there a query that has a correlation?"""
        return not bool(self.per_query.isnan().all())

    def __str__(self) -> str:
        low, high = self.interval
        return f"LDS {self.score:.3f} ({low:.3f} to {high:.3f})"

    def plot(self, path: str | Path) -> None:
        """Predicted against actual losses, all queries in one picture (needs matplotlib: ``persample[bench]``).

        Each query's are in standard deviations over subsets: scores say which loss is higher, not by how much.
        """
        names = (f"{what} loss of a query, in standard deviations" for what in ("predicted", "actual"))
        _scatter(_standardised(self.predicted), _standardised(self.actual), str(self), Path(path), *names)


@dataclass(frozen=True)
class Counterfactual:
    """What training without chosen examples was predicted to do to each query's loss, and what it did: (Q,) each.

    ``removed`` holds the ids left out for each query. A positive change is a higher loss.
    """

    predicted: Tensor
    actual: Tensor
    removed: list[Tensor]

    @property
    def correlation(self) -> float:
        """The rank correlation over queries of predicted and actual changes."""
        return float(spearman(self.predicted.unsqueeze(1), self.actual.unsqueeze(1)))

    def plot(self, path: str | Path) -> None:
        """Predicted against actual changes, one point per query (needs matplotlib: ``persample[bench]``)."""
        _scatter(self.predicted, self.actual, f"rank correlation {self.correlation:.2f}", Path(path))


def lds(
    scores: Tensor,
    retrain: Retrain,
    *,
    subsets: int = 60,
    drop: float = 0.05,
    seeds: Sequence[int] = (0,),
    workers: int = 0,
    folder: str | Path | None = None,
    seed: int = 0,
    confidence: float = 0.95,
    progress: bool | None = None,
) -> DataModelScore:
    """Train again on random subsets, and compare the queries' losses with what scores predict.

    >>> import torch
    >>> from persample import influence as pi
    >>> scores = torch.randn(3, 100)
    >>> retrain = lambda ids, seed: -scores[:, ids].sum(1)  # a world in which the scores are right
    >>> round(pi.lds(scores, retrain, subsets=10).score, 3)
    1.0

    Args:
        scores: (queries, examples); positive for examples whose training lowers the query's loss.
        retrain: ``retrain(ids, seed)`` trains on the examples ``ids`` and returns the losses of the queries. With
            ``workers``, a function that can be pickled: one of a module, not a lambda.
        subsets: how many random subsets.
        drop: which part of the examples is left out of each.
        seeds: given to ``retrain``, and losses are means over them: fewer differences by chance alone.
        workers: processes to train in, with one thread each; 0 for this process.
        folder: where results are kept, one file each. With the same arguments, what is there is not computed again.
        seed: of the subsets.
        confidence: of the interval.
        progress: show how far it is; by default in terminals.

    Returns:
        A `DataModelScore`.
    """
    scores = _checked(scores)
    examples = scores.shape[1]
    removed_count = round(drop * examples)
    if not 0 < drop < 1 or not 0 < removed_count < examples:
        raise ValueError(f"drop={drop} of {examples} examples must leave out at least one and keep at least one")
    if subsets < 3:
        raise ValueError(f"a rank correlation needs at least 3 subsets, not {subsets}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, not {confidence}")
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(examples, generator=generator) for _ in range(subsets)]
    kept = [order[removed_count:].sort().values for order in orders]
    actual = outcomes(retrain, kept, seeds, queries=len(scores), workers=workers, folder=folder, progress=progress)
    predicted = torch.stack([scores[:, order[:removed_count]].sum(1) for order in orders])
    per_query = spearman(predicted, actual)
    return DataModelScore(
        float(per_query.nanmean()), bootstrap(predicted, actual, confidence, generator), per_query, predicted, actual
    )


def counterfactual(
    scores: Tensor,
    retrain: Retrain,
    *,
    count: int,
    which: Literal["harmful", "helpful"] = "harmful",
    seeds: Sequence[int] = (0,),
    workers: int = 0,
    folder: str | Path | None = None,
    progress: bool | None = None,
) -> Counterfactual:
    """Train again without the examples that are worst (or best) for each query: predicted and actual changes.

    >>> import torch
    >>> from persample import influence as pi
    >>> scores = torch.randn(3, 100)
    >>> result = pi.counterfactual(scores, lambda ids, seed: -scores[:, ids].sum(1), count=5)
    >>> torch.allclose(result.predicted, result.actual, atol=1e-4), bool((result.actual < 0).all())
    (True, True)

    Args:
        scores: (queries, examples); positive for examples whose training lowers the query's loss.
        retrain: as for `lds`; it is called for all examples, and once for each query.
        count: how many examples to leave out for each query.
        which: "harmful", the lowest scores, or "helpful", the highest.
        seeds: given to ``retrain``, and losses are means over them.
        workers: processes to train in; 0 for this process.
        folder: where results are kept, so that they are not computed again.
        progress: show how far it is; by default in terminals.

    Returns:
        A `Counterfactual`.
    """
    scores = _checked(scores)
    queries, examples = scores.shape
    if which not in ("harmful", "helpful"):
        raise ValueError(f"which must be 'harmful' or 'helpful', not {which!r}")
    if not 0 < count < examples:
        raise ValueError(f"count must be from 1 to {examples - 1}, not {count}")
    order = scores.argsort(dim=1, descending=which == "helpful", stable=True)
    removed = [row[:count] for row in order]
    kept = [row[count:].sort().values for row in order]
    everything = torch.arange(examples)
    found = outcomes(
        retrain, [everything, *kept], seeds, queries=queries, workers=workers, folder=folder, progress=progress
    )
    predicted = torch.stack([scores[q, ids].sum() for q, ids in enumerate(removed)])
    return Counterfactual(predicted, found[1:].diagonal() - found[0], removed)


def ranks(values: Tensor) -> Tensor:
    """(n, Q): the rank of each value in its column; equal values share the mean of theirs."""
    rows = values.double().t().contiguous()
    ordered = rows.sort(dim=1).values
    below, up_to = (torch.searchsorted(ordered, rows, right=right) for right in (False, True))
    return (below + up_to + 1).t().double() / 2


def spearman(one: Tensor, other: Tensor) -> Tensor:
    """(Q,): the rank correlation of every column of (n, Q); NaN where a column does not vary."""
    a, b = ranks(one), ranks(other)
    a, b = a - a.mean(0), b - b.mean(0)
    size = (a.square().sum(0) * b.square().sum(0)).sqrt()
    return torch.where(size > 0, (a * b).sum(0) / size, torch.nan)


def bootstrap(
    predicted: Tensor, actual: Tensor, confidence: float, generator: torch.Generator, draws: int = 500
) -> tuple[float, float]:
    """A confidence interval of the mean rank correlation, by drawing rows again."""
    found = []
    for _ in range(draws):
        rows = torch.randint(len(predicted), (len(predicted),), generator=generator)
        found.append(spearman(predicted[rows], actual[rows]).nanmean())
    values = torch.stack(found)
    values = values[values.isfinite()]
    if not len(values):
        return float("nan"), float("nan")
    tail = (1 - confidence) / 2
    return float(values.quantile(tail)), float(values.quantile(1 - tail))


def _checked(scores: Tensor) -> Tensor:
    if not isinstance(scores, Tensor) or scores.ndim != 2 or not scores.numel():
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"scores must be (queries, examples), not {got}")
    if not scores.isfinite().all():
        raise ValueError("scores hold NaN or infinite numbers")
    return scores.detach().cpu().double()


def _standardised(losses: Tensor) -> Tensor:
    """(subsets, Q) with mean 0 and deviation 1 for each query; zeros where all are the same."""
    centred = losses - losses.mean(0)
    deviation = centred.std(0)
    return centred / torch.where(deviation > 0, deviation, 1)


def _scatter(
    predicted: Tensor,
    actual: Tensor,
    title: str,
    path: Path,
    x: str = "predicted change of the loss",
    y: str = "actual change of the loss",
) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'persample[bench]'") from error
    figure = Figure(figsize=(5, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.scatter(predicted.flatten(), actual.flatten(), s=6, alpha=0.4)
    axes.axline((0, 0), slope=1, color="grey", linewidth=0.8)
    axes.set(xlabel=x, ylabel=y, title=title)
    figure.savefig(path, dpi=150)
