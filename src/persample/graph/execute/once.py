"""What can be run backwards once only, where results are to be differentiated again."""

from __future__ import annotations

from ..._errors import UnsupportedError
from ..read.compiled import is_compiled
from ..read.nodes import op_name
from ..read.roots import Roots
from ..read.site import Sites
from ..read.tape import Tape

_WITHOUT_CHECKPOINT = "use checkpoint(..., use_reentrant=False)"
_WITHOUT_COMPILER = "compute the losses without torch.compile"


def refuse_once_differentiable(roots: Roots, tape: Tape, sites: Sites) -> None:
    """Refuse ops whose backward PyTorch cannot differentiate, before it says so without a remedy, or not at all."""
    if roots.regions.opened:
        raise _refusal("a reentrant checkpoint", _WITHOUT_CHECKPOINT)
    for number in tape.order:
        once = tape.op(number).once
        remedy = None if once is None else once(sites[number])
        if remedy is not None:
            raise _refusal(op_name(tape.node(number)), remedy)
        if is_compiled(tape.node(number)):
            raise _refusal("a compiled region", _WITHOUT_COMPILER)


def _refusal(what: str, remedy: str) -> UnsupportedError:
    return UnsupportedError(
        f"the backward of {what} cannot be differentiated in PyTorch, and create_graph=True asks for it: {remedy}"
    )
