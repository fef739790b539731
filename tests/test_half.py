"""Half precision, by autocast and by parameters: every case, and numbers at the ends of its range."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps
from tests.case_library.registry import in_half
from tests.cases import CASES, Case
from tests.reductions.expected import Stacks, Want, WantClipped, WantEach, assert_result, questions
from tests.reference import Params, definition, flat, vectors

HALVES = (torch.float16, torch.bfloat16)
MODES = {f"{'autocast' if cast else 'parameters'} {dtype}": (dtype, cast) for cast in (True, False) for dtype in HALVES}
SCALES = (1.0, 2.0**-12, 2.0**13)  # of the losses: gradients in the middle, at the lower and the upper end of float16
SUBNORMAL = 2.0**-24  # the smallest float16

# PyTorch adds up the gradients of hundreds of uses in half precision, and ends up elsewhere.
DRIFTS = {"deep_chain_of_small_layers", "long_scan_with_weights"}
# Where PyTorch's partial sums leave float16 (layer norms), or NaN spreads from one sample to all.
OVERFLOWS_IN_PYTORCH = {"checkpointed_blocks", "checkpointed_transformer", "large_and_small_samples"}
PARTS = 8


@pytest.fixture(autouse=True)
def _quick_seeds() -> Iterator[None]:
    """For devices that are absent, each seed would format a stack trace."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)
        yield


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("mode", MODES)
def test_every_case_in_one_mode(mode: str, part: int) -> None:
    """Every case in one of the four modes, with one of the scales; all reductions for every second case."""
    turn = list(MODES).index(mode)
    wrong, compared = [], 0
    cases = CASES[turn :: len(MODES)][part::PARTS]
    for place, case in enumerate(cases):
        compared += check_case(case, *MODES[mode], SCALES[place % 3], wrong, reductions=place % 2 == 0)
    assert not wrong, "\n".join(wrong)
    assert compared > 0.85 * len(cases)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", SCALES)
def test_every_case_in_every_mode(scale: float, mode: str, part: int) -> None:
    wrong: list[str] = []
    compared = [check_case(case, *MODES[mode], scale, wrong, reductions=True) for case in CASES[part::PARTS]]
    assert not wrong, "\n".join(wrong)
    assert sum(compared) > 0.85 * len(compared)


def check_case(
    case: Case, dtype: torch.dtype, autocast: bool, scale: float, wrong: list[str], *, reductions: bool
) -> bool:
    """Compare the gradients and reductions of a case, and tell what is wrong; False if PyTorch has no such gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            params, forward = in_half(case, dtype, autocast=autocast)(case.batches[0])
            losses = forward().float() * scale
            want = definition(losses, params)
        except (RuntimeError, TypeError):  # an op without a kernel for this dtype
            return False
        try:
            check_gradients(case, losses, params, want, dtype)
            if reductions and str(case) not in DRIFTS:
                check_reductions(case, losses, params, want, dtype)
        except AssertionError as error:
            wrong.append(f"{case}: {error}")
    return True


def check_gradients(case: Case, losses: Tensor, params: Params, want: Stacks, dtype: torch.dtype) -> None:
    """Gradients that are finite are autograd's; norms are infinite for those that are not."""
    finite = vectors(want).isfinite().all(1)
    if not finite.all():
        found = ps.norms(losses, params, retain_graph=True).isfinite()
        if not torch.equal(found, finite) and str(case) not in OVERFLOWS_IN_PYTORCH:
            raise AssertionError(f"norms are finite: {found.tolist()}, gradients: {finite.tolist()}")
    got = ps.grad(losses, params, retain_graph=True)
    stacks = got if isinstance(got, Mapping) else dict(zip(want, got, strict=True))
    if str(case) not in DRIFTS:
        assert_near({n: g[finite] for n, g in stacks.items()}, {n: g[finite] for n, g in want.items()}, dtype)


def check_reductions(case: Case, losses: Tensor, params: Params, want: Stacks, dtype: torch.dtype) -> None:
    """Each reduction of gradients that are finite and not rounding noise alone."""
    if case.zeros or not vectors(want).isfinite().all():
        return
    asked = questions(want, params, variants=False)
    results = ps.reduce(losses, params, *(ask.reduction for ask in asked.values()))
    for (name, ask), got in zip(asked.items(), results, strict=True):
        if name != "stack" and not beyond_range(ask.want):
            try:
                assert_result(got, ask.want, 16 * torch.finfo(dtype).eps)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


def beyond_range(want: object) -> bool:
    """May the result be infinite? Sums of float16 gradients are given in float16, squares in float32."""
    want = want.sums if isinstance(want, WantClipped) else want
    if not isinstance(want, WantEach) or want.powers == 2 and any(d != torch.float16 for d, _ in want.like.values()):
        return isinstance(want, Want) and want.beyond_range()
    return any(d == torch.float16 for d, _ in want.like.values()) and bool((want.value.abs() > 65000).any())


def assert_near(got: Stacks, want: Stacks, dtype: torch.dtype) -> None:
    """A few units in the last place of a gradient's largest element; less of all parameters', whose terms may cancel."""
    eps = torch.finfo(dtype).eps
    assert list(got) == list(want)
    whole = vectors(want).abs().amax(1)
    for name in want:
        assert (got[name].dtype, got[name].shape) == (want[name].dtype, want[name].shape)
        if not want[name].numel():
            continue
        error, size = (flat(got[name]) - flat(want[name])).abs().amax(1), flat(want[name]).abs().amax(1)
        allowed = 4 * eps * (size + whole) + 4 * SUBNORMAL
        assert bool((error <= allowed).all()), f"{name}: {error.tolist()} for {size.tolist()}"
