"""Choosing what to train on, or what to look at: by scores, by sketches of gradients, or from an index."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..kernels.norms import row_norms

Method = Literal["top", "diverse", "mislabelled"]


@dataclass(frozen=True)
class Selection:
    """Chosen examples, best first: their ``ids``, the ``scores`` they were chosen by, and ``weights`` if there are any.

    ``weights`` are those with which the chosen gradients add up to the target, for ``method="diverse"``.
    """

    ids: Tensor
    scores: Tensor
    weights: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)


def select(
    source: Any,
    targets: Any = None,
    *,
    fraction: float | None = None,
    count: int | None = None,
    method: Method = "top",
    normalise: bool = True,
) -> Selection:
    """The examples that are worth most for a target, that match it together, or that are most likely mislabelled.

    >>> import torch
    >>> from persample import influence as pi
    >>> sketches = torch.tensor([[1.0, 0.0], [5.0, 5.0], [0.0, 1.0], [-1.0, 0.0]])
    >>> pi.select(sketches, targets=torch.tensor([[1.0, 0.1]]), count=2).ids
    tensor([0, 1])
    >>> pi.select(sketches, count=1, method="mislabelled").ids
    tensor([1])

    Args:
        source: sketches (or whole gradients) of N examples, (N, D), with ``targets`` in the same space; or scores
            (Q, N), where positive is helpful, without ``targets``; or an index. For "mislabelled" also (N,) values of
            self-influence.
        targets: for sketches, (Q, D), or a list of such, one per task; for an index, a batch, or a list of batches.
            Every target task is one direction, the mean of its rows; an example counts by the task it is best for.
        fraction: how much of the data to choose, above 0 and at most 1.
        count: or how many examples.
        method: "top": by inner product with the target. "diverse": orthogonal matching pursuit, which chooses examples
            whose gradients together, with weights of at least 0, come nearest to the target's (by default the mean of
            all examples). "mislabelled": by self-influence, the squared norm of an example's gradient.
        normalise: divide gradients by their norms first, so that large ones do not win by size alone (as LESS does).

    Returns:
        A `Selection`.
    """
    if method not in ("top", "diverse", "mislabelled"):
        raise ValueError(f"method must be 'top', 'diverse' or 'mislabelled', not {method!r}")
    if not isinstance(source, Tensor):
        return _from_index(source, targets, fraction, count, method, normalise)
    _check_numbers(source, "source")
    if method == "mislabelled":
        return _best(_self_influence(source), fraction, count)
    if method == "top" and targets is None:
        if source.ndim != 2:
            raise ValueError(f"scores must be (queries, examples), not {tuple(source.shape)}")
        return _best(source.mean(0), fraction, count)
    sketches = _matrix(source, "sketches")
    if method == "top":
        return _best(_by_task(sketches, _tasks(targets, sketches), normalise), fraction, count)
    tasks = _unit(sketches.mean(0, keepdim=True), False) if targets is None else _tasks(targets, sketches)
    return _matched(sketches, tasks.mean(0), _how_many(len(sketches), fraction, count), normalise)


def _from_index(
    index: Any, targets: Any, fraction: float | None, count: int | None, method: Method, normalise: bool
) -> Selection:
    """From something with methods of an index: ``scores(batch)``, (Q, N), or ``sketches()``, (rows, D) at a time."""
    if method == "top":
        scores: Callable[..., Tensor] | None = getattr(index, "scores", None)
        if scores is None:
            raise TypeError(f"source must be a tensor or an index with scores(batch), not a {type(index).__name__}")
        if targets is None:
            raise ValueError("an index needs targets: a batch, or a list of batches")
        batches = targets if isinstance(targets, list) else [targets]
        found = torch.stack([scores(batch, normalise=normalise).mean(0) for batch in batches])
        return _by_id(index, _best(found.amax(0), fraction, count))
    blocks: Callable[[], Iterable[Tensor]] | None = getattr(index, "sketches", None)
    if blocks is None:
        raise TypeError(f"method={method!r} needs a tensor or an index with sketches(), not a {type(index).__name__}")
    if method == "mislabelled":
        found = torch.cat([_self_influence(block) for block in blocks()])
        return _by_id(index, _best(found, fraction, count))
    if targets is not None and not isinstance(targets, Tensor):
        raise TypeError(
            "method='diverse' from an index needs targets as sketches (Q, D), index.vectors(batch), or none for the "
            "whole data"
        )
    rows = torch.cat(list(blocks()))
    return _by_id(index, select(rows, targets, fraction=fraction, count=count, method=method, normalise=normalise))


def _by_id(index: Any, chosen: Selection) -> Selection:
    """By the examples' own ids, if the index has them, in place of their places."""
    ids: Callable[[], Tensor] | None = getattr(index, "ids", None)
    return chosen if ids is None else replace(chosen, ids=ids()[chosen.ids])


def _by_task(sketches: Tensor, tasks: Tensor, normalise: bool) -> Tensor:
    """(N,): the inner product with the task that each example is best for."""
    return (_unit(sketches, normalise) @ _unit(tasks, normalise).t()).amax(1)


def _matched(sketches: Tensor, target: Tensor, count: int, normalise: bool) -> Selection:
    """Orthogonal matching pursuit with weights of at least 0; what is left when nothing helps any more goes by size."""
    atoms = _unit(sketches.double(), normalise)
    target = target.double()
    goal = atoms @ target
    chosen: list[int] = []
    gains: list[float] = []
    weights, gram = atoms.new_zeros(count), atoms.new_zeros(count, count)
    with_chosen = atoms.new_zeros(count, len(atoms))  # inner products of those chosen with all
    free = torch.ones(len(atoms), dtype=torch.bool, device=atoms.device)
    for done in range(count):
        fits = (goal - weights[:done] @ with_chosen[:done]).masked_fill(~free, -torch.inf)
        best = int(fits.argmax())
        free[best] = False
        chosen.append(best)
        gains.append(float(fits[best]))
        with_chosen[done] = atoms @ atoms[best]
        gram[done, : done + 1] = with_chosen[done, chosen]
        gram[: done + 1, done] = with_chosen[done, chosen]
        weights[: done + 1] = _nonnegative(gram[: done + 1, : done + 1], goal[chosen], weights[: done + 1])
    return Selection(torch.tensor(chosen, dtype=torch.int64), torch.tensor(gains, dtype=torch.float64), weights.cpu())


def _nonnegative(gram: Tensor, goal: Tensor, start: Tensor) -> Tensor:
    """Least squares with weights of at least 0 (Lawson and Hanson), from those of one atom less."""
    weights, active, tiny = start, start > 0, 1e-12 * float(goal.abs().max())
    for _ in range(3 * len(goal)):
        slope = (goal - gram @ weights).masked_fill(active | (gram.diagonal() <= 0), -torch.inf)
        steepest = int(slope.argmax())
        if not float(slope[steepest]) > tiny:
            break
        active[steepest] = True
        weights = _of_active(gram, goal, weights, active)
    return weights


def _of_active(gram: Tensor, goal: Tensor, weights: Tensor, active: Tensor) -> Tensor:
    """Least squares of active atoms alone; those whose weights would fall below 0 are active no longer."""
    while True:
        places = active.nonzero().flatten()
        best, now = _solved(gram[places][:, places], goal[places]), weights[places]
        if bool((best > 0).all()):
            return torch.zeros_like(weights).index_copy_(0, places, best)
        steps = torch.where(best <= 0, now / (now - best).clamp(min=1e-300), torch.inf)
        step, first = steps.min(0)
        weights = torch.zeros_like(weights).index_copy_(0, places, (now + step * (best - now)).clamp_min(0))
        active[places[first]] = False


def _solved(gram: Tensor, goal: Tensor) -> Tensor:
    """Of atoms that may be copies of each other: a little more on the diagonal."""
    ridge = 1e-12 * gram.diagonal().sum()
    system = gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    solved: Tensor = torch.linalg.solve(system, goal)
    return solved


def _self_influence(source: Tensor) -> Tensor:
    return source if source.ndim == 1 else source.flatten(1).double().square().sum(1)


def _tasks(targets: Any, sketches: Tensor) -> Tensor:
    """(tasks, D): the mean of each task's rows, of unit length each."""
    groups: Sequence[Any] = targets if isinstance(targets, (list, tuple)) else [targets]
    if not groups:
        raise ValueError("targets are empty")
    means = []
    for group in groups:
        if not isinstance(group, Tensor):
            raise TypeError(f"targets of sketches must be tensors (Q, D), not {type(group).__name__}")
        rows = _matrix(group, "targets").to(sketches)
        _check_numbers(rows, "targets")
        if rows.shape[1] != sketches.shape[1] or not len(rows):
            raise ValueError(f"targets {tuple(group.shape)} are not of the space of sketches {tuple(sketches.shape)}")
        means.append(rows.mean(0))
    return torch.stack(means)


def _matrix(rows: Tensor, what: str) -> Tensor:
    if rows.ndim < 2:
        raise ValueError(f"{what} must have one row per example, (N, D), not {tuple(rows.shape)}")
    return rows.flatten(1)


def _check_numbers(values: Tensor, what: str) -> None:
    if not values.isfinite().all():
        raise ValueError(f"{what} holds NaN or infinite numbers: leave these examples out first")


def _unit(rows: Tensor, normalise: bool) -> Tensor:
    if not normalise:
        return rows
    norms = row_norms(rows).unsqueeze(1)
    return (rows / torch.where(norms > 0, norms, 1)).to(torch.promote_types(rows.dtype, torch.float32))


def _best(scores: Tensor, fraction: float | None, count: int | None) -> Selection:
    number = _how_many(len(scores), fraction, count)
    order = scores.argsort(descending=True, stable=True)[:number]
    return Selection(order.cpu(), scores[order].cpu())


def _how_many(examples: int, fraction: float | None, count: int | None) -> int:
    if (fraction is None) == (count is None):
        raise ValueError("say how many to choose: fraction= or count=, and not both")
    if fraction is not None:
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1, not {fraction}")
        return min(examples, max(1, round(fraction * examples)))
    assert count is not None
    if not 0 <= count <= examples:
        raise ValueError(f"count must be from 0 to {examples}, the number of examples, not {count}")
    return count
