"""Reductions that users write: three methods that see factors, beside the built-in ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import persample as ps
from tests.models import EveryForm, every_form
from tests.reference import assert_same, definition, named, vectors

B = 5


class LargestEntry(ps.Reduction):
    """(B,): the largest absolute entry of every sample's gradient."""

    def start(self, call: ps.Call) -> None:
        self.call, self.found = call, call.zeros(call.batch)

    def add(self, name: str, factor: ps.Factor) -> None:
        largest = factor.stack().abs().reshape(factor.batch, -1).amax(1).to(self.found)
        self.found = torch.maximum(self.found, largest)

    def result(self) -> Tensor:
        return self.found.to(self.call.dtype)


class Farthest(ps.Reduction):
    """For every sample, the sample whose gradient is farthest: needs all factors at once, so it holds them."""

    keeps_factors = True
    passes = 2

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def start(self, call: ps.Call) -> None:
        self.call, self.factors = call, {}

    def add(self, name: str, factor: ps.Factor) -> None:
        self.factors[name] = factor

    def result(self) -> tuple[Tensor, dict[str, Tensor]]:
        products = sum((f.gram(f, self.call.space).double() for f in self.factors.values()), self.call.zeros(1))
        squares = products.diagonal()
        distances = squares.unsqueeze(1) + squares - 2 * products
        chosen = distances.argmax(1)
        picked = {name: f[chosen].weighted_sum(torch.ones(B), self.call.space) for name, f in self.factors.items()}
        return chosen, self.call.pack_sums({name: p * self.scale for name, p in picked.items()})


class Watching(ps.Reduction):
    """Notes everything it is shown."""

    def start(self, call: ps.Call) -> None:
        self.call, self.names, self.modes = call, [], []

    def add(self, name: str, factor: ps.Factor) -> None:
        self.names.append(name)
        p = self.call.params[name]
        assert (factor.batch, factor.shape, factor.dtype) == (self.call.batch, tuple(p.shape), p.dtype)
        self.modes.append(
            (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"))
        )

    def result(self) -> tuple[ps.Call, list[str], list[tuple[bool, ...]]]:
        return self.call, self.names, self.modes


class Failing(ps.Reduction):
    """Raises in one of its methods."""

    def __init__(self, where: str, after: int = 0) -> None:
        self.where, self.left = where, after

    def _maybe(self, here: str) -> None:
        if self.where == here:
            if not self.left:
                raise KeyError(f"failed in {here}")
            self.left -= 1

    def start(self, call: ps.Call) -> None:
        self._maybe("start")

    def add(self, name: str, factor: ps.Factor) -> None:
        self._maybe("add")

    def result(self) -> None:
        self._maybe("result")


@pytest.fixture
def net() -> EveryForm:
    return every_form()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 6, (B, 4), generator=torch.Generator().manual_seed(0))


def assert_all(got: tuple[Any, ...], stacks: dict[str, Tensor]) -> None:
    """Results of LargestEntry, Norms, Farthest(3), ClippedSum(0.5), Stack."""
    every = vectors(stacks)
    largest, norms, (chosen, picked), clipped, stack = got
    torch.testing.assert_close(largest, every.abs().amax(1), rtol=1e-10, atol=0)
    torch.testing.assert_close(norms, every.norm(dim=1))
    assert chosen.tolist() == torch.cdist(every, every).argmax(1).tolist()
    torch.testing.assert_close(vectors({n: p.unsqueeze(0) for n, p in picked.items()})[0], 3 * every[chosen].sum(0))
    weights = (0.5 / norms).clamp(max=1)
    torch.testing.assert_close(vectors({n: p.unsqueeze(0) for n, p in clipped.items()})[0], weights @ every)
    assert_same(stack, stacks)


@pytest.mark.parametrize("max_memory", [None, 0, 1000, 2**30])
def test_beside_built_in_ones(net: EveryForm, ids: Tensor, max_memory: int | None) -> None:
    stacks = definition(net(ids), net)
    asked = [LargestEntry(), ps.Norms(), Farthest(3.0), ps.ClippedSum(0.5), ps.Stack()]
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        got = ps.reduce(net(ids), net, *(asked[i] for i in order), max_memory=max_memory)
        assert_all(tuple(got[order.index(i)] for i in range(5)), stacks)


@pytest.mark.parametrize("reduction", [LargestEntry(), ps.Norms(), Farthest(3.0)], ids=lambda r: type(r).__name__)
def test_alone_and_after_another(net: EveryForm, ids: Tensor, reduction: ps.Reduction) -> None:
    """Nothing is kept on the object: it can be asked twice in one call, and again on other samples."""
    before = dict(vars(reduction))
    (first,) = ps.reduce(net(ids), net, reduction)
    ps.reduce(net(ids.flip(1)), net, reduction)
    again, twice = ps.reduce(net(ids), net, reduction, reduction)
    for other in (again, twice):
        torch.testing.assert_close(other, first)
    assert vars(reduction) == before


def test_what_a_reduction_is_shown(net: EveryForm, ids: Tensor) -> None:
    with torch.enable_grad():
        ((call, names, modes),) = ps.reduce(net(ids), net, Watching())
    assert sorted(names) == sorted(n for n in named(net) if not n.startswith("unused"))
    assert list(call.params) == list(named(net))
    assert all(call.params[n] is p for n, p in named(net).items())
    assert (call.batch, call.device.type, call.dtype) == (B, "cpu", torch.float64)
    assert set(modes) == {(False, False, False)}
    losses = net(ids)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        ((_, names, modes),) = ps.reduce(losses, net, Watching())
    assert set(modes) == {(False, False, False)}
    ((call, names, _),) = ps.reduce(net(ids[:0]), net, Watching())
    assert (call.batch, names) == (0, [])
    ((call, names, _),) = ps.reduce(net(ids[:1]), net, Watching())
    assert (call.batch, len(names)) == (1, len(modes))


def test_packing_follows_the_parameters(net: EveryForm, ids: Tensor) -> None:
    """`pack_sums` gives zeros for what is not reached, in the container that the parameters came in."""
    params = {"table": net.table.weight, "unused": net.unused.weight, "scale": net.scale}
    ((_, found),) = ps.reduce(net(ids), params, Farthest(1.0))
    assert list(found) == list(params)
    assert not found["unused"].any()
    ((_, found),) = ps.reduce(net(ids), list(params.values()), Farthest(1.0))
    assert isinstance(found, tuple)
    assert [f.shape for f in found] == [p.shape for p in params.values()]
    assert not any(f.requires_grad for f in found)


@pytest.mark.parametrize("where", ["start", "add", "result"])
@pytest.mark.parametrize("batch", [1, B])
def test_its_errors_come_through(net: EveryForm, ids: Tensor, where: str, batch: int) -> None:
    """Unchanged, also from inside the backward, and nothing stays behind on the graph."""
    losses = net(ids[:batch])
    for after in range(3 if where == "add" else 1):
        with pytest.raises(KeyError, match=f"failed in {where}"):
            ps.reduce(losses, net, ps.Norms(), Failing(where, after), retain_graph=True)
    assert all(p.grad is None for p in net.parameters())
    assert_same(ps.grad(losses, net, retain_graph=True), definition(net(ids[:batch]), net))
    losses.sum().backward()  # no hook of the failed call is left
    ps.norms(net(ids), net)


def test_errors_of_a_failing_reduction_do_not_reach_the_next_call(net: EveryForm, ids: Tensor) -> None:
    with pytest.raises(KeyError):
        ps.reduce(net(ids), net, Failing("add"), LargestEntry())
    (got,) = ps.reduce(net(ids), net, LargestEntry())
    torch.testing.assert_close(got, vectors(definition(net(ids), net)).abs().amax(1))


def test_a_reduction_must_have_all_three_methods() -> None:
    class Incomplete(ps.Reduction):
        def start(self, call: ps.Call) -> None: ...

    with pytest.raises(TypeError, match="abstract"):
        Incomplete()  # type: ignore[abstract]


def test_something_that_is_no_reduction(net: EveryForm, ids: Tensor) -> None:
    losses = net(ids)
    for wrong, match in (
        (LargestEntry, r"expected reductions such as ps\.Norms\(\), but got .*: write LargestEntry\(\)"),
        (ps.Norms, r"write Norms\(\)"),
        ("norms", r"expected reductions such as ps\.Norms\(\), but got 'norms'"),
        ([ps.Norms()], r"expected reductions such as ps\.Norms\(\), but got \["),
    ):
        with pytest.raises(TypeError, match=match):
            ps.reduce(losses, net, wrong)  # type: ignore[arg-type]
    assert ps.reduce(losses, net, retain_graph=True) == ()
    assert ps.reduce(losses, net, ps.Norms())[0].shape == (B,)
