"""PyTorch's kernels get what autograd would give them, whatever form tensors come in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from persample.kernels.geometry import Geometry
from persample.kernels.library import (
    convolution,
    distance_gradient,
    end_to_end,
    group_norm_sums,
    gru_cell_gradient,
    input_gradient,
    is_fused_lstm_backward,
    lays_out_fused_weights,
    lstm_cell_gradient,
    materialized,
    weight_gradient,
)
from tests.forms import forms, numbers, seed
from tests.forms import plain as copied

ONE = Geometry((2,), (1,), (1,), False, (0,), 2)
TWO = Geometry((1, 2), (1, 0), (2, 1), False, (0, 0), 1)
BACK = Geometry((2, 2), (1, 0), (1, 1), True, (1, 0), 2)
SHAPES = {
    "1d grouped": (ONE, (2, 4, 5), (6, 2, 3)),
    "2d": (TWO, (2, 3, 5, 4), (4, 3, 2, 2)),
    "transposed": (BACK, (2, 4, 3, 3), (4, 3, 3, 2)),
}
Kernel = Callable[..., Tensor | tuple[Tensor, ...]]


def _distance_gradient(g: Tensor, x: Tensor, y: Tensor, distances: Tensor) -> Tensor:
    return distance_gradient(g, x, y, 1.0, distances)  # of which p = 1 reads no numbers, and any will do


def _lstm_cell(d_hy: Tensor, d_cy: Tensor, *others: Tensor) -> Tensor:
    return lstm_cell_gradient(d_hy, d_cy, (others[0], others[1]), (others[2], others[3]), *others[4:])


def _gru_cell(d_hy: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
    return gru_cell_gradient(d_hy, (others[0], others[1]), (others[2], others[3]), others[4])


def _kernels() -> dict[str, tuple[Kernel, list[tuple[int, ...]]]]:
    """Every kernel, with the shapes of its operands."""
    found: dict[str, tuple[Kernel, list[tuple[int, ...]]]] = {
        "group_norm_sums": (group_norm_sums, [(6, 5), (6, 5), (3,), (3,)]),
        "distance_gradient": (_distance_gradient, [(2, 4, 5), (2, 4, 3), (2, 5, 3), (2, 4, 5)]),
        "lstm_cell_gradient": (_lstm_cell, [*[(3, 2)] * 2, *[(3, 8)] * 2, *[(8,)] * 2, *[(3, 2)] * 2]),
        "gru_cell_gradient": (_gru_cell, [(3, 2), *[(3, 6)] * 2, *[(6,)] * 2, (3, 2)]),
    }
    for name, (geometry, x, weight) in SHAPES.items():
        y = tuple(convolution(torch.zeros(x), torch.zeros(weight), geometry).shape)
        found[f"convolution {name}"] = (lambda a, b, g=geometry: convolution(a, b, g)), [x, weight]
        found[f"weight {name}"] = (lambda a, b, g=geometry, w=weight: weight_gradient(a, b, a.new_empty(w), g)), [x, y]
        found[f"input {name}"] = (lambda a, b, g=geometry, x=x: input_gradient(a, b, x, g)), [y, weight]
    return found


KERNELS = _kernels()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_forms_do_not_matter(name: str, dtype: torch.dtype) -> None:
    kernel, shapes = KERNELS[name]
    if kernel is _distance_gradient and dtype == torch.bfloat16:
        pytest.skip("PyTorch has none in half precision")
    for place, shape in enumerate(shapes):
        for form, make in forms(shape, dtype):
            seed(0)
            given = [make(s, dtype) if p == place else numbers(s, dtype) for p, s in enumerate(shapes)]
            got, want = kernel(*given), kernel(*map(copied, given))
            torch.testing.assert_close(got, want, msg=lambda m, form=form, place=place: f"{form} operand {place}: {m}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_plain(dtype: torch.dtype) -> None:
    for form, make in forms((2, 3, 4), dtype):
        t = make((2, 3, 4), dtype)
        found = materialized(t)
        assert found.is_contiguous(), form
        assert not found.is_conj(), form
        assert not found.is_neg(), form
        assert torch.equal(found, t), form
        assert (found is t) == (form == "contiguous"), form


def test_kernels_of_recurrent_layers_are_known() -> None:
    assert is_fused_lstm_backward(torch.ops.aten.mkldnn_rnn_layer_backward.default)
    assert not is_fused_lstm_backward(torch.ops.aten.mkldnn_rnn_layer.default)
    assert lays_out_fused_weights(torch._cudnn_rnn_flatten_weight)
    assert not lays_out_fused_weights(torch.lstm)


@pytest.mark.parametrize("used", [(0, 1), (0,), (1,)])
def test_gradients_of_an_lstm_cell(used: tuple[int, ...]) -> None:
    h = 2
    p, q, b_ih, b_hh = (torch.randn(*s, dtype=torch.float64) for s in ((4, 4 * h), (4, 4 * h), (4 * h,), (4 * h,)))
    cx, *given = torch.randn(3, 4, h, dtype=torch.float64)
    p.requires_grad_()
    i, f, g, o = (p + q + b_ih + b_hh).chunk(4, 1)
    cy = f.sigmoid() * cx + i.sigmoid() * g.tanh()
    outputs = o.sigmoid() * cy.tanh(), cy
    (want,) = torch.autograd.grad([outputs[nr] for nr in used], p, [given[nr] for nr in used])
    d_hy, d_cy = (given[nr] if nr in used else None for nr in range(2))
    got = lstm_cell_gradient(d_hy, d_cy, (p.detach(), q), (b_ih, b_hh), cx, cy.detach())
    torch.testing.assert_close(got, want)


def test_gradients_of_a_gru_cell() -> None:
    h = 2
    gates = [torch.randn(4, 3 * h, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    hx, g = torch.randn(4, h, dtype=torch.float64), torch.randn(4, h, dtype=torch.float64)
    b_ih, b_hh = torch.randn(2, 3 * h, dtype=torch.float64)
    (p_r, p_z, p_n), (q_r, q_z, q_n) = (gates[0] + b_ih).chunk(3, 1), (gates[1] + b_hh).chunk(3, 1)
    z, n = (p_z + q_z).sigmoid(), (p_n + (p_r + q_r).sigmoid() * q_n).tanh()
    want = torch.autograd.grad((1 - z) * n + z * hx, gates, g)
    got = gru_cell_gradient(g, (gates[0].detach(), gates[1].detach()), (b_ih, b_hh), hx)
    torch.testing.assert_close(got, want)


def test_tensors_end_to_end() -> None:
    given = [torch.ones(2, 3).t(), torch.zeros(()), torch.arange(4.0)[::2], torch.zeros(0)]
    joined = end_to_end(given)
    assert torch.equal(joined, torch.cat([t.reshape(-1) for t in given]))
    assert end_to_end([given[0]]).data_ptr() != given[0].data_ptr()
