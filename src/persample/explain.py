"""How every use of every parameter will be handled, and how much memory it is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ._table import in_bytes, render
from .checks import boundary, check_losses
from .distributed import undisturbed
from .factors import Factor
from .graph.describe import Handling, describe
from .graph.read.compiled import break_graph
from .graph.several import count_positions, positions_meet
from .params import Params, named

__all__ = ["Explanation", "Handling", "Memory", "explain"]


@dataclass(frozen=True, slots=True)
class Memory:
    """How many bytes this batch is about; prints as a table."""

    parameters: int  # those that were asked for
    activations: int | None  # about what the forward pass has kept for the backward; None if it was not looked at
    factors: int  # what gradients are made from, for all parameters at once, beside what the forward pass has kept
    largest_factor: int  # the same for the parameter that has most, as one after another comes to `ps.norms`
    written_out: int  # all gradients of all losses, as `ps.grad` returns them

    def __str__(self) -> str:
        about = [
            ("parameters", self.parameters),
            ("kept by the forward pass, about", self.activations),
            ("what gradients are made from, of one parameter at most", self.largest_factor),
            ("what gradients are made from, of all parameters", self.factors),
            ("all gradients, written out", self.written_out),
        ]
        return render(("memory", ""), [(what, in_bytes(size)) for what, size in about if size is not None])


@dataclass(frozen=True, slots=True)
class Explanation:
    """One row per use of a parameter; prints as a table."""

    rows: tuple[Handling, ...]
    interactions: tuple[str, ...]  # ops in which samples meet
    undecided: tuple[str, ...]  # ops of which data decide where samples lie, and tensors on meta or fake ones have none
    memory: Memory
    way: str = ""  # with several losses per sample, how they are taken apart

    def __str__(self) -> str:
        header = ("parameter", "node", "via", "samples in", "handled by")
        table = render(header, [(r.parameter, r.op, r.via, r.layout, r.handling) for r in self.rows])
        lines = [table, *[f"samples interact in {op}" for op in self.interactions]]
        lines += [f"data decide in {op}, and there are none: samples are taken to meet there" for op in self.undecided]
        return "\n".join([*lines, *([self.way] if self.way else [])])


@break_graph
def explain(losses: Tensor, params: Params) -> Explanation:
    """Show how every use of every parameter will be handled: by rule, by the exact fallback, or not at all.

    >>> import torch, persample as ps
    >>> model = torch.nn.Linear(3, 2)
    >>> print(ps.explain(model(torch.ones(5, 3)).square().sum(1), model))
    parameter  node            via         samples in       handled by
    ---------  --------------  ----------  ---------------  -----------
    weight     AddmmBackward0  TBackward0  dim 0 of (5, 2)  rule: Outer
    bias       AddmmBackward0              dim 0 of (5, 2)  rule: Dense

    Args:
        losses: one loss per sample, of shape (B,), or several, (B, K…), with their graph. One backward is run, slow
            paths included; the graph is kept. On ``meta``, or in a ``FakeTensorMode``, nothing is computed but shapes.
        params: as for ``persample.grad``; a parameter of a module is named by its module path.

    Returns:
        An `Explanation`: ``rows`` with one entry per use, ``interactions``, the ops in which samples meet,
        ``undecided``, those of which data would have to decide that were not there, and ``memory``, in bytes.
    """
    check_losses(losses, several=True)
    factors = _Factors()
    with boundary(losses), undisturbed(losses, named(params), last=False) as leaves:
        described, way = (losses, "") if losses.ndim == 1 else _one_of_several(losses, leaves.full)
        said = describe(described, leaves.full, factors.add)
        memory = _memory(leaves.full, losses.numel(), said.activations, factors)
    return Explanation(tuple(said.rows), tuple(said.interactions), tuple(said.undecided), memory, way)


def _one_of_several(losses: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, str]:
    """The losses of one backward, and how many of them it takes for losses (B, K…)."""
    with torch.enable_grad():
        if positions_meet(losses, params):
            count = count_positions(losses)
            way = f"losses of one sample meet: {count} backwards like this one, each for all samples"
            return losses.flatten(1)[:, 0], way
        return losses.flatten(), f"no losses of one sample meet: each of the {losses.numel()} is taken for a sample"


class _Factors:
    """The sizes of the factors of one backward, in which none is kept."""

    def __init__(self) -> None:
        self._by_factor: list[set[StorageWeakRef]] = []
        self._bytes: dict[StorageWeakRef, int] = {}

    def add(self, names: Sequence[str], factor: Factor) -> None:
        """Note what a factor is made of."""
        storages = [t.untyped_storage() for t in factor.tensors]
        sizes = {StorageWeakRef(storage): storage.nbytes() for storage in storages}
        self._by_factor.append(set(sizes))
        self._bytes |= sizes

    def new_bytes(self) -> list[int]:
        """The sizes of the factors one by one, and of all at once; without what is still there, as the graph has it."""
        gone = {storage for storage in self._bytes if storage.expired()}
        each = [*self._by_factor, set(self._bytes)]
        return [sum(self._bytes[storage] for storage in one & gone) for one in each]


def _memory(params: Mapping[str, Tensor], batch: int, activations: int | None, factors: _Factors) -> Memory:
    *each, together = factors.new_bytes()
    unique = {id(p): p.numel() * p.element_size() for p in params.values()}
    written_out = batch * sum(p.numel() * p.element_size() for p in params.values())
    return Memory(sum(unique.values()), activations, together, max(each, default=0), written_out)
