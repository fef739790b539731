"""How a user is clipped does not depend on how many items others have: weights and whole numbers, bit by bit.

The rows of all users stay the same, so that PyTorch computes the same numbers, and only whose they are changes. Users
whose share is looked at keep theirs; of the others, one has most of the rows, or all have as many, or one each.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import persample as ps
from persample import dp
from persample.kernels.ragged import always_ragged
from persample.reductions.certified import ExactClippedSumOfSome
from persample.reductions.exact import ExactClippedSum
from tests.case_library.registry import Case, Program, _build, score
from tests.cases import CASES
from tests.reference import named

BOUND = 1e-3  # below every norm: all weights are as small as rounding errors make them
OWN = {"unequal": (2, 1), "equal": (5, 5)}  # the items of the two users that are looked at


def allotments(own: tuple[int, int], items: int) -> list[list[int]]:
    """Whose every item is: the first ones are those of two users, and the others are shared out in three ways."""
    first, rest = [0] * own[0] + [1] * own[1], items - sum(own)
    most, evenly = [2] * (rest - 2) + [3, 4], [2 + 3 * item // rest for item in range(rest)]
    return [first + others for others in (most, evenly, list(range(2, 2 + rest)))]


def shares(program: Program, owners: list[int]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The weights of the two users, and what both add to every sum, in whole numbers."""
    params, losses = named(program[0]), program[1]
    clip, both = ps.ClippedSum(BOUND, nonfinite="drop"), torch.tensor([0, 1])

    def asked(exactly: ExactClippedSum) -> Any:
        items = losses()
        users = items.new_zeros(max(owners) + 1).index_add(0, torch.tensor(owners), items)
        with always_ragged(True), warnings.catch_warnings():
            warnings.simplefilter("ignore", ps.PerformanceWarning)
            return ps.reduce(users, params, exactly, independent=True)[0]

    found = asked(ExactClippedSumOfSome(clip, 2**12, both))
    return asked(ExactClippedSum(clip, 2**12)).clipping.weights[:2], {name: found.take(name) for name in params}


def check(program: Program, own: tuple[int, int], items: int, rounding: float = 0.0) -> None:
    (weights, sums), *others = (shares(program, owners) for owners in allotments(own, items))
    assert float(weights.amin()) > 0 or not any(p.numel() for p in named(program[0]).values())
    for other_weights, other_sums in others:
        torch.testing.assert_close(other_weights, weights, rtol=rounding, atol=0)
        for name, total in sums.items():
            other = other_sums[name]
            if total is None or other is None:
                assert not any(bool(t.any()) for t in (total, other) if t is not None), name
            else:
                largest = float(total.double().abs().max()) if total.numel() else 0.0
                torch.testing.assert_close(other, total, rtol=0, atol=rounding * largest)


def in_float32(case: Case, items: int) -> Program | None:
    """The case's program with so many items; None if it is not defined for so many."""
    made: Case = case.build.args[0]  # type: ignore[attr-defined]
    try:
        program = _build(replace(made, dtype=torch.float32) if made.dtype == torch.float64 else made, items)
        return program if len(program[1]()) == items else None
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return None


QUICK = """
mlp linear_thin-one-output bilinear-plain conv2d-plain conv1d-groups conv2d_unbatched_loop embedding-sequences
embedding_bag-mean layer_norm-3d layer_norm_after_linear group_norm-4d group_norm_applied_twice rms_norm-3d
experts_index_add experts_boolean_mask experts_one_never_chosen experts_dispatch_over_the_batch experts_sorted_groups
experts_shared_and_routed hash_routing_of_tokens addbmm_over_heads cdist_to_parameters fused-lstm-plain fused-lstm-all
recurrent-gru-all packed-lstm-all-sorted linear_attention multihead-batch-first tied_autoencoder linear_applied_twice
sliced_weights cosine_classifier function_elementwise masked_assignment loop_over_samples_of_batch_one
""".split()
# Of PyTorch's kernels, which round products with weights of all users, or of a group of them, by how many there are.
ROUNDING = dict.fromkeys(
    ["weight_norm_convolution", "weight_norm_by_hand", "standardised_weight", "conv3d-circular-wide"], 1e-6
)
# With so many items, some of these programs have samples without any rows.
UNDEFINED = {"losses_per_user_by_matrix"}


def marked(case: Case) -> Any:
    return pytest.param(case, id=case.name, marks=[] if case.name in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("case", [marked(case) for case in CASES if not case.interacts and case.name not in UNDEFINED])
def test_of_every_case(case: Case, own: str) -> None:
    for items in ({"unequal": 12, "equal": 20}[own], max(case.batches)):
        program = in_float32(case, items)
        if program is not None and items >= sum(OWN[own]) + 3:
            break
    else:
        pytest.skip("not defined for so many items")
    try:
        check(program, OWN[own], items, ROUNDING.get(case.name, 0.0))
    except ps.InteractionError:
        pytest.skip("refused: users are seen to interact, or cannot be seen not to")


def test_the_quick_cases_are_there() -> None:
    assert set(QUICK) <= {case.name for case in CASES}


def experts_by_groups(items: int) -> Program:
    """Rows sorted by expert, and one product for all of them."""
    up, x = nn.Parameter(torch.randn(3, 8, 8)), torch.randn(items, 4, 8)
    chosen = torch.randint(3, (items * 4,))
    order, ends = chosen.argsort(stable=True), chosen.bincount(minlength=3).cumsum(0).to(torch.int32)

    def losses() -> Tensor:
        read: Tensor = F.grouped_mm(x.flatten(0, 1)[order], up, offs=ends)  # type: ignore[attr-defined]
        return score(read[order.argsort()].view(items, 4, 8))

    return {"up": up}, losses


def heads_with_a_loss(items: int, chunk: int | None) -> Program:
    head, x, y = nn.Linear(8, 20), torch.randn(items, 4, 8), torch.randint(20, (items * 4,))
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)  # type: ignore[attr-defined]

    def losses() -> Tensor:
        rows: Tensor = F.linear_cross_entropy(  # type: ignore[attr-defined]
            x.flatten(0, 1), head.weight, y, linear_bias=head.bias, reduction="none", options=options
        )
        return rows.view(items, 4).sum(1)

    return head, losses


MORE: dict[str, tuple[str, Callable[[int], Program]]] = {
    "grouped products": ("grouped_mm", experts_by_groups),
    "fused cross entropy": ("linear_cross_entropy", lambda items: heads_with_a_loss(items, None)),
    "fused cross entropy in chunks": ("linear_cross_entropy", lambda items: heads_with_a_loss(items, 3)),
}


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("kind", MORE)
def test_of_ops_that_not_every_release_has(kind: str, own: str) -> None:
    op, build = MORE[kind]
    if not hasattr(F, op):
        pytest.skip(f"this torch has no F.{op}")
    torch.manual_seed(0)
    check(build(20), OWN[own], 20, 1e-7 if "chunks" in kind else 0.0)  # of logits that are computed a few at a time


@pytest.mark.parametrize("others", [[2] * 9 + [3], [2] * 7 + [3] * 3])
def test_of_whole_runs(others: list[int]) -> None:
    """Four users with five items each, and two of them with other numbers, whose losses are zero: all else is equal."""
    torch.manual_seed(0)
    x, heard = torch.randn(20, 5, 6), torch.tensor([1.0] * 10 + [0.0] * 10)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))

    def released(whose: list[int]) -> list[Tensor]:
        plan = dp.Plan(users=4, batch_size=4, steps=1, sampling="cyclic", noise_multiplier=0.0, delta=1e-5)
        run = dp.Private(model, torch.optim.SGD(model.parameters(), lr=0.0), plan, ps.ClippedSum(BOUND))
        for inputs, loud in run.batches(TensorDataset(x, heard), users=whose):
            run.backward(score(model(inputs)) * loud)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    evenly = [item // 5 for item in range(20)]
    for ours, theirs in zip(released(evenly), released(evenly[:10] + others), strict=True):
        assert torch.equal(ours, theirs)
