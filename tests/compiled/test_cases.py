"""Every case of the library as a compiled step, against the definition."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator

import pytest
import torch

import persample as ps
from tests.case_library.registry import Case
from tests.cases import CASES
from tests.compiled.programs import compiled_twice
from tests.reference import assert_same, definition, vectors

pytestmark = pytest.mark.filterwarnings("ignore")

# How many of the cases each backend gets in a quick run, which has no time for all; Inductor takes seconds for one.
SHARES = {"eager": (1, 16), "aot_eager": (1, 60), "inductor": (0, 20)}
MOST = {"inductor": (1, 20)}  # and in a thorough one

LONG = {"long_scan_with_weights"}  # graphs of thousands of nodes


def _draw(case: Case, backend: str, share: tuple[int, int]) -> bool:
    return zlib.crc32(f"{case.name}/{backend}".encode()) % share[1] < share[0]


def _chosen() -> Iterator[object]:
    for backend, share in SHARES.items():
        for case in CASES:
            if _draw(case, backend, MOST.get(backend, (1, 1))):
                quick = _draw(case, backend, share) and case.name not in LONG
                slow = () if quick else (pytest.mark.slow,)
                yield pytest.param(case, backend, id=f"{case.name}-{backend}", marks=slow)


@pytest.mark.parametrize(("case", "backend"), list(_chosen()))
def test_built_on_some_numbers_and_run_on_others(case: Case, backend: str) -> None:
    B = case.batches[0]
    step, (norms, stacks), losses, params = compiled_twice(case, B, ps.Norms(), ps.Stack(), backend=backend)
    want = definition(losses, params)
    single = torch.float32 in {case.dtype, *[g.dtype for g in want.values()]}
    rtol = max(case.rtol, 1e-6 if single else case.rtol)
    assert_same(stacks, want, rtol, nan=True)
    expected = vectors(want).norm(dim=1)
    assert torch.allclose(norms.double(), expected, rtol=max(rtol, 1e-4), atol=1e-5, equal_nan=True), step


@pytest.mark.parametrize("B", [0, 1, 2])
def test_few_samples(B: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    step = ps.compile(
        lambda x: model(x).square().sum(1),
        model,
        ps.Norms(),
        ps.Stack(),
        ps.ClippedSum(0.1),
        backend="aot_eager",
        verbose=False,
    )
    step(torch.randn(B, 3).double())
    x = torch.randn(B, 3).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        norms, stacks, total = step(x)
    want = definition(model(x).square().sum(1), model)
    assert step.refused is None
    assert_same(stacks, want)
    assert torch.allclose(norms, vectors(want).norm(dim=1))
    weights = (0.1 / norms).clamp(max=1)
    for name, sums in total.items():
        assert torch.allclose(sums, torch.einsum("b,b...->...", weights, want[name]))
