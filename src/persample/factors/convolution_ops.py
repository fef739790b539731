"""What a graph asks of convolutions on the CPU, as ops of ``torch.library`` that run when the graph does.

The kernels of `kernels.convolution` keep what they write in caches, by loops over a few samples at a time, and look at
numbers to find the samples that need a longer way. Traced into a graph, such loops are unrolled, a compiler moves what
they write to memory, and there is nothing to look at. A compiler leaves these ops alone: inside, numbers are real.

Inputs may have any strides: the ops take what a compiler has, without a copy. Results are without gaps, in memory of
their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..kernels.convolution import Geometry
from ..kernels.graph_ops import define
from ..kernels.norms import row_norms, wide, widest
from ..kernels.pages import recycled
from .bounded import bounded_sum
from .convolution import Convolution
from .workspace import Workspace

_FACTOR = (
    "Tensor x, Tensor dy, SymInt[] size, SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, "
    "SymInt[] output_padding, SymInt groups"
)


def _norms(x: Tensor, dy: Tensor, *given: Any) -> Tensor:
    """(B,): the norms that the factor computes where it can look."""
    *shape, limit, batch_independent = given
    factor, space = _factor(x, dy, *shape), Workspace(limit)
    if batch_independent:
        factor.cache_batch_independent_norms(space)
    return factor.cached_norms(space).clone()


def _fake_norms(x: Tensor, dy: Tensor, *given: Any) -> Tensor:
    return x.new_empty(x.shape[0], dtype=widest(x.device))


def _term_norms(x: Tensor, dy: Tensor) -> Tensor:
    """(B,): ‖x‖‖dy‖."""
    return row_norms(x) * row_norms(dy)


def _fake_term_norms(x: Tensor, dy: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], dtype=widest(x.device))


def _stack(x: Tensor, dy: Tensor, *shape: Any) -> Tensor:
    """(B, *size): every gradient, in memory that is used again."""
    factor = _factor(x, dy, *shape)
    return factor.stack(recycled((factor.batch, *factor.shape), factor.dtype, factor.device)).contiguous()


def _fake_stack(x: Tensor, dy: Tensor, size: Sequence[int], *geometry: Any) -> Tensor:
    return x.new_empty((x.shape[0], *size))


def _bounded_sum(x: Tensor, dy: Tensor, weights: Tensor, norms: Tensor, *given: Any) -> Tensor:
    """(*size): `bounded_sum` of gradients whose norms are known."""
    *shape, limit = given
    factor = _factor(x, dy, *shape)
    factor.set_norms(norms)
    return bounded_sum(factor, weights, Workspace(limit)).contiguous()


def _fake_bounded_sum(
    x: Tensor, dy: Tensor, weights: Tensor, norms: Tensor, size: Sequence[int], *given: Any
) -> Tensor:
    return x.new_empty(tuple(size), dtype=wide(x.dtype))


def _factor(x: Tensor, dy: Tensor, size: Sequence[int], *geometry: Any) -> Convolution:
    hashable: Any = [tuple(option) if isinstance(option, list) else option for option in geometry]
    return Convolution(x, dy, tuple(size), Geometry(*hashable))


_SUM = _FACTOR.replace("Tensor dy", "Tensor dy, Tensor weights, Tensor norms")
_OPS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    f"convolution_norms({_FACTOR}, SymInt limit, bool batch_independent) -> Tensor": (_norms, _fake_norms),
    "convolution_term_norms(Tensor x, Tensor dy) -> Tensor": (_term_norms, _fake_term_norms),
    f"convolution_stack({_FACTOR}) -> Tensor": (_stack, _fake_stack),
    f"convolution_bounded_sum({_SUM}, SymInt limit) -> Tensor": (_bounded_sum, _fake_bounded_sum),
}


for _schema, (_function, _fake) in _OPS.items():
    define(_schema, _function, _fake)
