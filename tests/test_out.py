"""Buffers for the results: `out=`, and results that are the caller's own to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample as ps
from tests.cases import CASES
from tests.models import mlp_and_losses
from tests.reference import Params, assert_same, definition, named

# One or more programs for every factor, sum and view of factors, and for zeros.
NAMES = """
    mlp linear-3d bmm_heads conv2d-groups conv1d-stride conv_transpose2d-stride conv2d-one-by-one depthwise_separable
    conv2d_float32 embedding-padding-idx embedding-sparse tied_embedding_and_head linear_applied_twice lora-merged
    weight_norm_linear unused_parameters used_by_some_samples_only experts_index_add fused-lstm-all autocast_mlp
    autocast_embedding autocast_tied_weights autocast_cnn bfloat16_cnn bfloat16_norms function_with_weights-3d
    parameter_is_the_losses hypernetwork_matrix vision_transformer stacked_parameters concatenated_weights
    checkpointed_cnn batch_norm_training_in_cnn losses_per_user samples_assigned_one_by_one masked_assignment
    master_weights
""".split()
KINDS = [case for case in CASES if case.name in NAMES]

Fill = Callable[[int, Tensor], Tensor]
FILLS: dict[str, Fill] = {
    "contiguous": lambda B, p: p.new_full((B, *p.shape), torch.nan),
    "last dim strided": lambda B, p: p.new_full((B, *p.shape, 2), torch.nan)[..., 0],
    "batch last": lambda B, p: p.new_full((*p.shape, B), torch.nan).movedim(-1, 0),
    "every second sample": lambda B, p: p.new_full((2 * B, *p.shape), torch.nan)[::2],
}


def values(result: Mapping[str, Tensor] | tuple[Tensor, ...]) -> list[Tensor]:
    return list(result.values()) if isinstance(result, Mapping) else list(result)


def buffers(params: Params, B: int, fill: Fill) -> Any:
    """Buffers with garbage in them, in the container that a result would have."""
    made = {name: fill(B, p.detach()) for name, p in named(params).items()}
    return made if isinstance(params, nn.Module | Mapping) else list(made.values())


def test_the_kinds_exist() -> None:
    assert {case.name for case in KINDS} == set(NAMES)


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_garbage_in_a_buffer_does_not_leak(case: Any, fill: Fill) -> None:
    B = min(B for B in case.batches if B > 1)
    params, forward = case.build(B)
    out = buffers(params, B, fill)
    pointers = [(t.data_ptr(), t.stride()) for t in values(out)]
    got = ps.grad(forward(), params, out=out)
    assert all(g is buffer for g, buffer in zip(values(got), values(out), strict=True))
    assert [(t.data_ptr(), t.stride()) for t in values(got)] == pointers
    assert_same(got, definition(forward(), params), rtol=case.rtol)


def test_earlier_results_are_written_again() -> None:
    model, losses = mlp_and_losses()
    first = ps.grad(losses(), model)
    pointers = {name: g.data_ptr() for name, g in first.items()}
    with torch.no_grad():
        model[0].weight += 1
    again = ps.grad(losses(), model, out=first)
    assert {name: g.data_ptr() for name, g in again.items()} == pointers
    assert all(again[name] is first[name] for name in first)
    assert_same(again, definition(losses(), model))


def test_a_sequence_takes_a_sequence_of_buffers() -> None:
    model, losses = mlp_and_losses()
    params = list(model.parameters())
    first = ps.grad(losses(), params)
    again = ps.grad(losses(), params, out=first)
    assert all(a is b for a, b in zip(again, first, strict=True))
    assert_same(again, definition(losses(), params))


@pytest.mark.parametrize("B", [1, 5])
def test_results_of_constant_cotangents_can_be_given_back(B: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(B, 3).double()
    first = ps.grad(model(x).sum(1), model)
    for g in first.values():
        g.mul_(2)
    assert_same(ps.grad(model(x).sum(1), model, out=first), definition(model(x).sum(1), model))


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_results_are_the_callers_own(case: Any) -> None:
    """Changing one in place changes no other one, nor what the graph still needs."""
    B = min(B for B in case.batches if B > 1)
    params, forward = case.build(B)
    losses = forward()
    want = definition(forward(), params)
    for name, g in zip(want, values(ps.grad(losses, params, retain_graph=True)), strict=True):
        assert_same({name: g}, {name: want[name]}, rtol=case.rtol)
        g.fill_(torch.nan)
    assert_same(ps.grad(losses, params), want, rtol=case.rtol)


def test_two_equal_gradients_are_two_tensors() -> None:
    a, b, x = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2)), torch.randn(5, 2)
    first, second = ps.grad((x + a + b).square().sum(1), [a, b])
    assert torch.equal(first, second)
    first.zero_()
    assert second.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda out: {**out, "0.bias": torch.zeros(5, 3).double()},
            r"out\['0.bias'\] must be \(5, 4\).* but is \(5, 3\)",
        ),
        (lambda out: {**out, "0.bias": torch.zeros(4).double()}, r"out\['0.bias'\] must be \(5, 4\).* but is \(4,\)"),
        (lambda out: {**out, "2.bias": torch.zeros(5, 2)}, r"must be \(5, 2\) torch.float64 on cpu, .* torch.float32"),
        (lambda out: {**out, "2.bias": torch.zeros(5, 2, device="meta").double()}, "float64 on cpu, but is .* on meta"),
        (lambda out: {"0.bias": out["0.bias"]}, r"one buffer per parameter: expected \['0.weight', .*got \['0.bias'\]"),
        (lambda out: {**out, "more": out["0.bias"]}, "one buffer per parameter: .*'more'"),
        (lambda out: list(out.values()), r"expected \['0.weight', .*got \['0', '1', '2', '3'\]"),
    ],
)
def test_wrong_buffers_are_refused_and_the_graph_is_kept(change: Callable[[Any], Any], message: str) -> None:
    model, forward = mlp_and_losses()
    losses, good = forward(), buffers(model, 5, FILLS["contiguous"])
    with pytest.raises(ValueError, match=message):
        ps.grad(losses, model, out=change(good))
    assert all(bool(buffer.isnan().all()) for buffer in good.values()), "a buffer was written to"
    assert_same(ps.grad(losses, model, out=good), definition(forward(), model))


def test_a_buffer_must_be_a_tensor() -> None:
    model, losses = mlp_and_losses()
    with pytest.raises(TypeError, match=r"out\['0'\] must be a tensor of shape \(5, 4\), not NoneType"):
        ps.grad(losses(), [model[0].bias], out=[None])  # type: ignore[list-item]


def test_buffers_beside_other_reductions() -> None:
    model, losses = mlp_and_losses()
    out = buffers(model, 5, FILLS["contiguous"])
    norms, got = ps.reduce(losses(), model, ps.Norms(), ps.Stack(out))
    assert all(got[name] is out[name] for name in out)
    want = definition(losses(), model)
    assert_same(got, want)
    torch.testing.assert_close(norms, torch.cat([g.flatten(1) for g in want.values()], 1).norm(dim=1))
