"""Functions that have a rule, and where those that are known leave the samples of their data.

Two readers want to know. A function recorded alone is given data that carry the batch in a dim that is known, and
says where its results do. In a recorded module, a function that was given one of the module's inputs says where
the samples lie in its result, which is evidence for where they lie in the module's outputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..graph.layout import Labels, carry
from .samples import Samples, of_packed

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
Place = Callable[[Arguments, Any, Samples], None]  # tells the samples where they lie in the result, or raises


@dataclass(frozen=True, slots=True)
class Known:
    """A function whose gradients the graph engine knows; what is left to say is where its samples lie.

    ``alone`` says it for a function recorded alone; without it the samples are followed from the data to the results by
    the engine. ``inside`` says it in a recorded module, if it can be known.
    """

    alone: Place | None = None
    inside: Place | None = None
    dim: int | None = None  # of the batch, where the function leaves no choice


HANDLED: dict[Callable[..., Any], Known | type[torch.autograd.Function]] = {}


def enter(function: Callable[..., Any], rule: Known | type[torch.autograd.Function]) -> None:
    """Give a function its rule, once."""
    if not callable(function):
        raise RuntimeError(f"a rule is registered for a torch function, not for a {type(function).__name__}")
    if function in HANDLED:
        raise RuntimeError(f"{name_of(function)} already has a rule for expanded weights")
    HANDLED[function] = rule


def name_of(function: Callable[..., Any]) -> str:
    """A function as users know it."""
    name = getattr(function, "__name__", repr(function))
    owner = getattr(function, "__self__", None)
    return str(getattr(owner, "__name__", name)) if name == "__get__" else str(name)


def is_in_place(function: Callable[..., Any]) -> bool:
    """Does the function change its first argument?"""
    name = getattr(function, "__name__", "")
    return name in ("__setitem__", "__set__") or bool(re.fullmatch(r"__i[a-z]+__|[a-z]\w*[a-z0-9]_", name))


def _argument(arguments: Arguments, position: int, name: str, default: Any = None) -> Any:
    args, kwargs = arguments
    return args[position] if position < len(args) else kwargs.get(name, default)


def _first(arguments: Arguments) -> Tensor:
    """The data: every function below takes them first, as ``input``."""
    data: Tensor = _argument(arguments, 0, "input")
    return data


# What PyTorch's own expanded weights say of data without a batch: code that was written for them looks for it.
_UNBATCHED = "Expanded Weights expected input with a batch dimension"
_UNBATCHED_LINEAR = "Input does not have a batch dimension. Expanded Weights expected input of at least rank 2"
_UNBATCHED_IDS = "Expanded Weights needs an input with a batch size"
_UNBATCHED_IMAGES = "Expanded Weights only support convolution with batched input"
_NORMALISED_SAMPLES = (
    "Expanded Weights: Layer norm should not normalize over batch dimension for per sample gradient computations"
)


def _stays(
    func: Callable[..., Any], ndim: int = 1, behind: int = 0, exactly: bool = False, words: str = _UNBATCHED
) -> Place:
    """The batch stays in its dim; data have at least (or exactly) so many dims, and so many behind the batch."""

    def place(arguments: Arguments, result: Any, samples: Samples) -> None:
        x, least = _first(arguments), max(ndim, samples.dim + 1 + behind)
        if x.ndim < least or (exactly and x.ndim != least):
            raise _unbatched(words, func, x, least, exactly)
        if x.shape[samples.dim] != samples.batch:
            raise RuntimeError(
                f"Expected ExpandedWeights to have batch size matching input, but {name_of(func)} was given data of "
                f"shape {tuple(x.shape)}, with {x.shape[samples.dim]} samples in dim {samples.dim}, and Expanded "
                f"Weights of batch size {samples.batch}"
            )
        samples.tell_dim(result, samples.dim)

    return place


def _unbatched(words: str, func: Callable[..., Any], x: Tensor, dims: int, exactly: bool = True) -> RuntimeError:
    return RuntimeError(
        f"{words}: {name_of(func)} with expanded weights expects batched data of {'' if exactly else 'at least '}"
        f"{dims} dims, but got {x.ndim}, of shape {tuple(x.shape)}"
    )


def _normalised(func: Callable[..., Any]) -> Place:
    def place(arguments: Arguments, result: Any, samples: Samples) -> None:
        over = _argument(arguments, 1, "normalized_shape")
        _stays(func, behind=len(over), words=_NORMALISED_SAMPLES)(arguments, result, samples)

    return place


def _batch_norm(arguments: Arguments, result: Any, samples: Samples) -> None:
    training, mean = _argument(arguments, 5, "training", False), _argument(arguments, 1, "running_mean")
    if training or mean is None:
        raise RuntimeError(
            "Expanded Weights encountered but cannot handle function batch_norm with the statistics of the batch, by "
            "which samples interact: a sample has no gradient of its own. Use the running statistics (eval mode), or "
            "GroupNorm"
        )
    _stays(F.batch_norm, ndim=2)(arguments, result, samples)


def _bags(arguments: Arguments, result: Any, samples: Samples) -> None:
    """One bag per sample."""
    if len(result) != samples.batch:
        raise RuntimeError(
            f"Expected ExpandedWeights to have batch size matching input, but embedding_bag made {len(result)} bags "
            f"for Expanded Weights of batch size {samples.batch}: expected one bag per sample"
        )
    samples.tell_dim(result, 0)


def _attention(arguments: Arguments, result: Any, samples: Samples) -> None:
    """Time first, weights of attention batch first."""
    _stays(F.multi_head_attention_forward, ndim=3, exactly=True)(arguments, result[0], samples)
    if result[1] is not None:
        samples.tell_dim(result[1], 0)


def _is_packed(arguments: Arguments) -> bool:
    """(data, batch_sizes, hidden, weights, …) as opposed to (input, hidden, weights, …)."""
    return not isinstance(arguments[0][2], (list, tuple)) or isinstance(arguments[0][3], (list, tuple))


def _recurrent(arguments: Arguments, result: Any, samples: Samples) -> None:
    """Outputs carry the batch in dim 0 or 1 or are packed, the longest sample first; hidden states in dim 1."""
    args, _ = arguments
    output, *states = result
    if not _is_packed(arguments):
        samples.tell_dim(output, 0 if args[8] else 1)
    elif int(args[1][0]) == samples.batch:
        samples.tell(output, of_packed(args[1], None, output, samples.batch))
    for state in states:
        samples.tell_dim(state, 1)


def _recurrent_inside(arguments: Arguments, result: Any, samples: Samples) -> None:
    """In a recorded module, packed samples lie in an order that only the module's input can tell."""
    if not _is_packed(arguments):
        _recurrent(arguments, result, samples)
    elif samples.packed is not None and arguments[0][0] is samples.packed.data:
        order = samples.packed.sorted_indices
        samples.tell(result[0], of_packed(samples.packed.batch_sizes, order, result[0], samples.batch))
        for state in result[1:]:
            place = torch.arange(samples.batch, device="cpu") if order is None else order.cpu()
            samples.tell(state, Labels(samples.batch, place.reshape(1, -1, 1)))


def _keeps(kept: Callable[[int], Sequence[int | None]]) -> Place:
    """The result's samples from the input's, when that is one of the call's; ``kept``: the dims that stay."""

    def place(arguments: Arguments, result: Any, samples: Samples) -> None:
        x = _first(arguments)
        layout = samples.of_input(x)
        moved = None if layout is None else carry(layout, tuple(x.shape), tuple(result.shape), kept(x.ndim))
        if moved is not None:
            samples.tell(result, moved)

    return place


def _batched_images(func: Callable[..., Any], d: int) -> Place:
    """Images lie in dim 0, as samples or parts of samples; in an input without a batch, channels would be samples."""
    follow = _keeps(lambda n: [0, *[None] * (n - 1)])

    def place(arguments: Arguments, result: Any, samples: Samples) -> None:
        x = _first(arguments)
        if x.ndim != d + 2 and samples.of_input(x) is not None:
            raise _unbatched(_UNBATCHED_IMAGES, func, x, d + 2)
        follow(arguments, result, samples)

    return place


def _register() -> None:
    for d in (1, 2, 3):
        for name in (f"conv{d}d", f"conv_transpose{d}d"):
            function = getattr(F, name)
            alone = _stays(function, ndim=d + 2, exactly=True, words=_UNBATCHED_IMAGES)
            enter(function, Known(alone, _batched_images(function, d), dim=0))
    rows = _stays(F.linear, behind=1, words=_UNBATCHED_LINEAR)
    enter(F.linear, Known(rows, _keeps(lambda n: [*range(n - 1), None])))
    enter(F.bilinear, Known(_stays(F.bilinear, behind=1)))
    enter(F.embedding, Known(_stays(F.embedding, words=_UNBATCHED_IDS), _keeps(range)))
    enter(F.prelu, Known(_stays(F.prelu)))
    enter(F.embedding_bag, Known(_bags, dim=0))
    for name in ("layer_norm", "rms_norm"):
        for function in (getattr(F, name), getattr(torch, name)):
            enter(function, Known(_normalised(function)))
    for name in ("group_norm", "instance_norm"):
        for function in (getattr(F, name), getattr(torch, name)):
            enter(function, Known(_stays(function, ndim=2), dim=0))
    enter(F.batch_norm, Known(_batch_norm, dim=0))
    enter(F.multi_head_attention_forward, Known(_attention, dim=1))
    for function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu):
        enter(function, Known(_recurrent, _recurrent_inside))
    followed = "matmul mm addmm bmm baddbmm einsum add sub mul div".split()
    for function in [getattr(torch, name) for name in followed] + [F.scaled_dot_product_attention]:
        enter(function, Known())


_register()
