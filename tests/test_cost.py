"""What a call costs beyond the backward it needs: nothing, for ordinary networks, whatever B or T are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps
from persample.graph.execute.plan import plan
from persample.graph.locate import probe
from persample.graph.read.roots import Roots
from tests import models

Network = Callable[[int, int], tuple[nn.Module, Tensor]]


def mlp(B: int, T: int) -> tuple[nn.Module, Tensor]:
    net = models.mlp(4, 8, 3, activation=nn.ReLU, dtype=torch.float32)
    return net, net(torch.randn(B, T, 4)).square().mean((1, 2))


def cnn(B: int, T: int) -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(3))
    return net, F.cross_entropy(
        net(torch.randn(B, 2, 6, 4 + 2 * T)), torch.zeros(B, dtype=torch.long), reduction="none"
    )


def resnet(B: int, T: int) -> tuple[nn.Module, Tensor]:
    net = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Linear(4, 2)])
    x = torch.randn(B, 4, 4, T)
    h = x + F.relu(net[1](net[0](x)))
    return net, net[2](h.mean((2, 3))).square().sum(1)


def transformer(B: int, T: int) -> tuple[nn.Module, Tensor]:
    net, ids = models.Transformer(words=11, T=T, width=8), torch.randint(11, (B, T))
    return net, F.cross_entropy(net(ids).flatten(0, 1), ids.flatten(), reduction="none").view(B, T).mean(1)


def recurrent(kind: type[nn.Module]) -> Network:
    def build(B: int, T: int) -> tuple[nn.Module, Tensor]:
        net = kind(3, 4, num_layers=2, bidirectional=True)
        return net, net(torch.randn(T, B, 3))[0].square().sum((0, 2))

    build.__name__ = kind.__name__
    return build


NETWORKS = [mlp, cnn, resnet, transformer, *map(recurrent, (nn.LSTM, nn.GRU, nn.RNN))]


@pytest.mark.parametrize(("B", "T"), [(2, 3), (3, 3), (4, 8), (8, 4), (5, 1)])
@pytest.mark.parametrize("network", NETWORKS, ids=lambda n: n.__name__)
def test_ordinary_networks_take_one_backward_and_no_probe(
    network: Network, B: int, T: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, losses = network(B, T)
    backwards = []
    ordinary = torch.autograd.grad

    def counted(*args: object, **kwargs: object) -> object:
        backwards.append(args)
        return ordinary(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    monkeypatch.setattr(probe, "_by_bits", lambda *a, **k: pytest.fail("the data were asked"))
    ps.grad(losses, model)
    assert len(backwards) == 1


@pytest.mark.parametrize("network", NETWORKS, ids=lambda n: n.__name__)
def test_the_engine_computes_no_summed_weight_gradient(network: Network) -> None:
    """Nothing beyond the frontier is requested: no parameter's summed gradient is asked for."""
    model, losses = network(4, 3)
    found = plan(Roots.of_losses(losses), list(model.parameters()))
    leaves = set(found.tape.leaves)
    assert found.uses
    assert not [slot for slot in found.requested if slot[0] in leaves]


def test_an_empty_batch_and_a_single_sample_ask_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_by_bits", lambda *a, **k: pytest.fail("the data were asked"))
    for B in (0, 1):
        model, losses = mlp(B, 2)
        assert ps.grad(losses, model)["0.weight"].shape == (B, 8, 4)
