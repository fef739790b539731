"""Models on meta and under FakeTensorMode: planned and reduced by shapes alone, and what data decide is said."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import persample as ps
from persample.graph.describe import UNKNOWN
from persample.numberless import LiveBytes, NoNumbers, faking, has_numbers, read_numbers, storage_of, with_numbers
from persample.testing import check as compare
from tests import llama
from tests.case_library.registry import Case
from tests.cases import CASES
from tests.modes import megabytes
from tests.reference import Params, named

Built = tuple[Params, Tensor]
Build = Callable[[], tuple[Params, Callable[[], Tensor]]]


def on_meta(build: Build) -> Built:
    with torch.device("meta"):
        params, run = build()
        return params, run()


def in_mode(build: Build, *, beside_numbers: bool = False) -> Built:
    with FakeTensorMode(allow_non_fake_inputs=beside_numbers):
        params, run = build()
        return params, run()


KINDS: dict[str, Callable[[Build], Built]] = {"meta": on_meta, "fake": in_mode}
kinds = pytest.mark.parametrize("kind", KINDS)


def decoder() -> tuple[nn.Module, Callable[[], Tensor]]:
    model, ids = llama.small(), torch.randint(40, (3, 5))
    return model, lambda: llama.losses(model, ids)


def chosen() -> tuple[nn.Module, Callable[[], Tensor]]:
    """Losses in an order that data decide, of a layer above and one below."""
    net, order = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randperm(4)
    return net, lambda: net[2](net[1](net[0](torch.randn(4, 3)))[order]).square().sum(1)


def said(explanation: ps.Explanation) -> list[tuple[str, str, str, str]]:
    return [(row.parameter, row.op, row.layout, row.handling) for row in explanation.rows]


# --- what is relied on ---


@kinds
def test_what_has_numbers(kind: str) -> None:
    _, losses = KINDS[kind](decoder)
    assert not has_numbers(losses)
    assert has_numbers(torch.ones(2))
    with pytest.raises(NoNumbers):
        read_numbers(losses)
    assert storage_of(losses) == storage_of(losses[1:])
    assert storage_of(losses) != storage_of(losses.clone())


def test_tensors_with_numbers_can_be_made_in_a_fake_mode() -> None:
    made = with_numbers(lambda: (faking(), torch.arange(3)))
    with FakeTensorMode():
        assert faking()
        assert not has_numbers(torch.ones(2))
        inside, numbers = made()
        assert faking()
    assert not inside
    assert numbers.tolist() == [0, 1, 2]
    assert not faking()


@kinds
def test_bytes_that_are_live(kind: str) -> None:
    with FakeTensorMode() if kind == "fake" else nullcontext():
        before = torch.empty(100, device="meta" if kind == "meta" else "cpu")
        with LiveBytes() as memory:
            view, first = before[1:], before + 1
            second = first * 2
            assert memory.live == 800
            del first
            assert (memory.live, memory.peak) == (400, 800)
            assert memory.begin_peak() == 400
            del second, view
            assert (memory.live, memory.peak) == (0, 400)


# --- explain ---


@kinds
def test_a_plan_is_that_of_the_same_model_with_numbers(kind: str) -> None:
    params, run = decoder()
    real = ps.explain(run(), params)
    params, losses = KINDS[kind](decoder)
    found = ps.explain(losses, params)
    assert [row[0] for row in said(found)] == [row[0] for row in said(real)]
    assert {how for *_, how in said(found)} == {"rule: Rows", "rule: Dense", "rule: Outer"}
    assert (found.interactions, found.undecided) == ((), ())
    if kind == "fake":  # on meta, attention is another op
        assert found == real


def test_the_mode_may_be_left_or_not() -> None:
    with FakeTensorMode():
        params, run = decoder()
        losses = run()
        inside = ps.explain(losses, params)
    assert ps.explain(losses, params) == inside


@kinds
def test_what_data_decide_is_marked(kind: str) -> None:
    params, losses = KINDS[kind](chosen)
    found = ps.explain(losses, params)
    assert found.undecided == ("Index",)
    assert found.interactions == ()
    by_name = {row.parameter: row.handling for row in found.rows}
    assert by_name["2.weight"] == "rule: Outer"
    assert by_name["0.weight"].endswith(f"; {UNKNOWN}")
    assert str(found).splitlines()[-1] == "data decide in Index, and there are none: samples are taken to meet there"


@kinds
def test_positions_that_cannot_be_read_are_marked(kind: str) -> None:
    """As many positions as samples, scored as classes: integers that count are no data, but who knows."""

    def build() -> tuple[Params, Callable[[], Tensor]]:
        table, x = nn.Embedding(4, 3), torch.randn(4, 3)
        return table, lambda: (x @ table(torch.arange(4)).t()).square().sum(1)

    params, run = build()
    assert ps.explain(run(), params).interactions == ()
    params, losses = KINDS[kind](build)
    found = ps.explain(losses, params)
    assert (found.interactions, found.undecided) == ((), ("Embedding", "Mm"))
    assert all(row.handling.endswith(UNKNOWN) for row in found.rows)


def test_memory_of_factors_counts_what_the_forward_pass_has_not_kept() -> None:
    net, x = nn.Linear(3, 2), torch.randn(5, 4, 3)
    for made in (net, None):
        if made is None:
            net, x = net.to("meta"), x.to("meta")
        memory = ps.explain(net(x).square().sum((1, 2)), net).memory
        assert memory.parameters == 4 * 8
        assert memory.written_out == 5 * memory.parameters
        assert memory.factors == 4 * (5 * 4 * 2 + 5 * 2)  # the cotangent for the weight, its sums for the bias
        assert memory.largest_factor == 4 * 5 * 4 * 2
        assert memory.activations is not None
        assert "all gradients, written out                              160 B" in str(memory)


BIG = """
import torch, persample as ps
from tests import llama
torch.set_default_dtype(torch.bfloat16)
with torch.device("meta"):
    model, ids = llama.Llama(), torch.randint(128256, (8, 4096))
found = ps.explain(llama.losses(model, ids), model)
assert {row.handling for row in found.rows} == {"rule: Rows", "rule: Dense", "rule: Outer"}
assert (len(found.rows), found.interactions, found.undecided) == (723, (), ())
assert found.memory.parameters > 2 * 70e9 and found.memory.written_out == 8 * found.memory.parameters
print(peak())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read on Linux only")
def test_seventy_billion_parameters_are_planned_in_no_more_memory_than_torch_takes() -> None:
    assert megabytes(BIG) < 1000


# --- the verbs ---


def shapes(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: shapes(one) for name, one in value.items()}
    return [shapes(one) for one in value] if isinstance(value, (tuple, list)) else (tuple(value.shape), value.dtype)


VERBS: dict[str, Callable[[Tensor, Any], Any]] = {
    "grad": ps.grad,
    "norms": ps.norms,
    "norms of parameters": lambda losses, params: ps.norms(losses, params, per="parameter"),
    "second_moment": ps.second_moment,
    "variance": ps.variance,
    "gram": ps.gram,
    "dot": lambda losses, params: ps.dot(losses, params, {n: torch.ones_like(p) for n, p in named(params).items()}),
    "project": lambda losses, params: ps.project(losses, params, ps.Projection(dim=8, seed=0)),
    "independent": lambda losses, params: ps.norms(losses, params, independent=True),
}


@kinds
@pytest.mark.parametrize("verb", VERBS)
def test_results_have_the_shapes_of_those_with_numbers(kind: str, verb: str) -> None:
    params, run = decoder()
    want = shapes(VERBS[verb](run(), params))
    params, losses = KINDS[kind](decoder)
    found = VERBS[verb](losses, params)
    assert shapes(found) == want
    first = found if isinstance(found, Tensor) else next(iter(found.values()))
    assert not has_numbers(first)


@kinds
def test_results_do_not_depend_on_what_data_would_have_decided(kind: str) -> None:
    params, losses = KINDS[kind](chosen)
    assert shapes(ps.norms(losses, params, retain_graph=True)) == ((4,), torch.float32)
    with pytest.raises(ps.InteractionError, match="data decide whether samples interact in Index"):
        ps.norms(losses, params, independent=True)


@kinds
def test_an_op_that_needs_numbers_is_refused_with_the_way_out(kind: str) -> None:
    """The backward of an assignment to a mask has as many rows as the mask has ones."""

    def build() -> tuple[Params, Callable[[], Tensor]]:
        net, x, mask = nn.Linear(3, 2), torch.randn(4, 3), torch.ones(4, 2, dtype=torch.bool)

        def losses() -> Tensor:
            y = net(x).tanh()
            y[mask] = net.bias.sum()
            return y.square().sum(1)

        return net, losses

    params, losses = KINDS[kind](build)
    assert all(row.handling.startswith("refused: without data, ") for row in ps.explain(losses, params).rows)
    with pytest.raises(ps.UnsupportedError, match=r"numbers are needed here.*ps\.explain\(losses, params\) tells"):
        ps.grad(losses, params)


@kinds
def test_clipped_sums_have_shapes_or_say_what_they_lack(kind: str) -> None:
    """Whether a sample's terms cancel is looked at once, at the end."""
    params, run = decoder()
    want = shapes(ps.clipped_sum(run(), params, max_norm=1.0))
    params, losses = KINDS[kind](decoder)
    try:
        found = ps.clipped_sum(losses, params, max_norm=1.0)
    except ps.UnsupportedError as error:
        found = None
        said_so = "ps.explain" in str(error)
    assert said_so if found is None else shapes(found) == want


@kinds
def test_what_compares_or_records_numbers_refuses(kind: str) -> None:
    params, losses = KINDS[kind](decoder)
    with pytest.raises(ValueError, match=r"no numbers to compare: ps\.explain"):
        compare(lambda: losses, params)
    with pytest.raises(RuntimeError, match=r"on meta or of a FakeTensorMode.*ps\.explain"):
        ps.call_for_per_sample_grads(params)  # type: ignore[arg-type]


# --- everything ---


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def built(case: Case, kind: str) -> Built:
    """The case without numbers, but for what was made when the case was read."""
    build = lambda: case.build(case.batches[0])  # noqa: E731
    try:
        return on_meta(build) if kind == "meta" else in_mode(build, beside_numbers=True)
    except (RuntimeError, TypeError):
        pytest.skip("PyTorch does not run it without numbers")


def nodes(explanation: ps.Explanation) -> list[tuple[str, str]]:
    return [(row.parameter, row.op) for row in explanation.rows]


def check(case: Case, kind: str) -> None:
    with quiet():
        params, run = case.build(case.batches[0])
        real = ps.explain(run(), params)
        params, losses = built(case, kind)
        found = ps.explain(losses, params)
        marked = bool(found.undecided) or any("without data" in row.handling for row in found.rows)
        other_graph = kind == "meta" and nodes(found) != nodes(real)  # where fused kernels are the CPU's own
        assert marked or other_graph or (said(found), found.interactions) == (said(real), real.interactions)
        if not marked:
            assert shapes(ps.norms(losses, params))[0] == (len(losses),)


@kinds
@pytest.mark.parametrize("case", CASES[::17], ids=str)
def test_cases_are_explained_as_with_numbers_or_marked(case: Case, kind: str) -> None:
    check(case, kind)


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_cases_are_explained_as_with_numbers_or_marked(case: Case, kind: str) -> None:
    check(case, kind)


@pytest.mark.slow
def test_a_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0)

    def build() -> tuple[nn.Module, Callable[[], Tensor]]:
        model, ids = transformers.GPT2LMHeadModel(config), torch.randint(50, (4, 8))
        return model, lambda: llama.losses(lambda given: model(given).logits, ids)  # type: ignore[arg-type]

    with quiet():
        params, run = build()
        real = ps.explain(run(), params)
        params, losses = in_mode(build)
        assert said(ps.explain(losses, params)) == said(real)
        assert shapes(ps.norms(losses, params)) == ((4,), torch.float32)
