"""`independent=True` is attacked: interactions by name, each at every place between the data and the losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample as ps
from persample.graph.locate import probe
from tests.case_library.interaction import MIXERS
from tests.reference import assert_same, definition

B = 4
pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")]
Program = tuple[Any, Callable[[], Tensor]]


def layers() -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)])


def losses_of(h: Tensor) -> Tensor:
    return h.tanh().square().sum(1)


Mix = Callable[[Tensor], Tensor]


def between_layers(mix: Mix) -> Program:
    net, x = layers(), torch.randn(B, 3)
    return net, lambda: losses_of(net[2](net[1](mix(net[0](x).tanh())).tanh()))


def below_what_is_asked_for(mix: Mix) -> Program:
    """The layers that lead to it are trained, but by somebody else."""
    net, x = layers(), torch.randn(B, 3)
    return net[2], lambda: losses_of(net[2](net[1](mix(net[0](x).tanh())).tanh()))


def below_a_frozen_layer(mix: Mix) -> Program:
    net, x = layers(), torch.randn(B, 3)
    net[1].requires_grad_(False)
    return net, lambda: losses_of(net[2](net[1](mix(net[0](x).tanh())).tanh()))


def after_the_last(mix: Mix) -> Program:
    net, x = layers(), torch.randn(B, 3)
    return net, lambda: losses_of(mix(net[1](net[0](x).tanh())))


def before_the_first(mix: Mix) -> Program:
    """Data that carry a gradient, as for a penalty: the graph shows what was done to them."""
    net, x = layers(), torch.randn(B, 4, requires_grad=True)
    return net[1:], lambda: losses_of(net[2](net[1](mix(x)).tanh()))


def beside(mix: Mix) -> Program:
    """A branch of its own, that nothing asked for leads to."""
    net, x, y = layers(), torch.randn(B, 3), torch.randn(B, 4)
    return net[2], lambda: losses_of(net[2](y)) + losses_of(mix(net[0](x)))


PLACES = [between_layers, below_what_is_asked_for, below_a_frozen_layer, after_the_last, before_the_first, beside]
ALL_MIXERS = MIXERS | {
    "batch-norm": lambda h: F.batch_norm(h, None, None, training=True),
    "layer-norm-over-batch": lambda h: F.layer_norm(h, h.shape),
    "scan": lambda h: h.cumprod(0),
    "dot-with-all": lambda h: h @ h.t() @ h,
    "variance": lambda h: h * h.var(0),
    "running-maximum": lambda h: h.cummax(0).values,
    "batch-mean-of-products": lambda h: h + torch.einsum("bi,bj->ij", h, h)[0],
}


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("name", ALL_MIXERS)
def test_interactions_are_seen_everywhere(name: str, place: Callable[[Mix], Program]) -> None:
    params, losses = place(ALL_MIXERS[name])
    with pytest.raises(ps.InteractionError, match="samples interact in"):
        ps.norms(losses(), params, independent=True)
    assert_same(ps.grad(losses(), params), definition(losses(), params))  # and without the promise, the exact rows


def data() -> Tensor:
    return torch.randn(B, 6)


# Ops with weights that mix along the samples, as first layer: data go straight into them.
FIRST: dict[str, Callable[[], Program]] = {}


def first(fn: Callable[[], Program]) -> Callable[[], Program]:
    FIRST[fn.__name__] = fn
    return fn


@first
def convolution_over_samples() -> Program:
    net, x = nn.Conv1d(6, 3, 3, padding=1), data()
    return net, lambda: net(x.t()[None])[0].square().sum(0)


@first
def strided_transposed_convolution() -> Program:
    net, x = nn.ConvTranspose1d(6, 3, 3, padding=1), data()
    return net, lambda: net(x.t()[None])[0].square().sum(0)


@first
def convolution_with_groups_of_two_samples() -> Program:
    net, x = nn.Conv1d(B * 2, B * 2, 1, groups=B // 2), torch.randn(1, B * 2, 5)
    return net, lambda: net(x).reshape(B, -1).square().sum(1)


@first
def layer_norm_over_samples() -> Program:
    net, x = nn.LayerNorm([B, 6]), data()
    return net, lambda: net(x).square().sum(1)


@first
def group_norm_over_samples() -> Program:
    net, x = nn.GroupNorm(2, B), data()
    return net, lambda: net(x[None]).square().sum((0, 2))


@first
def recurrence_over_samples() -> Program:
    net, x = nn.LSTM(6, 3), data()
    return net, lambda: net(x[:, None])[0].square().sum((1, 2))


@first
def fused_recurrence_over_samples() -> Program:
    net, x = nn.LSTM(6, 3).float(), data().float()
    return net, lambda: net(x[:, None])[0].square().sum((1, 2))


@first
def batch_norm_of_data() -> Program:
    net, x = nn.BatchNorm1d(6), data()
    return net, lambda: net(x).square().sum(1)


@first
def rows_counted_over_the_batch() -> Program:
    net, ids = nn.Embedding(5, 3, scale_grad_by_freq=True), torch.tensor([[0, 1], [1, 1], [2, 0], [3, 3]])
    return net, lambda: net(ids).square().sum((1, 2))


@first
def bags_counted_over_the_batch() -> Program:
    net, ids = nn.EmbeddingBag(5, 3, scale_grad_by_freq=True), torch.tensor([[0, 1], [1, 1], [2, 0], [3, 3]])
    return net, lambda: net(ids).square().sum(1)


@pytest.mark.parametrize("name", FIRST)
def test_first_layers_that_mix_samples(name: str) -> None:
    params, losses = FIRST[name]()
    with pytest.raises(ps.InteractionError, match="samples interact in"):
        ps.norms(losses(), params, independent=True)
    single = next(params.parameters()).dtype == torch.float32
    assert_same(ps.grad(losses(), params), definition(losses(), params), rtol=1e-4 if single else 1e-8)


def one_by_one_convolution() -> Program:
    net, x = nn.Conv1d(6, 3, 1), data()
    return net, lambda: net(x.t()[None])[0].square().sum(0)


def convolution_with_a_group_per_sample() -> Program:
    net, x = nn.Conv1d(B * 2, B * 2, 3, padding=1, groups=B), torch.randn(1, B * 2, 5)
    return net, lambda: net(x).reshape(B, -1).square().sum(1)


def a_norm_per_sample() -> Program:
    net, x = nn.GroupNorm(B, B), data()
    return net, lambda: net(x[None]).square().sum((0, 2))


def data_with_gradients() -> Program:
    net, x = layers(), torch.randn(B, 3, requires_grad=True)
    return net[2], lambda: losses_of(net[2](net[1](net[0](x).tanh()).tanh()))


def batch_norm_with_running_statistics() -> Program:
    net, norm, x = layers(), nn.BatchNorm1d(4).eval(), torch.randn(B, 3)
    return net[2], lambda: losses_of(net[2](norm(net[0](x))))


def rows_counted_in_a_shared_table() -> Program:
    """Positions are read once for all samples: how often does not depend on them."""
    net, x = nn.Embedding(5, 3, scale_grad_by_freq=True), torch.randn(B, 6, 3)
    return net, lambda: (net(torch.tensor([0, 0, 1, 2, 2, 3])) * x).square().sum((1, 2))


APART = [
    one_by_one_convolution,
    convolution_with_a_group_per_sample,
    a_norm_per_sample,
    data_with_gradients,
    batch_norm_with_running_statistics,
    rows_counted_in_a_shared_table,
]


@pytest.mark.parametrize("make", APART, ids=lambda make: make.__name__)
def test_samples_that_are_apart_are_found_so(make: Callable[[], Program]) -> None:
    params, losses = make()
    for _ in range(2):  # once planned, once remembered
        assert_same(ps.grad(losses(), params, independent=True), definition(losses(), params))


def test_the_promise_is_not_remembered_for_those_who_did_not_ask() -> None:
    """A graph that was planned without it is looked at again when it is asked for."""
    net, norm, x = layers(), nn.BatchNorm1d(4), torch.randn(B, 3)
    losses = lambda: losses_of(net[2](norm(net[0](x))))  # noqa: E731
    assert_same(ps.grad(losses(), net[2]), definition(losses(), net[2]))
    with pytest.raises(ps.InteractionError, match="NativeBatchNorm"):
        ps.grad(losses(), net[2], independent=True)
    assert_same(ps.grad(losses(), net[2]), definition(losses(), net[2]))


# Samples that do not interact, with sizes that coincide: H positions, of which B may be a divisor.
Alike = Callable[[int, int], Program]
COINCIDING: dict[str, Alike] = {}


def coinciding(fn: Alike) -> Alike:
    COINCIDING[fn.__name__] = fn
    return fn


def distances(n: int) -> Tensor:
    return torch.arange(n)[:, None] - torch.arange(n) + n - 1


class Weights(nn.Module):
    """A square weight for features, one for positions, and a table of relative positions."""

    def __init__(self, H: int) -> None:
        super().__init__()
        self.w, self.square = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(H, H))
        self.table, self.places = nn.Parameter(torch.randn(2 * H, 3)), nn.Parameter(torch.randn(H, 3))


@coinciding
def relative_positions_of_sam(n: int, H: int) -> Program:
    net, x = Weights(H), torch.randn(n, H, H, 3)

    def losses() -> Tensor:
        q, r = x @ net.w, net.table[distances(H)]
        rows, columns = torch.einsum("bhwc,hkc->bhwk", q, r), torch.einsum("bhwc,wkc->bhwk", q, r)
        return (rows.unsqueeze(-1) + columns.unsqueeze(-2)).softmax(-1).square().sum((1, 2, 3, 4))

    return [net.w, net.table], losses


@coinciding
def relative_keys_of_wav2vec2_bert(n: int, H: int) -> Program:
    net, x = Weights(H), torch.randn(n, H, 3)
    near = distances(H).clamp(1, H)
    return [
        net.w,
        net.table,
    ], lambda: torch.einsum("bld,lrd->blr", x @ net.w, F.embedding(near, net.table)).softmax(-1).square().sum((1, 2))


@coinciding
def scores_of_positions(n: int, H: int) -> Program:
    net, x, where = Weights(H), torch.randn(n, 5, 3), torch.arange(H)
    return [
        net.w,
        net.places,
    ], lambda: (x @ net.w @ F.embedding(where, net.places).t()).softmax(-1).square().sum((1, 2))


@coinciding
def mixing_table_of_positions(n: int, H: int) -> Program:
    net, x, mask = Weights(H), torch.randn(n, H, 3), torch.ones(H, H).tril()
    return [net.w, net.square], lambda: ((net.square * mask) @ (x @ net.w)).tanh().square().sum((1, 2))


@coinciding
def table_of_positions_time_first(n: int, H: int) -> Program:
    net, x, mask = Weights(H), torch.randn(H, n, 3), torch.ones(H, H).tril()
    return [
        net.w,
        net.square,
    ], lambda: torch.einsum("st,tbc->sbc", net.square * mask, x @ net.w).tanh().square().sum((0, 2))


@coinciding
def transformed_positions(n: int, H: int) -> Program:
    net, x, fixed = Weights(H), torch.randn(n, H, 3), torch.randn(H, H)
    return [net.w, net.places], lambda: (x @ net.w + fixed @ net.places).tanh().square().sum((1, 2))


@coinciding
def transformed_weight(n: int, H: int) -> Program:
    net, x, fixed = Weights(H), torch.randn(n, 2, H), torch.randn(H, H)
    return [net.square], lambda: ((x @ net.square).tanh() @ (fixed @ net.square)).tanh().square().sum((1, 2))


def transform(equation: str) -> None:
    def build(n: int, H: int) -> Program:
        net, x, fixed = Weights(H), torch.randn(n, H, H, 3), torch.randn(H, H)
        return [net.w], lambda: torch.einsum(equation, x @ net.w, fixed).tanh().square().sum((1, 2, 3))

    COINCIDING[f"transform {equation}"] = build


for equation in ("bhwc,hk->bkwc", "bhwc,wk->bhkc", "bhwc,kh->bkwc", "bhwc,kw->bhkc"):
    transform(equation)


@coinciding
def columns_of_a_table(n: int, H: int) -> Program:
    """One row of a table, whose rows are as many as the samples; the columns are chosen by constants."""
    net, x = Weights(H), torch.randn(n, 3)
    return [net.square], lambda: (x + net.square.index_select(1, torch.tensor([0, 2, 2]))[0]).tanh().sum(1)


@coinciding
def features_of_a_table(n: int, H: int) -> Program:
    """Rows are read by constants, and features are as many as the samples."""
    table, x = nn.Embedding(9, H), torch.randn(n, H)
    return table, lambda: (x + table(torch.tensor([1, 5, 5, 7, 8])).sum(0)).tanh().sum(1)


@pytest.mark.parametrize(("n", "H"), [(2, 4), (4, 4), (3, 4), (2, 8), (8, 4)])
@pytest.mark.parametrize("name", COINCIDING)
def test_sizes_that_coincide_are_no_interaction(name: str, n: int, H: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are the data asked, which would have to be done at every call."""
    params, losses = COINCIDING[name](n, H)
    want = definition(losses(), params)
    monkeypatch.setattr(probe, "_by_bits", lambda *a, **k: pytest.fail("the data were asked"))
    for _ in range(2):
        assert_same(ps.grad(losses(), params, independent=True), want)


def test_words_read_by_other_samples_are_no_positions() -> None:
    """The twin of a table of positions: the same graph, but the integers are the samples' own."""
    table, w, x = nn.Parameter(torch.randn(9, 3)), nn.Parameter(torch.randn(3, 3)), torch.randn(B, 3)
    losses = lambda ids: (x @ w @ F.embedding(ids, table).t()).softmax(-1).square().sum(1)  # noqa: E731
    with pytest.raises(ps.InteractionError, match="samples interact in Mm"):
        ps.norms(losses(torch.tensor([5, 0, 7, 3])), [table, w], independent=True)
    ps.norms(losses(torch.arange(B)), [table, w], independent=True)
    with pytest.raises(ps.InteractionError, match="samples interact in Mm"):
        ps.norms(losses(torch.tensor([5, 0, 7, 3])), [table, w], independent=True)


def test_data_that_samples_use_are_no_positions() -> None:
    """Values of the whole batch, weighted by scores whose keys have no gradient: the same data are used by sample."""
    net, x = layers(), torch.randn(B, 3)
    keys = torch.randn(B, 4)
    values = nn.Linear(3, 2)
    mixed = lambda: losses_of((net[0](x) @ keys.t()).softmax(-1) @ values(x))  # noqa: E731
    with pytest.raises(ps.InteractionError, match="samples interact"):
        ps.norms(mixed(), [*net[0].parameters(), *values.parameters()], independent=True)


def subset(ask: int, between: Callable[[Tensor], Tensor] = lambda u: u) -> Program:
    """Weights that are plain tensors, as in functional code, of which one is asked for; all sizes are B."""
    x, u, w = torch.randn(B, B), torch.randn(B, B, requires_grad=True), torch.randn(B, B, requires_grad=True)
    return [(u, w)[ask]], lambda: losses_of(x @ between(u) @ w)


PLAIN: dict[str, Callable[[], Program]] = {
    "last": lambda: subset(1),
    "first": lambda: subset(0),
    "below a function": lambda: subset(1, torch.tanh),
    "below a softmax": lambda: subset(1, lambda u: u.softmax(0)),
    "below a product": lambda: subset(1, lambda u: u @ u),
}


@pytest.mark.parametrize("name", PLAIN)
def test_weights_that_are_not_asked_for_are_no_data(name: str) -> None:
    params, losses = PLAIN[name]()
    assert_same(ps.grad(losses(), params, independent=True), definition(losses(), params))


def test_a_table_that_is_not_asked_for_is_no_data() -> None:
    table, other, ids = (
        torch.randn(5, 3, requires_grad=True),
        torch.randn(2, requires_grad=True),
        torch.tensor([1, 1, 0]),
    )
    ps.norms(F.embedding(ids, table).sum(1), [other], independent=True)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def made_by(shape: tuple[int, ...], fn: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Program]:
    def build() -> Program:
        x, y, u, v = torch.randn(6, 4), torch.randn(6, 4), parameter(4, 4), parameter(*shape)
        return [u, v], lambda: F.cross_entropy(x @ u @ fn(y, v), torch.arange(6), reduction="none")

    return build


def first_layer(fn: Callable[[Tensor, nn.Parameter], Tensor], *shape: int) -> Callable[[], Program]:
    def build() -> Program:
        x, v = torch.randn(6, 4), parameter(*shape)
        return [v], lambda: fn(x, v)

    return build


def towers(fn: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Program]:
    def build() -> Program:
        x, u, v = torch.randn(6, 4), parameter(4, 4), parameter(4, 4)
        return [u, v], lambda: fn(x @ u, x @ v).square().sum(1)

    return build


# Found by attack: no node in which cotangents are added up, or constants that were not looked at.
SUBTLE: dict[str, Callable[[], Program]] = {
    "keys, features first": made_by((4, 4), lambda y, v: v.t() @ y.t()),
    "keys by einsum": made_by((4, 4), lambda y, v: torch.einsum("cd,de->ce", y, v).t()),
    "keys by a shift": made_by((4,), lambda y, v: (y + v).t()),
    "keys by a choice": made_by((4,), lambda y, v: torch.where(y > 0, y, v).t()),
    "keys, scaled": made_by((4, 1), lambda y, v: y.t().contiguous() * v),
    "the batch's mean": first_layer(lambda x, v: (x @ v - torch.ones(6, 6) / 6 @ (x @ v)).square().sum(1), 4, 4),
    "a mixing constant": first_layer(lambda x, v: (torch.randn(6, 6) @ (x @ v)).square().sum(1), 4, 4),
    "a mixing weight": first_layer(lambda x, v: (v @ x).square().sum(1), 6, 6),
    "a layer over the batch": first_layer(lambda x, v: F.linear(x.t(), v).t().square().sum(1), 6, 6),
    "a loss over the wrong dim": first_layer(lambda x, v: (x @ v).square().sum(0), 4, 6),
    "a wrong reshape": first_layer(lambda x, v: (x @ v).t().reshape(6, 4).square().sum(1), 4, 4),
    "ranks": first_layer(lambda x, v: (x @ v).sort(0).values * torch.arange(6), 4),
    "another sample's row": towers(lambda a, b: a * b.roll(1, 0)),
    "rows turned round": towers(lambda a, b: a * b.flip(0)),
    "rows in another order": towers(lambda a, b: a * b[torch.tensor([1, 0, 2, 3, 5, 4])]),
    "a tower's mean": towers(lambda a, b: a - b.mean(0)),
}


@pytest.mark.parametrize("name", SUBTLE)
def test_subtle_interactions(name: str) -> None:
    params, losses = SUBTLE[name]()
    with pytest.raises(ps.InteractionError, match="samples interact in"):
        ps.norms(losses(), params, independent=True)


@pytest.mark.parametrize("lengths", [[1, 2, 3, 1], [2, 2, 2], [5, 3, 4, 1, 2]], ids=str)
def test_ragged_batches(lengths: list[int]) -> None:
    """Rows of all samples in one tensor: attention within a sample is fine, across samples it is not."""
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    x, net = torch.randn(len(sample), 4), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    mask = torch.where(sample[:, None] == sample[None], 0.0, -torch.inf)

    def losses(change: Callable[[Tensor], Tensor]) -> Tensor:
        h = change((net[0](x) @ net[1](x).t()).clone()).softmax(1) @ net[1](x)
        return torch.zeros(len(lengths)).index_add(0, sample, h.square().sum(1))

    masked = lambda s: s + mask  # noqa: E731
    assert_same(ps.grad(losses(masked), net, independent=True), definition(losses(masked), net))
    with pytest.raises(ps.InteractionError, match="samples interact in"):
        ps.norms(losses(lambda s: s), net, independent=True)


def test_what_a_leaf_is_is_not_forgotten() -> None:
    """The same graph of a parameter and of data that carry a gradient."""
    w = parameter(4, 4)
    losses = lambda x: ((x - x.mean(0)) @ w).square().sum(1)  # noqa: E731
    ps.norms(losses(parameter(6, 4)), [w], independent=True)
    with pytest.raises(ps.InteractionError, match="samples interact in"):
        ps.norms(losses(torch.randn(6, 4, requires_grad=True)), [w], independent=True)


def test_a_support_set_that_all_samples_share() -> None:
    """It has as many features as there are samples, which run along the weights."""
    net, support, x = nn.Linear(3, 2), torch.randn(5, 3), torch.randn(3, 3)

    def losses() -> Tensor:
        (slope,) = torch.autograd.grad(net(support).square().mean(), net.weight, create_graph=True)
        return F.linear(x, net.weight - 0.1 * slope, net.bias).tanh().square().sum(1)

    assert_same(ps.grad(losses(), net, independent=True), definition(losses(), net))


@pytest.mark.parametrize("rows", [5, 6, 7])
def test_a_table_as_long_as_the_batch_is_no_excuse(rows: int) -> None:
    """Distances of all samples' data to a table, averaged over the samples: the result is square if sizes coincide."""
    x, table = torch.randn(6, 8), torch.randn(rows, 8, requires_grad=True)
    losses = (x.sum(1, keepdim=True) - torch.cdist(x, table).mean(0)).square().sum(1)
    with pytest.raises(ps.InteractionError, match=r"Cdist|Mean"):
        ps.norms(losses, [table], independent=True)
