"""Several losses per sample, (B, K…): both ways to take them apart, what is refused, and what is left behind."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import persample as ps
from persample import dp
from persample.graph.several import positions_meet
from tests.models import Recurrent, TiedEmbedding, Transformer, cnn, mlp
from tests.reference import Params, assert_same, definition, named, vectors

pytestmark = pytest.mark.usefixtures("float64")


def rows(losses: Tensor, params: Params) -> dict[str, Tensor]:
    """The definition, for every loss."""
    return definition(losses.flatten(), params)


def check(losses: Tensor, params: Params, meet: bool | None = None, want: Tensor | None = None) -> None:
    """Gradients, norms, sums and kernels, all at once and in portions of every size."""
    shape, names = losses.shape, list(named(params))
    stacks = rows(losses if want is None else want, params)
    flat = vectors(stacks)
    if meet is not None:
        assert positions_meet(losses, named(params)) == meet
    for memory in (None, 1, 3000):
        found, norms, total, moment, spread = ps.reduce(
            losses,
            params,
            ps.Stack(),
            ps.Norms(),
            ps.ClippedSum(0.5),
            ps.SecondMoment(),
            ps.Variance(),
            retain_graph=True,
            max_memory=memory,
        )
        found, total, moment, spread = (as_dict(each, names) for each in (found, total, moment, spread))
        assert_same({name: g.flatten(0, len(shape) - 1) for name, g in found.items()}, stacks)
        assert_close(norms, flat.norm(dim=1).view(shape))
        weights = (0.5 / flat.norm(dim=1)).clamp(max=1)
        for name, stack in stacks.items():
            assert_close(total[name], torch.einsum("i,i...->...", weights, stack))
            assert_close(moment[name], stack.square().mean(0))
            if len(stack) > 1:
                assert_close(spread[name], stack.var(0))
    assert_close(ps.gram(losses, params, retain_graph=True), (flat @ flat.t()).view(*shape, *shape))
    other = ps.gram(losses, params, losses[1:], retain_graph=True)
    assert_close(other, (flat @ flat[shape[1:].numel() :].t()).view(*shape, *losses[1:].shape))


def as_dict(result: Any, names: list[str]) -> dict[str, Tensor]:
    return result if isinstance(result, dict) else dict(zip(names, result, strict=True))


def assert_close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)


IDS = torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(3))


def lstm_steps() -> tuple[Params, Tensor]:
    model = Recurrent(3, 4)
    return model, model(torch.randn(4, 5, 3)).square().sum(-1)


def batch_second() -> tuple[Params, Tensor]:
    model = nn.LSTM(3, 4)
    return model, model(torch.randn(5, 4, 3))[0].transpose(0, 1).sum(-1)


def tokens_of_gpt() -> tuple[Params, Tensor]:
    model = Transformer(7, 5, 4, causal=True)
    return model, model(IDS).logsumexp(-1)


def tied_words() -> tuple[Params, Tensor]:
    model = TiedEmbedding(7, 3)
    return model, model(IDS).logsumexp(-1)


def adapter() -> tuple[Params, Tensor]:
    weight, a, b = torch.randn(5, 3), nn.Parameter(torch.randn(5, 2)), nn.Parameter(torch.randn(2, 3))
    return [a, b], torch.tanh(torch.randn(4, 3) @ (weight + a @ b).t()) @ torch.randn(5, 3)


def in_training() -> tuple[Params, Tensor]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    return model, model(torch.randn(4, 3))


def in_evaluation() -> tuple[Params, Tensor]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).eval()
    return model, model(torch.randn(4, 3))


def maps() -> tuple[Params, Tensor]:
    model = cnn()
    return model, model(torch.randn(3, 2, 6, 6)).flatten(2).sum(2)


def recomputed() -> tuple[Params, Tensor]:
    model = mlp(3, 4, 4, 2)
    return model, model[3:](checkpoint(model[:3], torch.randn(4, 3), use_reentrant=False))


def routed() -> tuple[Params, Tensor]:
    experts, x, chosen = nn.ModuleList([nn.Linear(3, 2) for _ in range(3)]), torch.randn(6, 3), torch.arange(6) % 3
    out = x.new_zeros(6, 2)
    for i, expert in enumerate(experts):
        mine = (chosen == i).nonzero().squeeze(1)
        out = out.index_put((mine,), expert(x[mine]))
    return experts, out


MEETING: list[Callable[[], tuple[Params, Tensor]]] = [
    lstm_steps,
    batch_second,
    tokens_of_gpt,
    adapter,
    in_evaluation,
    maps,
    recomputed,
    routed,
]


@pytest.mark.parametrize("make", MEETING)
def test_losses_that_meet(make: Callable[[], tuple[Params, Tensor]]) -> None:
    params, losses = make()
    check(losses, params, meet=True)


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
def test_samples_that_meet() -> None:
    params, losses = in_training()
    check(losses, params, meet=True)


def test_losses_that_do_not_meet() -> None:
    model = mlp()
    check(model(torch.randn(4, 5, 3)).square().sum(-1), model, meet=False)
    check(model(torch.randn(2, 3, 2, 3)).square().sum(-1), model, meet=False)
    params, losses = tied_words()
    check(losses, params, meet=False)


@pytest.mark.parametrize("sizes", [(4, 3), (3, 3), (4, 1), (1, 3), (1, 1), (2, 3, 2)])
def test_sizes(sizes: tuple[int, ...]) -> None:
    """K as large as B, one sample, one position, several dims of positions."""
    model = mlp(3, 4, sizes[-1])
    check(model(torch.randn(*sizes[:-1], 3)), model)


@pytest.mark.parametrize("sizes", [(0, 3), (4, 0), (0, 0)])
def test_none(sizes: tuple[int, int]) -> None:
    model = mlp(3, 4, 3)
    losses = model(torch.randn(sizes[0], 3))[:, : sizes[1]]
    assert ps.grad(losses, model, retain_graph=True)["0.weight"].shape == (*sizes, 4, 3)
    assert ps.norms(losses, model, retain_graph=True).shape == sizes
    assert ps.gram(losses, model, retain_graph=True).shape == (*sizes, *sizes)
    assert ps.gram(losses, model, model(torch.randn(2, 3)), retain_graph=True).shape == (*sizes, 2, 3)
    assert ps.project(losses, model, ps.Projection(4), retain_graph=True).shape == (*sizes, 4)
    assert not ps.clipped_sum(losses, model, 1.0, retain_graph=True)["0.weight"].any()
    assert ps.second_moment(losses, model, retain_graph=True)["0.weight"].isnan().all()
    assert ps.backward(losses, model, ps.ClippedSum(1.0)).weights.shape == sizes
    assert model[0].weight.grad is not None
    assert not model[0].weight.grad.any()


def test_forms_of_losses() -> None:
    """Expanded, transposed, cut, a leaf, and with positions that have no graph or other parameters."""
    model, x = mlp(3, 4, 3), torch.randn(5, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ps.PerformanceWarning)
        check(model(x).t(), model)
        check(model(x)[:1].expand(4, 3), model)
    check(model(x)[:, :1].expand(5, 4), model)
    check(model(x)[::2, 1:], model)
    heads = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])
    check(torch.cat([heads[0](x), x[:, :1], heads[1](x).sin()], 1), heads)
    leaf, scale = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4, 3))
    check(leaf, [leaf])
    check(leaf * scale.tanh(), [leaf, scale])
    frozen = mlp(3, 4, 3)
    frozen[0].requires_grad_(False)
    check(frozen(x), frozen)
    check(model(x), [model[2].bias])


class Doubled(torch.autograd.Function):
    """Changes its cotangent in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        doubled: Tensor = grads[0].mul_(2)
        return doubled


def test_custom_functions() -> None:
    model, x = mlp(3, 3, 3), torch.randn(5, 3)
    check(Doubled.apply(model(x)), model, meet=True)  # type: ignore[no-untyped-call]
    check(model[2](Doubled.apply(model[:2](x))), model, meet=True)  # type: ignore[no-untyped-call]


def test_memory_that_is_written_again_is_noticed() -> None:
    """A factor waits for those of other positions, and would have their numbers."""
    layer, head, memory = nn.Linear(3, 3), nn.Linear(3, 2), torch.zeros(5, 3)
    inner = layer(torch.randn(5, 3))
    inner.register_hook(memory.copy_)
    losses = head(inner)
    with pytest.raises(ps.UnsupportedError, match="was changed in place during the backward"):
        ps.grad(losses, layer, retain_graph=True)
    one_at_a_time = ps.norms(losses, layer, retain_graph=True, max_memory=1)
    assert_close(one_at_a_time, vectors(rows(losses, layer)).norm(dim=1).view(5, 2))


def test_hooks_on_tensors_are_called() -> None:
    model, x = mlp(3, 4, 3), torch.randn(5, 3)
    for samples in (x, x[:1]):
        inner = model[:2](samples)
        inner.register_hook(lambda g: g * 2)
        check(model[2](inner), model)


def test_results_and_records_have_the_losses_shape() -> None:
    model, x = mlp(3, 4, 3), torch.randn(5, 3)
    losses = model(x)
    direction = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    two = {name: torch.stack([v, 2 * v]) for name, v in direction.items()}
    flat = vectors(rows(losses, model))
    ones = torch.cat([v.flatten() for v in direction.values()])
    assert_close(ps.dot(losses, model, direction, retain_graph=True), (flat @ ones).view(5, 3))
    assert ps.dot(losses, model, two, retain_graph=True).shape == (5, 3, 2)
    assert ps.project(losses, model, ps.Projection(4), retain_graph=True).shape == (5, 3, 4)
    assert {n.shape for n in ps.norms(losses, model, per="parameter", retain_graph=True).values()} == {(5, 3)}
    groups = ps.norms(losses, model, per=[model[0], model[2]], retain_graph=True)
    assert [n.shape for n in groups] == [(5, 3), (5, 3)]
    record = ps.backward(losses, model, ps.ClippedSum(0.5), retain_graph=True)
    assert record.norms.shape == record.weights.shape == (5, 3)
    total = ps.clipped_sum(losses, model, 0.5)
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert_close(p.grad, total[name])
    assert_close(total.clipping.norms, flat.norm(dim=1).view(5, 3))


def test_a_function_for_weights_sees_all_norms() -> None:
    model, seen = mlp(3, 4, 3), list[tuple[int, ...]]()

    def weigh(norms: Tensor) -> Tensor:
        seen.append(tuple(norms.shape))
        return (norms >= norms.median()).to(norms)

    losses = model(torch.randn(5, 3))
    stacks = rows(losses, model)
    norms = vectors(stacks).norm(dim=1)
    total = ps.reduce(losses, model, ps.ClippedSum(weights=weigh), max_memory=1)[0]
    assert seen == [(15,)]
    for name, stack in stacks.items():
        assert_close(total[name], stack[norms >= norms.median()].sum(0))


class Largest(ps.Reduction):
    """The largest element of every gradient: what a user writes, who knows nothing of positions."""

    def start(self, call: ps.Call) -> None:
        self.found = torch.zeros(call.batch)

    def add(self, name: str, factor: ps.Factor) -> None:
        self.found = torch.maximum(self.found, factor.stack().abs().flatten(1).amax(1))

    def result(self) -> Tensor:
        return self.found


def test_reductions_of_the_users_own() -> None:
    for model, x in ((mlp(3, 4, 3), torch.randn(5, 3)), (cnn(), torch.randn(5, 2, 6, 6))):
        losses = model(x).flatten(1)[:, :3]
        (found,) = ps.reduce(losses, model, Largest(), max_memory=1, retain_graph=True)
        want = vectors(rows(losses, model)).abs().amax(1)
        assert_close(found, want)


class Deviation(ps.Variance):
    """A subclass that makes something else of what it inherits."""

    def result(self) -> dict[str, Tensor]:
        return {name: each.sqrt() for name, each in super().result().items()}


@pytest.mark.parametrize("memory", [None, 1])
def test_subclasses_with_results_of_their_own(memory: int | None) -> None:
    model = mlp(3, 4, 3)
    losses = model(torch.randn(5, 3))
    norms, found = ps.reduce(losses, model, ps.Norms(), Deviation(), max_memory=memory, retain_graph=True)
    for name, stack in rows(losses, model).items():
        assert_close(found[name], stack.std(0))
    assert_close(norms, ps.norms(losses, model))


def test_wrong_arguments_are_refused_before_the_backward() -> None:
    model = mlp(3, 4, 3)
    losses = model(torch.randn(5, 3))
    with pytest.raises(ValueError, match="direction must hold one tensor per parameter"):
        ps.dot(losses, model, {})
    with pytest.raises(ValueError, match="groups of a clipped sum must hold every parameter once"):
        ps.clipped_sum(losses, model, 1.0, per=[model[0]])
    assert ps.norms(losses, model).shape == (5, 3)  # the graph is still there


def test_weights_like_the_losses() -> None:
    model = mlp(3, 4, 3)
    losses, weights = model(torch.randn(5, 3)), torch.randn(5, 3)
    want = torch.autograd.grad((weights * losses).sum(), list(model.parameters()), retain_graph=True)
    for memory in (None, 1):
        (got,) = ps.reduce(losses, model, ps.WeightedSum(weights), retain_graph=True, max_memory=memory)
        for g, w in zip(got.values(), want, strict=True):
            assert_close(g, w)
    with pytest.raises(ValueError, match=r"weights must have shape \(5, 3\), one per loss, not \(15,\)"):
        ps.reduce(losses, model, ps.WeightedSum(weights.flatten()))


def test_buffers() -> None:
    model = mlp(3, 4, 3)
    losses = model(torch.randn(5, 3))
    want = rows(losses, model)
    out = {name: torch.full((5, 3, *p.shape), 7.0) for name, p in model.named_parameters()}
    for memory in (None, 1):
        got = ps.jacobian(losses, model, out=out, retain_graph=True, max_memory=memory)
        assert all(got[name] is out[name] for name in out)
        assert_same({name: g.flatten(0, 1) for name, g in got.items()}, want)
    strided = {name: torch.empty(3, 5, *p.shape).transpose(0, 1) for name, p in model.named_parameters()}
    got = ps.grad(losses, model, out=strided, retain_graph=True)
    assert_same({name: g.flatten(0, 1) for name, g in got.items()}, want)
    with pytest.raises(ValueError, match=r"out\['0.weight'\] must be \(5, 3, 4, 3\)"):
        ps.grad(losses, model, out={name: g.flatten(0, 1) for name, g in out.items()}, retain_graph=True)
    split = losses.unflatten(1, (3, 1))
    wrong = {name: torch.empty(5, 1, 3, *p.shape).transpose(1, 2) for name, p in model.named_parameters()}
    ps.grad(split, model, out=wrong, retain_graph=True)
    six = torch.cat([losses, losses], 1).unflatten(1, (3, 2))
    wrong = {name: torch.empty(5, 2, 3, *p.shape).transpose(1, 2) for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match="pass a contiguous buffer"):
        ps.grad(six, model, out=wrong)


@pytest.mark.parametrize("memory", [None, 1])
def test_the_graph_is_freed_unless_it_is_kept(memory: int | None) -> None:
    for positions in ((), (4,)):  # losses that meet, and some that do not
        model = mlp(3, 4, 2)
        out = model(torch.randn(5, *positions, 3))
        losses = out.square().sum(-1) if positions else out
        assert positions_meet(losses, named(model)) == (not positions)
        first = ps.norms(losses, model, retain_graph=True, max_memory=memory)
        assert_close(ps.norms(losses, model, max_memory=memory), first)
        with pytest.raises(RuntimeError, match=r"the graph of losses \(5, \d\) was freed by an earlier backward"):
            ps.norms(losses, model, max_memory=memory)


def test_gradients_that_are_not_finite() -> None:
    """Each loss is named, dropped or not, whatever portion it is in."""
    model, x = mlp(3, 4, 2), torch.randn(5, 3)
    x[3, 0] = torch.inf
    tokens = torch.randn(5, 2, 3)
    tokens[3, 1] = torch.nan
    for memory in (None, 1):
        bad = [(3, 0), (3, 1)]
        losses = model(x)
        with pytest.raises(ps.NonFiniteError, match=r"2 of 10 losses are not finite: \(3, 0\), \(3, 1\)") as error:
            ps.clipped_sum(losses, model, 1.0, retain_graph=True, max_memory=memory)
        assert error.value.samples == bad
        total = ps.clipped_sum(losses, model, 1.0, nonfinite="drop", max_memory=memory)
        assert total.clipping.dropped == bad
        assert not total.clipping.weights[3].any()
        want = ps.clipped_sum(model(x[[0, 1, 2, 4]]), model, 1.0)
        for name in want:
            assert_close(total[name], want[name])
        with pytest.raises(ps.NonFiniteError, match=r"1 of 10 losses are not finite: \(3, 1\)\."):
            ps.clipped_sum(model(tokens).sum(-1), model, 1.0, max_memory=memory)


def test_independent_samples_may_have_losses_that_meet() -> None:
    params, losses = tokens_of_gpt()
    assert_close(
        ps.norms(losses, params, independent=True, retain_graph=True), ps.norms(losses, params, retain_graph=True)
    )
    model = mlp()
    ps.norms(model(torch.randn(4, 5, 3)).square().sum(-1), model, independent=True)
    params, losses = in_training()
    with pytest.raises(ps.InteractionError, match="samples interact in NativeBatchNorm"):
        ps.norms(losses, params, independent=True)
    inner = model[0](torch.randn(4, 5, 3))
    for out in (model[2](inner - inner.mean(0)), inner.sum(-1) * inner.mean((0, 2))):
        with pytest.raises(ps.InteractionError, match="samples interact"):
            ps.norms(out, model, independent=True)


def test_it_is_said_once_that_samples_meet() -> None:
    params, losses = in_training()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ps.norms(losses, params, max_memory=1)
    messages = [str(each.message) for each in said]
    assert len(set(messages)) == len(messages)
    assert sum("samples interact in" in message for message in messages) == 1


def test_explain_tells_the_way() -> None:
    model = mlp(3, 4, 3)
    explained = ps.explain(model(torch.randn(5, 3)), model)
    assert explained.way == "losses of one sample meet: 3 backwards like this one, each for all samples"
    assert str(explained).endswith(explained.way)
    assert explained.memory.written_out == 15 * sum(p.nbytes for p in model.parameters())
    apart = ps.explain(model(torch.randn(2, 4, 3)).sum(-1), model)
    assert apart.way == "no losses of one sample meet: each of the 8 is taken for a sample"
    assert not ps.explain(model(torch.randn(5, 3)).sum(1), model).way


def test_what_is_refused() -> None:
    model = mlp(3, 4, 3)
    losses = model(torch.randn(5, 3))
    with pytest.raises(ValueError, match=r"shape \(B,\) or \(B, K…\), but have shape \(\): compute one loss"):
        ps.grad(losses.sum(), model)
    with pytest.raises(ValueError, match="must be real floating-point numbers"):
        ps.norms(losses.to(torch.complex128), model)
    with pytest.raises(RuntimeError, match="have no graph"):
        ps.norms(losses.detach(), model)
    monitor = ps.Monitor(model)
    with pytest.raises(ValueError, match=r"losses must have shape \(B,\), but have shape \(5, 3\)"):
        monitor(losses)


def test_private_training_refuses_them() -> None:
    """The sample could add K times its bound."""
    model = mlp(3, 4, 3)
    plan = dp.Plan(examples=100, batch_size=10, epochs=2, noise_multiplier=1.0, delta=1e-3, accountant="rdp")
    private = dp.Private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, clip=ps.ClippedSum(1.0))
    (x,) = next(iter(private.batches(torch.utils.data.TensorDataset(torch.randn(100, 3)))))
    with pytest.raises(ValueError, match="could add K times the bound that is accounted for"):
        private.step(model(x))


def test_compiled_steps_leave_them_to_the_eager_engine() -> None:
    model = mlp(3, 4, 3, dtype=torch.float32)
    x = torch.randn(5, 3, dtype=torch.float32)
    step = ps.compile(lambda x: model(x), model, ps.Norms(), backend="aot_eager", verbose=False)
    with pytest.warns(ps.PerformanceWarning, match=r"there are several losses per sample, \(5, 3\)"):
        torch.testing.assert_close(step(x)[0], ps.norms(model(x), model))
    torch.testing.assert_close(step(x)[0], ps.norms(model(x), model))
