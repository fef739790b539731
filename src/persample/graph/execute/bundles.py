"""Where samples meet what they share: ops that use a shared tensor, one at a time or several as one.

In a deep network of small layers, Python costs more per use than the arithmetic. Uses of one kind, with the same shapes
and options, whose samples lie in whole rows, are one use with more samples: the rows of their cotangents and of what
they saved are put together, and one rule makes the factor of all their parameters. The same holds for uses of one
parameter, each by some of the samples: the passes of a loop over samples or chunks, and the steps of packed sequences.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...factors import Factor, Part
from ...kernels.certificates import is_traced, usual_size
from ..layout import Block
from ..read.notes import unnoted
from ..read.saved import has, in_checkpoint, metadata, read, tensor
from ..read.site import Site
from ..read.tape import Slot, Tape
from .watch import Watch

if TYPE_CHECKING:
    from .plan import CapturePlan

_LARGEST = 2**16  # numbers in a cotangent; of larger ones, a copy costs more than it saves
_MOST = 2**23  # numbers that a forward pass may keep, as bundles wait for the end of the backward
Saved = Mapping[str, Tensor | None]


@dataclass(frozen=True, slots=True)
class Bundle:
    """One op that uses shared tensors, or several of one kind whose factors are made as one."""

    nodes: tuple[int, ...]
    outputs: tuple[int, ...]  # the backward outputs that go to shared tensors
    passed: bool  # whether the engine goes on from here, so that cotangents are caught in passing
    watch: Watch = field(default_factory=Watch)
    by_samples: bool = False  # of several nodes: do they use the same tensors, each with some of the samples?
    saved: Sequence[Saved] = ()  # of several nodes, what each has saved that is read: the backward lets go of it

    def reading(self, tape: Tape) -> Bundle:
        """This bundle with what its nodes have saved, in the graph of this call."""
        rowwise = tape.op(self.nodes[0]).rowwise
        assert rowwise is not None
        names = dict.fromkeys([name for k in self.outputs for name in rowwise.reads[k]])
        with unnoted():
            saved = [{name: tensor(tape.node(n), name) for name in names} for n in self.nodes]
        return replace(self, saved=saved)

    def taken_from(self, cotangents: dict[Slot, Tensor]) -> dict[int, Tensor]:
        """The cotangents of nodes at which the engine stopped, by their places."""
        return {place: g for place, n in enumerate(self.nodes) if (g := cotangents.pop((n, 0), None)) is not None}

    def is_alike(self, tape: Tape) -> bool:
        """Are all saved tensors of one kind, which is that of the cotangents?"""
        kinds = {
            (meta.dtype, meta.device, *[None if t is None else self._kind_of_saved(t, meta) for t in one.values()])
            for one, (meta, *_) in zip(self.saved, [metadata(tape.node(n)) for n in self.nodes], strict=True)
        }
        first = kinds.pop()
        return (
            None not in first
            and not first[0].is_complex
            and all(None not in kind and kind[:2] == first[:2] for kind in first[2:])
            and not kinds
        )

    def _kind_of_saved(self, t: Tensor, meta: Any) -> Hashable:
        """What nodes have to have in common; those of other samples may have more rows, as many as the cotangent."""
        if not self.by_samples:
            return t.dtype, t.device, t.shape
        return t.dtype, t.device, t.shape[1:], t.shape[:1] == meta.shape[:1] or None

    def is_as_planned(self, tape: Tape) -> bool:
        """Are they alike, as they were in a graph of the same form?

        What a product has saved follows from its weight and its cotangent, both of which are as they were then.
        """
        return tape.op(self.nodes[0]).product is not None or self.is_alike(tape)

    def saved_rows(self, places: Sequence[int], rounds: int) -> dict[str, Tensor]:
        """What the nodes at these places have saved, as rows of one op."""
        chosen = [self.saved[place] for place in places]
        return {name: joined([one[name] for one in chosen], rounds) for name in chosen[0]}  # type: ignore[misc]


def joined(tensors: Sequence[Tensor], rounds: int) -> Tensor:
    """The rows of several tensors as those of one with more samples.

    The rows of each are so many rounds through its samples, one round for every position if these come first. In every
    round of the result, one tensor's samples come after another's.
    """
    if rounds == 1:
        return torch.cat(list(tensors))
    return torch.stack([t.unflatten(0, (rounds, -1)) for t in tensors], 1).flatten(0, 2)


def bundle_up(plan: CapturePlan) -> None:
    """Make one bundle of uses that the engine passes, and that are alike."""
    if plan.activations > _MOST and not is_traced():
        return
    alike: dict[Hashable, list[Bundle]] = {}
    for use in plan.uses:
        if use.nodes[0] in plan.present:
            kind = _kind_by_samples(plan, use)
        else:
            kind = _kind(plan, use) if use.passed else None
        if kind is not None:
            alike.setdefault(kind, []).append(use)
    several = [
        Bundle(
            tuple([node for use in uses for node in use.nodes]),
            uses[0].outputs,
            uses[0].passed,
            by_samples=uses[0].nodes[0] in plan.present,
        ).reading(plan.tape)
        for uses in alike.values()
        if len(uses) > 1
    ]
    several = [bundle for bundle in several if bundle.is_alike(plan.tape)]
    taken = {node for bundle in several for node in bundle.nodes}
    plan.uses = [*[use for use in plan.uses if use.nodes[0] not in taken], *several]


def _kind(plan: CapturePlan, use: Bundle) -> Hashable:
    """Equal for uses that can be in one bundle; None for those that cannot be in any."""
    (number,) = use.nodes
    tape = plan.tape
    node, op, shapes = tape.node(number), tape.op(number), tape.shapes(number)
    if op.rowwise is None:
        return None
    reads, options = op.rowwise.reads, op.rowwise.options
    layout, size = plan.samples.cotangents.get((number, 0)), prod(shapes[0])
    whole_rows = size and isinstance(layout, Block) and layout.inner % prod(shapes[0][1:]) == 0
    if not whole_rows or not reads.keys() >= set(use.outputs) or in_checkpoint(node):
        return None
    assert isinstance(layout, Block)
    if usual_size(size, layout.batch) > _LARGEST:
        return None
    ways = []
    for k in use.outputs:
        *views, leaf = _only_way(plan, number, k)
        if not tape.is_leaf(leaf) or plan.waiting[leaf] != 1:
            return None
        ways.append((k, len(views), tape.shapes(leaf), metadata(tape.node(leaf))[0].dtype))
    below = tape.edges[number][0]
    input_shape = None if below is None else tape.shape(below)  # known if the input was computed from parameters
    return op, shapes, input_shape, layout, tuple(ways), tuple([read(node, o) for o in options if has(node, o)])


def _kind_by_samples(plan: CapturePlan, use: Bundle) -> Hashable:
    """The same for uses by some of the samples: those of one kind use the same parameters.

    Their rows must be one sample's after another's. Of matrices, samples may have different numbers of them.
    """
    (number,) = use.nodes
    tape = plan.tape
    node, op, (shape, *_) = tape.node(number), tape.op(number), tape.shapes(number)
    (layout, *others), size = plan.present[number].layouts, prod(shape)
    if op.rowwise is None or any(others) or not isinstance(layout, Block) or not 0 < size <= _LARGEST:
        return None
    if layout.batch * layout.inner != size or layout.inner % prod(shape[1:]):
        return None
    reads, options = op.rowwise.reads, op.rowwise.options
    if not reads.keys() >= set(use.outputs) or in_checkpoint(node):
        return None
    ways = []
    for k in use.outputs:
        *views, leaf = _only_way(plan, number, k)
        if not tape.is_leaf(leaf):
            return None
        if op.rowwise.by_last_dims and len(tape.shapes(leaf)[0]) >= len(shape):  # one sample without a dim of rows
            return None
        target = tape.shapes(views[0] if views else leaf)[0]
        if not reads[k] and len(target) == len(shape) and target[0] != 1:  # a row for each row of a sample
            return None
        ways.append((k, [tape.op(n) for n in views], leaf))
    rows = None if len(shape) == 2 else layout.inner
    kept = tuple([read(node, o) for o in options if has(node, o)])
    return "by samples", op, use.passed, shape[1:], rows, str(ways), kept


def _only_way(plan: CapturePlan, number: int, k: int) -> Iterator[int]:
    """The nodes below an output: through transposes, as long as nothing else comes to them; the last is another op."""
    slot = plan.tape.edges[number][k]
    while slot is not None:
        yield slot[0]
        op = plan.tape.op(slot[0])
        alone = plan.waiting[slot[0]] == 1 and op.view and not op.has_options
        slot = plan.tape.edges[slot[0]][0] if alone else None


def parts_as_one(
    plan: CapturePlan, site: Site, factors: Mapping[int, Factor | None]
) -> list[tuple[list[int], Factor | None]]:
    """What comes to shared tensors: parts of one factor as one, if each is all that comes to a parameter."""
    wholes: dict[int, list[int]] = {}
    for k, factor in factors.items():
        node, _ = site.edges[k]  # type: ignore[misc]
        if isinstance(factor, Part) and plan.tape.is_leaf(node) and plan.waiting[node] == 1:
            wholes.setdefault(id(factor.whole), []).append(k)
    complete: dict[int, list[int]] = {}
    for outputs in wholes.values():
        parts = [part for k in outputs if isinstance(part := factors[k], Part)]
        if [part.place for part in parts] == list(range(parts[0].count)):
            complete[outputs[0]] = outputs
    taken = {k for outputs in complete.values() for k in outputs}
    alone: list[tuple[list[int], Factor | None]] = [([k], f) for k, f in factors.items() if k not in taken]
    first = [(outputs, factors[k].whole) for k, outputs in complete.items()]  # type: ignore[union-attr]
    return [*first, *alone]
