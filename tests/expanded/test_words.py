"""Refusals in the words, and of the types, that code written for PyTorch's own expanded weights looks for.

Every case runs on PyTorch's private modules as well, where these phrases come from.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample.expanded import implements_per_sample_grads
from tests.expanded.helpers import Run, r
from tests.expanded.ported import OURS, both
from tests.expanded.rules import offered

pytestmark = pytest.mark.usefixtures("float64", "registries")


def weight(api: Any, *shape: int, size: int = 5, reduction: str = "sum", first: bool = True) -> Any:
    made = api.ExpandedWeight(r(*shape, grad=True), size, reduction)
    made.set_batch_first(first)
    return made


def helper(api: Any, *values: Any) -> Tensor:
    """`forward_helper` as a rule for `F.linear` calls it."""
    args, kwargs = api.standard_kwargs(("bias",), values)
    return api.forward_helper(F.linear, args, kwargs)


def twice(api: Any) -> None:
    """Two calls of one module, nothing cleared between."""
    module, x = nn.Linear(3, 2), r(5, 3)
    api.call_for_per_sample_grads(module)(x).sum().backward()
    api.call_for_per_sample_grads(module)(x)


def call(api: Any, *args: Any, module: Any = None, **options: Any) -> Any:
    return api.call_for_per_sample_grads(nn.Linear(3, 2) if module is None else module, **options)(*args)


def two(m: Run, x: Tensor, y: Any) -> Tensor:
    return m.l(x)


CASES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "module": ("Module passed must be nn.Module", lambda api: call(api, r(5, 3), module="fail")),
    "reduction": (
        "Expected loss_reduction argument to be sum or mean",
        lambda api: call(api, r(5, 3), loss_reduction=""),
    ),
    "size-type": (
        "Batch size passed must be None or an integer",
        lambda api: call(api, r(5, 3), batch_size=6.4),
    ),
    "size-value": ("Batch size must be positive", lambda api: call(api, r(5, 3), batch_size=-64)),
    "size-zero": ("Batch size must be positive", lambda api: call(api, r(5, 3), batch_size=0)),
    "sizes": (
        "found at least one input with batch size 4 and one with batch size 5",
        lambda api: call(api, r(4, 3), r(5, 3), module=Run(two, l=nn.Linear(3, 2))),
    ),
    "no-size": (
        "ExpandedWeights cannot compute the batch size from the inputs",
        lambda api: call(api, "text", 3, module=Run(two, l=nn.Linear(3, 2))),
    ),
    "wrong-size": (
        "Expected ExpandedWeights to have batch size matching input",
        lambda api: call(api, r(5, 3), batch_size=4),
    ),
    "twice": ("incorrect for multiple calls without clearing gradients", twice),
    "no-tensor": (
        "Can only make Expanded Weights of Tensors, got list",
        lambda api: api.ExpandedWeight([1.0], 5, "sum"),
    ),
    "no-grad": (
        "Can only build ExpandedWeights objects of tensors that require",
        lambda api: api.ExpandedWeight(r(3), 5, "sum"),
    ),
    "conv1d": (
        "Expanded Weights only support convolution with batched input",
        lambda api: F.conv1d(r(3, 6), weight(api, 2, 3, 2, size=3)),
    ),
    "conv2d": (
        "Expanded Weights only support convolution with batched input",
        lambda api: F.conv2d(r(3, 6, 6), weight(api, 2, 3, 2, 2, size=3)),
    ),
    "conv3d": (
        "Expanded Weights only support convolution with batched input",
        lambda api: F.conv3d(r(3, 6, 6, 6), weight(api, 2, 3, 2, 2, 2, size=3)),
    ),
    "linear": (
        "Input does not have a batch dimension. Expanded Weights expected input of at least rank 2",
        lambda api: F.linear(r(3), weight(api, 2, 3, size=1)),
    ),
    "layer_norm": (
        "Expanded Weights: Layer norm should not normalize over batch dimension for per sample gradient",
        lambda api: F.layer_norm(r(5, 3), (5, 3), weight(api, 5, 3)),
    ),
    "linear-size": (
        "Expected ExpandedWeights to have batch size matching input",
        lambda api: F.linear(r(4, 3), weight(api, 2, 3)),
    ),
    "group_norm-size": (
        "Expected ExpandedWeights to have batch size matching input",
        lambda api: F.group_norm(r(4, 6), 2, weight(api, 6)),
    ),
    "in-place": (
        "Expanded Weights encountered but cannot handle function mul_",
        lambda api: r(5, 3).mul_(weight(api, 3)),
    ),
    "no-batch": (
        "Expanded Weights encountered but cannot handle function add",
        lambda api: torch.add(r(4, 3, grad=True), weight(api, 3)),
    ),
    "helper-weight": (
        "do not support inputs that are also ExpandedWeights.",
        lambda api: helper(api, weight(api, 3, 4, size=3), r(5, 4), r(5)),
    ),
    "helper-number": ("requires a Tensor as the first input", lambda api: helper(api, 3, r(5, 4), r(5))),
    "helper-scalar": (
        "requires a batch dimension but got an input of size 0",
        lambda api: helper(api, torch.tensor(3.0), r(5, 4), r(5)),
    ),
    "helper-none": (
        "0 is not a valid batch size for Expanded Weights",
        lambda api: helper(api, r(0, 1, 2), r(5, 4), r(5)),
    ),
    "helper-none-of-five": (
        "0 is not a valid batch size for Expanded Weights",
        lambda api: helper(api, r(0, 4), weight(api, 5, 4), r(5)),
    ),
    "helper-size": (
        "Expected ExpandedWeights to have batch size matching input",
        lambda api: helper(api, r(3, 4), weight(api, 5, 4), r(5)),
    ),
    "helper-reductions": (
        "Expected ExpandedWeights to all have the same loss_reduction argument",
        lambda api: helper(api, r(5, 4), weight(api, 5, 4), weight(api, 5, reduction="mean")),
    ),
    "reductions": (
        "Expected ExpandedWeights to all have the same loss_reduction argument",
        lambda api: F.linear(r(5, 4), weight(api, 5, 4), weight(api, 5, reduction="mean")),
    ),
    "batch-first": (
        "Got conflicting batch_first arguments in the same layer",
        lambda api: api.is_batch_first([weight(api, 5, 4), weight(api, 5, first=False)]),
    ),
    "unpack": (
        "does not support a mixture of ExpandedWeight parameters and normal Parameters",
        lambda api: api.unpack_expanded_weight_or_tensor(r(3, grad=True)),
    ),
    "set": (
        "does not support a mixture of ExpandedWeight parameters and normal Parameters",
        lambda api: api.set_grad_sample_if_exists(r(4, grad=True), lambda w: w),
    ),
}


@both
@pytest.mark.parametrize("name", CASES)
def test_refused_in_these_words(api: Any, name: str) -> None:
    phrase, run = CASES[name]
    with pytest.raises(RuntimeError, match=re.escape(phrase)):
        run(api)


@pytest.mark.parametrize("word", ["require_grad", "requires_grad"], ids=["earlier", "now"])
def test_without_grad_in_the_words_of_all_releases(word: str) -> None:
    with pytest.raises(RuntimeError, match=f"Can only build ExpandedWeights objects of tensors that {word}"):
        OURS.ExpandedWeight(r(3), 5, "sum")


@pytest.mark.parametrize(
    ("phrase", "run"),
    [
        ("Expanded Weights needs an input with a batch size", lambda: F.embedding(torch.tensor(3), weight(OURS, 6, 2))),
        ("Expanded Weights", lambda: F.embedding(torch.tensor([3, 1]), weight(OURS, 6, 2, size=1))),
        ("Expanded Weights", lambda: F.embedding_bag(torch.zeros(4, 2).long(), weight(OURS, 6, 2))),
        ("Expanded Weights", lambda: F.batch_norm(r(5, 3), None, None, weight(OURS, 3), training=True)),
        ("Expanded Weights", lambda: F.conv_transpose1d(r(3, 6), weight(OURS, 3, 2, 2, size=3))),
        ("Got conflicting batch_first", lambda: F.linear(r(5, 5, 4), weight(OURS, 2, 4), weight(OURS, 2, first=False))),
    ],
    ids=["embedding", "embedding-size", "bags", "batch_norm", "conv_transpose", "batch_first"],
)
def test_what_pytorch_refuses_otherwise_or_not_at_all(phrase: str, run: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match=phrase):
        run()


class TestValuesOfAnotherShape:
    """`set_grad_sample_if_exists` takes what the original takes: norms, say, in place of gradients."""

    @both
    @pytest.mark.parametrize("reduction", ["sum", "mean"])
    def test_are_taken_and_added_up(self, api: Any, reduction: str) -> None:
        w, values = r(4, grad=True), r(3)
        for _ in range(2):
            api.set_grad_sample_if_exists(api.ExpandedWeight(w, 3, reduction), lambda _: values)
        torch.testing.assert_close(w.grad_sample, 2 * values * (3 if reduction == "mean" else 1))

    @both
    def test_of_fewer_samples(self, api: Any) -> None:
        w, values = r(4, grad=True), r(2, 3)
        api.set_grad_sample_if_exists(api.ExpandedWeight(w, 3, "sum"), lambda _: values)
        torch.testing.assert_close(w.grad_sample, torch.cat([values, torch.zeros(1, 3)]))

    @pytest.mark.parametrize("shape", [(), (4, 2)])
    def test_without_a_row_for_each_sample_are_refused(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(RuntimeError, match=re.escape(f"shape {shape} for an ExpandedWeight of batch size 3")):
            OURS.set_grad_sample_if_exists(weight(OURS, 5, size=3), lambda _: r(*shape))

    def test_are_refused_in_a_module(self) -> None:
        """There they would be combined with other uses of the weight."""
        function = offered(lambda x, w: x * w, "times")

        @implements_per_sample_grads(function)
        class Times(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, names: Any, func: Any, x: Tensor, w: Any) -> Tensor:
                ctx.w = w
                return OURS.forward_helper(func, (x, w), {})

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> Any:
                OURS.set_grad_sample_if_exists(ctx.w, lambda _: g.sum(1))
                return None, None, None, None

        module = Run(lambda m, x: function(x, m.w), w=r(3))
        with pytest.raises(RuntimeError, match=r"per-sample gradients of shape \(5,\) .* expected \(5, 3\)"):
            OURS.call_for_per_sample_grads(module)(r(5, 3)).sum().backward()
        assert getattr(module.w, "grad_sample", None) is None
