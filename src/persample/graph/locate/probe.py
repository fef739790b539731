"""Asking the data: which sample does each element of a backward output belong to?

The sample's number is found bit by bit. For every bit the op is run twice, once with the cotangents of those samples
alone whose number has it, once with those of the others, zeros standing for the rest. An element that is zero in one of
the two runs has nothing of its samples; one that is not zero in either is where samples meet. A zero is exact: however
small a contribution, and in whatever dtype, nothing rounds away beside another sample's. 2 log2 B runs tell B samples.

C++ nodes are linear in their cotangents, so they can be asked alone, with random cotangents; these are as large as the
dtype allows, so that nothing underflows that a real backward would not lose. Custom ``autograd.Function``s need not be
linear: they are asked with the cotangents of this call, one sample after another, as the definition does, and each
sample's part must be what it is with all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...kernels.ragged import is_always_ragged
from ..layout import NOBODY, Block, Labels, Layout, Shape, labels, simplify, strides
from ..read.invoke import call_each
from ..read.library import unspent
from ..read.notes import by_data
from ..read.roots import Roots
from ..read.saved import metadata
from ..read.site import Flow, Outcome, Site
from ..read.tape import Slot, Tape

_Outputs = Sequence[Tensor | None]
_Run = Callable[[Sequence["_Weigh"]], Iterable[_Outputs]]
_Weigh = Callable[[Tensor], Tensor]  # from sample numbers to what their cotangents are multiplied by; False: zeros
Answers = list["_Answer | None"]
_OWN: Shape = (-1,)  # in place of a target's shape: whatever the output's own shape is


def probe_node(site: Site, layouts: Sequence[Layout | None], batch: int, *, summed: bool = True) -> list[Outcome]:
    """The outcome of every output of a linear node, from random cotangents with these layouts.

    ``summed=False`` asks about outputs as the node returns them, before the engine sums over broadcast dims. Random
    numbers may cancel, in half precision soon: where an element stayed zero, others are drawn.
    """
    metas, targets = metadata(site.node), _targets(site, summed)
    answers: Answers | None = None
    for draw in range(_draws(metas[0].dtype)):
        seed = len(metas) * draw
        noise = [None if layout is None else _noise(metas[nr], seed + nr) for nr, layout in enumerate(layouts)]
        answers = _joined(answers, _by_bits(_runs(site, noise, layouts), targets, batch, exactly=False))
        if all(answer is None or answer.is_whole() for answer in answers):
            break
    return _outcomes(answers or [], targets, batch)


def probe_call(
    site: Site,
    cotangents: Sequence[Tensor | None],
    layouts: Sequence[Layout | None],
    batch: int,
    *,
    linear: bool = True,
) -> list[Outcome]:
    """The outcome of every output of a node, for the cotangents that a backward brought to it.

    A node that need not be linear is run sample by sample.
    """
    run, targets = _runs(site, cotangents, layouts), _targets(site, summed=True)
    answers = _by_bits(run, targets, batch, exactly=True) if linear else _one_by_one(run, targets, batch)
    return _outcomes(answers, targets, batch)


def probe_slots(tape: Tape, roots: Roots, slots: Sequence[Slot], *, linear: bool = True) -> dict[Slot, Outcome]:
    """The outcome of the cotangents at ``slots``, by real backwards from the roots."""
    metas, places = [metadata(node)[nr] for node, nr in roots.slots], [tape.graph.at(slot) for slot in slots]
    starts = roots.cotangents or [torch.ones(m.shape, dtype=m.dtype, device=m.device) for m in metas]
    sample_indices = [labels(layout, tuple(m.shape), m.device) for layout, m in zip(roots.layouts, metas, strict=True)]

    def run(weighings: Sequence[_Weigh]) -> Iterator[_Outputs]:
        for weigh in weighings:
            weighed = [_weighed(g, sample_index, weigh) for g, sample_index in zip(starts, sample_indices, strict=True)]
            with unspent(map(tape.node, tape.order)):
                yield [_plain(t) for t in roots.pull(weighed, places, retain_graph=True)]

    targets = [tape.shape(slot) for slot in slots]
    answers = _by_bits(run, targets, roots.batch, exactly=True) if linear else _one_by_one(run, targets, roots.batch)
    return dict(zip(slots, _outcomes(answers, targets, roots.batch), strict=True))


def _targets(site: Site, summed: bool) -> list[Shape | None]:
    return [None if slot is None else site.target(k) if summed else _OWN for k, slot in enumerate(site.edges)]


def _runs(site: Site, cotangents: Sequence[Tensor | None], layouts: Sequence[Layout | None]) -> _Run:
    """A node's outputs for some samples' part of these cotangents."""
    labelled: list[tuple[Tensor, Tensor] | None] = [
        None if g is None or layout is None else (g, labels(layout, tuple(g.shape), g.device))
        for g, layout in zip(cotangents, layouts, strict=True)
    ]

    def run(weighings: Sequence[_Weigh]) -> list[_Outputs]:
        rows = ([None if g is None else _weighed(*g, weigh) for g in labelled] for weigh in weighings)
        return call_each(site.node, rows, site.edges, lambda outputs: [_plain(t) for t in outputs])

    return run


def _weighed(g: Tensor, sample_index: Tensor, weigh: _Weigh) -> Tensor:
    """A cotangent with some samples' part replaced by zeros, never multiplied by them: they may be NaN."""
    by = weigh(sample_index)
    zero = torch.zeros((), dtype=g.dtype, device=g.device)
    return torch.where(by & (sample_index != NOBODY), g, zero) if by.dtype == torch.bool else g * by.to(g.dtype)


def _plain(t: Tensor | None) -> Tensor | None:
    """Dense numbers as they are, whatever the tensor's own form."""
    return None if t is None else (t.to_dense() if t.is_sparse else t).resolve_conj().resolve_neg()


def _noise(meta: Any, seed: int) -> Tensor:
    """Large numbers, random but for a period that no op has reason to follow; the user's generator is left alone."""
    shape, dtype = tuple(meta.shape), meta.dtype
    period, count = 65537, prod(shape)
    generator = torch.Generator("cpu").manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    line = torch.rand(min(period, count), generator=generator, dtype=wide, device="cpu").add_(1)
    line = line.mul_(torch.finfo(dtype).max ** 0.5 / 16).to(meta.device, dtype)
    return line.repeat(-(-count // period))[:count].reshape(shape) if count else line.reshape(shape)


def _everybody(sample_index: Tensor) -> Tensor:
    return torch.ones_like(sample_index, dtype=torch.bool)


def _nobody(sample_index: Tensor) -> Tensor:
    return torch.zeros_like(sample_index, dtype=torch.bool)


def _unequal(sample_index: Tensor) -> Tensor:
    """Weights by which contributions that cancelled no longer do, and by which what is not linear shows."""
    return torch.exp2((sample_index.clamp(min=0) % 4).to(torch.float64))


def _only(i: int) -> _Weigh:
    return lambda sample_index: sample_index == i


def _with_bit(j: int, value: int) -> _Weigh:
    return lambda sample_index: (sample_index >> j) & 1 == value


def _by_bits(run: _Run, shapes: Sequence[Shape | None], batch: int, exactly: bool) -> Answers:
    """Bit by bit; ``exactly``: what samples have apart must be what they have together.

    The first bit alone, as most samples that meet do so there; the others at once, as every run may cost a
    recomputation of a checkpointed region.
    """
    by_data()
    bits = [_with_bit(j, value) for j in range((batch - 1).bit_length()) for value in (0, 1)]
    checks = [_everybody, _unequal] if exactly else []
    blank, *others = run([_nobody, *checks, *bits[:2]])
    checked, runs = others[: len(checks)], others[len(checks) :]
    answers = [None if t is None or s is None else _Answer(t) for t, s in zip(blank, shapes, strict=True)]

    together = checked[0] if exactly else [None] * len(blank)
    _read_bit(answers, 0, together, *runs)
    if bits[2:] and not all(answer is None or answer.mixed for answer in answers):
        runs = list(run(bits[2:]))
        for j in range(1, len(bits) // 2):
            _read_bit(answers, j, together, *runs[2 * j - 2 : 2 * j])
    for k, answer in enumerate(answers):
        if answer is not None and exactly:
            answer.compare(*[outputs[k] for outputs in checked])
    return answers


def _read_bit(answers: Answers, j: int, together: _Outputs, without: _Outputs, having: _Outputs) -> None:
    """Bit j of every output, from the runs of samples without it and of those that have it."""
    for answer, zero, one, total in zip(answers, without, having, together, strict=True):
        if answer is not None and zero is not None and one is not None and not answer.mixed:
            answer.read(j, zero, one, total)


def _one_by_one(run: _Run, shapes: Sequence[Shape | None], batch: int) -> Answers:
    """One sample after another, as in the definition: each has alone what it has with all others."""
    by_data()
    blank, together, *singles = run([_nobody, _everybody, *[_only(i) for i in range(batch)]])
    answers = [None if t is None or s is None else _Answer(t) for t, s in zip(blank, shapes, strict=True)]
    for k, answer in enumerate(answers):
        if answer is not None:
            answer.read_singles([outputs[k] for outputs in singles], together[k])
    return answers


def _joined(before: Answers | None, after: Answers) -> Answers:
    """What two draws have shown."""
    if before is not None:
        for old, new in zip(before, after, strict=True):
            if old is not None and new is not None:
                new.join(old)
    return after


def _outcomes(answers: Answers, shapes: Sequence[Shape | None], batch: int) -> list[Outcome]:
    return [
        None if a is None or s is None else a.outcome(tuple(a.index.shape) if s is _OWN else s, batch)
        for a, s in zip(answers, shapes, strict=True)
    ]


def _draws(dtype: torch.dtype) -> int:
    """After how many draws chance is out of the question."""
    return {torch.float64: 1, torch.complex128: 1, torch.float32: 2, torch.complex64: 2}.get(dtype, 5)


class _Answer:
    """What is known so far of the samples in one output."""

    def __init__(self, blank: Tensor) -> None:
        self.index = torch.zeros(blank.shape, dtype=torch.int64, device=blank.device)
        self.spoilt = blank != 0  # for cotangents of zeros: NaN, whatever they are, and anybody's
        self.live: Tensor | None = None  # somebody's
        self.mixed = False

    def read(self, j: int, zero: Tensor, one: Tensor, together: Tensor | None) -> None:
        """Bit j: an element is not zero in one of the two, always the same way."""
        clean = ~self.spoilt
        zeros, ones = (zero != 0) & clean, (one != 0) & clean
        live = zeros | ones
        conflict = zeros & ones
        if self.live is not None:
            conflict |= (live != self.live) & clean
        if together is not None:
            conflict |= (torch.where(ones, one, zero) != together) & clean & together.isfinite()
        self.live = live
        self.mixed = bool(conflict.any())
        self.index += ones.to(torch.int64) << j

    def read_singles(self, singles: Sequence[Tensor | None], together: Tensor | None) -> None:
        """Every sample's part: nobody else's, and the same as with all."""
        clean = ~self.spoilt
        live, conflict = torch.zeros_like(clean), torch.zeros_like(clean)
        if together is not None:
            apart = torch.zeros_like(together)
            for i, one in enumerate(singles):
                if one is not None:
                    here = (one != 0) & clean
                    conflict |= here & live
                    self.index[here], live = i, live | here
                    apart = torch.where(here, one, apart)
            conflict |= (apart != together) & clean & together.isfinite()
        self.live, self.mixed = live, bool(conflict.any())

    def compare(self, together: Tensor | None, unequal: Tensor | None) -> None:
        """Samples with other weights have what they have together with all, as often."""
        if self.mixed or self.live is None or together is None:
            return
        power = _unequal(self.index).to(together.dtype)
        wanted = torch.where(self.live, together * power, torch.zeros_like(together))
        conflict = unequal is None or bool(((unequal != wanted) & ~self.spoilt & wanted.isfinite()).any())
        self.mixed = self.mixed or conflict

    def is_whole(self) -> bool:
        """Is every element somebody's, or is nothing left to find out?"""
        return self.mixed or self.live is None or bool((self.live | self.spoilt).all())

    def join(self, other: _Answer) -> None:
        """What another draw has shown besides."""
        if self.live is None or other.live is None or self.mixed or other.mixed:
            self.mixed = self.mixed or other.mixed
            return
        both = self.live & other.live
        self.mixed = bool((both & (self.index != other.index)).any())
        self.index = torch.where(self.live, self.index, other.index)
        self.live = self.live | other.live

    def outcome(self, shape: Shape, batch: int) -> Outcome:
        live = self.live
        if live is None:
            return None
        if self.mixed or bool((self.index[live] >= batch).any()):
            return Flow.MIXED
        spoilt = bool(self.spoilt.any())
        if not bool(live.any()):  # zeros carry nothing; NaN may be anybody's
            return Flow.SHARED if spoilt else None
        index = self.index.masked_fill(~live, NOBODY).to("cpu")
        if index.shape != shape:  # the engine would sum a broadcast output to its target's shape
            return _summed(index, shape, batch)
        return fit(index, shape, batch, poisoned=spoilt)


def _summed(index: Tensor, shape: Shape, batch: int) -> Outcome:
    """The outcome of an output that still has to be summed over broadcast dims."""
    offset = index.ndim - len(shape)
    dims = [d for d in range(index.ndim) if d < offset or shape[d - offset] == 1]
    top = index.amax(dims, keepdim=True)
    if bool(((index != top) & (index != NOBODY)).any()):
        return Flow.SHARED
    return fit(top.reshape(shape), shape, batch)


def fit(index: Tensor, shape: Shape, batch: int, poisoned: bool = False) -> Layout | Flow:
    """The simplest layout that agrees with the labels known (those that are not -1).

    An unknown element is zero and may stay nobody's; NaN must go to somebody, so only a regular pattern will do then.
    """
    if poisoned or not is_always_ragged():
        block = _fit_block(index, shape, batch)
        if block is not None:
            return Labels(batch, labels(block, shape)) if is_always_ragged() else block
    if not poisoned:
        for width in (1, 2):
            for first in range(len(shape) - width + 1):
                layout = _fit_dims(index, shape, batch, range(first, first + width))
                if layout is not None:
                    return layout
    return Flow.MIXED if poisoned else Labels(batch, index)


def _fit_block(index: Tensor, shape: Shape, batch: int) -> Block | None:
    known = index != NOBODY
    for candidate in _blocks(shape, batch):
        if bool((labels(candidate, shape).expand(shape) == index)[known].all()):
            return candidate
    return None


def _fit_dims(index: Tensor, shape: Shape, batch: int, dims: range) -> Layout | None:
    others = [d for d in range(len(shape)) if d not in dims]
    top = index.amax(others, keepdim=True) if others else index
    if bool((top.expand(shape) == index)[index != NOBODY].all()):
        return simplify(top, shape, batch)
    return None


def _blocks(shape: Shape, batch: int) -> list[Block]:
    """Blocks whose sample lies in one dim, outermost first."""
    blocks = []
    for dim, n in enumerate(shape):
        if n and n % batch == 0:
            parts = n // batch
            inners = [b for b in range(1, parts + 1) if parts % b == 0]
            blocks += [Block(batch, b * strides(shape)[dim]) for b in reversed(inners)]
    return blocks
