"""Data that meet a weight and leave without a batch: what no graph shows, and the gate, which follows data, does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps
from tests.expanded.helpers import Run, check, r, squares, taken, total
from tests.reference import assert_same, definition

pytestmark = pytest.mark.usefixtures("float64")
B, C = 4, 3
Body = Callable[[Run, Tensor], Tensor]


def model(body: Body) -> Run:
    """All that the programs below use."""
    modules = {"u": nn.Linear(C, C), "v": nn.Linear(C, C), "flat": nn.Linear(B * C, C), "conv": nn.Conv1d(C, C, 3)}
    mixers = {"up": nn.Linear(B, 11), "down": nn.Linear(11, B), "bag": nn.EmbeddingBag(3, C)}
    weights = {"p": r(B), "q": r(5, B), "k": r(C)}
    return Run(body, **modules, **mixers, **weights)


USED: dict[str, tuple[Body, str]] = {
    "learned-mean": (lambda m, x: m.u(x) - m.p @ x, "matmul"),
    "learned-weights": (lambda m, x: m.u(x) - m.p.softmax(0) @ x, "matmul"),
    "learned-mean-by-einsum": (lambda m, x: m.u(x) - torch.einsum("b,bd->d", m.p, x), "einsum"),
    "inducing-points": (lambda m, x: m.u(x) @ (m.q @ x).t(), "matmul"),
    "all-in-one-row": (lambda m, x: m.u(x) + m.flat(x.flatten()), "linear"),
    "keys-of-the-others": (lambda m, x: m.u(x) @ m.v(x[1:]).t(), "linear"),
    "keys-of-all-and-more": (lambda m, x: m.u(x) @ m.v(torch.cat([x, torch.ones(2, C)])).t(), "linear"),
    "keys-of-some": (lambda m, x: m.u(x) @ m.v(x[::3].tanh()).t(), "linear"),
    "windows-over-samples": (lambda m, x: m.u(x) - m.conv(x.t()[None])[0].mean(1), "conv1d"),
    "mixed-by-layers": (lambda m, x: m.down(m.up(x.t()).relu()).t(), "linear"),
    "one-bag": (lambda m, x: m.u(x) + m.bag((x[:, 0] > 0).long()[None]), "embedding_bag"),
    "mean-error": (lambda m, x: m.u(x) + F.mse_loss(m.k.expand(B, C), x), "mse_loss"),
}


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("name", USED)
def test_samples_that_use_it_interact(name: str, reduction: str) -> None:
    """Twice, as plans are remembered."""
    body, op = USED[name]
    module = model(body)
    for _ in range(2):
        loss = total(squares(ps.call_for_per_sample_grads(module, loss_reduction=reduction)(r(B, C))), reduction)
        with pytest.raises(ps.InteractionError, match=rf"samples interact in [\w, ]*{op}"):
            loss.backward()
        assert all(getattr(p, "grad_sample", None) is None for p in module.parameters())


APART: dict[str, Body] = {
    "not-used": lambda m, x: (m.u(x), m.p @ x)[0],
    "used-without-gradient": lambda m, x: m.u(x) + 0 * m.v(x),
    "rows-of-some-for-themselves": lambda m, x: torch.cat([m.u(x[:1]), m.v(x[1:])]),
    "rows-of-some-by-index": lambda m, x: m.u(x).index_add(0, torch.tensor([1, 3]), m.v(x[1::2])),
}


@pytest.mark.parametrize("name", APART)
def test_samples_that_keep_to_their_own_pass(name: str) -> None:
    check(model(APART[name]), r(B, C))


def test_a_mean_over_samples_that_is_the_loss() -> None:
    """What meets above the samples' own losses is the user's way to add them up."""
    module, x = Run(lambda m, x: F.mse_loss(m.u(x), x.flip(1)), u=nn.Linear(C, C)), r(B, C)
    each = F.mse_loss(module.u(x), x.flip(1), reduction="none").mean(1)
    want = definition(each, module)
    ps.call_for_per_sample_grads(module, loss_reduction="mean")(x).backward()
    assert_same(taken(module), want)
