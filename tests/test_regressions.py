"""Answers that were once wrong, or silent where they should have spoken."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import persample as ps
from persample.graph.execute.plan import plan
from persample.graph.read.roots import Roots
from persample.testing import check
from tests.reference import assert_same, definition

X = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def parameter(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64).mul_(0.5).requires_grad_()


class Penalty(torch.autograd.Function):
    """Adds to the gradient whatever the cotangent is: not linear, and not zero at zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] + 0.1 * ctx.saved_tensors[0].sign()


class Straight(torch.autograd.Function):
    """A custom op on weights alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
def test_a_custom_backward_that_adds_a_penalty_in_a_loop_over_samples() -> None:
    w = parameter(3)
    losses = torch.stack([Penalty.apply(row * w).sum() for row in X])
    assert_same(ps.grad(losses, [w], retain_graph=True), definition(losses, [w]))


INTERACTING = {
    "sum": lambda w: (X * w).sum() * X.sum(1),
    "max": lambda w: (X * w).max() * X.sum(1),
    "masked": lambda w: torch.masked_select(X * w, X > 0).sum() * X.sum(1),
}


@pytest.mark.parametrize("name", INTERACTING)
def test_one_number_from_the_whole_batch_is_an_interaction(name: str) -> None:
    w = parameter(3)
    with pytest.raises(ps.InteractionError, match="samples interact"):
        ps.grad(INTERACTING[name](w), [w], independent=True)


def test_a_slow_op_on_weights_alone_says_so() -> None:
    w = parameter(3, 2)
    with pytest.warns(ps.PerformanceWarning, match="Straight"):
        ps.grad((X @ Straight.apply(w)).square().sum(1), [w])


def test_an_empty_operand_of_a_concatenation() -> None:
    v, empty = parameter(1), nn.Parameter(torch.empty(0, dtype=torch.float64))
    losses = torch.cat([empty, v * X[:2], v * X[2:]], 0).square().sum(1)
    assert_same(ps.grad(losses, [v, empty], retain_graph=True), definition(losses, [v, empty]))


def test_weight_norm_needs_no_loop(recwarn: pytest.WarningsRecorder) -> None:
    net = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2, dtype=torch.float64), dim=1)
    losses = net(X).square().sum(1)
    assert_same(ps.grad(losses, net, retain_graph=True), definition(losses, net))
    assert not recwarn.list


def test_unfolded_images_are_not_probed() -> None:
    w = parameter(1, 1, 4, 4)
    image = torch.ones(3, 2, 4, 4, dtype=torch.float64)
    found = plan(Roots.of_losses(F.unfold(image * w, 2).square().sum((1, 2))), [w])
    assert not found.samples.probed


def test_module_hooks_below_an_interaction_are_refused() -> None:
    net = nn.Linear(3, 3, dtype=torch.float64)
    handle = net.register_full_backward_hook(lambda module, given, got: None)
    h = net(X * parameter(3))
    with pytest.raises(ps.UnsupportedError, match="register_full_backward_hook"):
        ps.grad((h - h.mean(0)).square().sum(1), net)
    handle.remove()


def test_check_sees_one_wrong_row_beside_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    w = parameter(3)
    scale = torch.tensor([1e9, 1.0, 1.0, 1.0], dtype=torch.float64)

    def wrong(losses: Tensor, params: Any) -> tuple[Tensor, ...]:
        right = definition(losses, params)["0"].clone()
        right[2] *= 1.001
        return (right,)

    monkeypatch.setattr("persample.testing.compare.grad", wrong)
    assert not check(lambda: (X * w).square().sum(1) * scale, [w]).ok


def test_explain_and_grad_agree_on_a_hidden_region_of_one_sample() -> None:
    net = nn.Linear(3, 2)
    x = torch.randn(1, 3, requires_grad=True)
    noisy = lambda x: torch.nn.functional.dropout(net(x))  # noqa: E731
    losses = torch.utils.checkpoint.checkpoint(noisy, x, use_reentrant=True, preserve_rng_state=False).square().sum(1)
    assert all(row.handling.startswith("refused") for row in ps.explain(losses, net).rows)
    with pytest.raises(ps.UnsupportedError, match="preserve_rng_state=True"):
        ps.grad(losses, net)


@pytest.mark.parametrize(
    "losses", [lambda y: y.sum((1, 2)), lambda y: y.mean(2)[:, 1], lambda y: y.transpose(1, 2).amax((1, 2))]
)
def test_group_norm_whose_cotangent_is_expanded(losses: Any) -> None:
    net, x = nn.GroupNorm(2, 4, dtype=torch.float64), torch.randn(3, 4, 5, dtype=torch.float64)
    want = definition(losses(net(x)), net)
    assert_same(ps.grad(losses(net(x)), net), want)
    losses(ps.call_for_per_sample_grads(net, loss_reduction="sum")(x)).sum().backward()
    assert_same({name: p.grad_sample for name, p in net.named_parameters()}, want)


MOVED = {
    "transposed": lambda w: w.transpose(0, -1),
    "rolled": lambda w: w.roll(1),
    "selected": lambda w: w.index_select(0, torch.tensor([0])).reshape(()),
}


@pytest.mark.parametrize("name", MOVED)
def test_views_of_a_weight_without_dims(name: str) -> None:
    w = parameter()
    losses = (X * MOVED[name](w)).sum(1)
    assert_same(ps.grad(losses, [w], retain_graph=True), definition(losses, [w]))


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
def test_a_backward_that_reads_its_cotangent_from_the_start_of_memory() -> None:
    w, v = parameter(3), parameter(2)
    losses = (X * torch.as_strided_scatter(w, v, (2,), (1,), 1)).sum(1)
    assert_same(ps.grad(losses, [w, v], retain_graph=True), definition(losses, [w, v]))


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
def test_rows_of_a_number_read_by_index() -> None:
    w = parameter()
    losses = torch.stack([w.index_select(0, torch.tensor([0])).reshape(()) * row.sum() for row in X])
    assert_same(ps.grad(losses, [w], retain_graph=True), definition(losses, [w]))


@pytest.mark.parametrize("irregular", [False, True])
def test_random_numbers_that_cancel_are_nobodys_zeros(irregular: bool) -> None:
    """In bfloat16, one difference in 128 of random numbers is zero: the place still belongs to its sample."""
    torch.manual_seed(0)
    x, w = torch.randn(300, 2).bfloat16(), torch.randn(2).bfloat16().requires_grad_()
    weights, kernel = torch.randn(2, 300).bfloat16(), torch.tensor([[[1.0]], [[-1.0]]]).bfloat16()
    sample = torch.randint(50, (300,)) if irregular else torch.arange(300)

    def losses() -> Tensor:
        each = (F.conv1d((x @ w)[None, None], kernel)[0] * weights).sum(0)
        return torch.zeros(int(sample.max()) + 1).bfloat16().index_add(0, sample, each)

    got, want = ps.grad(losses(), [w])[0], definition(losses(), [w])["0"]
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert torch.equal(got.abs().sum(1) == 0, want.abs().sum(1) == 0)


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning", "ignore:Sparse CS. tensor support")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_sparse_matrices_that_mix_samples(layout: str) -> None:
    torch.manual_seed(0)
    x, w, v = torch.randn(5, 4).double(), torch.randn(4, 4).double(), torch.randn(4, 4).double()
    params = [w.requires_grad_(), v.requires_grad_()]
    dense = {"apart": torch.eye(5).double(), "mixed": torch.rand(5, 5).double()}
    sparse = {"coo": Tensor.to_sparse, "csr": Tensor.to_sparse_csr, "csc": Tensor.to_sparse_csc}[layout]
    for name, matrix in dense.items():
        losses = lambda s=matrix: ((sparse(s) @ (sparse(s) @ (x @ w)).tanh()) @ v).square().sum(1)  # noqa: E731
        assert_same(ps.grad(losses(), params), definition(losses(), params))
        if name == "apart":
            ps.norms(losses(), params, independent=True)
        else:
            with pytest.raises(ps.InteractionError, match="samples interact in"):
                ps.norms(losses(), params, independent=True)


def test_selective_checkpoints_that_would_have_to_run_often() -> None:
    linear, x, order = nn.Linear(3, 4), torch.randn(5, 3), torch.tensor([1, 0, 2, 4, 3])
    chosen = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    inner = lambda t: torch.eye(5)[order] @ linear(t).tanh()  # noqa: E731
    losses = checkpoint(inner, x, use_reentrant=False, context_fn=chosen).square().sum(1)
    with pytest.raises(ps.UnsupportedError, match=r"selective checkpointing.*without context_fn"):
        ps.grad(losses, linear)


def test_cotangents_that_were_never_written() -> None:
    """The second derivative of ``abs`` is a zero that PyTorch does not write out."""
    x = torch.randn(2, 1, dtype=torch.float64, requires_grad=True)

    def losses() -> Tensor:
        (slope,) = torch.autograd.grad(x.abs().sum(), x, create_graph=True)
        return slope.sum(1) + x.sum(1)

    assert_same(ps.grad(losses(), [x]), definition(losses(), [x]))


def test_images_of_one_pixel_whose_channels_come_last() -> None:
    """Strides of dims with one element may be of either order, and PyTorch's kernel for float64 wants one of them."""
    x = torch.randn(2, 2, 1, 1, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    w, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((1, 2, 1, 2), (1,)))
    for given in (x, x.expand(2, 2, 3, 3).contiguous(memory_format=torch.channels_last)):
        losses = lambda given=given: F.conv2d(given, w, b, padding=1).flatten(1).sum(1)  # noqa: E731
        for params in ([w], [w, b]):
            assert_same(ps.grad(losses(), params), definition(losses(), params))


def test_independence_of_what_cannot_be_run_backwards() -> None:
    """A weight that was not asked for lies below a tensor that was changed in place."""
    x, w, v = X[:, :1], parameter(1, 1), parameter()
    h = (x * w).clone()
    h.copy_(h.sin() * v)
    losses = torch.cat(h.split(1)[::-1]).sum(1) + h.sum(1)
    with pytest.raises((ps.UnsupportedError, ps.InteractionError), match=r"changed in place|samples interact"):
        ps.grad(losses, [v], independent=True)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_parameter_that_was_converted_between_two_uses_is_refused(batch: int) -> None:
    """PyTorch's graph then holds two leaves for it, of which each has a part of the gradient."""
    w, x = nn.Parameter(torch.randn(4, 4)), torch.randn(batch, 4)
    h = (x @ w).sin()
    w.data = w.data.double()
    w.data = w.data.float()
    losses = (h @ w).sum(1)
    for ask in (ps.grad, ps.norms):
        with pytest.raises(ps.UnsupportedError, match="in this graph twice"):
            ask(losses, [w])
