"""Samples of PyTorch's own database of ops (OpInfo), for entries of the table that nobody has written samples for."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from tests.expanded.samples import databases
from tests.graph.samples.leaves import Sample

_MOST = 12  # samples of one op


def samples_of(names: Iterable[str]) -> Iterator[Sample]:
    """What may make nodes of these names: calls of the ops that are called alike."""
    wanted = [name.lower() for name in names]
    for info in databases()[0] if wanted else ():
        if torch.float64 in info.dtypes and any(_is_alike(info, name) for name in wanted):
            torch.manual_seed(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of features in beta
                given = list(info.sample_inputs("cpu", torch.float64, requires_grad=True))
            yield from (_sample(info.op, one) for one in given[:: max(1, len(given) // _MOST)])


def _is_alike(info: Any, node: str) -> bool:
    """Is one name part of the other? ``nn.functional.layer_norm`` makes a NativeLayerNorm."""
    called = {_letters(name) for name in (info.name, info.aten_name or "", info.name.rpartition(".")[2])}
    return node in called or any(node in one or (len(one) > 3 and one in node) for one in called)


def _letters(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _sample(op: Any, given: Any) -> Sample:
    def sample() -> Tensor:
        args, kwargs = tree_map_only(Tensor, _drawn_again, ((given.input, *given.args), given.kwargs))
        try:
            result = op(*args, **kwargs)
        except RuntimeError:  # not all ops take any numbers
            args, kwargs = tree_map_only(Tensor, _leaf, ((given.input, *given.args), given.kwargs))
            result = op(*args, **kwargs)
        results = [t for t in tree_flatten(result)[0] if isinstance(t, Tensor)]
        return next((t for t in results if t.requires_grad), results[0])

    return sample


def _drawn_again(t: Tensor) -> Tensor:
    """A new leaf of this shape, between 0.1 and 0.9; the matrix draws it in other dtypes and forms."""
    if t.dtype != torch.float64 or not t.requires_grad:
        return t
    return (torch.rand(t.shape, dtype=torch.float64) * 0.8 + 0.1).requires_grad_()


def _leaf(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_() if t.requires_grad else t
