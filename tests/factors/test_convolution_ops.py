"""Convolutions in graphs: ops that compute what the eager engine does, on numbers that no graph was traced with."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from persample.factors import Convolution, Workspace, bounded_sums, convolution_ops, split, terms_are_bounded
from persample.factors.bounded import bounded_sum
from persample.kernels.certificates import Certificate, traced
from persample.kernels.devices import looking
from persample.kernels.pages import POOL
from tests.kernels.conv_cases import CASES, Case, case

WIDE = case((8, 8), (3, 3), padding=1, d=32, p=32)  # whose norms come from Gram matrices
BORDERLESS = case((10, 10), (3, 3), d=32, p=32)  # the same, and cotangents of a constant are only added up
FIRST = case((12, 12), (3, 3), padding=1, d=3, p=16)  # whose gradients are written out
BY_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}
every_case = pytest.mark.parametrize("c", CASES.values(), ids=CASES)


def traced_graph(compute: Callable[..., Any], *args: Tensor) -> tuple[GraphModule, list[Certificate]]:
    """The graph of a function, and what it takes for true, from shapes alone."""

    def run(*given: Tensor) -> Any:
        with looking(False), traced() as certificates, torch.no_grad():
            result = compute(*given)
        noted.extend(certificates)
        return result

    noted: list[Certificate] = []
    return make_fx(run, tracing_mode="fake")(*args), noted


def factor_of(c: Case, x: Tensor, dy: Tensor) -> Convolution:
    return Convolution(x, dy, c.weight_size, c.geometry)


def norms_of(stack: Tensor) -> Tensor:
    return stack.double().flatten(1).norm(dim=1)


def names_in(graph: GraphModule) -> set[str]:
    return {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}


def numbers(c: Case, samples: int, images: int, dtype: torch.dtype = torch.float64) -> tuple[Sequence[Tensor], ...]:
    """x and dy to trace with, and others to run with."""
    x, dy = c.tensors(samples, images, dtype)
    return (torch.zeros_like(x), torch.zeros_like(dy)), (x, dy)


@pytest.mark.parametrize("images", [1, 2])
@every_case
def test_gradients_and_their_norms_and_sums(c: Case, images: int) -> None:
    """On numbers that the graph was not traced with, every geometry."""

    def compute(x: Tensor, dy: Tensor, weights: Tensor) -> Sequence[Tensor]:
        factor, space = factor_of(c, x, dy), Workspace()
        (total,) = bounded_sums({"w": factor}, weights, space).values()
        return factor.stack(), factor.norms(space), total, factor.term_norms()

    zeros, (x, dy) = numbers(c, 3, images)
    weights = torch.tensor([0.5, 2.0, 0.0], dtype=torch.float64)
    graph, certificates = traced_graph(compute, *zeros, torch.ones_like(weights))
    stack, norms, total, terms = graph(x, dy, weights)
    expected = c.reference(x, dy)
    torch.testing.assert_close(stack, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(norms, norms_of(expected), rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(total, (expected.movedim(0, -1) @ weights), rtol=1e-10, atol=1e-12)
    assert bool((terms >= norms * (1 - 1e-12)).all())
    assert not certificates


@pytest.mark.parametrize("dtype", BY_ROUNDING, ids=str)
@pytest.mark.parametrize("c", [WIDE, FIRST, CASES["2d-depthwise"], CASES["2d-transposed-groups"]])
def test_every_dtype(c: Case, dtype: torch.dtype) -> None:
    def compute(x: Tensor, dy: Tensor, weights: Tensor) -> Sequence[Tensor]:
        factor, space = factor_of(c, x, dy), Workspace()
        return factor.stack(), factor.norms(space), factor.bounded_sum(weights, space)

    zeros, (x, dy) = numbers(c, 3, 1, dtype)
    weights = torch.tensor([0.5, 2.0, 1.0])
    graph, _ = traced_graph(compute, *zeros, weights)
    results, expected = graph(x, dy, weights), c.reference(x, dy)
    total = torch.einsum("b,b...->...", weights.double(), expected)
    for result, right in zip(results, (expected, norms_of(expected), total), strict=True):
        assert (result.double() - right).norm() <= BY_ROUNDING[dtype] * right.norm()
    fakes = [node.meta["val"] for node in graph.graph.nodes if node.target != "output" and "val" in node.meta]
    assert {f.dtype for f in fakes} >= {result.dtype for result in results}


@pytest.mark.parametrize("samples", [0, 1])
@pytest.mark.parametrize("images", [0, 1])
@pytest.mark.parametrize("c", [WIDE, FIRST, CASES["1d-transposed"]])
def test_few_or_no_samples_and_images(c: Case, samples: int, images: int) -> None:
    def compute(x: Tensor, dy: Tensor, weights: Tensor) -> Sequence[Tensor]:
        factor, space = factor_of(c, x, dy), Workspace()
        return factor.stack(), factor.norms(space), factor.bounded_sum(weights, space)

    zeros, (x, dy) = numbers(c, samples, images)
    weights = torch.full((samples,), 0.5, dtype=torch.float64)
    stack, norms, total = traced_graph(compute, *zeros, weights)[0](x, dy, weights)
    expected = c.reference(x, dy)
    torch.testing.assert_close((stack, norms, total), (expected, norms_of(expected), expected.sum(0) * 0.5))


def extreme(c: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Samples that are ordinary, zero, NaN, infinite, huge, denormal, and whose terms cancel."""
    x, dy = c.tensors(8, 1, dtype)
    info = torch.finfo(dtype)
    x[1], x[2, 0, 0], x[3, 0, 0] = 0, math.nan, math.inf
    x[4], dy[4] = x[4] * math.sqrt(info.max) * 1e-4, dy[4] * math.sqrt(info.max) * 1e-4
    x[5] *= info.tiny
    x[6] = 1  # under cotangents that add up to nothing, but for borders
    dy[6] = dy[6] - dy[6].mean()
    return x, dy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("c", [WIDE, BORDERLESS, FIRST])
def test_extreme_samples_are_those_of_the_eager_engine(c: Case, dtype: torch.dtype) -> None:
    """To the last digit, and the graph takes nothing for true."""
    x, dy = extreme(c, dtype)
    graph, certificates = traced_graph(lambda x, dy: factor_of(c, x, dy).norms(), *numbers(c, 8, 1, dtype)[0])
    torch.testing.assert_close(graph(x, dy), factor_of(c, x, dy).norms(), rtol=0, atol=0, equal_nan=True)
    assert not certificates


def test_samples_whose_terms_cancel_are_written_out_when_the_graph_runs() -> None:
    """Their rounding errors would be far larger than their clipped gradients."""
    c = BORDERLESS
    x, dy = c.tensors(4, 1, torch.float32)
    dy[0], x[0] = dy[0] * 1e-2, 1
    dy[0] += 1e3 * torch.tensor([1.0, -1.0]).repeat(32).view(8, 8)  # which a constant x adds up to nothing
    factor = factor_of(c, x, dy)
    weights = (1e-3 / factor.norms()).clamp(max=1)
    assert factor.cancelling_samples().tolist() == [0]

    def compute(x: Tensor, dy: Tensor, weights: Tensor) -> Sequence[Tensor]:
        factors, space = {"w": factor_of(c, x, dy)}, Workspace()
        assert not terms_are_bounded(factors, space)  # nobody else has to find them
        return list(bounded_sums(factors, weights, space).values())

    graph, certificates = traced_graph(compute, *numbers(c, 4, 1, torch.float32)[0], torch.ones_like(weights))
    (total,) = graph(x, dy, weights)
    torch.testing.assert_close(total, bounded_sum(factor, weights.float()), rtol=0, atol=0)
    assert not torch.equal(total, factor.weighted_sum(weights))
    assert not certificates


def test_parts_of_several_parameters() -> None:
    """Each has its own sum, of samples with its own norms."""
    c = WIDE

    def compute(x: Tensor, dy: Tensor, weights: Tensor) -> Sequence[Tensor]:
        parts = dict(zip("ab", split(factor_of(c, x, dy), 2), strict=True))
        return list(bounded_sums(parts, weights, Workspace()).values())

    zeros, (x, dy) = numbers(c, 6, 1)
    weights = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
    totals = traced_graph(compute, *zeros, weights)[0](x, dy, weights)
    expected = torch.einsum("b,kb...->k...", weights, c.reference(x, dy).unflatten(0, (2, 3)))
    torch.testing.assert_close(torch.stack(totals), expected)


@pytest.mark.parametrize("c", [WIDE, FIRST, CASES["2d-pointwise"]])
def test_norms_that_do_not_depend_on_the_batch(c: Case) -> None:
    def compute(x: Tensor, dy: Tensor) -> Sequence[Tensor]:
        factor, space = factor_of(c, x, dy), Workspace()
        return factor.norm_bounds(space), factor.cached_norms(space)

    zeros, (x, dy) = numbers(c, 4, 1, torch.float32)
    graph, certificates = traced_graph(compute, *zeros)
    bounds, norms = graph(x, dy)
    eager = factor_of(c, x, dy)
    torch.testing.assert_close(bounds, eager.norm_bounds(), rtol=1e-6, atol=0)
    torch.testing.assert_close(norms, eager.cached_norms(), rtol=0, atol=0)
    assert not certificates


def test_a_graph_holds_one_op_for_each_question() -> None:
    """However many samples there are: chunks are not unrolled."""
    graph, _ = traced_graph(lambda x, dy: factor_of(WIDE, x, dy).norms(), *numbers(WIDE, 64, 1)[0])
    assert names_in(graph) == {"persample.convolution_norms.default", "aten.clone.default"}


def test_other_devices_are_traced_as_before() -> None:
    """The ops are the CPU's."""
    x, dy = (t.to("meta") for t in WIDE.tensors(2, 1))
    with looking(False), traced():
        assert factor_of(WIDE, x, dy).stack().shape == (2, *WIDE.weight_size)
        assert not factor_of(WIDE, x, dy).bounds_sums


def arguments(c: Case, x: Tensor, dy: Tensor) -> dict[str, tuple[Any, ...]]:
    given = c.weight_size, *c.geometry.arguments
    factor = factor_of(c, x, dy)
    return {
        "convolution_norms": (x, dy, *given, 2**24, False),
        "convolution_term_norms": (x, dy),
        "convolution_stack": (x, dy, *given),
        "convolution_bounded_sum": (x, dy, torch.ones(len(x), dtype=x.dtype), factor.norms(), *given, 2**24),
    }


def layouts(x: Tensor) -> dict[str, Tensor]:
    """Equal tensors (B, R, C, H, W) with other strides."""
    sliced = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)[..., ::2]
    batch_last = torch.empty(*x.shape[1:], len(x), dtype=x.dtype).movedim(-1, 0)
    last = x.flatten(0, 1).to(memory_format=torch.channels_last).view(x.shape)
    return {"channels last": last, "sliced": sliced.copy_(x), "batch last": batch_last.copy_(x), "contiguous": x}


@pytest.mark.parametrize("name", arguments(FIRST, *FIRST.tensors(2, 1)))
@pytest.mark.parametrize("layout", layouts(FIRST.tensors(2, 1)[0]))
@pytest.mark.parametrize("c", [FIRST, CASES["2d-depthwise"], CASES["2d-transposed-groups"], WIDE])
def test_what_is_promised_of_an_op(c: Case, name: str, layout: str) -> None:
    """Its schema, and shapes, strides and dtypes without numbers, also for any number of samples."""
    x, dy = (layouts(t)[layout] for t in c.tensors(3, 1, torch.float32))
    op = getattr(torch.ops.persample, name).default
    torch.library.opcheck(op, arguments(c, x, dy)[name])
    expected = op(*arguments(c, *c.tensors(3, 1, torch.float32))[name])
    torch.testing.assert_close(op(*arguments(c, x, dy)[name]), expected, rtol=1e-4, atol=1e-4)


def test_expanded_inputs() -> None:
    c = FIRST
    x, dy = c.tensors(1, 1, torch.float32)
    x, dy = x.expand(3, *x.shape[1:]), dy.sum((3, 4), keepdim=True).expand(3, *dy.shape[1:])
    for name, given in arguments(c, x, dy).items():
        op = getattr(torch.ops.persample, name).default
        torch.library.opcheck(op, given)
    norms = torch.ops.persample.convolution_norms(*arguments(c, x, dy)["convolution_norms"])
    torch.testing.assert_close(norms, norms_of(c.reference(x, dy)), rtol=1e-5, atol=0)


def test_results_own_their_memory() -> None:
    """What a page holds is overwritten by the next call; results are kept."""
    c = case((32, 32), (3, 3), padding=1, d=32, p=64)
    x, dy = c.tensors(16, 1, torch.float32)
    for name, given in arguments(c, x, dy).items():
        op = getattr(torch.ops.persample, name).default
        result = op(*given)
        before, storage = result.clone(), result.untyped_storage().data_ptr()
        again = op(x * 2, *given[1:])
        assert torch.equal(result, before)
        assert storage != again.untyped_storage().data_ptr()
        POOL.empty()
        assert torch.equal(result, before)


def test_registered_once() -> None:
    """A module that is loaded again finds its ops."""
    importlib.reload(convolution_ops)
    zeros, (x, dy) = numbers(FIRST, 2, 1)
    norms = traced_graph(lambda x, dy: factor_of(FIRST, x, dy).norms(), *zeros)[0](x, dy)
    torch.testing.assert_close(norms, norms_of(FIRST.reference(x, dy)))


def test_inside_a_trace_an_op_computes() -> None:
    """It looks at its numbers, and asks no op again."""
    x, dy = WIDE.tensors(2, 1)
    with looking(False), traced() as certificates:
        norms = factor_of(WIDE, x, dy).norms()
    torch.testing.assert_close(norms, norms_of(WIDE.reference(x, dy)))
    assert not certificates
