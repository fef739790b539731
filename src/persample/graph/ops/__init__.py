"""All that is known of PyTorch's ops: one entry for each kind of graph node, in one file per family.

An entry (`table.op`) says where an op's samples go (its flow), what its parameters' gradients are made of (its rule),
and whatever else the engine may ask of it (the fields of `table.Op`). Whoever meets a node asks `table.lookup`.

- A *flow* is called as ``flow(site, k, layouts)`` and says where the samples lie in backward output ``k`` when the
  node's cotangents have these ``layouts``: a layout, ``Flow.SHARED`` (the output sums over samples), or ``Flow.PROBE``
  (this call's data decide). Answers never depend on data, except where a flow reads an index tensor of this very call.
  Flows are written with `dims`, which holds them to the ranks and sizes that they state.
- A *rule* is called as ``rule(use)`` for one backward output that sums over samples, and returns the factor of the
  tensor it belongs to, or None when it has no fast form for this layout (the exact fallback serves then).
- A *lift* is called as ``lift(site, factor, target)`` and takes a factor through a view of weights without stacking it.

``persample.graph`` imports every family, so that the table is complete before anybody asks.
"""
