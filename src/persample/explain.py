"""How every use of every parameter will be handled."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ._table import render
from .checks import boundary, check_losses
from .distributed import undisturbed
from .graph.describe import Handling, describe
from .params import Params, named

__all__ = ["Explanation", "Handling", "explain"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """One row per use of a parameter; prints as a table."""

    rows: tuple[Handling, ...]
    interactions: tuple[str, ...]  # ops in which samples meet

    def __str__(self) -> str:
        header = ("parameter", "node", "via", "samples in", "handled by")
        table = render(header, [(r.parameter, r.op, r.via, r.layout, r.handling) for r in self.rows])
        return table + "".join(f"\nsamples interact in {op}" for op in self.interactions)


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
        losses: one loss per sample, of shape (B,), with its graph. One backward is run, slow paths included; the graph
            is kept.
        params: as for ``persample.grad``; a parameter of a module is named by its module path.

    Returns:
        An `Explanation`: ``rows`` with one entry per use, and ``interactions``, the ops in which samples meet.
    """
    check_losses(losses)
    with boundary(losses), undisturbed(losses, named(params), last=False) as leaves:
        rows, meeting = describe(losses, leaves.full)
    return Explanation(tuple(rows), tuple(meeting))
