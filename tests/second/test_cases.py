"""Every case of the library: derivatives of what the verbs answer are those of a loop over samples."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import persample as ps
from tests.cases import CASES, Case
from tests.reference import Params, named
from tests.second.loop import (
    assert_close,
    data_of,
    defined,
    derivatives,
    listed,
    loop,
    mixed,
    real_parts,
    verbs,
)

# PyTorch's own double backward takes the norms of the weight for constants, or loses terms where a cotangent is zero:
# finite differences tell.
WRONG_IN_PYTORCH = {"weight_norm_linear", "weight_norm_convolution", "reduction-logcumsumexp"}
REFUSED = {"embedding_by_frequency", "embedding_by_frequency-padding"}  # whose gradients are no derivatives
# g / (‖g‖ + 1e-12), with g near 0
ILL_CONDITIONED = {f"function_not_linear_backward_on_a_weight-{which}normalised": 1e-3 for which in ("", "rows-")}
OVERFLOWING = {"float32_reordered_near_overflow"}
COMPILED = {"compiled_model"}  # of which PyTorch may keep nothing for a second backward, as the loop needs it


def first_of_each(cases: Sequence[Case]) -> list[Case]:
    """One variant of every function that builds cases."""
    return list({case.name.partition("-")[0]: case for case in reversed(cases)}.values())[::-1]


TRIED = [case for case in CASES if case.name not in WRONG_IN_PYTORCH | OVERFLOWING | COMPILED]
LONG = {"long_scan_with_weights", "long_cumulative_loop", "deep_chain_of_small_layers", "deep_chain_on_the_weight"}
FEW = [case for case in first_of_each(TRIED) if case.name not in LONG]  # which are among the many
MANY = [(case, B, data) for case in TRIED for B in case.batches if B for data in (False, True)]


class Problem:
    """Losses, what they may be differentiated by, and directions for `ps.dot`."""

    def __init__(self, case: Case, B: int, with_data: bool) -> None:
        self.params, program = case.build(B)
        tensors = list(named(self.params).values())
        data = data_of(program) if with_data else []
        for t in data:
            t.requires_grad_()
        try:
            self.losses = program()
        except RuntimeError as error:  # data that are changed in place, or that an op takes without gradients
            if not data:
                raise AssertionError(case.name) from error
            for t in data:
                t.requires_grad_(False)
            data, self.losses = [], program()
        generator = torch.Generator().manual_seed(1)
        self.direction = [
            torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype).requires_grad_() for p in tensors
        ]
        self.leaves = [*tensors, *data, *self.direction]

    def wanted(self) -> dict[str, tuple[list[Tensor], list[Tensor]]] | None:
        """Answers and derivatives by definition; None if PyTorch has none, or warns that they may be wrong."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", message=".*autograd kernel was not registered")
            try:
                answers = defined(loop(self.losses, self.params), self.losses, self.direction)
                return {name: (found, derivatives(mixed(found), self.leaves)) for name, found in answers.items()}
            except (RuntimeError, UserWarning) as error:
                if not is_unknown_to_pytorch(error):
                    raise
                return None


UNKNOWN_TO_PYTORCH = (
    "is not implemented",
    "autograd kernel was not registered",
    "does not currently support double backward",
    "a leaf Variable that requires grad is being used in an in-place",  # a compiled region
    "not compatible with .grad()",  # a reentrant checkpoint
    "When use_reentrant=True",
)


def is_unknown_to_pytorch(error: Exception) -> bool:
    return any(words in str(error) for words in UNKNOWN_TO_PYTORCH)


def check(case: Case, B: int, with_data: bool) -> None:
    problem = Problem(case, B, with_data)
    if not problem.losses.requires_grad:
        return
    wanted = problem.wanted()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            answers = dict(verbs(problem.losses, problem.params, problem.direction))
        except ps.UnsupportedError as error:
            if wanted is not None and case.name not in REFUSED:
                raise AssertionError(case.name) from error
            return
        if wanted is None:
            for found in answers.values():
                _differentiated_if_at_all(found, problem.leaves)
            return
    rtol = ILL_CONDITIONED.get(case.name, max(case.rtol, 1e-6))
    for name, (want, second) in wanted.items():
        for a, b in zip(answers[name], want, strict=True):
            x, y = (real_parts(t).detach() for t in (a, b))  # the variance of one sample is NaN
            torch.testing.assert_close(x, y, rtol=rtol, atol=rtol, equal_nan=True, msg=name)
        try:
            assert_close(derivatives(mixed(answers[name]), problem.leaves), second, rtol)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def _differentiated_if_at_all(found: list[Tensor], leaves: Sequence[Tensor]) -> None:
    """By rules of this package, as those for bags of embeddings; or PyTorch says that it cannot."""
    try:
        derivatives(mixed(found), leaves)
    except RuntimeError as error:
        if not is_unknown_to_pytorch(error):
            raise


@pytest.mark.parametrize("case", FEW, ids=str)
def test_derivatives_are_those_of_a_loop(case: Case) -> None:
    check(case, max(case.batches), with_data=True)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "B", "with_data"), MANY, ids=str)
def test_derivatives_are_those_of_a_loop_everywhere(case: Case, B: int, with_data: bool) -> None:
    check(case, B, with_data)


@pytest.mark.parametrize("name", sorted(WRONG_IN_PYTORCH | {"embedding_bag-sum", "embedding_bag-mean"}))
def test_where_pytorch_has_no_answer_finite_differences_agree(name: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    params, program = case.build(4)
    total = mixed(listed(ps.grad(program(), params, create_graph=True)))
    tensors = list(named(params).values())
    for p, g in zip(tensors, derivatives(total, tensors), strict=True):
        v = torch.randn(p.shape, generator=torch.Generator().manual_seed(2), dtype=p.dtype)
        torch.testing.assert_close((g * v).sum(), _slope(program, params, p, v), rtol=1e-5, atol=1e-6)


def _slope(program: object, params: Params, p: Tensor, v: Tensor, step: float = 1e-6) -> Tensor:
    """The derivative along one direction of one parameter, by central differences."""
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            p.add_(v, alpha=sign * step)
        ends.append(mixed(listed(ps.grad(program(), params))))  # type: ignore[operator]
        with torch.no_grad():
            p.add_(v, alpha=-sign * step)
    return (ends[0] - ends[1]) / (2 * step)
