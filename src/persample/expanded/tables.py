"""Tables of positions and their like, that are as long as the batch by coincidence.

The graph shows that a constant went into what all samples share, and its sizes, but not what it is: the other samples'
data, or sines of positions. A call that was followed knows of some that no input went into them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..graph.assign import assign
from ..graph.interaction import interactions
from ..graph.nodes import NodeSlot
from ..graph.roots import Roots
from ..graph.site import weights_only
from ..graph.tape import Tape


def interact_without(tables: Sequence[NodeSlot], tape: Tape, roots: Roots, tensors: Sequence[Tensor]) -> bool:
    """Do samples meet in any other place than in these tables? ``tape`` leads to all of the tensors."""
    numbers = {tape.graph.numbers.get(node) for node, _ in tables}
    tops = {number for number in numbers if number in tape.edges and not weights_only(tape, number)}
    if not tops or _used_with_data(tape, tops):
        return True
    cut = tape.graph.ending_at(tops).tape(tensors)
    cut.fed &= tape.fed
    cut.data = tape.data
    return bool(interactions(cut, assign(cut, roots), thoroughly=True))


def _used_with_data(tape: Tape, tops: set[int]) -> bool:
    """Is any of them used by an op that is given a constant that may be data, so that it must be looked at as it is?"""
    inside = set().union(*[tape.below(node) for node in tops])
    return any(
        node in tape.fed and any(slot is not None and slot[0] in tops for slot in tape.edges[node])
        for node in tape.order
        if node not in inside
    )
