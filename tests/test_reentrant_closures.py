"""Functions of reentrant checkpoints that use computed tensors around them which they were not given.

The engine does not know of such a use, so what leads to a requested parameter by it is refused.
"""

from __future__ import annotations

from threading import Thread

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import persample as ps
from tests.reference import assert_same, definition
from tests.test_reentrant import Body, ByDepth, Net, Run, other, plain, prepare, reentrant

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
REFUSAL = r"uses a result of \w+ of shape \(.*\) without being given it: pass it as an argument.*use_reentrant=False"


def tensors_in_a_list(net: Net, h: Tensor, run: Run) -> Tensor:
    """PyTorch keeps a list as it is, with the graph of its tensors."""
    return run(lambda given, a: net.linear[0](given[0] * a) + given[1], [net.linear[1](h), h], h)


def closure(net: Net, h: Tensor, run: Run) -> Tensor:
    """A tensor from around, used by no other way."""
    scale = net.linear[2](h).tanh()
    return run(lambda a: net.linear[1](net.linear[0](a) * scale).tanh(), h)


def closure_also_outside(net: Net, h: Tensor, run: Run) -> Tensor:
    """Used beside and below the region as well, and hooked: a hook sees the sum of all."""
    scale = net.linear[2](h).tanh()
    scale.register_hook(lambda g: g.sin())
    y = run(lambda a, b: net.linear[1](net.linear[0](a * b) * scale).tanh(), h, net.linear[3](scale))
    return y * scale


def closures_over_one_another(net: Net, h: Tensor, run: Run) -> Tensor:
    """What is taken from around leads to other things that are, and every one is hooked."""
    first = net.linear[2](h).tanh()
    second = net.linear[3](first).tanh()
    for t in (h, first, second):
        t.register_hook(lambda g: g.sin())
    return run(lambda a: net.linear[0](a * first) * second + h + first, second) * second


def closures_alone(net: Net, h: Tensor, run: Run) -> Tensor:
    """Of what it is given, nothing is used: all goes on through what it takes from around."""
    scale = net.linear[2](h).tanh()
    return run(lambda a: run(lambda b: net.linear[1](net.linear[0](scale) * 2), a), h) * scale


def closures_in_a_chain(net: Net, h: Tensor, run: Run) -> Tensor:
    """What one region takes from around, another gave, which took from around in its turn."""
    first = net.linear[2](h).tanh()
    second = run(lambda a: net.linear[0](a) * first, h)
    third = run(lambda a: net.linear[1](a) * second + first, h)
    return run(lambda a: net.linear[3](a) * third * second, h) + first


def closures_inside(net: Net, h: Tensor, run: Run) -> Tensor:
    """A region in a region, that takes from both around it."""
    first = net.linear[2](h).tanh()

    def body(a: Tensor) -> Tensor:
        here = net.linear[1](a).tanh()
        return run(lambda b: net.linear[0](b) * here * first, net.linear[3](a)) + run(lambda b: b * here, a)

    return run(body, h)


def closure_over_a_weight(net: Net, h: Tensor, run: Run) -> Tensor:
    """Computed from parameters alone, one of which is used inside, too."""
    w = net.matrix @ net.linear[0].weight
    return run(lambda a: F.linear(a @ net.matrix, w), h) + run(lambda a: F.linear(a, w.tanh()), h)


def closure_given_on(net: Net, h: Tensor, run: Run) -> Tensor:
    """Given to the inner region, but not to the one around it."""
    scale = net.linear[2](h).tanh()
    return run(lambda a: run(lambda b, c: net.linear[0](b) * c, a, scale), h)


def closure_over_a_region(net: Net, h: Tensor, run: Run) -> Tensor:
    """What leads to a parameter lies inside of another region."""
    scale = run(net.linear[2], h.detach().requires_grad_())
    return run(lambda a: net.linear[0](a) * scale, h)


def closure_over_what_comes_later(net: Net, h: Tensor, run: Run) -> Tensor:
    """A function that finds its own result there when it is run again."""
    kept = [torch.ones_like(h)]
    y = run(lambda a: net.linear[0](a) * kept[0], h)
    kept[0] = y.tanh() if run is not plain else kept[0]
    return kept[0] * y


NESTED = [closures_alone, closures_inside]
CLOSURES = [
    tensors_in_a_list, closure, closure_also_outside, closures_over_one_another, closures_in_a_chain,
    closure_over_a_weight, closure_given_on, closure_over_a_region, *NESTED,
]  # fmt: skip
bodies = pytest.mark.parametrize("body", CLOSURES, ids=lambda body: body.__name__)


@bodies
@pytest.mark.parametrize("B", [1, 2, 5])
def test_what_a_region_uses_without_being_given_it_is_refused(body: Body, B: int) -> None:
    net, losses = prepare(body, B)
    for _ in range(2):
        with pytest.raises(ps.UnsupportedError, match=REFUSAL):
            ps.grad(losses(reentrant), net)
    assert all(p.grad is None for p in net.parameters())


def test_a_function_that_finds_its_own_result_is_refused() -> None:
    net, losses = prepare(closure_over_what_comes_later, 3)
    with pytest.raises(ps.UnsupportedError, match=REFUSAL):
        ps.grad(losses(reentrant), net)


def test_the_op_and_the_shape_are_named() -> None:
    net, losses = prepare(closure, 5)
    with pytest.raises(ps.UnsupportedError, match=r"uses a result of Tanh of shape \(5, 3\) without"):
        ps.grad(losses(reentrant), net)
    net, losses = prepare(closure_over_a_region, 5)
    with pytest.raises(ps.UnsupportedError, match=r"uses a result of Addmm of shape \(5, 3\) without"):
        ps.grad(losses(reentrant), net)


@bodies
def test_every_parameter_is_exact_or_refused(body: Body) -> None:
    net, losses = prepare(body, 3)
    want = definition(losses(plain), net)
    refused = []
    for name, p in net.named_parameters():
        try:
            got = ps.grad(losses(reentrant), {name: p})
        except ps.UnsupportedError:
            refused.append(name)
        else:
            assert_same(got, {name: want[name]})
    assert refused


def test_parameters_that_such_tensors_do_not_lead_to() -> None:
    net, losses = prepare(closure, 3)
    want = definition(losses(plain), net)
    asked = {name: p for name, p in net.named_parameters() if name.startswith(("linear.0.", "linear.1."))}
    for _ in range(2):
        got = ps.grad(losses(reentrant), asked)
        assert_same(got, {name: want[name] for name in asked})
        assert min(float(g.abs().max()) for g in got.values()) > 0


def test_independence_is_not_promised_for_them() -> None:
    """Whatever is asked for: samples may have met in what is not looked at."""
    net, losses = prepare(closure, 3)
    with pytest.raises(ps.UnsupportedError, match=REFUSAL):
        ps.grad(losses(reentrant), net.linear[0], independent=True)
    assert ps.grad(losses(plain), net.linear[0], independent=True)


def test_a_plan_that_is_remembered_does_not_let_them_pass() -> None:
    """A view of a tensor from around looks like an argument: these are views inside."""
    net, losses = prepare(lambda net, h, run: run(lambda a: net.linear[0](a) * net.linear[1](a), h), 3)
    assert_same(ps.grad(losses(reentrant), net), definition(losses(plain), net))

    def views(net: Net, h: Tensor, run: Run) -> Tensor:
        view = h.view_as(h)
        return run(lambda a: net.linear[0](view) * net.linear[1](view), h)

    net, losses = prepare(views, 3)
    with pytest.raises(ps.UnsupportedError, match=REFUSAL):
        ps.grad(losses(reentrant), net)


@bodies
def test_both_kinds_in_one_another(body: Body) -> None:
    """Only the function of a reentrant one has to be given what it uses."""
    net, losses = prepare(body, 3)
    with pytest.raises(ps.UnsupportedError, match=REFUSAL):
        ps.grad(losses(ByDepth(reentrant, other)), net)
    if body in NESTED:
        with pytest.raises(ps.UnsupportedError, match=REFUSAL):
            ps.grad(losses(ByDepth(other, reentrant)), net)
    else:
        assert_same(ps.grad(losses(ByDepth(other, reentrant)), net), definition(losses(plain), net))


@bodies
def test_in_another_thread(body: Body) -> None:
    """Numbers that PyTorch gives to nodes are counted per thread, and those of a new one are small."""
    net, losses = prepare(body, 3)
    want, graph = definition(losses(plain), net), losses(reentrant)
    got, errors = list[dict[str, Tensor]](), list[str]()

    def ask() -> None:
        try:
            got.append(ps.grad(graph, net))
        except ps.UnsupportedError as error:
            errors.append(str(error))

    thread = Thread(target=ask)
    thread.start()
    thread.join()
    assert len(got) + len(errors) == 1
    for found in got:
        assert_same(found, want)
