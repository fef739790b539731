"""What is taken together: every form of ``per``, in norms and in clipped sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample as ps
from tests.reference import definition, named

B = 4


class Net(nn.Module):
    """Two layers, a number of its own, a frozen layer and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen, self.unused = nn.Linear(2, 2).requires_grad_(False), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.frozen(self.b(self.a(x).tanh())) * self.scale).square().sum(1)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(B, 3, dtype=torch.float64)


NAMES = ["scale", "a.weight", "a.bias", "b.weight", "unused.weight", "unused.bias"]


def norm(stacks: dict[str, Tensor], names: list[str]) -> Tensor:
    rows = [stacks[n].reshape(B, -1) for n in names]
    return torch.cat([torch.zeros(B, 0, dtype=torch.float64), *rows], 1).norm(dim=1)


def assert_norms(got: Any, want: list[Tensor]) -> None:
    found = list(got.values()) if isinstance(got, dict) else list(got)
    assert len(found) == len(want)
    for a, b in zip(found, want, strict=True):
        assert a.shape == (B,)
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


# A group in every form, and the names it stands for.
FORMS: dict[str, tuple[Callable[[Net], Any], list[str]]] = {
    "module": (lambda net: net.a, ["a.weight", "a.bias"]),
    "whole_model": (lambda net: net, NAMES),
    "list_of_modules": (lambda net: [net.b, net.a], ["a.weight", "a.bias", "b.weight"]),
    "module_list": (lambda net: nn.ModuleList([net.a, net.b]), ["a.weight", "a.bias", "b.weight"]),
    "names": (lambda net: ["b.weight", "scale"], ["scale", "b.weight"]),
    "tuple_of_names": (lambda net: ("a.bias",), ["a.bias"]),
    "set_of_names": (lambda net: {"a.bias", "scale"}, ["scale", "a.bias"]),
    "tensors": (lambda net: [net.a.weight, net.scale], ["scale", "a.weight"]),
    "generator": (lambda net: net.a.parameters(), ["a.weight", "a.bias"]),
    "mixed": (lambda net: [net.b, "a.bias", net.scale], ["scale", "a.bias", "b.weight"]),
    "twice_the_same": (lambda net: ["a.bias", net.a.bias, net.a], ["a.weight", "a.bias"]),
    "nothing": (lambda net: [], []),
    "unused": (lambda net: net.unused, ["unused.weight", "unused.bias"]),
    "frozen": (lambda net: net.frozen, []),
    "without_parameters": (lambda net: nn.Tanh(), []),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_group(net: Net, x: Tensor, form: str) -> None:
    build, names = FORMS[form]
    stacks = definition(net(x), net)
    want = norm(stacks, names)
    listed = ps.norms(net(x), net, per=[build(net), ["a.weight"]])
    assert isinstance(listed, tuple)
    assert_norms(listed, [want, norm(stacks, ["a.weight"])])
    by_key = ps.norms(net(x), net, per={"z": build(net), "y": ["a.weight"]})
    assert isinstance(by_key, dict)
    assert list(by_key) == ["z", "y"]
    assert_norms(by_key, [want, norm(stacks, ["a.weight"])])


@pytest.mark.parametrize("form", FORMS)
def test_a_reduction_can_be_used_again(net: Net, x: Tensor, form: str) -> None:
    """Also if a group was given as something that can be gone through once only."""
    build, names = FORMS[form]
    reduction = ps.Norms(per=[build(net)])
    rest = [n for n in NAMES if n not in names]
    clipped = ps.ClippedSum(0.1, per={"some": build(net), "rest": rest})
    first = None
    for _ in range(2):
        stacks = definition(net(x), net)
        norms, sums = ps.reduce(net(x), net, reduction, clipped)
        assert_norms(norms, [norm(stacks, names)])
        assert_norms(sums.clipping.norms, [norm(stacks, names), norm(stacks, rest)])
        first = first or sums
        for name in NAMES:
            torch.testing.assert_close(sums[name], first[name])


def test_per_parameter_follows_the_container(net: Net, x: Tensor) -> None:
    stacks, params = definition(net(x), net), named(net)
    want = [norm(stacks, [name]) for name in NAMES]
    got = ps.norms(net(x), net, per="parameter")
    assert list(got) == NAMES == list(params)
    assert_norms(got, want)
    backwards = dict(reversed(params.items()))
    got = ps.norms(net(x), backwards, per="parameter")
    assert list(got) == NAMES[::-1]
    assert_norms(got, want[::-1])
    got = ps.norms(net(x), list(backwards.values()), per="parameter")
    assert isinstance(got, tuple)
    assert_norms(got, want[::-1])
    assert ps.norms(net(x), [], per="parameter") == ()
    assert ps.norms(net(x), {}, per="parameter") == {}


def test_sequences_by_position_tensor_and_module(net: Net, x: Tensor) -> None:
    stacks, params = definition(net(x), net), list(named(net).values())
    want = [norm(stacks, ["scale", "b.weight"]), norm(stacks, ["a.weight"])]
    for per in (
        [[0, 3], [1]],
        [["0", "3"], ("1",)],
        [[net.scale, net.b], [params[1]]],
        {"x": [3, 0], "y": range(1, 2)},
    ):
        assert_norms(ps.norms(net(x), params, per=per), want)


def test_groups_of_norms_may_overlap_and_leave_out(net: Net, x: Tensor) -> None:
    stacks = definition(net(x), net)
    groups = [["a.weight"], ["a.weight", "scale"], net.a, ["a.weight"]]
    names = [["a.weight"], ["scale", "a.weight"], ["a.weight", "a.bias"], ["a.weight"]]
    got = ps.norms(net(x), net, per=groups)
    assert_norms(got, [norm(stacks, n) for n in names])
    got[0].fill_(7)  # results are one's own
    assert_norms(got[1:], [norm(stacks, n) for n in names[1:]])


def test_results_of_one_call_do_not_share_memory(x: Tensor) -> None:
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    alone, each, clipped = ps.reduce((x * w).sum(1), [w], ps.Norms(), ps.Norms("parameter"), ps.ClippedSum(1.0))
    places = {t.data_ptr() for t in (alone, each[0], clipped.clipping.norms, clipped.clipping.weights)}
    assert len(places) == 4
    seen: list[Tensor] = []

    def in_place(norms: Tensor) -> Tensor:
        seen.append(norms.clone())
        return norms.zero_()

    norms, clipped = ps.reduce((x * w).sum(1), [w], ps.Norms(), ps.ClippedSum(weights=in_place))
    for found in (norms, clipped.clipping.norms, *seen):
        torch.testing.assert_close(found, x.norm(dim=1))


def test_tied_parameters_have_one_name(x: Tensor) -> None:
    a, b = nn.Linear(3, 3, bias=False).double(), nn.Linear(3, 3).double()
    b.weight = a.weight
    model = nn.Sequential(a, b)
    stacks = definition(model(x).sum(1), model)
    got = ps.norms(model(x).sum(1), model, per=[a, b])
    assert_norms(got, [norm(stacks, ["0.weight"]), norm(stacks, ["0.weight", "1.bias"])])
    with pytest.raises(ValueError, match=r"\['0.weight'\] in several"):
        ps.clipped_sum(model(x).sum(1), model, 1.0, per=[a, b])


# --- clipped sums


def test_groups_of_clipped_sums_must_hold_every_parameter_once(net: Net, x: Tensor) -> None:
    match = (
        r"must hold every parameter once: \['a.bias', 'unused.bias'\] are in none, \['b.weight', 'scale'\] in several"
    )
    groups = [["scale", "b.weight"], [net.b, "scale"], ["a.weight", "unused.weight"]]
    with pytest.raises(ValueError, match=match):
        ps.clipped_sum(net(x), net, 1.0, per=groups)
    with pytest.raises(ValueError, match="are in none"):
        ps.clipped_sum(net(x), net, 1.0, per=[])
    with pytest.raises(ValueError, match=r"\['unused.weight', 'unused.bias'\] are in none"):
        ps.backward(net(x), net, ps.ClippedSum(1.0, per=[["scale"], net.a, net.b]))
    assert all(p.grad is None for p in net.parameters())


def test_clipping_is_given_in_the_form_of_per(net: Net, x: Tensor) -> None:
    groups = [["scale"], net.a, [net.b, net.unused]]
    keyed = dict(zip("zyx", groups, strict=True))
    names = [["scale"], ["a.weight", "a.bias"], ["b.weight", "unused.weight", "unused.bias"]]
    stacks = definition(net(x), net)
    norms = [norm(stacks, n) for n in names]
    bounds = [0.5 * float(n.mean()) for n in norms]
    weights = [(b / n).clamp(max=1) for b, n in zip(bounds, norms, strict=True)]
    for per, bound, form in ((groups, bounds, tuple), (keyed, dict(zip("zyx", bounds, strict=True)), dict)):
        got = ps.clipped_sum(net(x), net, bound, per=per)
        assert list(got) == NAMES
        assert all(type(part) is form for part in got.clipping)
        assert form is tuple or list(got.clipping.norms) == list(got.clipping.weights) == ["z", "y", "x"]
        assert_norms(got.clipping.norms, norms)
        assert_norms(got.clipping.weights, weights)
        for group, w in zip(names, weights, strict=True):
            for name in group:
                torch.testing.assert_close(got[name], torch.einsum("b,b...->...", w, stacks[name]))
    each = ps.clipped_sum(net(x), list(named(net).values()), 0.1, per="parameter")
    assert isinstance(each, tuple)
    assert type(each.clipping.norms) is tuple
    assert len(each.clipping.weights) == len(NAMES)


def test_sensitivity_counts_groups(net: Net) -> None:
    assert ps.ClippedSum(3.0, per=[net.a, net.b]).sensitivity == pytest.approx(3 * math.sqrt(2))
    assert ps.ClippedSum(3.0, per={"a": net.a}).sensitivity == pytest.approx(3)
    assert ps.ClippedSum([3.0, 4.0], per=[net.a, net.b]).sensitivity == pytest.approx(5)
    assert ps.ClippedSum({"a": 3.0, "b": 4.0}, per={"a": net.a, "b": net.b}).sensitivity == pytest.approx(5)


# --- wrong arguments


@pytest.mark.parametrize(
    ("per", "error", "match"),
    [
        ("layer", ValueError, "per must be None, 'parameter', a list of groups or a dict of them, not 'layer'"),
        (3, TypeError, "per must be None, 'parameter', a list of groups or a dict of them, not"),
        (nn.Linear(1, 1), TypeError, "per must be None, 'parameter', a list of groups"),
        (["a.weight"], TypeError, "group 0 must be a module or a list of parameters, not str"),
        ([3], TypeError, "group 0 must be a module or a list of parameters, not int"),
        ([["scale"], torch.ones(2)], TypeError, "group 1 must be a module or a list of parameters, not Tensor"),
        ({"k": 5.0}, TypeError, "group 'k' must be a module or a list of parameters, not float"),
        ([None], TypeError, "group 0 must be a module or a list of parameters, not NoneType"),
        ([["a"]], ValueError, "group 0 holds 'a', which is none of the parameters"),
        ({"k": ["frozen.weight"]}, ValueError, "group 'k' holds 'frozen.weight', which is none of the parameters"),
        ([[0]], ValueError, "group 0 holds 0, which is none of the parameters"),
        (
            [[torch.ones(2, 3)]],
            ValueError,
            r"group 0 holds a (T|t)ensor.*, which is none of the parameters",
        ),
    ],
)
def test_wrong_groups(net: Net, x: Tensor, per: Any, error: type[Exception], match: str) -> None:
    for reduction in (ps.Norms, lambda per: ps.ClippedSum(1.0, per=per)):
        with pytest.raises(error, match=match):
            ps.reduce(net(x), net, reduction(per))


def test_a_module_from_elsewhere(net: Net, x: Tensor) -> None:
    """The twin of a layer has parameters, but none of these: norms of zero would be a wrong answer."""
    with pytest.raises(ValueError, match=r"group 1 .*none of the parameters"):
        ps.norms(net(x), net, per=[net.a, deepcopy(net.b)])


def test_wrong_groups_leave_the_graph_alone(net: Net, x: Tensor) -> None:
    losses = net(x)
    with pytest.raises(ValueError, match="'layer'"):
        ps.norms(losses, net, per="layer")
    assert ps.norms(losses, net).shape == (B,)
