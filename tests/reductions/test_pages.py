"""Memory that is used again from call to call, and never by two at a time."""

from __future__ import annotations

import copy
import gc
import io
import sys
from collections.abc import Iterator
from threading import Thread

import pytest
import torch
from torch import Tensor, nn

import persample as ps
from persample.factors import Factor
from persample.kernels import pages
from persample.kernels.pages import POOL, fresh, recycled
from tests.models import mlp

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, memory is the allocator's business")


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything is large enough."""
    monkeypatch.setattr(pages, "_LEAST", 1)
    monkeypatch.setattr(pages, "_LEAST_FRESH", 1)
    POOL.empty()
    yield
    POOL.empty()


def sequences(B: int = 6, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """A model whose gradients are written out and kept for the sum."""
    torch.manual_seed(seed)
    net = mlp(8, 10, 9, seed=seed)
    return net, net(torch.randn(B, 40, 8, dtype=torch.float64)).square().sum((1, 2))


def clipped(net: nn.Module, losses: Tensor) -> dict[str, Tensor]:
    found: dict[str, Tensor] = ps.clipped_sum(losses, net, max_norm=1.0, retain_graph=True)
    return found


def test_a_page_is_used_again_when_its_tensors_are_gone() -> None:
    first = recycled((2000,), torch.float32, CPU)
    place, size = first.data_ptr(), POOL.nbytes
    part = first[10:]
    del first
    assert recycled((2000,), torch.float32, CPU).data_ptr() != place, "a view is still there"
    del part
    assert recycled((1900,), torch.float32, CPU).data_ptr() == place
    assert POOL.nbytes == 2 * size


def test_two_at_a_time_never_share() -> None:
    held = [recycled((2000,), torch.float64, CPU).fill_(k) for k in range(20)]
    assert all(bool((t == k).all()) for k, t in enumerate(held))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64])
def test_any_dtype_and_no_elements(dtype: torch.dtype) -> None:
    for shape in ((3, 5), (), (0, 4), (7, 0)):
        for make in (recycled, fresh):
            made = make(shape, dtype, CPU)
            assert (made.shape, made.dtype, made.is_contiguous()) == (shape, dtype, True)


def test_what_the_last_calls_did_not_use_is_let_go() -> None:
    recycled((5000,), torch.float32, CPU)
    large = POOL.nbytes
    for _ in range(8):
        POOL.begin_call()
        recycled((100,), torch.float32, CPU)
    assert 0 < POOL.nbytes < large


def test_the_second_call_is_as_the_first_and_takes_no_more() -> None:
    net, losses = sequences()
    first = clipped(net, losses)
    size = POOL.nbytes
    assert size > 0, "nothing was written out"
    for _ in range(3):
        again = clipped(net, losses)
        assert all(torch.equal(again[name], first[name]) for name in first)
    assert POOL.nbytes == size
    ps.empty_cache()
    assert POOL.nbytes == 0
    assert all(torch.equal(clipped(net, losses)[name], first[name]) for name in first)


class Keeper(ps.Reduction):
    """Keeps what it is shown."""

    def start(self, call: ps.Call) -> None:
        self.stacks: dict[str, Tensor] = {}
        self.factors: dict[str, Factor] = {}

    def add(self, name: str, factor: Factor) -> None:
        self.stacks[name], self.factors[name] = factor.stack(), factor

    def result(self) -> tuple[dict[str, Tensor], dict[str, Factor]]:
        return self.stacks, self.factors


def test_what_outlives_its_call_is_left_alone() -> None:
    """Results and stacks, even factors, that somebody keeps do not change when other calls come."""
    net, losses = sequences()
    wanted = ps.grad(losses, net, retain_graph=True)
    total, (stacks, factors), rows = ps.reduce(losses, net, ps.ClippedSum(1.0), Keeper(), ps.Stack(), retain_graph=True)
    before = copy.deepcopy(dict(total))
    for seed in range(3):
        clipped(*sequences(seed=seed + 1))
    for name, want in wanted.items():
        torch.testing.assert_close(stacks[name], want)
        torch.testing.assert_close(factors[name].stack(), want)
        torch.testing.assert_close(rows[name], want)
        assert torch.equal(total[name], before[name])


class Failing(ps.Reduction):
    """Raises in the middle of a backward."""

    def start(self, call: ps.Call) -> None:
        self.left = 2

    def add(self, name: str, factor: Factor) -> None:
        self.left -= 1
        if not self.left:
            raise ArithmeticError("no more")

    def result(self) -> None:
        return None


def test_a_call_that_fails_gives_its_pages_back() -> None:
    net, losses = sequences()
    first = clipped(net, losses)
    size = POOL.nbytes
    for _ in range(3):
        with pytest.raises(ArithmeticError):
            ps.reduce(losses, net, ps.ClippedSum(1.0), Failing(), retain_graph=True)
    gc.collect()
    again = clipped(net, losses)
    assert all(torch.equal(again[name], first[name]) for name in first)
    assert POOL.nbytes <= 2 * size


def test_several_threads_at_once() -> None:
    models = [sequences(B=3 + k, seed=k) for k in range(4)]
    wanted, wrong = [clipped(*model) for model in models], []

    def work(k: int) -> None:
        for _ in range(15):
            found = clipped(*models[k])
            wrong.extend(name for name in found if not torch.equal(found[name], wanted[k][name]))

    threads = [Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_large_results_are_ordinary_tensors() -> None:
    made = fresh((30, 40), torch.float32, CPU).copy_(torch.arange(1200.0).view(30, 40))
    want = torch.arange(1200.0).view(30, 40)
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    assert torch.equal(torch.load(file), want)
    assert torch.equal(copy.deepcopy(made), want)
    array, row = made.numpy(), made[3]
    assert torch.equal(copy.deepcopy(made).share_memory_(), want)
    assert not made._is_view()
    leaf = made.requires_grad_()
    (leaf * 2).sum().backward()
    assert leaf.grad is not None
    del made, leaf
    gc.collect()
    assert array[3, 5] == row[5] == 125
    with pytest.raises(RuntimeError, match="not resizable"):
        fresh((2,), torch.float32, CPU).resize_(10**6)


def test_gradients_are_written_into_fresh_memory_and_again() -> None:
    net, losses = sequences()
    found = ps.grad(losses, net, retain_graph=True)
    kept = {name: g.clone() for name, g in found.items()}
    assert not any(g.untyped_storage().resizable() for g in found.values())
    again = ps.grad(losses, net, retain_graph=True)
    assert all(found[name].data_ptr() != again[name].data_ptr() for name in found)
    written = ps.grad(2 * losses, net, out=found)
    assert all(written[name] is found[name] and torch.equal(written[name], 2 * kept[name]) for name in kept)
    assert all(torch.equal(again[name], kept[name]) for name in kept)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_memory_goes_back() -> None:
    """To the system: of results with the last tensor, of pages when the cache is emptied."""
    before = resident()
    for make in (fresh, recycled):
        made = make((2**26,), torch.uint8, CPU).zero_()
        assert resident() > before + 2**25
        del made
        POOL.empty()
        assert resident() < before + 2**25


def test_without_mappings_memory_is_the_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(size: int) -> object:
        raise OSError("too many mappings")

    monkeypatch.setattr(pages, "_mapped", refused)
    for make in (fresh, recycled):
        assert make((3, 4), torch.float32, CPU).untyped_storage().resizable()
    assert POOL.nbytes == 0
    assert fresh((2,), torch.float32, torch.device("meta")).is_meta
