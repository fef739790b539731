"""Every function that expanded weights know, on the samples of PyTorch's operator database.

A sample becomes a case by giving its arguments roles. What is not made a case, and why, is said where it happens
(`Drop`); `Unbatched` samples must be refused. The numbers in `OPERATORS` guard against a database that has changed so
that few or no samples are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from persample.expanded import ExpandedWeight
from tests.expanded.samples import (
    Case,
    Slot,
    assert_agree,
    definition_of,
    describe,
    expanded_run,
    for_every,
    operator_samples,
)

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")

Arguments = tuple[list[Any], dict[str, Any]]


class Drop(Exception):
    """A sample that says nothing about per-sample gradients; the message is the reason."""


class Unbatched(Exception):
    """A sample whose data have no batch in dim 0 (or 1): expanded weights must refuse it."""

    def __init__(self, *data: Slot, dim: int = 0) -> None:
        self.data, self.dim = data, dim


@dataclass(frozen=True)
class Operator:
    """How the samples of one OpInfo are called, and at least how many are compared and refused."""

    fn: Callable[..., Any]
    info: str
    roles: Callable[[list[Any], dict[str, Any]], dict[str, Any]]
    compared: int
    refused: int = 0
    variant: str = ""
    adapt: Callable[[list[Any], dict[str, Any]], Arguments] = lambda args, kwargs: (args, kwargs)


def at_least(dims: int, *data: Slot, dim: int = 0) -> Callable[..., dict[str, Any]]:
    """Roles of a function whose data have the batch in dim 0 (or 1) when they have `dims` dims or more."""
    data = data or (0,)

    def roles(args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        if args[0].dim() < dims:
            raise Unbatched(*data, dim=dim)
        return {"data": data, "batch": args[0].shape[dim], "out_dim": dim, "batch_first": dim == 0}

    return roles


def normalized(args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """layer_norm and rms_norm: normalising over every dim leaves none for the batch."""
    if args[0].dim() == len(args[1]):
        raise Unbatched(0)
    return {"data": (0,), "batch": len(args[0])}


def evaluation(args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """batch_norm with given statistics; training mode mixes samples, which `test_batch_norm_in_training` covers."""
    if kwargs.get("training", False):
        raise Drop("statistics of the batch")
    return {"data": (0,), "batch": len(args[0])}


def bags(args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """embedding_bag: a sample is a bag, which is a row of the indices or a stretch between two offsets."""
    data = (0, *[key for key in ("offsets", "per_sample_weights") if kwargs.get(key) is not None])
    offsets = kwargs.get("offsets")
    if offsets is None:
        return {"data": data, "batch": len(args[0])}
    return {"data": data, "batch": len(offsets) - bool(kwargs.get("include_last_offset"))}


def operand(slot: int, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Broadcasting of two operands, of which `slot` is data: its dim 0 may come out further right."""
    data, other = args[slot], args[1 - slot]
    if data.dim() == 0:
        raise Unbatched(slot)
    if len(data) == 1 and other.dim() >= data.dim() and other.shape[-data.dim()] != 1:
        raise Drop("the one sample is repeated along its batch dim, so that no output is its own")
    return {"data": (slot,), "batch": len(data), "out_dim": max(0, other.dim() - data.dim())}


def product(slot: int, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """matmul: as `operand`, but the dims that are contracted cannot be the batch."""
    if args[slot].dim() < (2, 3)[slot]:
        raise Unbatched(slot)
    return operand(slot, args, kwargs)


def fixed(*data: Slot, rows: int, **more: Any) -> Callable[..., dict[str, Any]]:
    """Roles that do not depend on the sample; the batch is dim 0 (dim 1 if told so) of the argument `rows`."""

    def roles(args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        dim = 0 if more.get("batch_first", True) else 1
        return {"data": data, "batch": args[rows].shape[dim], **more}

    return roles


def residual(args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """addmm and baddbmm whose first argument is data too; only one with a row per sample can be."""
    if args[0].dim() != args[1].dim():
        raise Drop("the summand is the same for every sample")
    return {"data": (0, 1), "batch": len(args[1])}


def contraction(args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """einsum whose first operand is data."""
    if len(args) < 3:
        raise Drop("one operand, so there is no parameter")
    inputs, _, output = args[0].replace(" ", "").partition("->")
    if not output.startswith(inputs[0]):
        raise Drop("the batch is summed, so that no output is a sample's own")
    return {"data": (1,), "batch": len(args[1])}


def attention(params: tuple[Slot, ...], args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """multi_head_attention_forward: (T, B, E), dropout off."""
    args[10] = 0.0
    return {"data": (0, 1, 2), "params": params, "batch": args[0].shape[1], "out_dim": 1, "batch_first": False}


def swapped(args: list[Any], kwargs: dict[str, Any]) -> Arguments:
    """The database has embedding tables first and indices second."""
    return [args[1], args[0], *args[2:]], kwargs


def equation_first(args: list[Any], kwargs: dict[str, Any]) -> Arguments:
    """The database has (operands, equation)."""
    return [args[1], *args[0]], kwargs


PROJECTIONS = (5, 6, 7, 8, 11, 12)
OPERATORS = {
    "linear": Operator(F.linear, "nn.functional.linear", at_least(2), 14, 4),
    "linear-second": Operator(F.linear, "nn.functional.linear", at_least(3, dim=1), 6, 10),
    "conv1d": Operator(F.conv1d, "nn.functional.conv1d", at_least(3), 5, 5),
    "conv2d": Operator(F.conv2d, "nn.functional.conv2d", at_least(4), 15, 15),
    "conv3d": Operator(F.conv3d, "nn.functional.conv3d", at_least(5), 10, 10),
    "conv_transpose1d": Operator(F.conv_transpose1d, "nn.functional.conv_transpose1d", at_least(3), 5, 5),
    "conv_transpose2d": Operator(F.conv_transpose2d, "nn.functional.conv_transpose2d", at_least(4), 6, 6),
    "conv_transpose3d": Operator(F.conv_transpose3d, "nn.functional.conv_transpose3d", at_least(5), 5, 5),
    "embedding": Operator(F.embedding, "nn.functional.embedding", at_least(1), 2, 1, adapt=swapped),
    "embedding-second": Operator(F.embedding, "nn.functional.embedding", at_least(2, dim=1), 1, 2, adapt=swapped),
    "embedding_bag": Operator(F.embedding_bag, "nn.functional.embedding_bag", bags, 32, adapt=swapped),
    "layer_norm": Operator(F.layer_norm, "nn.functional.layer_norm", normalized, 3, 2),
    "rms_norm": Operator(F.rms_norm, "nn.functional.rms_norm", normalized, 3, 2),
    "group_norm": Operator(F.group_norm, "nn.functional.group_norm", at_least(2), 20),
    "instance_norm": Operator(F.instance_norm, "nn.functional.instance_norm", at_least(3), 7),
    "batch_norm": Operator(F.batch_norm, "nn.functional.batch_norm", evaluation, 5),
    "bilinear": Operator(F.bilinear, "nn.functional.bilinear", at_least(2, 0, 1), 12, 4),
    "bilinear-second": Operator(F.bilinear, "nn.functional.bilinear", at_least(3, 0, 1, dim=1), 4, 10),
    "prelu": Operator(F.prelu, "nn.functional.prelu", at_least(1), 17, 5),
    "matmul": Operator(torch.matmul, "matmul", partial(product, 0), 11, 4),
    "matmul-right": Operator(torch.matmul, "matmul", partial(product, 1), 5, 7),
    "mm": Operator(torch.mm, "mm", fixed(0, rows=0), 3),
    "mm-right": Operator(torch.mm, "mm", fixed(1, rows=1, out_dim=1, batch_first=False), 3),
    "addmm": Operator(torch.addmm, "addmm", fixed(1, rows=1), 6),
    "addmm-residual": Operator(torch.addmm, "addmm", residual, 3),
    "addmm-unscaled": Operator(torch.addmm, "addmm", fixed(1, rows=1), 6, variant="decomposed"),
    "bmm": Operator(torch.bmm, "bmm", fixed(0, rows=0), 1),
    "bmm-rows": Operator(torch.bmm, "bmm", fixed(0, rows=0, out_dim=1, batch_first=False), 1),
    "baddbmm": Operator(torch.baddbmm, "baddbmm", fixed(1, rows=1), 6),
    "baddbmm-residual": Operator(torch.baddbmm, "baddbmm", residual, 2),
    "einsum": Operator(torch.einsum, "einsum", contraction, 5, adapt=equation_first),
    "add": Operator(torch.add, "add", partial(operand, 0), 10, 1),
    "add-right": Operator(torch.add, "add", partial(operand, 1), 7, 3),
    "sub": Operator(torch.sub, "sub", partial(operand, 0), 10, 1),
    "sub-right": Operator(torch.sub, "sub", partial(operand, 1), 7, 3),
    "mul": Operator(torch.mul, "mul", partial(operand, 0), 8, 1),
    "mul-right": Operator(torch.mul, "mul", partial(operand, 1), 5, 3),
    "div": Operator(torch.div, "div", partial(operand, 0), 8, 1, variant="no_rounding_mode"),
    "div-right": Operator(torch.div, "div", partial(operand, 1), 5, 3, variant="no_rounding_mode"),
    "div-floor": Operator(torch.div, "div", partial(operand, 0), 8, 1, variant="floor_rounding"),
    "attention": Operator(
        F.multi_head_attention_forward,
        "nn.functional.multi_head_attention_forward",
        partial(attention, PROJECTIONS),
        1,
    ),
    "attention-mask": Operator(
        F.multi_head_attention_forward,
        "nn.functional.multi_head_attention_forward",
        partial(attention, (*PROJECTIONS, "attn_mask")),
        1,
    ),
}


@lru_cache
def cases(name: str) -> tuple[list[Case], list[Case]]:
    """The cases of an operator to compare, and those to refuse."""
    operator = OPERATORS[name]
    compared: list[Case] = []
    refused: list[Case] = []
    for number, (args, kwargs) in enumerate(operator_samples(operator.info, operator.variant)):
        args, kwargs = operator.adapt(args, kwargs)
        label = f"{name}[{number}] {describe(args)} {describe(kwargs)}"
        try:
            found = operator.roles(args, kwargs)
        except Drop:
            continue
        except Unbatched as refusal:
            sizes, dim = args[refusal.data[0]].shape, refusal.dim
            found = {"data": refusal.data, "batch": sizes[dim] if dim < len(sizes) else 1, "batch_first": dim == 0}
            goes_to = refused
        else:
            goes_to = compared
        found.setdefault("params", tuple(trainable(args, kwargs, found["data"])))
        if goes_to is refused and not found["batch"]:
            continue  # with no rows at all nothing can be taken for a sample
        if found["params"]:  # without a parameter there is nothing to expand
            goes_to.append(Case(label, operator.fn, args, kwargs, **found))
    return compared, refused


def trainable(args: list[Any], kwargs: dict[str, Any], data: tuple[Slot, ...]) -> Iterator[Slot]:
    """Where the tensors are that require a gradient and are not data."""
    named: dict[Slot, Any] = {**dict(enumerate(args)), **kwargs}
    for slot, value in named.items():
        if isinstance(value, Tensor) and value.requires_grad and slot not in data:
            yield slot


@pytest.mark.parametrize("name", OPERATORS)
def test_enough_samples(name: str) -> None:
    compared, refused = cases(name)
    assert len(compared) >= OPERATORS[name].compared
    assert len(refused) >= OPERATORS[name].refused


@pytest.mark.parametrize(("reduction", "data"), [("sum", "differentiable"), ("mean", "constant")])
@pytest.mark.parametrize("name", OPERATORS)
def test_equals_the_definition(name: str, reduction: str, data: str) -> None:
    def check(case: Case) -> None:
        case = case.constant_data() if data == "constant" else case
        want = definition_of(case, reduction == "mean")
        assert_agree(expanded_run(case, reduction), want)

    for_every(cases(name)[0], check)


# Functions of more than one parameter; of addmm and baddbmm those whose summand is not data.
SEVERAL = "linear conv bilinear layer_norm group_norm instance_norm batch_norm addmm baddbmm attention".split()


@pytest.mark.parametrize(
    "name", [name for name in OPERATORS if name.startswith(tuple(SEVERAL)) and not name.endswith("residual")]
)
def test_one_parameter_expanded_the_others_plain(name: str) -> None:
    """The plain ones get their gradient summed over the batch in `.grad`, as ever."""

    def check(case: Case) -> None:
        want = definition_of(case, mean=False)
        for slot in case.params:
            if slot == "attn_mask":
                continue  # PyTorch does not ask a mask alone how attention is done, only the other arguments
            assert_agree(expanded_run(case, "sum", expand=[slot]), want)

    several = [case for case in cases(name)[0] if len(case.params) > 1]
    assert several
    for_every(several, check)


@pytest.mark.parametrize("name", [name for name, operator in OPERATORS.items() if operator.refused])
def test_data_without_a_batch_are_refused(name: str) -> None:
    def check(case: Case) -> None:
        with pytest.raises(RuntimeError, match=rf"\b{name.partition('-')[0]}\b"):
            expanded_run(case, "sum")
        with pytest.raises(RuntimeError):  # at backward, where constants could be part of a computation of weights
            expanded_run(case.constant_data(), "sum")

    for_every(cases(name)[1], check)


def test_batch_norm_in_training() -> None:
    """Samples share their statistics: there are no gradients of one sample alone."""
    found = [(args, kwargs) for args, kwargs in operator_samples("nn.functional.batch_norm") if kwargs.get("training")]
    with_weights = [(args, kwargs) for args, kwargs in found if args[3] is not None]
    assert len(with_weights) >= 4
    for args, kwargs in with_weights:
        x, mean, var, weight, bias = args
        with pytest.raises(RuntimeError, match="batch_norm"):
            F.batch_norm(x, mean, var, *[ExpandedWeight(p, len(x), "sum") for p in (weight, bias)], **kwargs)
