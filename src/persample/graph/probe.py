"""Asking the data: which sample does each element of a backward output belong to?

Every sample's cotangent is scaled by its own power of two. That is exact in floating point, so an output element
that depends on one sample alone is scaled by exactly that sample's power, and any other ratio means that samples
meet in it. Sixteen samples are told apart in one extra run, 256 in two, 16**n in n.

C++ nodes are linear in their cotangents, so they can be asked alone, with random cotangents. Custom
``autograd.Function``s and compiled regions need not be linear: they are asked by a real backward from the losses.
Elements that are zero or not finite prove nothing. Nor is a contribution seen that rounds away beside another sample's,
or a custom backward that is linear for cotangents as large as these and not for smaller ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from .invoke import call_each
from .layout import NOBODY, Block, Labels, Layout, Shape, carry, labels, sample_dims, simplify, strides
from .library import unspent
from .notes import by_data
from .roots import Roots
from .saved import metadata
from .site import Fate, Flow, Site
from .tape import Slot, Tape

_Outputs = Sequence[Tensor | None]
_Scale = Callable[[Tensor], Tensor]  # from sample numbers to factors
_OWN: Shape = (-1,)  # in place of a target's shape: whatever the output's own shape is


def probe_node(site: Site, layouts: Sequence[Layout | None], batch: int, *, summed: bool = True) -> list[Fate]:
    """The fate of every output of a linear node, from random cotangents with these layouts.

    ``summed=False`` asks about outputs as the node returns them, before the engine sums over broadcast dims.
    """
    about = metadata(site.node)
    given: list[tuple[Tensor, Tensor] | None] = []
    for nr, layout in enumerate(layouts):
        if layout is None:
            given.append(None)
            continue
        mark = labels(layout, site.shapes[nr], about[nr].device)
        noise = _noise(site.shapes[nr], about[nr].dtype, about[nr].device, seed=nr)
        given.append((noise.masked_fill(mark == NOBODY, 0) if isinstance(layout, Labels) else noise, mark))

    def run(scales: Sequence[_Scale | None]) -> list[_Outputs]:
        rows = (
            [None if g is None else g[0] if scale is None else g[0] * scale(g[1]).to(g[0].dtype) for g in given]
            for scale in scales
        )
        return call_each(site.node, rows, site.edges, lambda outputs: [_plain(t) for t in outputs])

    targets = [None if slot is None else site.target(k) if summed else _OWN for k, slot in enumerate(site.edges)]
    guesses = [None if shape is None else _guess(site.shapes, layouts, shape) for shape in targets]
    return _ask(run, targets, batch, base=_base(about[0].dtype), guesses=guesses)


def _guess(shapes: Sequence[Shape], layouts: Sequence[Layout | None], target: Shape) -> Layout | None:
    """What is most likely: the sample stays in its dim."""
    live = [(shape, layout) for shape, layout in zip(shapes, layouts, strict=True) if layout is not None]
    if len(live) != 1 or len(live[0][0]) != len(target):
        return None
    shape, layout = live[0]
    if not sample_dims(layout, shape):  # one sample's: of the target, only what was read is
        return None
    return carry(layout, shape, target, [d if shape[d] == target[d] else None for d in range(len(shape))])


def probe_slots(tape: Tape, roots: Roots, slots: Sequence[Slot]) -> dict[Slot, Fate]:
    """The fate of the cotangents at ``slots``, by real backwards from the roots."""
    about = [metadata(node)[nr] for node, nr in roots.slots]
    starts = [  # not ones: whole numbers meet by chance
        _noise(tuple(m.shape), m.dtype, m.device, seed=nr) for nr, m in enumerate(about)
    ]
    marks = [labels(lay, tuple(m.shape), m.device) for lay, m in zip(roots.layouts, about, strict=True)]

    def run(scales: Sequence[_Scale | None]) -> list[_Outputs]:
        runs = []
        for scale in scales:
            pairs = zip(starts, marks, strict=True)
            scaled = [g if scale is None else g * scale(mark).to(g.dtype) for g, mark in pairs]
            with unspent(tape.order):
                runs.append([_plain(t) for t in roots.pull(scaled, slots, retain_graph=True)])
        return list(runs)

    fates = _ask(run, [tape.shape(s) for s in slots], roots.batch, base=_base(about[0].dtype))
    return dict(zip(slots, fates, strict=True))


def _plain(t: Tensor | None) -> Tensor | None:
    """Dense numbers as they are, whatever the tensor's own form."""
    return None if t is None else (t.to_dense() if t.is_sparse else t).resolve_conj().resolve_neg()


def _noise(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """Numbers between 1 and 2, random but for a period that no op has reason to follow; the user's generator rests."""
    period, count = 65537, prod(shape)
    generator = torch.Generator("cpu").manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    line = torch.rand(min(period, count), generator=generator, dtype=wide, device="cpu").add_(1).to(device, dtype)
    return line.repeat(-(-count // period))[:count].reshape(shape) if count else line.reshape(shape)


def _base(dtype: torch.dtype) -> int:
    """How many powers of two are told apart in one run; half precision overflows early."""
    return 4 if dtype == torch.float16 else 16


def _ask(
    run: Callable[[Sequence[_Scale | None]], list[_Outputs]],
    shapes: Sequence[Shape | None],
    batch: int,
    base: int,
    guesses: Sequence[Layout | None] | None = None,
) -> list[Fate]:
    """Run once plain and once per digit of the sample number, and read the samples from the ratios."""
    by_data()
    places = [base**j for j in range(64) if base**j < batch]

    def power(place: int) -> _Scale:
        return lambda mark: torch.exp2((mark.clamp(min=0) // place % base + 1).to(torch.float64))

    plain, *scaled = run([None, *[power(place) for place in places]])
    fates: list[Fate] = []
    for k, one in enumerate(plain):
        shape = None if one is None else tuple(one.shape) if shapes[k] is _OWN else shapes[k]
        runs = [outputs[k] for outputs in scaled]
        if one is None or shape is None or any(r is None for r in runs):
            fates.append(None)
            continue
        guess = None if guesses is None or shape != tuple(one.shape) else guesses[k]
        mark = None if guess is None else labels(guess, shape, one.device)
        if (
            mark is not None
            and not ((one != 0) & (mark == NOBODY)).any()
            and all(
                torch.equal(r, one * power(place)(mark).to(one.dtype))  # type: ignore[arg-type]
                for r, place in zip(runs, places, strict=True)
            )
        ):
            fates.append(guess if bool((one != 0).any()) else None)
            continue
        read = [_digits(one, r, base) for r in runs if r is not None]
        index = torch.stack([digits * place for (digits, _), place in zip(read, places, strict=True)]).sum(0)
        fates.append(_fate(one, index.to("cpu"), shape, batch, mixed=not all(clean for _, clean in read)))
    return fates


def _digits(one: Tensor, scaled: Tensor, base: int) -> tuple[Tensor, bool]:
    """log2(scaled / one) - 1 where it is a whole number, and whether it is so for every number that is finite."""
    if one.is_complex():
        pairs = zip(torch.view_as_real(one).unbind(-1), torch.view_as_real(scaled).unbind(-1), strict=True)
        (real, real_clean), (imag, imag_clean) = (_digits(o, s, base) for o, s in pairs)
        agree = (real == imag) | (one.real == 0) | (one.imag == 0)
        return torch.where(one.real != 0, real, imag), real_clean and imag_clean and bool(agree.all())
    known = torch.isfinite(one) & (one != 0)
    mantissa, exponent = torch.frexp((scaled.double() / one.double()).where(known, 2.0))
    whole = (mantissa == 0.5) & (exponent >= 2) & (exponent <= base + 1)  # false where the scaled number overflowed
    return (exponent - 2).clamp(0, base - 1).to(torch.int64), bool(whole.all() & ~((one == 0) & (scaled != 0)).any())


def _fate(one: Tensor, index: Tensor, shape: Shape, batch: int, mixed: bool) -> Fate:
    finite = torch.isfinite(one)
    known = (finite & (one != 0)).to("cpu")
    if mixed or bool((index[known] >= batch).any()):
        return Flow.MIXED
    if not bool(known.any()):  # zeros carry nothing; NaN may be anybody's
        return None if bool(finite.all()) else Flow.SHARED
    index = index.masked_fill(~known, NOBODY)
    if index.shape != shape:  # the engine would sum a broadcast output to its target's shape
        return _summed(index, shape, batch)
    return fit(index, shape, batch, poisoned=not bool(finite.all()))


def _summed(index: Tensor, shape: Shape, batch: int) -> Fate:
    """The fate of an output that still has to be summed over broadcast dims."""
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
    if not poisoned:
        for width in (1, 2):
            for first in range(len(shape) - width + 1):
                found = _fit_dims(index, shape, batch, range(first, first + width))
                if found is not None:
                    return found
    block = _fit_block(index, shape, batch)
    return block or (Flow.MIXED if poisoned else Labels(batch, index))


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
    found = []
    for dim, n in enumerate(shape):
        if n and n % batch == 0:
            rest = n // batch
            inners = [b for b in range(1, rest + 1) if rest % b == 0]
            found += [Block(batch, b * strides(shape)[dim]) for b in reversed(inners)]
    return found
