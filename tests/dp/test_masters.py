"""Parameters in bfloat16: exact sums, gradients in float32, and steps that float32 copies take."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps
from persample import dp
from persample.reductions.exact import ExactClippedSum
from tests.dp.helpers import dataset, flat, losses_of, network, plan, private

HALF = torch.bfloat16


def half_network() -> nn.Module:
    return network().to(HALF)


def losses_in_half(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0].to(HALF)).float(), batch[1], reduction="none")


def train(run: dp.Private, model: nn.Module, **options: Any) -> dp.Private:
    for batch in run.batches(dataset(), **options):
        run.step(losses_in_half(model, batch))
    return run


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-4),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, lr=1e-4, weight_decay=0.1, foreach=False),
    "AdamBC": lambda p: dp.AdamBC(p, lr=1e-4),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_are_those_of_float32(kind: str) -> None:
    """The gradients that are released, given to the same optimizer of a model in float32, leave the same behind."""
    model, single = half_network(), half_network().float()
    own, theirs = OPTIMIZERS[kind](model.parameters()), OPTIMIZERS[kind](single.parameters())
    run = private(model, plan(steps=20), optimizer=own)
    for batch in run.batches(dataset()):
        run.backward(losses_in_half(model, batch))
        for p, q in zip(model.parameters(), single.parameters(), strict=True):
            assert p.grad is not None
            assert p.grad.dtype == torch.float32
            q.grad = p.grad.clone()
        if isinstance(own, dp.AdamBC) and isinstance(theirs, dp.AdamBC):
            theirs.noise_std = own.noise_std
        own.step()
        theirs.step()
        assert all(p.dtype == HALF for p in model.parameters())
        assert torch.equal(flat(model), flat(single).to(HALF))
    state = [v for s in own.state.values() for v in s.values() if isinstance(v, Tensor)]
    assert all(t.dtype != HALF for t in state)


def test_steps_that_are_too_small_for_bfloat16_add_up() -> None:
    moved = {}
    for masters in (True, False):
        model = half_network()
        with torch.no_grad():
            model[0].weight.fill_(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        run = private(model, plan(steps=200, noise_multiplier=0.0), optimizer=optimizer, masters=masters)
        for batch in run.batches(dataset()):
            losses = model(batch[0].to(HALF)).sum(1) * 0 + model[0].weight.float().sum().expand(len(batch[0]))
            run.step(losses)
        moved[masters] = float((model[0].weight.detach() - 1).abs().max())
    assert moved[False] == 0.0
    assert moved[True] > 2**-9


def test_gradients_are_of_the_parameters_dtype_without_masters() -> None:
    model = half_network()
    run = private(model, masters=False)
    batch = next(run.batches(dataset()))
    run.backward(losses_in_half(model, batch))
    assert all(p.grad is not None and p.grad.dtype == HALF for p in model.parameters())


def test_the_price_of_bfloat16_is_rounding() -> None:
    """With the same noise, training ends within the rounding of the model's own computation."""
    model, single = half_network(), half_network().float()
    train(private(model, plan(steps=20), masters=True), model)
    run = private(single, plan(steps=20))
    for batch in run.batches(dataset()):
        run.step(losses_of(single, batch))
    difference = float((flat(model).float() - flat(single)).norm() / flat(single).norm())
    assert 0 < difference < 0.02


def test_what_others_write_is_believed() -> None:
    model = half_network()
    run = private(model, plan(steps=4), optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    train(run, model, steps=2)
    state = {name: torch.full_like(t, 0.25) for name, t in model.state_dict().items()}
    model.load_state_dict(state)
    train(run, model, steps=2)
    assert all(bool((p == 0.25).all()) for p in model.parameters())


def test_memory_and_identity_of_parameters_stay() -> None:
    model = half_network()
    before = [(id(p), p.data_ptr(), p._version) for p in model.parameters()]
    train(private(model), model)
    after = [(id(p), p.data_ptr(), p._version) for p in model.parameters()]
    assert [b[:2] for b in before] == [a[:2] for a in after]
    assert all(b[2] < a[2] for b, a in zip(before, after, strict=True))  # saved for an earlier backward: it can tell


def test_a_run_leaves_parameters_as_others_have_them() -> None:
    model = half_network()
    run = private(model)
    train(run, model, steps=1)
    gone = weakref.ref(run)
    del run
    gc.collect()
    assert gone() is None
    losses_in_half(model, dataset()[:4]).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == HALF for p in model.parameters())


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("first_is_gone", [True, False])
def test_runs_of_one_model_share_its_masters(kind: str, first_is_gone: bool) -> None:
    """A second run has what a first would have gone on with, also where that one is still there, and steps again."""
    ends = []
    for twice in (False, True):
        model = half_network()
        optimizer = OPTIMIZERS[kind](model.parameters())
        settings = plan(noise_multiplier=0.0, batch_size=60, steps=6)
        run: dp.Private | None = private(model, settings, optimizer=optimizer)
        first = run
        for _ in range(3):
            assert run is not None
            train(run, model, steps=2)
            if twice and run is first:
                run = private(model, settings, optimizer=optimizer)
                if first_is_gone:
                    first = None
                    gc.collect()
            elif twice and not first_is_gone:
                run = first
        with torch.no_grad():
            ends.append([t.clone() for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)])
        assert all(p.dtype == HALF and p.grad_dtype == torch.float32 for p in model.parameters())
        ends[-1].append(flat(model))
        del run, first
        gc.collect()
        assert all(p.grad_dtype == HALF for p in model.parameters())
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind != "AdamBC"])
def test_an_optimizer_that_has_made_steps_goes_on_in_float32(kind: str) -> None:
    model = half_network()
    optimizer = OPTIMIZERS[kind](model.parameters())
    losses_in_half(model, dataset()[:4]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    train(private(model, optimizer=optimizer), model)
    assert all(t.dtype != HALF for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor))


def test_an_error_of_the_optimizer_leaves_the_model_in_bfloat16() -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("no step")

    model = half_network()
    run = private(model, optimizer=Fails(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="no step"):
        train(run, model)
    assert all(p.dtype == HALF for p in model.parameters())


@pytest.mark.parametrize("kind", ["momentum", "Adam"])
def test_a_resumed_run_has_the_masters(tmp_path: Path, kind: str) -> None:
    """What bfloat16 does not show is saved, too: later steps are those of a run that was not interrupted."""
    ends = []
    for interrupted in (False, True):
        model = half_network()
        run = private(
            model, plan(noise_multiplier=0.0, batch_size=60, steps=8), optimizer=OPTIMIZERS[kind](model.parameters())
        )
        train(run, model, steps=4)
        if interrupted:
            run.save(tmp_path / "run.safetensors")
            model = half_network()
            again = private(model, run.plan, optimizer=OPTIMIZERS[kind](model.parameters()))
            again.resume(tmp_path / "run.safetensors")
            run = again
        train(run, model)
        run.save(tmp_path / f"end-{interrupted}.safetensors")
        ends.append([tmp_path / f"end-{interrupted}.safetensors", model])
    from safetensors.torch import load_file

    whole, resumed = (load_file(path) for path, _ in ends)
    assert all(t.dtype == torch.float32 for name, t in whole.items() if name.startswith("model."))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert torch.equal(flat(ends[0][1]), flat(ends[1][1]))


def test_states_that_are_kept_by_hand(tmp_path: Path) -> None:
    """The optimizer's is loaded as it was, in float32; masters begin with the model's weights."""
    model = half_network()
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    run = train(private(model, optimizer=optimizer), model, steps=3)
    states = model.state_dict(), optimizer.state_dict(), run.state_dict()
    torch.save(states, tmp_path / "states")
    model = half_network()
    again = OPTIMIZERS["Adam"](model.parameters())
    later = private(model, optimizer=again)
    for one, state in zip((model, again, later), torch.load(tmp_path / "states"), strict=True):
        one.load_state_dict(state)
    assert all(p.dtype == HALF for p in model.parameters())
    for got, want in zip(again.state.values(), optimizer.state.values(), strict=True):
        assert got["exp_avg"].dtype == torch.float32
        assert torch.equal(got["exp_avg_sq"], want["exp_avg_sq"])
    train(later, model)
    assert later.steps == 6


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.gru(x)[0]
        return out


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[..., 0].abs() * 5).long().clamp(max=11)
        return F.linear(self.words(ids) + x, self.words.weight)


class Scaled(nn.Module):
    """A computed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 4), nn.Parameter(torch.rand(4, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.linear.weight * self.scale, self.linear.bias)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 4), (6,)),
    "linear on a sequence": (lambda: nn.Linear(6, 4), (17, 6)),
    "wide on a sequence": (lambda: nn.Linear(40, 40), (3, 40)),
    "convolution": (lambda: nn.Conv2d(3, 4, 3), (3, 7, 7)),
    "grouped convolution": (lambda: nn.Conv1d(4, 4, 3, groups=2), (4, 9)),
    "layer norm": (lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)), (5, 6)),
    "group norm": (lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.GroupNorm(2, 4)), (4, 9)),
    "gru": (Recurrent, (5, 6)),
    "tied": (Tied, (5, 6)),
    "computed": (Scaled, (5, 6)),
    "attention": (Attention, (5, 6)),
    "prelu": (lambda: nn.Sequential(nn.Linear(6, 6), nn.PReLU(6)), (6,)),
}


@pytest.mark.parametrize("scale", [1.0, 1e-3, 300.0])
@pytest.mark.parametrize("which", MODELS)
def test_a_sample_moves_the_sum_by_its_bound_at_most(which: str, scale: float) -> None:
    """Sums of bfloat16 gradients with and without one sample; alone it adds what it adds beside others."""
    make, shape = MODELS[which]
    torch.manual_seed(0)
    model = make().to(HALF)
    params = dict(model.named_parameters())
    x = (torch.randn(9, *shape) * scale).to(HALF)
    cotangents = torch.randn_like(model(x).float()).detach()

    def summed(keep: slice) -> Tensor:
        losses = (model(x[keep]).float() * cotangents[keep]).flatten(1).sum(1)
        found = ps.reduce(losses, params, ExactClippedSum(ps.ClippedSum(0.5), 2**12), independent=True)[0]
        parts = [(found.take(name), found.units[name].size, p) for name, p in params.items()]
        return torch.cat([(torch.zeros(p.numel()) if t is None else t.flatten()).double() * u for t, u, p in parts])

    share = summed(slice(0, 9)) - summed(slice(1, 9))
    assert float(share.norm()) <= 0.5 * (1 + 1e-9)
    gradient = torch.cat(
        [
            g.double().flatten()
            for g in torch.autograd.grad((model(x[:2]).float() * cotangents[:2])[0].sum(), [*params.values()])
        ]
    )
    want = gradient * min(1.0, 0.5 / float(gradient.norm()))
    assert float((share - want).norm()) <= 0.02 * float(want.norm())


@pytest.mark.parametrize("clip", [ps.ClippedSum(0.3), dp.AdaptiveClip(initial=0.3)], ids=["flat", "adaptive"])
def test_compiled_steps(clip: Any) -> None:
    ends = []
    for compiled in (False, True):
        model = half_network()
        run = private(
            model,
            clip=clip,
            compile=(lambda x, y, model=model: losses_in_half(model, (x, y))) if compiled else None,
            backend="eager",
        )
        for batch in run.batches(dataset()):
            run.step(*batch) if compiled else run.step(losses_in_half(model, batch))
        ends.append(flat(model).float())
    torch.testing.assert_close(ends[0], ends[1], rtol=2e-2, atol=2e-2)


def test_users() -> None:
    model = half_network()
    run = private(model, dp.Plan(users=20, batch_size=5, steps=3, noise_multiplier=1.0, delta=1e-5, accountant="rdp"))
    for batch in run.batches(dataset(), users=torch.arange(60) % 20):
        run.step(losses_in_half(model, batch))
    assert all(p.dtype == HALF for p in model.parameters())
