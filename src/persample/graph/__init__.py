"""Capture: read the autograd graph, find each sample in it, contract what backward would have summed.

The rooms, in the order in which a loss passes them (each knows those before it):

- ``layout``, ``sample_rows``: the algebra of where samples lie in a tensor.
- ``read``: PyTorch's graph as a tape of numbered nodes, and what its nodes saved.
- ``ops``: the table of what is known of every kind of node.
- ``locate``: where the samples lie in every cotangent, and whether they meet.
- ``execute``: one backward, in which factors are made and brought to the parameters.
- ``remember``: plans of graphs that have been seen before.
- ``entry``: the way in.

The words used here:

- *cotangent*: the gradient of the losses with respect to a forward op's output; *slot*: one cotangent of one node.
- *separable*: each element of a cotangent belongs to one sample; its *layout* says to which.
- *shared*: a sum over samples, the cotangent of a weight or of anything computed from weights; *mixed*: elements
  depend on several samples in some other way. Either makes a node *batched*: B cotangents have to go through it.
- *outcome*: what one output of a node's backward is, of these: a layout, shared, mixed, or nothing.
- *use*: where samples meet a shared tensor, a separable node with outputs into batched ones. Factors are made there.
- *bundle*: one use, or several that are alike and made into factors as one.
- *opaque*: a custom Function or a compiled region, of whose forward pass nobody sees the inside.
"""

from .ops import fused
from .ops.custom import COMPILED, keeps_samples_apart, teach

# isort: split
from .ops import (  # noqa: F401  entered into the table
    along_dims,
    attention,
    cells,
    convolutions,
    copies,
    device_recurrences,
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

# isort: split
from .compiled import entry  # noqa: F401  entered as taught

__all__ = ["COMPILED", "fused", "keeps_samples_apart", "teach"]
