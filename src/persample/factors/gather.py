"""All contributions to one gradient as one factor, those in which samples are missing as well.

A loop over samples, over chunks of a batch or over the steps of packed sequences uses a weight many times, each time
for some of the samples. What each of them has is collected: outer products and rows of a table as so many positions of
it, anything else sample by sample. Samples with about as many positions are put into one group and padded with zeros.
A sample's group is decided by its own positions alone, so that what is computed for it does not depend on the lengths
of others, and one long sample makes none of the others longer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import prod

import torch
from torch import Tensor

from ..kernels.ragged import is_always_ragged
from ..kernels.rows import rows_summed
from ..numberless import with_numbers
from .apart import Apart, Group
from .base import Factor
from .combine import Sum
from .deferred import Deferred
from .dense import Dense
from .forms import Form, form_of
from .outer import Outer
from .rows import Rows

_Tables = list[tuple[Tensor, Tensor]]  # samples (b,), and which rows are theirs (b, T), or their parts' (b, parts, T)


def combine(terms: Sequence[Factor]) -> Factor:
    """The sum of ``terms`` as one factor: outer products and rows are concatenated along their positions."""
    if len(terms) == 1:
        return terms[0]
    terms = [each for term in terms for each in (term.terms if isinstance(term, Sum) else [term])]
    terms = [term.compute_all() if isinstance(term, Deferred) else term for term in terms]  # to be concatenated
    if is_always_ragged() or any(isinstance(term, Apart) for term in terms):
        terms = _gathered(terms)
    groups: dict[object, list[Factor]] = {}
    for position, term in enumerate(terms):
        groups.setdefault(_concatenation_key(term, position), []).append(term)
    concatenated = [_concatenated(group) if len(group) > 1 else group[0] for group in groups.values()]
    return concatenated[0] if len(concatenated) == 1 else _added(concatenated)


def _added(terms: Sequence[Factor]) -> Factor:
    """The sum of terms. Where it must not matter which terms others are in, every sample has a sum of its own ones."""
    if not is_always_ragged() or not any(isinstance(term, Apart) for term in terms):
        return Sum(terms)
    batch = terms[0].batch
    factors = [[factor for _, factor in term.groups] if isinstance(term, Apart) else [term] for term in terms]
    groups: list[Group] = []
    for samples, found in _in_the_same_terms(terms, batch):
        parts = [factors[term][group][places.to(terms[0].device)] for term, group, places in found]
        every = [each for part in parts for each in (part.terms if isinstance(part, Sum) else [part])]
        groups.append((samples, every[0] if len(every) == 1 else Sum(every)))
    return Apart(groups or [(_all(0), factors[0][0][:0])], batch)


@with_numbers
def _in_the_same_terms(terms: Sequence[Factor], batch: int) -> list[tuple[Tensor, list[tuple[int, int, Tensor]]]]:
    """Samples that are in the same groups of terms: which term, which of its groups, and their places in it."""
    group = torch.full((len(terms), batch), -1, device="cpu")
    place = torch.zeros_like(group)
    for number, term in enumerate(terms):
        every = [index for index, _ in term.groups] if isinstance(term, Apart) else [_all(batch)]
        for which, index in enumerate(every):
            group[number, index], place[number, index] = which, _all(len(index))
    kinds, kind = group.unique(dim=1, return_inverse=True)
    found = []
    for number, groups in enumerate(kinds.t().tolist()):
        samples = (kind == number).nonzero().squeeze(1)
        members = [(term, which, place[term, samples]) for term, which in enumerate(groups) if which >= 0]
        found += [(samples, members)] if members else []
    return found


def _concatenation_key(term: Factor, position: int) -> object:
    """Equal for terms that can be concatenated, and different for all others."""
    if isinstance(term, Outer):
        return Outer, term.left.shape[1:-2], term.shape, term.dtype
    return (Rows, term.shape, term.dtype) if isinstance(term, Rows) else position


def _concatenated(group: Sequence[Factor]) -> Factor:
    outers = [f for f in group if isinstance(f, Outer)]
    return Outer.concatenate(outers) if outers else Rows.concatenate([f for f in group if isinstance(f, Rows)])


def _gathered(terms: Sequence[Factor]) -> list[Factor]:
    """Terms of one sum, where those in which samples are missing are gathered with all that are like them."""
    batch = terms[0].batch
    pieces: dict[Hashable, list[Group]] = {}
    partial: set[Hashable] = set()
    for position, term in enumerate(terms):
        for index, factor in term.groups if isinstance(term, Apart) else [(None, term)]:
            form = form_of(factor)
            key = _kind(factor, form, position)
            pieces.setdefault(key, []).append((_all(batch) if index is None else index, factor))
            partial.update([] if index is None else [key])
    result: list[Factor] = []
    for key, some in pieces.items():
        result += _joined(some, batch) if key in partial or is_always_ragged() else [factor for _, factor in some]
    return result


def placed(index: Tensor, factor: Factor, batch: int) -> Factor:
    """The factor of all samples, from one whose sample j is part of number index[j]: one may be there several times."""
    groups = [(_of(index, some), f) for some, f in factor.groups] if isinstance(factor, Apart) else [(index, factor)]
    if _are_distinct([index]):
        return settled(groups, batch)
    kinds: dict[Hashable, list[Group]] = {}
    for position, (numbers, some) in enumerate(groups):
        kinds.setdefault(_kind(some, form_of(some), position), []).append((numbers, some))
    terms = [term for pieces in kinds.values() for term in _joined(pieces, batch)]
    return terms[0] if len(terms) == 1 else Sum(terms)


def _kind(factor: Factor, form: Form | None, position: int) -> Hashable:
    """Equal for factors that can be gathered; alone: not with any other."""
    if isinstance(factor, Outer) and factor.left.ndim == 3:
        return Outer, factor.shape, factor.dtype
    if isinstance(factor, Rows):
        return Rows, factor.shape, factor.dtype
    if form is None:
        return position
    return form.kind, tuple([(tuple(t.shape[1:]), t.dtype, t.device) for t in form.tensors])


def _joined(pieces: Sequence[Group], batch: int) -> list[Factor]:
    first = pieces[0][1]
    if isinstance(first, Outer) and first.left.ndim == 3:
        return [products([(index, f) for index, f in pieces if isinstance(f, Outer)], batch)]
    if isinstance(first, Rows):
        return [_read_rows([(index, f) for index, f in pieces if isinstance(f, Rows)], batch)]
    if type(first) is Dense:
        return [_written_out([(index, f.value) for index, f in pieces if isinstance(f, Dense)], batch)]
    pieces = [piece for index, factor in pieces for piece in _one_by_one(index, factor)]
    forms = [(index, form) for index, factor in pieces if (form := form_of(factor)) is not None]
    if len(forms) < len(pieces):
        return [settled([piece], batch) for piece in pieces]
    return [_side_by_side(some, batch) for some in _without_repeats(forms)]


def settled(groups: Sequence[Group], batch: int) -> Factor:
    """One factor of all samples, in their order if there is one group of them."""
    if len(groups) > 1 or len(groups[0][0]) < batch or is_always_ragged():
        return Apart(groups, batch)
    ((index, factor),) = groups
    order = _sorting(index)
    return factor if order is None else factor[order.to(factor.device)]


@with_numbers
def _sorting(index: Tensor) -> Tensor | None:
    """The order in which all samples come one after another; None if they do."""
    order = torch.argsort(index)
    return None if torch.equal(order, _all(len(index))) else order


@with_numbers
def _of(index: Tensor, some: Tensor) -> Tensor:
    return index[some]


@with_numbers
def _all(batch: int) -> Tensor:
    return torch.arange(batch, device="cpu")


def _one_by_one(index: Tensor, factor: Factor) -> list[Group]:
    """What a sample has first, and what it has a second time, and so on."""
    if _are_distinct([index]):
        return [(index, factor)]
    return [(_of(index, some), factor[some.to(factor.device)]) for some in _occurrences(index)]


@with_numbers
def _occurrences(index: Tensor) -> list[Tensor]:
    """The places of the first of all that are equal, of the second, and so on."""
    seen, places = dict[int, int](), list[list[int]]()
    for place, number in enumerate(index.tolist()):
        count = seen[number] = seen.get(number, -1) + 1
        places += [[]] if count == len(places) else []
        places[count].append(place)
    return [torch.tensor(some, device="cpu") for some in places]


@with_numbers
def _without_repeats(forms: Sequence[tuple[Tensor, Form]]) -> list[list[tuple[Tensor, Form]]]:
    """As few lists as it takes for no sample to be in one of them twice."""
    lists: list[tuple[set[int], list[tuple[Tensor, Form]]]] = []
    for index, form in forms:
        samples = set(index.tolist())
        for taken, members in lists:
            if taken.isdisjoint(samples):
                taken |= samples
                members.append((index, form))
                break
        else:
            lists.append((samples, [(index, form)]))
    return [members for _, members in lists]


def _side_by_side(forms: Sequence[tuple[Tensor, Form]], batch: int) -> Factor:
    """One sample's gradients after another's."""
    each = zip(*[form.tensors for _, form in forms], strict=True)
    whole = forms[0][1].make([torch.cat(tensors) if len(tensors) > 1 else tensors[0] for tensors in each])
    return settled([(_end_to_end([index for index, _ in forms]), whole)], batch)


@with_numbers
def _end_to_end(indices: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(indices)) if len(indices) > 1 else indices[0]


def _written_out(pieces: Sequence[tuple[Tensor, Tensor]], batch: int) -> Factor:
    """Gradients that are written out, those of one sample added up."""
    indices = [index for index, _ in pieces]
    rows = torch.cat([value for _, value in pieces]) if len(pieces) > 1 else pieces[0][1]
    if _are_distinct(indices):
        return settled([(_end_to_end(indices), Dense(rows))], batch)
    samples, place = _numbered(_end_to_end(indices))
    return settled([(samples, Dense(rows_summed(rows, place.to(rows.device, non_blocking=True), len(samples))))], batch)


@with_numbers
def _numbered(index: Tensor) -> tuple[Tensor, Tensor]:
    """The samples that there are, and which of them every number is."""
    samples, place = torch.unique(index, return_inverse=True)
    return samples, place


def products(pieces: Sequence[tuple[Tensor, Outer]], batch: int) -> Factor:
    """The sum of outer products, of which every piece has those of some samples."""
    if _fit_side_by_side(pieces):
        scale = pieces[0][1].scale
        forms = [(index, Form(Outer, o.tensors, lambda ts: Outer(ts[0], ts[1], scale))) for index, o in pieces]
        return _side_by_side(forms, batch)
    left = [(o.left if o.scale == 1.0 else o.left * o.scale).flatten(0, 1) for _, o in pieces]
    right = [o.right.flatten(0, 1) for _, o in pieces]
    owners = _owners([(index, o.positions) for index, o in pieces])
    return products_of_rows(left, right, owners, batch)


def products_of_rows(
    left: Sequence[Tensor], right: Sequence[Tensor], owners: Tensor, batch: int, scale: float = 1.0
) -> Factor:
    """Σ left[n] ⊗ right[n] over the rows n of every sample; ``owners`` says whose row it is, -1 that it is nobody's."""
    tables = _tables(owners, batch)
    lefts, rights = _picked(left, tables, 0), _picked(right, tables, 0)
    groups: list[Group] = [(index, Outer(a, b, scale)) for (index, _), a, b in zip(tables, lefts, rights, strict=True)]
    return settled(groups, batch)


def factors_of_rows(
    rows: Sequence[Tensor], owners: Tensor, batch: int, make: Callable[[list[Tensor]], Factor]
) -> Factor:
    """What ``make`` makes of the rows (b, T, ...) of samples, which are padded with zeros.

    ``owners`` says whose a row of each of the tensors is, -1 that it is nobody's.
    """
    return _made(rows, _tables(owners, batch), batch, make)


def products_of_parts(
    left: Tensor, right: Tensor, owners: Tensor, batch: int, parts: int, scale: float = 1.0
) -> Factor:
    """Σ left[n] ⊗ right[n] over the rows n of every sample, apart for each of so many ``parts`` (experts).

    ``owners`` says whose row it is and which part's: sample · parts + part, or -1 that it is nobody's. A sample's parts
    are padded to that of its own with the most rows.
    """
    tables = _tables(owners, batch, (parts,))
    return _made([left, right], tables, batch, lambda sides: Outer(sides[0], sides[1], scale))


def _made(rows: Sequence[Tensor], tables: _Tables, batch: int, make: Callable[[list[Tensor]], Factor]) -> Factor:
    picked = [_picked([t], tables, 0) for t in rows]
    return settled([(index, make(list(each))) for (index, _), *each in zip(tables, *picked, strict=True)], batch)


def _fit_side_by_side(pieces: Sequence[tuple[Tensor, Outer]]) -> bool:
    """Is every sample in one piece alone, all of them with as many positions as need no padding?"""
    first = pieces[0][1]
    if any(o.positions != first.positions or o.scale != first.scale for _, o in pieces):
        return False
    return _width(first.positions) == first.positions and _are_distinct([index for index, _ in pieces])


@with_numbers
def _are_distinct(indices: Sequence[Tensor]) -> bool:
    numbers = _end_to_end(indices).tolist()
    return len(set(numbers)) == len(numbers)


def _read_rows(pieces: Sequence[tuple[Tensor, Rows]], batch: int) -> Factor:
    """Rows of a table that samples have read."""
    owners = _owners([(index, rows.positions) for index, rows in pieces])
    ids = [rows.ids.flatten(0, 1) for _, rows in pieces]
    return rows_read(ids, [rows.dy.flatten(0, 1) for _, rows in pieces], owners, batch, pieces[0][1].size)


def rows_read(ids: Sequence[Tensor], dy: Sequence[Tensor], owners: Tensor, batch: int, size: int) -> Factor:
    """Rows ids[n] of a table with cotangents dy[n], of which ``owners`` says whose they are."""
    tables = _tables(owners, batch)
    grouped = zip(tables, _picked(ids, tables, -1), _picked(dy, tables, 0), strict=True)
    groups: list[Group] = [(index, Rows(few, values, size)) for (index, _), few, values in grouped]
    return settled(groups, batch)


@with_numbers
def _owners(pieces: Sequence[tuple[Tensor, int]]) -> Tensor:
    """The samples of all rows, where those in a piece have so many each."""
    return torch.cat([index if count == 1 else index.repeat_interleave(count) for index, count in pieces])


def _picked(rows: Sequence[Tensor], tables: _Tables, padding: int) -> list[Tensor]:
    """(b, [parts,] T, ...) for every table; where a sample has no more rows, they are of ``padding``."""
    last = rows[0].new_full((1, *rows[0].shape[1:]), padding)
    every = torch.cat([*rows, last])
    picked = []
    for _, table in tables:
        where = table.to(every.device, non_blocking=True)
        picked.append(every.index_select(0, where.reshape(-1)).reshape(*where.shape, *every.shape[1:]))
    return picked


@with_numbers
def _tables(owners: Tensor, batch: int, parts: tuple[int, ...] = ()) -> _Tables:
    """The rows of samples that have about as many, in their order; one past the last where a sample has no more.

    With ``parts``, owners are parts of samples.
    """
    every = prod(parts)
    order = torch.argsort(owners, stable=True)
    counts = torch.bincount(owners + 1, minlength=batch * every + 1)
    ends, counts = counts.cumsum(0)[1:], counts[1:]
    starts = ends - counts
    longest = counts.reshape(batch, every).amax(1) if every else counts.new_zeros(batch)
    widths = torch.tensor([_width(n) for n in longest.tolist()], device="cpu")
    order = torch.cat([order, order.new_full((1,), len(owners))])
    starts, ends = (t.reshape(batch, *parts, 1) for t in (starts, ends))
    tables = []
    for width in widths.unique().tolist():
        samples = (widths == width).nonzero().squeeze(1)
        if width:
            place = starts[samples] + torch.arange(width, device="cpu")
            tables.append((samples, order[place.where(place < ends[samples], len(owners))]))
    none = torch.empty(0, dtype=torch.long, device="cpu")
    return tables or [(none, none.reshape(0, *parts, 0))]


def _width(positions: int) -> int:
    """So many positions and a few more, less than half: there are two numbers for every power of two.

    >>> [_width(n) for n in (0, 1, 3, 5, 9, 17, 33, 50, 1000)]
    [0, 1, 3, 6, 12, 24, 48, 64, 1024]
    """
    step = 1 << max((positions - 1).bit_length() - 2, 0)
    return -(-positions // step) * step
