"""Samples that meet: exact Jacobian rows and one warning, or with `independent=True` an error that names the op."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import persample as ps
from tests import models
from tests.case_library.functions import OwnLinear
from tests.reference import Params, assert_same, definition

B = 4
pytestmark = pytest.mark.usefixtures("float64")
Program = tuple[Params, Callable[[], Tensor]]
MEETING: dict[str, tuple[str, Callable[[], Program]]] = {}  # name -> (op from which samples share a value, program)
APART: dict[str, Callable[[], Program]] = {}


def meeting(op: str) -> Callable[[Callable[[], Program]], Callable[[], Program]]:
    def register(fn: Callable[[], Program]) -> Callable[[], Program]:
        MEETING[fn.__name__] = (op, fn)
        return fn

    return register


def apart(fn: Callable[[], Program]) -> Callable[[], Program]:
    APART[fn.__name__] = fn
    return fn


def between(op: str, name: str, mix: Callable[[Tensor], Tensor]) -> None:
    """Register a function of the batch between two layers."""

    def build() -> Program:
        net, x = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)]), torch.randn(B, 3)
        return net, lambda: net[1](mix(net[0](x).tanh())).tanh().square().sum(1)

    MEETING[name] = (op, build)


between("Sub", "minus the mean", lambda h: h - h.mean(0))
between("Softmax", "softmax over the batch", lambda h: h.softmax(0))
between("Div", "divided by the deviation", lambda h: h / (h.std(0) + 0.1))
between("Div", "divided by the variance", lambda h: h / (h.var(0, keepdim=True) + 0.1))
between("Cumsum", "running sum", lambda h: h.cumsum(0))
between("Index", "pairs by index", lambda h: h + h[torch.tensor([1, 0, 3, 2])].tanh())
between("View", "pairs by view", lambda h: h * h.view(2, 2, 4).flip(1).reshape(4, 4))
between("Roll", "next sample", lambda h: h * h.roll(1, 0))
between("Div", "norm of the batch", lambda h: h / h.norm())
between("Mm|Bmm", "attention over the batch", lambda h: (h @ h.t()).softmax(1) @ h)


@meeting("NativeBatchNorm")
def batch_norm() -> Program:
    net, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), torch.randn(B, 3)
    return net, lambda: net(x).square().sum(1)


@meeting("NativeBatchNorm")
def batch_norm_of_images() -> Program:
    net, x = (
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(27, 2)),
        torch.randn(B, 2, 5, 5),
    )
    return net, lambda: net(x).square().sum(1)


@meeting("NativeBatchNorm")
def batch_norm_of_the_data() -> Program:
    """Nothing trainable lies below it, and still a loss depends on other samples."""
    net, x = nn.Sequential(nn.BatchNorm1d(3, affine=True), nn.Linear(3, 2)), torch.randn(B, 3)
    return net, lambda: net(x).square().sum(1)


@meeting("Mm")
def contrastive_one_tower() -> Program:
    net, x, y = models.mlp(3, 5, 4), torch.randn(B, 3), torch.randn(B, 3)
    return net, lambda: F.cross_entropy(net(x) @ net(y).t(), torch.arange(B), reduction="none")


@meeting("Mm")
def contrastive_two_towers() -> Program:
    net, x, y = nn.ModuleList([nn.Linear(3, 4), nn.Linear(5, 4)]), torch.randn(B, 3), torch.randn(B, 5)
    return net, lambda: F.cross_entropy(net[0](x) @ net[1](y).t(), torch.arange(B), reduction="none")


@meeting("Flip")
def preference_pairs() -> Program:
    net, x = models.mlp(3, 4, 1), torch.randn(B, 3)

    def losses() -> Tensor:
        reward = net(x).view(2, 2)
        return -F.logsigmoid(reward - 0.5 * reward.flip(1)).flatten()

    return net, losses


@apart
def mlp() -> Program:
    net, x = models.mlp(), torch.randn(B, 3)
    return net, lambda: F.cross_entropy(net(x), torch.arange(B) % 2, reduction="none")


@apart
def cnn_with_group_norm() -> Program:
    net = nn.Sequential(
        nn.Conv2d(2, B, 3), nn.GroupNorm(2, B), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(B, B)
    )
    x = torch.randn(B, 2, 6, 6)
    return net, lambda: F.cross_entropy(net(x), torch.arange(B), reduction="none")


@apart
def batch_norm_in_eval_mode() -> Program:
    net, x = nn.Sequential(nn.Linear(3, B), nn.BatchNorm1d(B), nn.Linear(B, 2)).eval(), torch.randn(B, 3)
    return net, lambda: net(x).square().sum(1)


@apart
def transformer() -> Program:
    """As many positions as samples, heads times width and vocabulary divisible by them."""
    net, ids = models.Transformer(words=8, T=B, width=4, causal=True), torch.randint(8, (B, B))
    return net, lambda: F.cross_entropy(net(ids).mT, ids, reduction="none").mean(1)


@apart
def time_first_transformer() -> Program:
    net, x = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), torch.randn(B, B, 4)
    return net, lambda: net(x).square().sum((0, 2))


@apart
def experts_by_routing() -> Program:
    net, x = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)]), torch.randn(B, 5, 3)

    def losses() -> Tensor:
        flat = x.flatten(0, 1)
        gate, chosen = net[2](flat).softmax(1).max(1)
        out = torch.zeros_like(flat)
        for e in range(2):
            rows = (chosen == e).nonzero()[:, 0]
            out = out.index_add(0, rows, net[e](flat[rows]).tanh() * gate[rows, None])
        return out.view(x.shape).square().sum((1, 2))

    return net, losses


@apart
def lora() -> Program:
    w, down, up, x = (
        torch.randn(4, 3),
        nn.Parameter(torch.randn(2, 3)),
        nn.Parameter(torch.randn(4, 2)),
        torch.randn(B, 3),
    )
    return [down, up], lambda: F.linear(x, w + up @ down).tanh().square().sum(1) + (x @ down.t() @ up.t()).sum(1)


@apart
def normalised_weights() -> Program:
    net, x = nn.Sequential(weight_norm(nn.Linear(3, B)), nn.Tanh(), weight_norm(nn.Linear(B, 2))), torch.randn(B, 3)
    return net, lambda: net(x).square().sum(1)


@apart
def lstm_and_dropout() -> Program:
    net, x = nn.ModuleList([nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)]), torch.randn(B, B, 3)
    return net, lambda: net[1](F.dropout(net[0](x)[0][:, -1], 0.5)).square().sum(1)


@apart
def users() -> Program:
    net, x, user = nn.Linear(3, 2), torch.randn(7, 3), torch.tensor([1, 0, 3, 1, 2, 0, 3])
    return net, lambda: torch.zeros(B).index_add(0, user, net(x).square().sum(1))


@pytest.mark.parametrize("name", MEETING)
def test_the_error_names_the_op(name: str) -> None:
    op, build = MEETING[name]
    params, forward = build()
    losses = forward()
    with pytest.raises(
        ps.InteractionError, match=rf"samples interact in [\w, ]*({op}).*: .*GroupNorm.*drop independent=True"
    ):
        ps.grad(losses, params, independent=True)
    with pytest.warns(ps.PerformanceWarning):
        ps.grad(losses, params)  # the refusal freed nothing


@pytest.mark.parametrize("name", MEETING)
def test_the_default_gives_jacobian_rows_and_warns_once(name: str) -> None:
    op, build = MEETING[name]
    params, forward = build()
    want = definition(forward(), params)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_same(ps.grad(forward(), params), want)
    about = [w for w in caught if "samples interact in" in str(w.message)]
    assert len(about) == 1
    assert about[0].category is ps.PerformanceWarning
    assert about[0].filename == __file__, "the warning must point to the caller"
    assert any(part in str(about[0].message) for part in op.split("|"))
    assert "exact Jacobian" in str(about[0].message)


@pytest.mark.parametrize("name", APART)
def test_independent_models_are_accepted_without_a_warning(name: str) -> None:
    params, forward = APART[name]()
    torch.manual_seed(1)
    want = definition(forward(), params)
    torch.manual_seed(1)
    losses = forward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = ps.grad(losses, params, independent=True)
    assert_same(got, want)


def test_one_sample_meets_nobody() -> None:
    net, x = nn.Linear(3, 2), torch.randn(1, 3)
    losses = (lambda h: h - h.mean(0) + h)(net(x)).square().sum(1)
    assert_same(ps.grad(losses, net, retain_graph=True, independent=True), definition(losses, net))


class Centred(OwnLinear):
    """Samples meet where no graph shows it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return OwnLinear.forward(ctx, x - x.mean(0), w, b)


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
def test_what_nobody_can_see_is_not_waved_through() -> None:
    w, b, x = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4)), torch.randn(B, 3)
    losses = Centred.apply(x, w, b).square().sum(1)
    with pytest.raises(
        ps.InteractionError, match=r"cannot see inside custom Centred, .*data and weights.*drop independent=True"
    ):
        ps.grad(losses, [w, b], independent=True)
    assert_same(ps.grad(losses, [w, b], retain_graph=True), definition(losses, [w, b]))
