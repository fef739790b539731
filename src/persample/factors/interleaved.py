"""The gradients of several losses per sample: K factors of B samples as one of B·K, in the order (b, k).

`interleave` keeps what the K factors have in common: the input of a layer is the same whichever loss is looked at, and
only cotangents differ (`SharedSide`). Factors of other forms stay what they are, and answer one by one (`Interleaved`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels.devices import can_look
from ..kernels.norms import row_norms, wide, widest
from ..kernels.products import inner_products
from ..numberless import has_numbers
from .base import Factor, Selection, Shape
from .combine import View
from .deferred import Deferred
from .dense import Dense
from .forms import form_of
from .moments import Sides, added, empty_moments, sum_of
from .outer import Outer
from .rearrange import Permute
from .rows import Rows
from .stacks import squares
from .workspace import Workspace

_CHUNK = 2**24  # bytes of a side that all losses of a sample share, repeated for each of them
Place = slice | Tensor  # where the samples of a part are: every K-th, or indices


def interleave(parts: Sequence[Factor]) -> Factor:
    """The factor of which sample b·K + k is sample b of ``parts[k]``."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, View):
        views = [part for part in parts if isinstance(part, View)]
        if len(views) == len(parts) and all((v.shape, v.rearrange) == (first.shape, first.rearrange) for v in views):
            return View(interleave([view.base for view in views]), first.shape, first.rearrange)
    return _with_shared_side(parts) or _rows_in_turn(parts) or Interleaved.of(dict(enumerate(parts)), len(parts))


def _rows_in_turn(parts: Sequence[Factor]) -> Factor | None:
    """One factor of the same form, if little but cotangents is copied for that."""
    if any(type(part) is not type(parts[0]) or type(part) not in (Dense, Rows) for part in parts):
        return None
    forms = [form for part in parts if (form := form_of(part)) is not None]
    if len({(f.kind, *[(t.shape, t.dtype) for t in f.tensors]) for f in forms}) != 1 or len(forms) < len(parts):
        return None
    return forms[0].make([_in_turn(tensors) for tensors in zip(*[f.tensors for f in forms], strict=True)])


def _in_turn(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors), 1).flatten(0, 1)


def _with_shared_side(parts: Sequence[Factor]) -> Factor | None:
    """Outer products of which one side is the same tensor in all of them."""
    outers = [part for part in parts if type(part) is Outer and part.left.ndim == 3 and has_numbers(part.left)]
    first = outers[0] if outers else None
    if first is None or len(outers) < len(parts) or any(o.scale != first.scale or not o.positions for o in outers):
        return None
    if _are_one([o.right for o in outers]) and _are_alike([o.left for o in outers]):
        return SharedSide(torch.stack([o.left for o in outers], 1), first.right, first.scale)
    if _are_one([o.left for o in outers]) and _are_alike([o.right for o in outers]):
        swapped = SharedSide(torch.stack([o.right for o in outers], 1), first.left, first.scale)
        return View(swapped, first.shape, Permute((1, 0)))
    return None


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    return len({(t.shape, t.dtype, t.device) for t in tensors}) == 1


def _are_one(tensors: Sequence[Tensor]) -> bool:
    """Are these the same numbers, at the same place in memory?"""
    return len({(t.data_ptr(), t.shape, t.stride(), t.dtype, t.device, t.is_conj(), t.is_neg()) for t in tensors}) == 1


class SharedSide(Deferred):
    """gradient[b·K + k] = Σ_t each[b, k, t] ⊗ shared[b, t], for each (B, K, T, p) and shared (B, T, d)."""

    __slots__ = ("each", "scale", "shared")

    def __init__(self, each: Tensor, shared: Tensor, scale: float = 1.0) -> None:
        self.each, self.shared, self.scale = each, shared, scale
        count, positions = each.shape[1:3]
        lines = each.flatten(0, 1)

        def outers(samples: Selection) -> Outer:
            which = torch.arange(len(lines), device=each.device)[samples] // count
            return Outer(lines[samples], shared[which], scale)

        most = _CHUNK // max(1, positions * (shared.shape[-1] + each.shape[-1]) * each.dtype.itemsize)
        shape = (each.shape[-1], shared.shape[-1])
        super().__init__(outers, len(lines), positions, shape, (each, shared), most)

    def stack(self, out: Tensor | None = None) -> Tensor:
        samples, count = self.each.shape[:2]
        if out is not None and out.dtype != self.dtype:
            return out.copy_(self.stack())
        if self.positions == 1:
            into = None if out is None else out.unflatten(0, (samples, count))
            written = torch.mul(self.each.mT, self.shared.unsqueeze(1), out=into)
            written = written.mul_(self.scale) if self.scale != 1.0 else written
            return written.flatten(0, 1) if out is None else out
        return super().stack(out)

    @property
    def may_cancel(self) -> bool:
        return self.positions > 1

    def weighted_sum(self, weights: Tensor, space: Workspace | None = None) -> Tensor:
        """One product for all losses of a sample: their sides are added up before."""
        dtype = wide(self.dtype)
        given = weights.to(dtype.to_real()).view(self.each.shape[:2])
        each = torch.einsum("bk,bktp->btp", given.to(dtype), self.each.to(dtype))
        return Outer(each, self.shared.to(dtype), self.scale).weighted_sum(given.new_ones(len(each)), space)

    def _compute_norms(self, space: Workspace) -> Tensor:
        """One position: ‖l ⊗ r‖ = ‖l‖‖r‖."""
        if self.positions > 1 or not can_look(self.device):
            return super()._compute_norms(space)
        shared = row_norms(self.shared).repeat_interleave(self.each.shape[1])
        norms = row_norms(self.each.flatten(0, 1)) * shared * abs(self.scale)
        # Elements may be too large for their dtype, or be lost beside others: `Outer` takes a closer look.
        return super()._compute_norms(space) if bool((norms > torch.finfo(self.dtype).max).any()) else norms

    def sum_squares(self, center: Tensor | None = None, space: Workspace | None = None) -> Tensor:
        """One position: Σ (l ⊗ r)² = (Σ_k l²)ᵀ(r²), less the square of the mean; in float64, as terms may cancel."""
        dtype = widest(self.device)
        if self.positions > 1 or self.dtype.is_complex or (center is not None and self.dtype == dtype):
            return super().sum_squares(center, space)
        each, shared = self.each.squeeze(2).to(dtype) * self.scale, self.shared.squeeze(1).to(dtype)
        total = each.square().sum(1).t() @ shared.square()
        if center is not None:
            total -= (each.sum(1).t() @ shared).square_() / max(self.batch, 1)
        return total.clamp_(min=0).to(wide(self.dtype))

    def dot(self, directions: Tensor, space: Workspace | None = None) -> Tensor:
        """Σ_t each_tᵀ V shared_t, where V shared_t is computed once for all losses of a sample."""
        if self.dtype.is_complex or (self.positions > 1 and len(directions) > 2):
            return super().dot(directions, space)
        dtype = wide(self.dtype)
        each, shared = self.each.to(dtype), self.shared.to(dtype)
        products = [torch.einsum("bktp,btp->bk", each, shared @ v.to(dtype).mT).flatten() for v in directions]
        return torch.stack(products, 1) * self.scale if products else each.new_zeros(self.batch, 0)

    def gram(self, other: Factor, space: Workspace | None = None) -> Tensor:
        """One position each: (l l'ᵀ) ∘ (r r'ᵀ), the latter for samples only."""
        if not isinstance(other, SharedSide) or self.dtype.is_complex or self.positions != 1 or other.positions != 1:
            return super().gram(other, space)
        mine, theirs = self.each.shape[1], other.each.shape[1]
        shared = inner_products(self.shared.squeeze(1), other.shared.squeeze(1)) * (self.scale * other.scale)
        each = inner_products(self.each.flatten(0, 2), other.each.flatten(0, 2))
        blocks = each.view(len(shared), mine, shared.shape[1], theirs)
        return blocks.mul_(shared[:, None, :, None]).view(self.batch, other.batch)


class Interleaved(Factor):
    """Several factors as one: samples of part i are at ``places[i]``; those that are in no part are zeros."""

    __slots__ = ("_batch", "parts", "places")

    def __init__(self, parts: Sequence[Factor], places: Sequence[Place], batch: int) -> None:
        self.parts, self.places, self._batch = list(parts), list(places), batch

    @classmethod
    def of(cls, parts: dict[int, Factor], count: int) -> Interleaved:
        """Sample b of ``parts[k]`` as sample b·count + k, for as many k as there are."""
        batch = next(iter(parts.values())).batch * count
        return cls(list(parts.values()), [slice(k, batch, count) for k in parts], batch)

    @property
    def batch(self) -> int:
        return self._batch

    @property
    def shape(self) -> Shape:
        return self.parts[0].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple({id(t): t for part in self.parts for t in part.tensors}.values())

    def __getitem__(self, samples: Selection) -> Factor:
        owners = torch.full((self.batch,), -1, device=self.device)
        within = torch.zeros_like(owners)
        for i, (part, place) in enumerate(zip(self.parts, self.places, strict=True)):
            owners[place] = i
            within[place] = torch.arange(part.batch, device=self.device)
        owners, within = owners[samples], within[samples]
        wheres = [(owners == i).nonzero().squeeze(1) for i in range(len(self.parts))]
        parts = [part[within[where]] for part, where in zip(self.parts, wheres, strict=True)]
        return Interleaved(parts, wheres, len(owners))

    def _collected(self, ask: Callable[[Factor], Tensor]) -> Tensor:
        """One row per sample, from those of the parts."""
        answers = [ask(part) for part in self.parts]
        rows = answers[0].new_zeros(self.batch, *answers[0].shape[1:])
        for place, answer in zip(self.places, answers, strict=True):
            rows[place] = answer.to(rows.dtype)
        return rows

    def stack(self, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(self.batch, *self.shape, dtype=self.dtype, device=self.device)
        if sum(part.batch for part in self.parts) < self.batch:
            out.zero_()
        every, space = torch.arange(self.batch, device=self.device), Workspace()
        for part, place in zip(self.parts, self.places, strict=True):
            for some, rows in part.stacks(space):
                out[place[some] if isinstance(place, Tensor) else every[place][some]] = rows.to(out.dtype)
        return out

    def prefers_stack(self, reused: bool) -> bool:
        return all(part.prefers_stack(reused) for part in self.parts)

    def _compute_norms(self, space: Workspace) -> Tensor:
        return self._collected(lambda part: part.cached_norms(space))

    def set_norms(self, norms: Tensor) -> None:
        super().set_norms(norms)
        for part, place in zip(self.parts, self.places, strict=True):
            part.set_norms(norms[place])

    @property
    def may_cancel(self) -> bool:
        return any(part.may_cancel for part in self.parts)

    def term_norms(self) -> Tensor:
        return self._collected(lambda part: part.term_norms())

    def rounding_errors(self) -> Tensor:
        return self._collected(lambda part: part.rounding_errors())

    def cancelling_samples(self, space: Workspace | None = None) -> Tensor:
        every, found = torch.arange(self.batch, device=self.device), []
        for part, place in zip(self.parts, self.places, strict=True):
            found.append(every[place][part.cancelling_samples(space)])
        return torch.cat(found)

    def upcast(self, dtype: torch.dtype | None = None) -> Factor:
        return Interleaved([part.upcast(dtype) for part in self.parts], self.places, self.batch)

    def elements(self, start: int, stop: int) -> Tensor | None:
        answers = [part.elements(start, stop) for part in self.parts]
        known = iter([answer for answer in answers if answer is not None])
        return None if any(answer is None for answer in answers) else self._collected(lambda part: next(known))

    def weighted_sum(self, weights: Tensor, space: Workspace | None = None) -> Tensor:
        total = torch.zeros(self.shape, dtype=wide(self.dtype), device=self.device)
        for part, place in zip(self.parts, self.places, strict=True):
            total += part.weighted_sum(weights[place], space)
        return total

    def sum_squares(self, center: Tensor | None = None, space: Workspace | None = None) -> Tensor:
        """With a center, the deviations of every part from its own mean, and of the means from that of all samples."""
        dtype = wide(self.dtype)
        total = torch.zeros(self.shape, dtype=dtype.to_real(), device=self.device)
        if center is None:
            for part in self.parts:
                total += part.sum_squares(None, space)
            return total
        mean = torch.zeros(self.shape, dtype=dtype, device=self.device)
        missing = self.batch - sum(part.batch for part in self.parts)
        means = [(missing, mean)]
        for part in [part for part in self.parts if part.batch]:
            ones = torch.full((part.batch,), 1 / part.batch, dtype=dtype.to_real(), device=self.device)
            means.append((part.batch, part.weighted_sum(ones, space)))
            total += part.sum_squares(means[-1][1], space)
        of_all = sum([own * (count / max(self.batch, 1)) for count, own in means], mean)
        for count, own in means:
            total += count * squares(own - of_all)
        return total

    def dot(self, directions: Tensor, space: Workspace | None = None) -> Tensor:
        return self._collected(lambda part: part.dot(directions, space))

    def moments(self, left: bool, right: bool, space: Workspace | None = None) -> Sides:
        total = empty_moments(self, left, right)
        for part in self.parts:
            total = added(total, part.moments(left, right, space))
        return total

    def rotated_squares(self, left: Tensor | None, right: Tensor | None, space: Workspace | None = None) -> Tensor:
        return sum_of([part.rotated_squares(left, right, space) for part in self.parts])

    def compress(self, left: Tensor, right: Tensor, space: Workspace | None = None) -> Tensor:
        return self._collected(lambda part: part.compress(left, right, space))

    def gram(self, other: Factor, space: Workspace | None = None) -> Tensor:
        if isinstance(other, Interleaved):
            columns: Interleaved = other
            return self._collected(lambda part: columns._gram_columns(part, space))
        return self._collected(lambda part: part.gram(other, space))

    def _gram_columns(self, of: Factor, space: Workspace | None) -> Tensor:
        """(B', B): the inner products of another factor's gradients with these."""
        answers = [of.gram(part, space) for part in self.parts]
        columns = answers[0].new_zeros(of.batch, self.batch)
        for place, answer in zip(self.places, answers, strict=True):
            columns[:, place] = answer
        return columns
