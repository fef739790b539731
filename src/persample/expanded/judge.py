"""What running data again shows of one result: where its samples lie, and whether they meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..graph.layout import Layout, Shape, labels
from .registry import name_of
from .replay import Place, Replay, Unfit, Way, decoded, depends_on_several, fitting
from .verdicts import Verdict

Choices = Callable[[Shape], Sequence[Layout]]  # the layouts that fit a shape


def judged(replay: Replay, place: Place, choices: Choices) -> Verdict:
    """What the pattern of one result says."""

    def fits(pattern: Tensor) -> bool:
        return bool(fitting(pattern, choices(tuple(pattern.shape)), replay.batch))

    seen = replay.shown(place, fits)
    if seen is None:
        return Verdict()
    way, pattern = seen
    if not choices(tuple(pattern.shape)):  # a mean over samples, say, to which data may contribute that are apart
        given = _judged_by_data(replay, place, way)
        return given if given.interact else _pooled(replay, place)
    if fits(pattern):
        found = fitting(pattern, choices(tuple(pattern.shape)), replay.batch)
        return Verdict(found[0] if len(found) == 1 else None)
    if not replay.is_deterministic(place, way) or _is_by_coincidence(replay, place, fits):
        return Verdict()
    interact = depends_on_several(pattern, replay.batch)
    return Verdict(None if interact else decoded(pattern, replay.batch), _culprits(replay, place, way, fits), interact)


def _judged_by_data(replay: Replay, place: Place, way: Way) -> Verdict:
    """What data say that went into a result which has no batch."""
    step = replay.steps[place[0]]
    makers = {number: (i, k) for i, s in enumerate(replay.steps[: place[0]]) for k, number in enumerate(s.numbers)}
    given = [makers[number] for number in step.uses() if number in makers]
    try:
        patterns = replay.patterns(given, way) if given else {}
    except Unfit:
        return Verdict()
    meet = [made for made, pattern in patterns.items() if depends_on_several(pattern, replay.batch)]
    return Verdict(None, _culprits(replay, meet[0], way, lambda pattern: True), interact=True) if meet else Verdict()


def _pooled(replay: Replay, place: Place) -> Verdict:
    """What the first input, which is taken at its word, says of a result that has no batch."""
    seen = replay.shown(place, lambda pattern: False, only=0)
    if seen is None or not replay.is_deterministic(place, seen[0]):
        return Verdict()
    _, pattern = seen
    layout = None if depends_on_several(pattern, replay.batch) else decoded(pattern, replay.batch)
    alone = layout is not None and len(labels(layout, tuple(pattern.shape)).unique()) == 1
    return Verdict() if alone else Verdict(layout, name_of(replay.steps[place[0]].func), pooled=True)


def _is_by_coincidence(replay: Replay, place: Place, fits: Callable[[Tensor], bool]) -> bool:
    """Do inputs disagree of which each keeps samples apart? Then some is a table that is as long as the batch."""
    alone = [replay.shown(place, fits, only=number) for number in range(len(replay.sources))]
    return len(alone) > 1 and all(seen is None or fits(seen[1]) for seen in alone)


def _culprits(replay: Replay, place: Place, way: Way, fits: Callable[[Tensor], bool]) -> str:
    """Of the functions that lead to a result, the first in which samples meet, and the first that moves them."""
    before = [(i, k) for i in replay.needed(place) if i != place[0] for k in range(len(replay.steps[i].numbers))]
    try:
        patterns = replay.patterns(before, way) if before else {}
    except Unfit:
        patterns = {}
    meet = [i for (i, _), pattern in patterns.items() if depends_on_several(pattern, replay.batch)]
    moved = [i for (i, _), p in patterns.items() if len(p[p != 0].unique()) > 1 and not fits(p)]
    first = sorted({*sorted(meet)[:1], *sorted(moved)[:1]}) or [place[0]]
    return ", ".join(name_of(replay.steps[i].func) for i in first)
