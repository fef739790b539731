"""Capture: read the autograd graph, find each sample in it, contract what backward would have summed.

The words used here:

- *cotangent*: the gradient of the losses with respect to a forward op's output; *slot*: one cotangent of one node.
- *separable*: each element of a cotangent belongs to one sample; its *layout* says to which.
- *shared*: a sum over samples, the cotangent of a weight or of anything computed from weights; *mixed*: elements
  depend on several samples in some other way. Either makes a node *batched*: B cotangents have to go through it.
- *frontier*: the edges from separable nodes to batched ones. Factors are made there.
"""

from . import fused
from .custom import COMPILED, keeps_samples_apart, teach
from .ops import (  # noqa: F401  entered into the table
    along_dims,
    attention,
    convolutions,
    distances,
    images,
    linear_algebra,
    losses,
    norms,
    pointwise,
    products,
    recurrence,
    scatters,
    sections,
    tables,
    views,
    wrappers,
)

__all__ = ["COMPILED", "fused", "keeps_samples_apart", "teach"]
