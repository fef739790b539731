"""The public boundary of `persample.grad`: what it takes and what it gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample as ps
from tests.models import mlp
from tests.reference import assert_same, definition, named


def losses_of(model: nn.Module, B: int = 5, seed: int = 1) -> Tensor:
    x = torch.randn(B, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return model(x).square().sum(1)


# ------------------------------------------------------------------------------------------------ params


def test_params_as_module_mapping_and_sequence() -> None:
    model = mlp()
    want = definition(losses_of(model), model)
    assert_same(ps.grad(losses_of(model), model), want)
    mapping = {f"own {name}": p for name, p in model.named_parameters()}
    got = ps.grad(losses_of(model), mapping)
    assert isinstance(got, dict)
    assert_same(got, {f"own {name}": g for name, g in want.items()})
    for sequence in (list(model.parameters()), tuple(model.parameters())):
        result = ps.grad(losses_of(model), sequence)
        assert isinstance(result, tuple)
        assert_same(result, {str(i): g for i, g in enumerate(want.values())})


def test_a_sequence_keeps_its_order_and_its_repeats() -> None:
    model = mlp()
    last, first = model[2].weight, model[0].weight
    got = ps.grad(losses_of(model), [last, first, last])
    want = definition(losses_of(model), [last, first, last])
    assert [g.shape[1:] for g in got] == [last.shape, first.shape, last.shape]
    assert_same(got, want)


def test_no_params_give_an_empty_container() -> None:
    model = mlp()
    assert ps.grad(losses_of(model), []) == ()
    assert ps.grad(losses_of(model), {}) == {}
    assert ps.grad(losses_of(model), nn.Tanh()) == {}
    assert ps.grad(losses_of(model, B=1), []) == ()


def test_frozen_parameters_are_left_out_of_a_dict() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    names = ["0.bias", "2.weight", "2.bias"]
    assert_same(ps.grad(losses_of(model), model), definition(losses_of(model), model))
    assert list(ps.grad(losses_of(model), model)) == names
    assert list(ps.grad(losses_of(model), dict(model.named_parameters()))) == names


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda m: m.parameters(), TypeError, r"not generator; for one tensor write \[tensor\].*list\(\.\.\.\)"),
        (lambda m: m[0].weight, TypeError, r"params must be .*not Parameter; for one tensor write \[tensor\]"),
        (lambda m: "0.weight", TypeError, "params must .* str"),
        (lambda m: None, TypeError, "params must be .*not NoneType"),
        (lambda m: [m[0]], TypeError, r"params must hold tensors, but params\[0\] is a Linear"),
        (lambda m: {"w": "weight"}, TypeError, "params must hold tensors, but 'w' is a str"),
        (lambda m: [m[0].weight * 2], ValueError, r"params\[0\] of shape \(4, 3\) was computed by MulBackward0: pass"),
        (lambda m: {"w": m[0].weight.t()}, ValueError, r"leaf tensors, but 'w' of shape \(3, 4\) was computed by T"),
        (
            lambda m: [m[0].bias, torch.zeros(2)],
            ValueError,
            r"params\[1\] of shape \(2,\) does not require grad: leave",
        ),
    ],
)
def test_wrong_params_are_refused(make: Callable[[Any], Any], error: type[Exception], message: str) -> None:
    model = mlp()
    losses = losses_of(model)
    for verb in (ps.grad, ps.explain):
        with pytest.raises(error, match=message):
            verb(losses, make(model))
    assert_same(ps.grad(losses, model), definition(losses_of(model), model))  # nothing was freed


def test_hooked_parameters_are_refused() -> None:
    model = mlp()
    handle = model[0].bias.register_hook(lambda g: 2 * g)
    with pytest.raises(ValueError, match=r"parameter '0.bias' has hooks \(register_hook\).*remove them, or apply"):
        ps.grad(losses_of(model), model)
    ps.grad(losses_of(model), [model[0].weight])  # somebody else's hook does not matter
    handle.remove()
    assert_same(ps.grad(losses_of(model), model), definition(losses_of(model), model))


def test_hooks_after_accumulation_are_not_called() -> None:
    model, called = mlp(), []
    model[0].weight.register_post_accumulate_grad_hook(called.append)
    ps.grad(losses_of(model), model)
    assert not called


# ------------------------------------------------------------------------------------------------ losses


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.sum(), ValueError, r"shape \(B,\) or \(B, K…\), but have shape \(\): .*reduction='none'"),
        (lambda t: list(t), TypeError, r"tensor of shape \(B,\) or \(B, K…\), not list: .*reduction='none'"),
        (lambda t: None, TypeError, "not NoneType"),
        (lambda t: t.long(), ValueError, r"real floating-point numbers, but have dtype torch\.int64"),
        (lambda t: t.to(torch.complex128), ValueError, r"but have dtype torch\.complex128"),
        (lambda t: t.detach(), RuntimeError, r"losses of shape \(5,\) have no graph: .*no torch\.no_grad, no \.detach"),
        (lambda t: t.detach()[:0], RuntimeError, r"losses of shape \(0,\) have no graph"),
    ],
)
def test_wrong_losses_are_refused(change: Callable[[Tensor], Any], error: type[Exception], message: str) -> None:
    model = mlp()
    for verb in (ps.grad, ps.explain):
        with pytest.raises(error, match=message):
            verb(change(losses_of(model)), model)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: torch.stack([t.sin(), t], 1)[:, 1],
        lambda t: torch.stack([t, t.cos()], 1).flatten()[::2],
        lambda t: t.view(5, 1).expand(5, 3)[:, 2],
        lambda t: t.flip(0),
        lambda t: torch.stack(list(t)),
        lambda t: t.unbind()[2].expand(1),
        lambda t: t[1:4],
        lambda t: torch.cat([t[3:], t[:3]]),
        lambda t: t.as_strided((3,), (2,)),
    ],
)
def test_losses_may_be_any_view(change: Callable[[Tensor], Tensor]) -> None:
    model = mlp()
    assert_same(ps.grad(change(losses_of(model)), model), definition(change(losses_of(model)), model))


@pytest.mark.parametrize("B", [1, 4])
def test_losses_that_are_a_parameter(B: int) -> None:
    p, other = nn.Parameter(torch.randn(B)), nn.Parameter(torch.randn(2))
    assert_same(ps.grad(p, [p, other]), {"0": torch.eye(B), "1": torch.zeros(B, 2)})


@pytest.mark.parametrize("B", [0, 1, 2])
def test_no_one_and_two_samples_are_exact(B: int) -> None:
    model = mlp()
    assert_same(ps.grad(losses_of(model, B), model), definition(losses_of(model, B), model))
    buffers = {name: p.new_full((B, *p.shape), torch.nan) for name, p in named(model).items()}
    assert_same(ps.grad(losses_of(model, B), model, out=buffers), definition(losses_of(model, B), model))


@pytest.mark.parametrize("B", [0, 1, 3])
def test_unreached_parameters_get_zeros(B: int) -> None:
    model, spare = mlp(), nn.Parameter(torch.ones(2, 2, dtype=torch.float32))
    (got,) = ps.grad(losses_of(model, B), [spare])
    assert torch.equal(got, torch.zeros(B, 2, 2))
    buffer = torch.full((B, 2, 2), torch.nan)
    assert ps.grad(losses_of(model, B), [spare], out=[buffer])[0] is buffer
    assert torch.equal(buffer, torch.zeros(B, 2, 2))


@pytest.mark.parametrize("B", [1, 3])
def test_several_dtypes_in_one_model(B: int) -> None:
    table, scale, head = nn.Embedding(5, 4).bfloat16(), nn.Parameter(torch.ones(4)), nn.Linear(4, 2).double()
    params = {"table": table.weight, "scale": scale, **dict(head.named_parameters())}
    losses = lambda: head((table(torch.arange(B)).float() * scale).double()).square().sum(1)  # noqa: E731
    got, want = ps.grad(losses(), params), definition(losses(), params)
    assert [g.dtype for g in got.values()] == [torch.bfloat16, torch.float32, torch.float64, torch.float64]
    assert_same(got, want, rtol=1e-2)
    assert_same({k: got[k] for k in ("weight", "bias")}, {k: want[k] for k in ("weight", "bias")})


@pytest.mark.parametrize("B", [1, 3])
def test_sharded_parameters_are_not_answered_with_zeros(B: int) -> None:
    """The graph of a sharded model holds other leaves than `model.parameters()`."""
    model, shard = mlp(), nn.Parameter(torch.zeros(2))
    shard._local_tensor = shard.data  # type: ignore[attr-defined]
    with pytest.raises(ps.UnsupportedError, match=r"sharded parameters \['1'\] are not leaves .* not supported"):
        ps.grad(losses_of(model, B), [model[0].weight, shard])
