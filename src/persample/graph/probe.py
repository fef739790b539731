"""Asking the data: which sample does each element of a backward output belong to?

Every sample's cotangent is scaled by its own power of two. That is exact in floating point, so an output element
that depends on one sample alone is scaled by exactly that sample's power, and any other ratio means that samples
meet in it. Sixteen samples are told apart in one extra run, 256 in two, 16**n in n.

C++ nodes are linear in their cotangents, so they can be asked alone, with random cotangents. Custom
``autograd.Function``s and compiled regions need not be linear: they are asked by a real backward from the losses.
Elements that are zero or not finite prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .invoke import call
from .layout import NOBODY, Block, Labels, Layout, Shape, labels, simplify, strides
from .site import Fate, Flow, Site
from .tape import Slot, Tape

_Outputs = Sequence[Tensor | None]
_OWN: Shape = (-1,)  # in place of a target's shape: whatever the output's own shape is


def probe_node(
    site: Site, layouts: Sequence[Layout | None], batch: int, *, summed: bool = True
) -> list[Fate]:
    """The fate of every output of a linear node, from random cotangents with these layouts.

    ``summed=False`` asks about outputs as the node returns them, before the engine sums over broadcast dims.
    """
    metadata = site.node._input_metadata  # type: ignore[attr-defined]
    random: list[Tensor | None] = []
    marks: list[Tensor | None] = []
    for nr, layout in enumerate(layouts):
        if layout is None:
            random.append(None)
            marks.append(None)
            continue
        device, dtype = metadata[nr].device, metadata[nr].dtype
        mark = labels(layout, site.shapes[nr], device)
        noise = torch.randn(site.shapes[nr], generator=_generator(device), device=device, dtype=dtype)
        random.append(noise.masked_fill(mark == NOBODY, 0))
        marks.append(mark)

    def run(scale: Callable[[Tensor], Tensor]) -> _Outputs:
        scaled = [None if r is None or m is None else r * scale(m).to(r.dtype) for r, m in zip(random, marks, strict=True)]
        return [_plain(t) for t in call(site.node, scaled, site.edges)]

    targets = [None if slot is None else site.target(k) if summed else _OWN for k, slot in enumerate(site.edges)]
    return _ask(run, targets, batch, base=_base(metadata[0].dtype))


def probe_slots(tape: Tape, losses: Tensor, slots: Sequence[Slot]) -> dict[Slot, Fate]:
    """The fate of the cotangents at ``slots``, by real backwards from the losses."""
    edges = [GradientEdge(node, nr) for node, nr in slots]
    samples = torch.arange(len(losses), device=losses.device)

    def run(scale: Callable[[Tensor], Tensor]) -> _Outputs:
        cotangent = scale(samples).to(losses.dtype)
        grads = torch.autograd.grad(losses, edges, cotangent, retain_graph=True, allow_unused=True)
        return [_plain(t) for t in grads]

    fates = _ask(run, [tape.shape(s) for s in slots], len(losses), base=_base(losses.dtype))
    return dict(zip(slots, fates, strict=True))


def _plain(t: Tensor | None) -> Tensor | None:
    """Dense numbers as they are, whatever the tensor's own form."""
    return None if t is None else (t.to_dense() if t.is_sparse else t).resolve_conj().resolve_neg()


def _generator(device: torch.device) -> torch.Generator:
    """Random numbers that leave the user's generator alone."""
    return torch.Generator(device=device).manual_seed(0)


def _base(dtype: torch.dtype) -> int:
    """How many powers of two are told apart in one run; half precision overflows early."""
    return 4 if dtype == torch.float16 else 16


def _ask(
    run: Callable[[Callable[[Tensor], Tensor]], _Outputs], shapes: Sequence[Shape | None], batch: int, base: int
) -> list[Fate]:
    """Run once plain and once per digit of the sample number, and read the samples from the ratios."""
    plain = run(lambda mark: torch.ones_like(mark, dtype=torch.float64))
    found: list[Tensor | None] = [None if t is None else torch.zeros(t.shape, dtype=torch.int64) for t in plain]
    mixed = [False] * len(plain)
    weight = 1
    while weight < batch:
        digit = weight

        def scale(mark: Tensor, digit: int = digit) -> Tensor:
            exponent = (mark.clamp(min=0) // digit % base) + 1
            return torch.pow(2.0, exponent.to(torch.float64))

        for k, (one, scaled) in enumerate(zip(plain, run(scale), strict=True)):
            so_far = found[k]
            if one is None or scaled is None or so_far is None or shapes[k] is None:
                continue
            digits, clean = _digits(one, scaled, base)
            mixed[k] |= not clean
            found[k] = so_far + digits.to("cpu") * digit
        weight *= base
    return [_fate(plain[k], found[k], shapes[k], batch, mixed[k]) for k in range(len(plain))]


def _digits(one: Tensor, scaled: Tensor, base: int) -> tuple[Tensor, bool]:
    """log2(scaled / one) - 1 where it is a whole number, and whether it is so for every number that is finite."""
    if one.is_complex():
        pairs = zip(torch.view_as_real(one).unbind(-1), torch.view_as_real(scaled).unbind(-1), strict=True)
        (real, real_clean), (imag, imag_clean) = (_digits(o, s, base) for o, s in pairs)
        return torch.where(one.real != 0, real, imag), real_clean and imag_clean
    known = torch.isfinite(one) & (one != 0)
    mantissa, exponent = torch.frexp((scaled.double() / one.double()).where(known, 2.0))
    whole = (mantissa == 0.5) & (exponent >= 2) & (exponent <= base + 1)  # false where the scaled number overflowed
    return (exponent - 2).clamp(0, base - 1).to(torch.int64), bool(whole.all() & ~((one == 0) & (scaled != 0)).any())


def _fate(one: Tensor | None, index: Tensor | None, shape: Shape | None, batch: int, mixed: bool) -> Fate:
    if one is None or index is None or shape is None:
        return None
    known = (torch.isfinite(one) & (one != 0)).to("cpu")
    if mixed or bool((index[known] >= batch).any()):
        return Flow.MIXED
    if not bool(known.any()):
        return None
    index = index.masked_fill(~known, NOBODY)
    poisoned = not bool(torch.isfinite(one).all())
    shape = tuple(index.shape) if shape is _OWN else shape
    if index.shape != shape:  # the engine would sum a broadcast output to its target's shape
        return _summed(index, shape, batch)
    return fit(index, shape, batch, poisoned)


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
    regular = [lambda: _fit_block(index, shape, batch)]
    explicit = [
        lambda first=first, width=width: _fit_dims(index, shape, batch, range(first, first + width))
        for width in (1, 2)
        for first in range(len(shape) - width + 1)
    ]
    for attempt in regular if poisoned else [*explicit, *regular]:
        found = attempt()
        if found is not None:
            return found
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
    found = []
    for dim, n in enumerate(shape):
        if n and n % batch == 0:
            rest = n // batch
            inners = [b for b in range(1, rest + 1) if rest % b == 0]
            found += [Block(batch, b * strides(shape)[dim]) for b in reversed(inners)]
    return found
