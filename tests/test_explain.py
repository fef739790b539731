"""`persample.explain`: one row for every use of a parameter, and nothing changed by asking."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import persample as ps
from tests.case_library.functions import OwnLinear
from tests.reference import assert_same, definition


def rows(losses: Tensor, params: object) -> dict[str, list[tuple[str, str, str]]]:
    """Per parameter: node, layout and handling of every use."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for row in ps.explain(losses, params).rows:  # type: ignore[arg-type]
        found.setdefault(row.parameter, []).append((row.op, row.layout, row.handling))
    return found


def test_a_table_with_a_row_per_use() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, 2))
    text = str(ps.explain(net(torch.randn(4, 1, 5, 5)).square().sum(1), net))
    assert [line.rstrip() for line in text.splitlines()] == [
        "parameter  node                  via         samples in             handled by",
        "---------  --------------------  ----------  ---------------------  -----------------",
        "0.weight   ConvolutionBackward0              dim 0 of (4, 2, 3, 3)  rule: Convolution",
        "0.bias     ConvolutionBackward0              dim 0 of (4, 2, 3, 3)  rule: Dense",
        "3.weight   AddmmBackward0        TBackward0  dim 0 of (4, 2)        rule: Outer",
        "3.bias     AddmmBackward0                    dim 0 of (4, 2)        rule: Dense",
    ]


def test_every_use_is_listed() -> None:
    tok, ids = nn.Embedding(6, 3), torch.randint(6, (4, 5))
    found = rows((tok(ids) @ tok.weight.t()).square().sum((1, 2)), tok)["weight"]
    assert sorted((op, how) for op, _, how in found) == [
        ("EmbeddingBackward0", "rule: Rows"),
        ("MmBackward0", "rule: Outer"),
    ]


LAYOUTS: dict[str, tuple[str, Callable[[nn.Linear], Tensor]]] = {
    "in front": ("dim 0 of (4, 2)", lambda net: net(torch.randn(4, 3)).square().sum(1)),
    "folded": ("dim 0 of (20, 2), as 1·B·5", lambda net: net(torch.randn(4, 5, 3)).square().sum((1, 2))),
    "time first": ("dim 0 of (20, 2), as 5·B·1", lambda net: net(torch.randn(5, 4, 3)).square().sum((0, 2))),
    "middle": ("dim 0 of (24, 2), as 2·B·3", lambda net: net(torch.randn(2, 4, 3, 3)).square().sum((0, 2, 3))),
    "by index": (
        "index along dim 0 of (4, 2)",
        lambda net: torch.zeros(4).index_add(0, torch.tensor([3, 1, 0, 2]), net(torch.randn(4, 3)).square().sum(1)),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layout_is_told(name: str) -> None:
    want, losses = LAYOUTS[name]
    net = nn.Linear(3, 2)
    assert rows(losses(net), [net.bias])["0"] == [("AddmmBackward0", want, "rule: Dense")]


def test_a_loop_over_samples_has_a_row_for_each() -> None:
    net, x = nn.Linear(3, 2), torch.randn(4, 3)
    found = rows(torch.stack([net(one).square().sum() for one in x]), [net.bias])["0"]
    assert [layout for _, layout, _ in found] != []
    assert {f"sample {i}" for i in range(4)} == {layout[-8:] for _, layout, _ in found}


def test_the_fallback_is_told() -> None:
    w, b, x = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4)), torch.randn(5, 3)
    found = rows(OwnLinear.apply(x, w, b).square().sum(1), {"w": w, "b": b})
    assert found["w"] == [("OwnLinearBackward", "dim 0 of (5, 4)", "fallback: 5 calls of the node")]
    assert found["b"][0][2].startswith("fallback: ")


def test_unreached_parameters_are_told() -> None:
    net, spare = nn.Linear(3, 2), nn.Parameter(torch.zeros(2))
    found = rows(net(torch.randn(4, 3)).square().sum(1), {"spare": spare, "bias": net.bias})
    assert found["spare"] == [("", "", "zeros: the losses do not reach it")]
    assert found["bias"][0][2] == "rule: Dense"


def test_separable_parameters_are_told() -> None:
    p = nn.Parameter(torch.randn(4, 3))
    assert rows(p.square().sum(1), [p])["0"][0][1:] == ("dim 0 of (4, 3)", "separable: every element is one sample's")


def test_refusals_are_told() -> None:
    net, x = nn.Linear(3, 3), torch.randn(4, 3, requires_grad=True)
    noisy = lambda x: nn.functional.dropout(net(x))  # noqa: E731
    losses = checkpoint(noisy, x, use_reentrant=True, preserve_rng_state=False).square().sum(1)
    explanation = ps.explain(losses, net)
    assert [row.parameter for row in explanation.rows] == ["weight", "bias"]
    assert all("refused: " in row.handling and "preserve_rng_state=True" in row.handling for row in explanation.rows)


def test_interactions_are_told() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    explanation = ps.explain(net(torch.randn(5, 3)).square().sum(1), net)
    assert explanation.interactions == ("NativeBatchNorm",)
    assert str(explanation).splitlines()[-1] == "samples interact in NativeBatchNorm"
    assert ps.explain(net.eval()(torch.randn(5, 3)).square().sum(1), net).interactions == ()


@pytest.mark.parametrize("B", [0, 1])
def test_one_sample_or_none_is_told_as_an_ordinary_backward(B: int) -> None:
    net = nn.Linear(3, 2)
    found = rows(net(torch.randn(B, 3)).square().sum(1), net)
    assert {how for uses in found.values() for _, _, how in uses} == {"one sample or none: an ordinary backward"}


def test_the_path_to_a_merged_weight_is_told() -> None:
    base, up, down, x = (nn.Parameter(torch.randn(*s)) for s in ((4, 3), (4, 2), (2, 3), (5, 3)))
    losses = F.linear(x.detach(), base + up @ down).square().sum(1)
    via = {row.parameter: row.via for row in ps.explain(losses, {"base": base, "up": up}).rows}
    assert via == {"base": "TBackward0, AddBackward0", "up": "TBackward0, AddBackward0, MmBackward0"}


def test_parameters_of_a_module_have_their_path() -> None:
    net = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(3, 2))})
    names = [row.parameter for row in ps.explain(net["encoder"](torch.randn(4, 3)).sum(1), net).rows]
    assert names == ["encoder.0.weight", "encoder.0.bias"]


def test_asking_changes_nothing_and_warns_about_nothing() -> None:
    """Warnings are errors here, and the fallback is on the way."""
    w, b, x = (
        nn.Parameter(torch.randn(4, 3).double()),
        nn.Parameter(torch.randn(4).double()),
        torch.randn(5, 3).double(),
    )
    forward = lambda: OwnLinear.apply(OwnLinear.apply(x, w, b).tanh()[:, :3], w, b).square().sum(1)  # noqa: E731
    losses, state = forward(), torch.get_rng_state()
    first, second = ps.explain(losses, [w, b]), ps.explain(losses, [w, b])
    assert str(first) == str(second)
    assert torch.equal(torch.get_rng_state(), state)
    assert w.grad is None
    with pytest.warns(ps.PerformanceWarning):
        assert_same(ps.grad(losses, [w, b]), definition(forward(), [w, b]))
