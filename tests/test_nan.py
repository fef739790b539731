"""NaN or Inf in some samples: their own rows only, the others as in a batch without the bad samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import persample as ps
from tests.case_library.functions import OwnLinear
from tests.modes import default_dtype
from tests.reference import Params, assert_same, definition

Forward = Callable[..., Tensor]
Program = tuple[Params, tuple[Tensor, ...], Forward]  # the data have the sample in front; the first is spoilt

B = 5
PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(fn: Callable[[], Program]) -> Callable[[], Program]:
    PROGRAMS[fn.__name__] = fn
    return fn


def layers(*modules: nn.Module, x: tuple[int, ...], name: str) -> None:
    """Register a chain of modules on inputs (B, *x)."""

    def build() -> Program:
        net = nn.Sequential(*modules).to(torch.float64)
        for p in net.parameters():
            nn.init.normal_(p, std=0.5)
        return net, (torch.randn(B, *x),), lambda data: net(data).tanh().flatten(1).square().sum(1)

    PROGRAMS[name] = build


layers(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), x=(3,), name="mlp")
layers(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2), x=(6, 3), name="positions")
layers(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Conv1d(4, 2, 3, padding=1), x=(2, 7), name="conv1d")
layers(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), x=(2, 7, 7), name="conv2d_groups")
layers(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Conv2d(4, 3, 2, dilation=2), x=(2, 8, 8), name="conv2d_stride")
layers(nn.Conv2d(3, 6, 3, groups=3), nn.SiLU(), nn.Conv2d(6, 3, 1), x=(3, 6, 6), name="conv2d_depthwise")
layers(
    nn.ConvTranspose2d(2, 4, 3, stride=2, output_padding=1), nn.Conv2d(4, 2, 3), x=(2, 4, 4), name="conv_transpose2d"
)
layers(nn.ConvTranspose1d(4, 4, 3, groups=2), nn.Conv1d(4, 1, 2), x=(4, 5), name="conv_transpose_groups")
layers(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), nn.MaxPool2d(2), x=(2, 6, 6), name="conv2d_circular")
layers(nn.Conv3d(2, 3, 2), nn.AvgPool3d(2), x=(2, 5, 5, 5), name="conv3d")
layers(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2), x=(5, 3), name="layer_norm")
layers(nn.Linear(3, 4), nn.RMSNorm(4), nn.Linear(4, 2), x=(5, 3), name="rms_norm")
layers(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), x=(2, 5, 5), name="group_norm")
layers(nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4, affine=True), x=(2, 6), name="instance_norm")
layers(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4).eval(), x=(2, 6), name="batch_norm_eval")
layers(nn.Linear(3, 4), nn.PReLU(4), nn.Dropout(0.0), nn.Softmax(-1), x=(3,), name="prelu_and_softmax")
layers(weight_norm(nn.Linear(3, 4)), nn.Tanh(), weight_norm(nn.Linear(4, 2)), x=(3,), name="weight_norms")
layers(
    nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True), nn.Linear(4, 2), x=(3, 4), name="transformer"
)


@program
def conv2d_float32() -> Program:
    net, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=4)).float(), torch.randn(B, 3, 9, 9).float()
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return net, (x,), lambda x: net(x.to(memory_format=torch.channels_last)).sigmoid().sum((1, 2, 3))


@program
def attention() -> Program:
    net, x = nn.ModuleList([nn.Linear(4, 12), nn.Linear(4, 4)]), torch.randn(B, 5, 4)

    def forward(x: Tensor) -> Tensor:
        q, k, v = net[0](x).view(-1, 5, 3, 2, 2).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return net[1](h.transpose(1, 2).flatten(2)).square().sum((1, 2))

    return net, (x,), forward


@program
def embedding() -> Program:
    net, weight, ids = nn.Embedding(7, 3, padding_idx=0), torch.randn(B, 4, 1), torch.randint(7, (B, 4))
    return net, (weight, ids), lambda weight, ids: (net(ids) * weight).tanh().sum((1, 2))


@program
def embedding_bag() -> Program:
    net, weight, ids = nn.EmbeddingBag(7, 3, mode="sum"), torch.randn(B, 4), torch.randint(7, (B, 4))
    return net, (weight, ids), lambda weight, ids: net(ids, per_sample_weights=weight).square().sum(1)


@program
def tied_embedding_and_head() -> Program:
    net, weight, ids = nn.Embedding(7, 3), torch.randn(B, 4, 1), torch.randint(7, (B, 4))
    return net, (weight, ids), lambda w, ids: ((net(ids) * w).tanh() @ net.weight.t()).square().sum((1, 2))


@program
def lstm_fused() -> Program:
    net, x = nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True).float(), torch.randn(B, 6, 3).float()
    return net, (x,), lambda x: net(x)[0].square().sum((1, 2))


@program
def gru_time_first() -> Program:
    net, x = nn.GRU(3, 4), torch.randn(B, B, 3)
    return net, (x,), lambda x: net(x.transpose(0, 1))[0].square().sum((0, 2))


@program
def lstm_packed() -> Program:
    net, x, lengths = nn.LSTM(3, 4, batch_first=True), torch.randn(B, 6, 3), torch.tensor([6, 2, 5, 2, 3])

    def forward(x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(net(packed)[0], batch_first=True)[0].square().sum((1, 2))

    return net, (x, lengths), forward


@program
def experts_by_index() -> Program:
    net, x, route = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)]), torch.randn(B, 4, 3), torch.randint(3, (B, 4))

    def forward(x: Tensor, route: Tensor) -> Tensor:
        flat, chosen = x.flatten(0, 1), route.flatten()
        out = torch.zeros_like(flat)
        for e, expert in enumerate(net):
            rows = (chosen == e).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(flat[rows]).tanh())
        return out.view(x.shape).square().sum((1, 2))

    return net, (x, route), forward


@program
def broadcast_parameters() -> Program:
    shapes = {"scale": (3,), "shift": (4, 1), "position": (1, 4, 3), "gate": (), "token": (1, 1, 3), "divisor": (3,)}
    p = {name: nn.Parameter(torch.rand(shape) + 1) for name, shape in shapes.items()}

    def forward(x: Tensor) -> Tensor:
        h = torch.cat([p["token"].expand(len(x), -1, -1), (x * p["scale"] - p["shift"] + p["position"]).tanh()], 1)
        return (h.cumsum(1) / p["divisor"] * p["gate"]).square().sum((1, 2))

    return p, (torch.randn(B, 4, 3),), forward


@program
def reused_lora_and_bilinear() -> Program:
    net = nn.ModuleDict({"base": nn.Linear(3, 3), "both": nn.Bilinear(3, 3, 2)})
    down, up = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(3, 2))

    def forward(x: Tensor) -> Tensor:
        for _ in range(2):
            x = F.linear(x, net["base"].weight + up @ down, net["base"].bias).tanh()
        return net["both"](x, x.cos()).square().sum(1)

    return {"down": down, "up": up, **dict(net.named_parameters())}, (torch.randn(B, 3),), forward


@program
def checkpointed() -> Program:
    net, x = nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.ReLU(), nn.Linear(4, 4)), torch.randn(B, 2, 4)
    run = lambda h: checkpoint(net, h, use_reentrant=False)  # noqa: E731
    return net, (x,), lambda x: run(run(x)).square().sum((1, 2))


@program
def custom_function() -> Program:
    """NaN in cotangents. (Nobody can keep apart what a Function's own backward multiplies by zero and adds.)"""
    net, w, b, x = nn.Linear(4, 3), nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4)), torch.randn(B, 3)
    params = {"w": w, "b": b, **dict(net.named_parameters())}
    scale = torch.randn(B, 4)
    return params, (scale, x), lambda scale, x: net(scale * OwnLinear.apply(x, w, b).tanh()).square().sum(1)


@program
def loop_over_samples() -> Program:
    net, x = nn.Linear(3, 4), torch.randn(B, 3)
    return net, (x,), lambda x: torch.stack([net(one).square().sum() for one in x])


@program
def sorted_by_length() -> Program:
    net, x, key = nn.Linear(3, 3), torch.randn(B, 3), torch.rand(B)

    def forward(x: Tensor, key: Tensor) -> Tensor:
        order = key.argsort()
        h = net(net(x[order]).tanh())
        return h[order.argsort()].square().sum(1)

    return net, (x, key), forward


def spoil(data: Tensor, bad: list[int], value: float, everywhere: bool) -> Tensor:
    """`data` with `value` in the bad samples: in their last element, or in all."""
    data = data.clone()
    for i in bad:
        data[i].view(-1)[slice(None) if everywhere else slice(-1, None)] = value
    return data


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
@pytest.mark.parametrize("everywhere", [False, True], ids=["one element", "all elements"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("bad", [[2], [0, 4]], ids=["one", "two"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_bad_samples_keep_to_their_rows(name: str, bad: list[int], value: float, everywhere: bool) -> None:
    params, (first, *rest), forward = build(name)
    good = [i for i in range(B) if i not in bad]
    got = by_name(ps.grad(forward(spoil(first, bad, value, everywhere), *rest), params))
    want = definition(forward(first[good], *(t[good] for t in rest)), params)
    assert_same({n: g[good] for n, g in got.items()}, want, rtol=1e-8 if first.dtype == torch.float64 else 1e-4)
    if everywhere and value != value:
        for i in bad:
            assert not all(bool(g[i].isfinite().all()) for g in got.values()), f"row {i} hides its NaN"


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
def test_a_bad_sample_keeps_to_its_user() -> None:
    torch.manual_seed(0)
    net, x, user = nn.Linear(3, 2).double(), torch.randn(6, 3).double(), torch.tensor([1, 0, 2, 1, 0, 2])
    x[3, 1] = torch.nan
    losses = lambda some: x.new_zeros(3).index_add(0, user[some], net(x[some]).square().sum(1))  # noqa: E731
    got = ps.grad(losses(slice(None)), net)
    want = definition(losses([0, 1, 2, 4, 5]), net)
    for name, g in got.items():
        assert_same({name: g[[0, 2]]}, {name: want[name][[0, 2]]})
        assert bool(g[1].isnan().any())


def build(name: str) -> Program:
    """The program in float64, unless it casts to something else itself."""
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        return PROGRAMS[name]()


def by_name(result: Any) -> dict[str, Tensor]:
    return result if isinstance(result, dict) else {str(i): g for i, g in enumerate(result)}
