"""`torch.compile`d models and blocks: exact, before and after ordinary training, again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample as ps
from tests.case_library.functions import Square
from tests.reference import assert_same, definition

# Compiling says what it likes.
pytestmark = pytest.mark.filterwarnings("ignore")


class Compiled:
    """A model, its compiled form, and the same losses computed by either."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2)
        ).double()
        self.run = torch.compile(self.model, backend=backend)
        self.x = torch.randn(5, 3).double()

    def losses(self) -> Tensor:
        return self.run(self.x).square().sum(1)

    def want(self) -> dict[str, Tensor]:
        return definition(self.model(self.x).square().sum(1), self.model)

    def compile(self, fn: Callable[..., Tensor]) -> Callable[..., Any]:
        return torch.compile(fn, backend=self.backend)

    def train(self, steps: int = 2) -> None:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            self.losses().mean().backward()
            optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)], scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[Compiled]:
    yield Compiled(request.param)
    torch.compiler.reset()


def test_a_whole_model(compiled: Compiled) -> None:
    losses = compiled.losses()
    assert_same(ps.grad(losses, compiled.model), compiled.want())
    assert_same(ps.grad(compiled.losses(), compiled.model), compiled.want())


def test_after_ordinary_training(compiled: Compiled) -> None:
    """The backward that training has compiled may use saved tensors as scratch memory."""
    fresh = Compiled(compiled.backend)
    for _ in range(2):
        fresh.train()
        assert_same(ps.grad(fresh.losses(), fresh.model), fresh.want())


def test_training_goes_on_as_before(compiled: Compiled) -> None:
    ps.grad(compiled.losses(), compiled.model)
    compiled.losses().sum().backward()
    for name, p in compiled.model.named_parameters():
        torch.testing.assert_close(p.grad, compiled.want()[name].sum(0))
    compiled.model.zero_grad()


def test_the_graph_is_kept_when_asked(compiled: Compiled) -> None:
    compiled.train()
    losses = compiled.losses()
    for _ in range(3):
        assert_same(ps.grad(losses, compiled.model, retain_graph=True), compiled.want())
    losses.sum().backward()
    for name, p in compiled.model.named_parameters():
        torch.testing.assert_close(p.grad, compiled.want()[name].sum(0))
    compiled.model.zero_grad()


def test_a_freed_graph_is_refused(compiled: Compiled) -> None:
    losses = compiled.losses()
    ps.grad(losses, compiled.model)
    with pytest.raises(RuntimeError, match=r"was freed by an earlier backward: .*retain_graph=True"):
        ps.grad(losses, compiled.model)


@pytest.mark.parametrize("B", [1, 2, 7])
def test_other_batch_sizes(compiled: Compiled, B: int) -> None:
    model, x = compiled.model, torch.randn(B, 3).double()
    assert_same(ps.grad(compiled.run(x).square().sum(1), model), definition(model(x).square().sum(1), model))


def test_some_of_the_parameters(compiled: Compiled) -> None:
    chosen = [compiled.model[2].bias, compiled.model[5].weight]
    want = compiled.want()
    assert_same(ps.grad(compiled.losses(), chosen), {"0": want["2.bias"], "1": want["5.weight"]})


def test_a_block_between_layers(compiled: Compiled) -> None:
    net, x = (
        nn.ModuleList([nn.Linear(3, 4), nn.Conv1d(4, 4, 3, padding=1), nn.Linear(4, 2)]).double(),
        torch.randn(5, 6, 3).double(),
    )
    block = lambda h: net[1](h.mT).mT.relu()  # noqa: E731
    fast = compiled.compile(block)
    losses = lambda middle: net[2](middle(net[0](x))).square().sum((1, 2))  # noqa: E731
    want = definition(losses(block), net)
    assert_same(ps.grad(losses(fast), net), want)
    losses(fast).sum().backward()
    assert_same(ps.grad(losses(fast), net), want)


def test_a_block_between_layers_whose_graph_is_kept(compiled: Compiled) -> None:
    """PyTorch itself refuses to keep the graph where compiled code takes what it has saved as scratch memory."""
    net, x = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)]).double(), torch.randn(5, 3).double()
    block = lambda h: net[1](h).tanh()  # noqa: E731
    losses = lambda middle: net[2](middle(net[0](x))).square().sum(1)  # noqa: E731
    want = definition(losses(block), net)
    with torch._functorch.config.patch(donated_buffer=False):
        fast = compiled.compile(block)
        losses(fast).sum().backward()
        kept = losses(fast)
        for _ in range(2):
            assert_same(ps.grad(kept, net, retain_graph=True), want)


def test_a_block_used_twice_and_time_first(compiled: Compiled) -> None:
    """As many steps as samples: the layout inside cannot be told by sizes."""
    net, x = nn.ModuleList([nn.Linear(3, 3), nn.LayerNorm(3)]).double(), torch.randn(5, 5, 3).double()
    block = lambda h: net[1](net[0](h)).tanh()  # noqa: E731
    fast = compiled.compile(block)
    losses = lambda run: run(run(x.cumsum(0)).flip(0)).square().sum((0, 2))  # noqa: E731
    assert_same(ps.grad(losses(fast), net), definition(losses(block), net))


def test_losses_computed_inside(compiled: Compiled) -> None:
    fast = compiled.compile(lambda x: compiled.model(x).square().sum(1))
    assert_same(ps.grad(fast(compiled.x), compiled.model), compiled.want())


def test_a_region_without_parameters(compiled: Compiled) -> None:
    model, x = compiled.model, compiled.x
    middle = lambda h: (h * 2).tanh().roll(1, 1)  # noqa: E731
    fast = compiled.compile(middle)
    want = definition(middle(model(x)).square().sum(1), model)
    assert_same(ps.grad(fast(model(x)).square().sum(1), model), want)
    assert_same(ps.grad(fast(model(x)).square().sum(1), model, independent=True), want)


def test_samples_that_interact_inside(compiled: Compiled) -> None:
    net, x = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)]).double(), torch.randn(5, 3).double()
    middle = lambda h: net[1](h - h.mean(0)).tanh()  # noqa: E731
    fast = compiled.compile(middle)
    losses = lambda run: run(net[0](x).tanh()).square().sum(1)  # noqa: E731
    assert_same(ps.grad(losses(fast), net), definition(losses(middle), net))
    with pytest.raises(ps.InteractionError, match="CompiledFunction"):
        ps.grad(losses(fast), net, independent=True)


def test_independence_inside_a_compiled_model_is_not_promised(compiled: Compiled) -> None:
    """Nobody can see into the region: it must not be waved through."""
    net, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double(), torch.randn(5, 3).double()
    fast = compiled.compile(net)
    with pytest.raises((ps.InteractionError, ps.UnsupportedError), match="CompiledFunction"):
        ps.grad(fast(x).square().sum(1), net, independent=True)


def test_scratch_memory_is_really_in_play() -> None:
    """The tests above mean something only if PyTorch refuses an ordinary second backward here."""
    compiled = Compiled("aot_eager")
    compiled.train(1)
    losses = compiled.losses()
    with pytest.raises(RuntimeError, match="donated buffers"):
        losses.sum().backward(retain_graph=True)


def test_a_region_that_runs_once_beside_a_custom_function() -> None:
    """Asking the Function takes a backward that keeps the graph: right where PyTorch allows one, else refused."""
    compiled = Compiled("aot_eager")
    compiled.train(1)
    first = nn.Linear(3, 3).double()
    losses = lambda run: run(Square.apply(first(compiled.x))).square().sum(1)  # noqa: E731
    try:
        torch.autograd.grad(losses(compiled.run).sum(), first.weight, retain_graph=True)
    except RuntimeError:
        with pytest.raises(ps.UnsupportedError, match="donated_buffer = False"):
            ps.grad(losses(compiled.run), first)
    else:
        assert_same(ps.grad(losses(compiled.run), first), definition(losses(compiled.model), first))
