"""Recurrences of other devices on the same matrix: a CPU makes their nodes with kernels in plain ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from persample.graph.read.site import Site
from tests.graph.device_recurrences import on_cpu
from tests.graph.matrix import flows, rules
from tests.graph.matrix.nodes import UNMADE, narrowed, sites
from tests.graph.matrix.test_rules import check
from tests.graph.matrix.variants import VARIANTS
from tests.graph.samples.leaves import c, w

B, T, D, H = 4, 4, 4, 4  # anywhere else sizes would refuse a flow that mistakes one dim for another
GATES = {0: 1, 1: 1, 2: 4, 3: 3}


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with on_cpu():
        yield


def weights(mode: int, layers: int, both: bool, bias: bool) -> list[Tensor]:
    rows, found = GATES[mode] * H, list[Tensor]()
    for layer in range(layers):
        for _ in range(1 + both):
            found += [w(rows, D if layer == 0 else H * (1 + both)), w(rows, H), *([w(rows), w(rows)] if bias else [])]
    return found


def cudnn(
    mode: int,
    layers: int = 1,
    both: bool = False,
    bias: bool = True,
    first: bool = False,
    sizes: Any = (),
    hidden: Any = w,
) -> Tensor:
    x = hidden(sum(sizes), D) if sizes else hidden(B, T, D) if first else hidden(T, B, D)
    flat, batch = weights(mode, layers, both, bias), sizes[0] if sizes else B
    h, c = (hidden(layers * (1 + both), batch, H) for _ in range(2))
    each, cx = 4 if bias else 2, c if mode == 2 else None
    return torch._cudnn_rnn(x, flat, each, None, h, cx, mode, H, 0, layers, first, 0.0, True, both, sizes, None)[0]  # type: ignore[no-any-return]


def miopen(mode: int) -> Tensor:
    states = w(2, B, H), w(2, B, H) if mode == 2 else None
    flat = weights(mode, 1, True, True)
    return torch.miopen_rnn(w(B, T, D), flat, 4, *states, mode, H, 1, True, 0.0, True, True, [], None)[0]  # type: ignore[no-any-return]


def mps(layers: int, first: bool, bias: bool) -> Tensor:
    states, flat = [w(layers, B, H), w(layers, B, H)], weights(2, layers, False, bias)
    return torch._lstm_mps(w(T, B, D), states, flat, bias, layers, 0.0, True, False, first)[0]  # type: ignore[no-any-return]


def cell(gru: bool, hidden: Any = w) -> Tensor:
    n = 3 if gru else 4
    gates, state, biases = [hidden(B, n * H), hidden(B, n * H)], hidden(B, H), [w(n * H), w(n * H)]
    aten = torch.ops.aten
    fused = aten._thnn_fused_gru_cell if gru else aten._thnn_fused_lstm_cell
    return fused(*gates, state, *biases)[0]  # type: ignore[no-any-return]


NODES: dict[str, tuple[str, Callable[[], Tensor]]] = {
    **{f"cudnn {mode}": ("CudnnRnn", lambda mode=mode: cudnn(mode)) for mode in GATES},
    **{f"cudnn {mode} all": ("CudnnRnn", lambda mode=mode: cudnn(mode, 2, True, first=True)) for mode in GATES},
    **{f"cudnn {mode} packed": ("CudnnRnn", lambda mode=mode: cudnn(mode, 1, True, sizes=(4, 2, 1))) for mode in GATES},
    "cudnn packed": ("CudnnRnn", lambda: cudnn(2, 2, bias=False, sizes=(2, 2))),
    "cudnn data": ("CudnnRnn", lambda: cudnn(3, 2, bias=False, hidden=c)),
    "miopen lstm": ("MiopenRnn", lambda: miopen(2)),
    "miopen gru": ("MiopenRnn", lambda: miopen(3)),
    "mps": ("LstmMps", lambda: mps(1, False, True)),
    "mps layers": ("LstmMps", lambda: mps(2, True, False)),
    "lstm cell": ("ThnnFusedLstmCell", lambda: cell(gru=False)),
    "gru cell": ("ThnnFusedGruCell", lambda: cell(gru=True)),
    "gru cell data": ("ThnnFusedGruCell", lambda: cell(gru=True, hidden=c)),
}
every_node = pytest.mark.parametrize("name", NODES)


def made(name: str, under: Any = None) -> Site:
    node, build = NODES[name]
    (site,) = [site for site in sites(build, under) if site.name == node]
    assert node in UNMADE
    return site


@every_node
def test_a_rule_is_right_wherever_it_answers(name: str) -> None:
    site = made(name)
    asked = [(site, combination) for combination in rules.combinations(site, False)]
    for one in narrowed(site):
        asked += [(one, combination) for combination in list(rules.combinations(one, False))[::40]]
    check(asked)


@every_node
def test_a_flow_is_right_wherever_it_answers(name: str) -> None:
    site, answers = made(name), 0
    for combination in flows.combinations(site, False):
        found, answered = flows.wrong_flows(site, combination)
        assert found == []
        answers += answered
    assert answers


@every_node
@pytest.mark.parametrize("variant", ["torch.float32", "torch.float16", "transposed", "expanded along 0", "negative"])
def test_operands_of_any_dtype_and_form(name: str, variant: str) -> None:
    site = made(name, VARIANTS[variant]())
    check((site, combination) for combination in list(rules.combinations(site, False))[::5])
