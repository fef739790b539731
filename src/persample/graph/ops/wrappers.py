"""Nodes by which DDP, FSDP2 and DTensors come into a graph.

Cotangents go on as they are, or as parts of a whole.
"""

from __future__ import annotations

from ..._errors import UnsupportedError
from ...distributed.tensor_parallel import keeps_whole
from ...distributed.wrappers import passed_from, passes_on
from ...factors import Factor
from ..layout import Outcome, Shape, carry
from ..read.site import Site
from .table import EVERY, Layouts, Undecided, op


def handed_on(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Every input has the cotangent of one output."""
    if not passes_on(site.node):
        raise Undecided
    return layouts[passed_from(site.node, k)]


def placed_anew(site: Site, k: int, layouts: Layouts) -> Outcome:
    """From a whole tensor to this process's part of it, or back: no dim but that of the samples has to stay."""
    layout, shape, to_shape = layouts[0], site.shapes[0], site.target(k)
    if layout is None:
        return None
    kept = [d if size == to_size else None for d, (size, to_size) in enumerate(zip(shape, to_shape, strict=True))]
    found = carry(layout, shape, to_shape, kept)
    if found is None:
        raise UnsupportedError(
            f"samples are parted by a DTensor's placement (from {to_shape} to {shape} by to_local, from_local or "
            f"redistribute): every process of a tensor parallel model needs all samples of its losses. Shard other "
            f"dims, and use data parallelism for samples"
        )
    return found


def same_weights(site: Site, factor: Factor, shape: Shape) -> Factor:
    """Weights that are placed in another way, and whole before and after."""
    if not keeps_whole(site.node):
        raise UnsupportedError(
            f"weights become parts of a whole of shape {shape} by to_local or from_local, which hides whose "
            f"gradients are whose: use them as DTensors, as nn.Linear and nn.Embedding do after parallelize_module"
        )
    return factor


op("_DDPSink RegisterPostBackwardFunction", flow={EVERY: handed_on})
op("_ToTorchTensor _FromTorchTensor Redistribute", flow=placed_anew, lift=same_weights)
