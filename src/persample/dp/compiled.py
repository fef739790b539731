"""Clipped sums of private training by compiled steps: from a batch to whole numbers.

A sample is added by the compiled graph if its own numbers allow it, and by the eager engine if they do not, whatever
the samples beside it are like, and whether or not the batch size was seen before. Otherwise one sample could change how
others are rounded, and move what is released by more than its bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..compiled.build import Backend
from ..compiled.compilers import open_batch
from ..compiled.region import Call, State
from ..compiled.step import Asked, CompiledStep
from ..reductions import ClippedSum, Clipping
from ..reductions.certified import NOMINAL, CertifiedClippedSum, CertifiedSums, ExactClippedSumOfSome, put_end_to_end
from ..reductions.exact import ExactClippedSum, ExactSums
from ..reductions.groups import listed
from ..trees import leaves
from ..verbs import reduce
from .clips import Clipper
from .given import Given, check_count, check_one_per_sample
from .plan import Plan
from .sampling import BatchPart, most_samples
from .sums import Joined

_MOST_BUILDS = 32  # before the eager engine answers whatever has not been built


@dataclass
class Task:
    """What is asked for in a step: the clip as it is now, and how many samples there are."""

    clip: ClippedSum
    size: int
    padding: int


@dataclass(frozen=True)
class AskedExactly(Asked):
    """What the eager engine is to compute for a step: sums that are exact, of all samples that count or of some."""

    samples: int = 0  # that may be added up at most
    expected: int = 0  # in a batch, by the plan
    task: Task = field(default_factory=lambda: Task(ClippedSum(NOMINAL), 0, 0))

    def usual(self, samples: int) -> int:
        return self.expected  # and not what was drawn

    def losses(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """One loss for every sample of the batch."""
        return self.checked(self.losses_fn(*args, **kwargs))

    def checked(self, losses: Tensor) -> Tensor:
        """The losses, which must be as many as there are samples."""
        check_one_per_sample(losses)
        check_count(len(losses), self.task.size)
        return losses

    def reduced(self, losses: Tensor) -> tuple[Any, ...]:
        clip = ExactClippedSum(self.task.clip, self.samples, self.task.padding)
        found: ExactSums = reduce(self.checked(losses), self.params, clip, independent=True)[0]
        return (_of_exact(found, self.task, self.params),)

    def of_some(self, which: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ExactSums:
        """The sums over these samples alone."""
        clip = ExactClippedSumOfSome(self.task.clip, self.samples, which)
        found: ExactSums = reduce(self.losses(args, kwargs), self.params, clip, independent=True)[0]
        return found


class CompiledSums(CompiledStep):
    """The clipped sums of steps, by compiled graphs where there are some."""

    def __init__(
        self,
        losses_fn: Callable[..., Tensor],
        model: nn.Module,
        params: Mapping[str, Tensor],
        clipper: Clipper,
        plan: Plan,
        backend: Backend,
    ) -> None:
        if not callable(losses_fn):
            raise TypeError(f"compile must be a function from a batch to losses, not a {type(losses_fn).__name__}")
        clip, moving = copy(clipper.reduction()), clipper.bound is not None
        if moving:
            clip.max_norm = NOMINAL
        most = most_samples(plan)
        self._model, self._graphs = model, CertifiedClippedSum(clip, most, moving=moving)
        self._exactly = AskedExactly(losses_fn, params, (self._graphs,), True, None, most, plan.batch_size)
        super().__init__(self._exactly, backend, None, _MOST_BUILDS, verbose=False)

    def sums(self, given: Given, part: BatchPart, clipper: Clipper, at_once: int, *, varies: bool) -> BatchSums:
        """The clipped sums of a batch, in a call that may have at most so many samples ``at_once``."""
        self._expect(part.size, part.padding, clipper.reduction())
        counting = part.size - part.padding
        bound = clipper.bound if isinstance(clipper.bound, float) else NOMINAL
        self._graphs.set_for(bound, counting=counting, at_once=at_once)
        if varies:
            _open([*given.args, *given.options.values()], part.size)
        found: CertifiedSums = self(*given.args, **given.options)[0]
        check_count(len(found.added), part.size)
        return BatchSums.of(found, counting)

    def _expect(self, size: int, padding: int, clip: ClippedSum) -> None:
        vars(self._exactly.task).update(size=size, padding=padding, clip=clip)

    def show(self, given: Given, size: int) -> None:
        """Run the losses' function as Python runs it, and leave no trace of it."""
        self._exactly.task.size = size
        tensors = [t for t in leaves([given.args, given.options]) if isinstance(t, Tensor)]
        before = State.of([*tensors, *self._model.buffers()])
        try:
            with torch.inference_mode(False), torch.enable_grad():
                self._exactly.losses(given.args, given.options)
        finally:
            before.restore()

    def _first(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        want = super()._first(call, args, kwargs)
        if call.answer is None:
            return want
        return call.answer.results if call.answer.doubt is None else self._again(call, args, kwargs)

    def _again(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The eager engine adds the samples that the graph has left out."""
        assert call.answer is not None
        call.undo()
        self.doubts += 1
        found: CertifiedSums = call.answer.results[0]
        task = self._exactly.task
        check_count(len(found.added), task.size)
        which = (~found.added[: task.size - task.padding]).nonzero().squeeze(1)
        return (_with_some(found, self._exactly.of_some(which, args, kwargs), which),)


def _of_exact(found: ExactSums, task: Task, params: Any) -> CertifiedSums:
    """What the eager engine has computed, in the form of a graph's answer: padding has the numbers of no sample."""
    sums = {name: total for name in params if (total := found.take(name)) is not None}
    device = listed(found.clipping.norms)[0].device
    clipping, asked = (_padded(c, task.padding) for c in (found.clipping, found.asked))
    added = torch.ones(task.size, dtype=torch.bool, device=device)
    added[task.size - task.padding :] = False
    return CertifiedSums(tuple(sums), put_end_to_end(list(sums.values()), device), clipping, asked, added)


def _padded(clipping: Clipping, padding: int) -> Clipping:
    norms, weights = clipping
    if padding:
        norms, weights = (_each(lambda t: torch.cat([t, t.new_zeros(padding)]), tree) for tree in clipping)
    return Clipping(norms, weights, clipping.dropped)


def _each(change: Callable[..., Tensor], *trees: Any) -> Any:
    """The same for every group."""
    first = trees[0]
    if isinstance(first, Tensor):
        return change(*trees)
    if isinstance(first, Mapping):
        return {key: change(*[tree[key] for tree in trees]) for key in first}
    return tuple(change(*each) for each in zip(*trees, strict=True))


def _with_some(found: CertifiedSums, some: ExactSums, which: Tensor) -> CertifiedSums:
    """A graph's answer, with samples that it has left out."""
    more = [some.take(name) for name in found.names]
    sums = [t for t in more if t is not None]
    assert len(sums) in (0, len(more))  # the same losses reach the same parameters
    line = found.line + put_end_to_end(sums, found.line.device) if sums else found.line
    dropped = which[list(some.clipping.dropped)].tolist()

    def filled(ours: Clipping, theirs: Clipping) -> Clipping:
        norms, weights = (
            _each(lambda every, few: every.index_copy(0, which, few), x, y) for x, y in zip(ours, theirs, strict=True)
        )
        return Clipping(norms, weights, dropped)

    clipping, asked = filled(found.clipping, some.clipping), filled(found.asked, some.asked)
    return CertifiedSums(found.names, line, clipping, asked, found.added.index_fill(0, which, True))


def _first_of(clipping: Clipping, counting: int) -> Clipping:
    if len(listed(clipping.norms)[0]) == counting:
        return clipping
    norms, weights = (_each(lambda t: t[:counting], tree) for tree in clipping)
    return Clipping(norms, weights, clipping.dropped)


@dataclass(frozen=True)
class BatchSums:
    """The sums of a batch, and how they came about."""

    line: Joined
    clipping: Clipping
    asked: Clipping
    weighed_down: float

    @classmethod
    def of(cls, found: CertifiedSums, counting: int) -> BatchSums:
        """Of all samples that count."""
        clipping, asked = (_first_of(c, counting) for c in (found.clipping, found.asked))
        first, *others = [w < 1 for w in listed(clipping.weights)]
        below = int(sum(others, first).count_nonzero()) if counting else 0
        return cls(Joined(found.names, found.line), clipping, asked, below / max(counting, 1))


def _open(batch: Any, size: int) -> None:
    """Tell Dynamo that the batch size varies."""
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == size > 1:
            open_batch(leaf)
