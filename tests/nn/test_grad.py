"""`persample.nn.grad` against autograd through the forward pass, and against `torch.nn.grad`."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from persample.nn import grad
from tests.nn.convolutions import FAMILIES, Case, by_autograd, check, every_gradient, tensors
from tests.reference import assert_same


def grid() -> Iterator[Case]:
    """Strides, paddings, dilations and groups in every combination, numbers and one number per dim."""
    for family, n in itertools.product(FAMILIES, (1, 2, 3)):
        strides, paddings, dilations = (1, 3, (2, 1, 3)[:n]), (0, (1, 0, 2)[:n], 2), (1, (2, 1, 3)[:n])
        for s, p, d, g in itertools.product(strides, paddings, dilations, (1, 2)):
            yield Case(n, family, options={"stride": s, "padding": p, "dilation": d, "groups": g})


def special() -> Iterator[Case]:
    """Empty and single batches, depthwise, kernels of 1, every remainder, output_padding."""
    for family, n in itertools.product(FAMILIES, (1, 2, 3)):
        for batch in (0, 1):
            yield Case(n, family, batch)
            yield Case(n, family, batch, options={"stride": 2, "padding": 1, "groups": 2})
        yield Case(n, family, channels=(4, 4), options={"groups": 4, "padding": 1})
        yield Case(n, family, channels=(4, 8), options={"groups": 4, "stride": 2})
        yield Case(n, family, kernel=(1, 1, 1), options={"stride": 2, "padding": 1})
        yield Case(n, family, channels=(1, 1), space=(3, 2, 2))
        for size in (7, 8, 9, 10):
            yield Case(n, family, space=(size, 5, 6), options={"stride": 3})
        yield Case(n, family, space=(size, 5, 6), batch=2, options={"stride": (3, 2, 2)[:n], "dilation": 2})
    for n, more in itertools.product((1, 2, 3), (1, (2, 0, 1))):
        padding = more if isinstance(more, int) else more[:n]
        yield Case(n, "conv_transpose", options={"stride": 3, "output_padding": padding, "padding": 1})
        yield Case(n, "conv_transpose", options={"dilation": 3, "output_padding": padding, "groups": 2})
        yield Case(n, "conv_transpose", 0, options={"stride": 3, "output_padding": padding})


def worded() -> Iterator[Case]:
    """Padding in words; an odd number of zeros is uneven."""
    for n, dilation, groups in itertools.product((1, 2, 3), (1, 2, 3), (1, 2)):
        for kernel in ((2, 3, 4), (3, 2, 1), (4, 4, 2)):
            options = {"padding": "same", "dilation": dilation, "groups": groups}
            yield Case(n, kernel=kernel, space=(5, 4, 6), options=options)
    for n in (1, 2, 3):
        yield Case(n, batch=0, kernel=(2, 2, 2), options={"padding": "same"})
        yield Case(n, batch=1, kernel=(2, 2, 2), options={"padding": "same", "stride": (1,)})
        yield Case(n, options={"padding": "valid", "stride": 2, "dilation": 2})


@pytest.mark.parametrize("case", list(grid()), ids=str)
def test_grid_against_autograd(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", list(special()), ids=str)
def test_special_shapes_against_autograd(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", list(worded()), ids=lambda c: f"{c}-k{'x'.join(map(str, c.kernel[: c.n]))}")
def test_padding_in_words_against_autograd(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", [c for c in (*grid(), *special()) if c.family == "conv"], ids=str)
def test_torch_nn_grad_gives_the_same(case: Case) -> None:
    """Positionally, as its callers may; both with sizes of every kind."""
    x, w, dy = tensors(case)
    options = [case.options.get(k, d) for k, d in (("stride", 1), ("padding", 0), ("dilation", 1), ("groups", 1))]
    peer_input, peer_weight = (getattr(torch.nn.grad, f"conv{case.n}d_{kind}") for kind in ("input", "weight"))
    want = {"x": peer_input(x.shape, w, dy, *options), "w": peer_weight(x, w.shape, dy, *options)[None]}
    for kind in (tuple, list, torch.Size):
        got = case.ours("input")(kind(x.shape), w, dy, *options)
        assert_same({"x": got, "w": case.ours("weight")(x, kind(w.shape), dy, *options)[None]}, want, rtol=1e-12)


@pytest.mark.parametrize("name", [n for n in dir(torch.nn.grad) if n.startswith("conv")])
def test_the_signatures_are_those_of_torch_nn_grad(name: str) -> None:
    def described(fn: Callable[..., object]) -> list[tuple[str, object, object]]:
        return [(p.name, p.default, p.kind) for p in inspect.signature(fn).parameters.values()]

    assert described(getattr(grad, name)) == described(getattr(torch.nn.grad, name))


def test_the_input_size_is_not_guessed() -> None:
    """Four inputs with one size of output: what the kernel never reached has gradient zero."""
    w, dy = torch.ones(1, 1, 2), torch.ones(1, 1, 2)
    found = [grad.conv1d_input((1, 1, size), w, dy, stride=4).flatten().tolist() for size in (6, 7, 8, 9)]
    assert found == [[1, 1, 0, 0, 1, 1] + [0] * more for more in range(4)]


@pytest.mark.parametrize("options", [{"padding": 1}, {"stride": 2}, {"padding": "same"}], ids=str)
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_complex_gradients_are_those_of_autograd(family: str, n: int, options: dict[str, Any]) -> None:
    if family == "conv_transpose" and "same" in options.values():
        options = {"output_padding": 1, "stride": 2}
    case = Case(n, family, batch=2, space=(5, 4, 4), options=options, dtype=torch.complex128)
    check(case)
    x, w, dy = (t.conj() for t in tensors(case))  # conjugates that are only marked so
    assert_same(every_gradient(case, x, w, dy), by_autograd(case, x, w, dy), rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64], ids=str)
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_narrow_dtypes_come_close_to_wide_ones(family: str, n: int, dtype: torch.dtype) -> None:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    case = Case(n, family, batch=2, space=(5, 4, 4), options={"stride": 2, "padding": 1}, dtype=wide)
    x, w, dy = (t.to(dtype) for t in tensors(case))
    got = every_gradient(case, x, w, dy)
    assert {g.dtype for g in got.values()} == {dtype}
    want = by_autograd(case, x.to(wide), w.to(wide), dy.to(wide))
    assert_same({k: g.to(wide) for k, g in got.items()}, want, rtol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "expanded", "every_second"])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_memory_layout(family: str, n: int, layout: str) -> None:
    case = Case(n, family, space=(6, 6, 6), kernel=(3, 3, 3), options={"padding": 1, "groups": 2})
    x, w, dy = tensors(case)
    if layout == "channels_last":
        x, w, dy = (t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (x, w, dy))
    elif layout == "transposed":
        x, w, dy = (t.transpose(0, -1).contiguous().transpose(0, -1) for t in (x, w, dy))
    elif layout == "expanded":
        x, dy = x[:1].expand_as(x), dy[:, :1, :1].expand_as(dy)
    else:
        x, w, dy = (t.repeat_interleave(2, -1)[..., ::2] for t in (x, w, dy))
    assert not x.is_contiguous()
    assert_same(every_gradient(case, x, w, dy), by_autograd(case, x.clone(), w.clone(), dy.clone()), rtol=1e-9)


def test_an_empty_batch_gives_zeros_of_the_right_shape() -> None:
    x, w, dy = torch.ones(0, 2, 5), torch.ones(3, 2, 2), torch.ones(0, 3, 4)
    assert grad.conv1d_input((0, 2, 5), w, dy).shape == (0, 2, 5)
    assert torch.equal(grad.conv1d_weight(x, w.shape, dy), torch.zeros(3, 2, 2))
    assert grad.conv1d_weight_per_sample(x, w.shape, dy).shape == (0, 3, 2, 2)
    assert torch.equal(grad.conv1d_bias(dy), torch.zeros(3))
    assert grad.conv1d_bias_per_sample(dy).shape == (0, 3)


@pytest.mark.parametrize("empty", ["no_inputs", "no_outputs", "no_channels", "no_space"])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_without_channels_or_space_gradients_are_zeros(family: str, n: int, empty: str) -> None:
    """Most of these have no forward pass in PyTorch."""
    into, out = {"no_inputs": (0, 6), "no_outputs": (4, 0), "no_channels": (0, 0)}.get(empty, (4, 6))
    inner, outer = (0, 2) if empty == "no_space" else (5, 3)
    if family == "conv_transpose":
        options, outer = {"padding": 0}, inner + 2
    else:
        options = {"padding": 2} if empty == "no_space" else {"padding": 0}
    case = Case(n, family, 2, (into, out), (inner,) * 3, (3, 3, 3), options)
    x, w, dy = case.random(*case.input_size), case.random(*case.weight_size), case.random(2, out, *[outer] * n)
    got = every_gradient(case, x, w, dy)
    want = {"input": x, "weight": w[None], "weight_per_sample": x.new_zeros(2, *w.shape)}
    assert_same({k: got[k] for k in want}, {k: torch.zeros_like(v) for k, v in want.items()})


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(1, options={"stride": 2}),
        Case(1, kernel=(2,), options={"padding": "same"}),
        Case(2, options={"padding": 1, "groups": 2}),
        Case(1, "conv_transpose", options={"stride": 2, "output_padding": 1}),
    ],
    ids=str,
)
def test_summed_gradients_can_be_differentiated_again(case: Case, dtype: torch.dtype) -> None:
    small = Case(case.n, case.family, 2, (2, 2), (4, 3), case.kernel, case.options, dtype)
    x, w, dy = (t.requires_grad_() for t in tensors(small))
    of_input, of_weight = small.ours("input"), small.ours("weight")
    assert torch.autograd.gradcheck(lambda w, dy: of_input(x.shape, w, dy, **case.options), (w, dy))
    assert torch.autograd.gradcheck(lambda x, dy: of_weight(x, w.shape, dy, **case.options), (x, dy))
    assert not small.ours("weight_per_sample")(x, w.shape, dy, **case.options).requires_grad


def test_numbers_of_every_kind() -> None:
    """A sequence of one stands for all dims, as in PyTorch; NumPy's integers are integers."""
    case = Case(2, options={"stride": 2, "padding": 1, "dilation": 1, "groups": 2})
    x, w, dy = tensors(case)
    want = every_gradient(case, x, w, dy)
    for one in (lambda v: [v], lambda v: (v, v), np.int64, lambda v: np.array([v, v]), lambda v: torch.Size([v])):
        options = {k: one(v) if k != "groups" else v for k, v in case.options.items()}
        assert_same(every_gradient(Case(2, options=options), x, w, dy), want, rtol=1e-12)
    sizes = np.array(x.shape), torch.tensor(x.shape)
    for size in sizes:
        assert_same([grad.conv2d_input(size, w, dy, **case.options)], {"0": want["input"]}, rtol=1e-12)


def test_under_vmap_and_without_data() -> None:
    x, dy = torch.randn(5, 2, 3, 6, dtype=torch.float64), torch.randn(5, 2, 4, 4, dtype=torch.float64)
    got = torch.func.vmap(lambda x, dy: grad.conv1d_weight(x, (4, 3, 3), dy))(x, dy)
    assert_same([got], {"0": torch.stack([grad.conv1d_weight(a, (4, 3, 3), b) for a, b in zip(x, dy, strict=True)])})
    meta = torch.empty(2, 4, 4, device="meta")
    assert grad.conv1d_input((2, 3, 6), torch.empty(4, 3, 3, device="meta"), meta).shape == (2, 3, 6)


def test_a_compiler_follows_the_checks() -> None:
    x, w, dy = tensors(Case(2, options={"stride": 2}))
    follow = torch.compile(
        lambda x, w, dy: (grad.conv2d_input(x.shape, w, dy, stride=2), grad.conv2d_weight(x, w.shape, dy, stride=2)),
        fullgraph=True,
        backend="eager",
    )
    want = grad.conv2d_input(x.shape, w, dy, stride=2), grad.conv2d_weight(x, w.shape, dy, stride=2)
    assert_same(follow(x, w, dy), dict(zip("01", want, strict=True)), rtol=1e-12)
