"""`persample.nn.grad` against autograd through the forward pass, and against `torch.nn.grad`."""

from __future__ import annotations

import doctest
import inspect
import itertools
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from persample.nn import grad
from tests.reference import assert_same, definition

FAMILIES = ["conv", "conv_transpose"]
KINDS = ["input", "weight", "weight_per_sample", "bias", "bias_per_sample"]
NAMES = [f"{family}{n}d_{kind}" for family in FAMILIES for n in (1, 2, 3) for kind in KINDS]


@dataclass(frozen=True)
class Case:
    """A convolution to be differentiated."""

    n: int
    family: str = "conv"
    batch: int = 3
    channels: tuple[int, int] = (4, 6)
    space: tuple[int, ...] = (8, 7, 6)
    kernel: tuple[int, ...] = (3, 2, 2)
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        options = ",".join(f"{k}={v}" for k, v in self.options.items()).replace(" ", "")
        return f"{self.family}{self.n}d-B{self.batch}-{'x'.join(map(str, self.space[: self.n]))}-{options}"

    @property
    def input_size(self) -> tuple[int, ...]:
        return (self.batch, self.channels[0], *self.space[: self.n])

    @property
    def weight_size(self) -> tuple[int, ...]:
        into, out = self.channels if self.family == "conv_transpose" else self.channels[::-1]
        return (into, out // self.options.get("groups", 1), *self.kernel[: self.n])

    def random(self, *size: int) -> Tensor:
        return torch.randn(*size, dtype=self.dtype)

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using padding='same' with even kernel lengths")
            return getattr(F, f"{self.family}{self.n}d")(x, w, b, **self.options)

    def ours(self, kind: str) -> Callable[..., Tensor]:
        return getattr(grad, f"{self.family}{self.n}d_{kind}")


def every_gradient(case: Case, x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """What the five functions give, each as a stack."""
    return {
        "input": case.ours("input")(x.shape, w, dy, **case.options),
        "weight": case.ours("weight")(x, w.shape, dy, **case.options)[None],
        "weight_per_sample": case.ours("weight_per_sample")(x, w.shape, dy, **case.options),
        "bias": case.ours("bias")(dy)[None],
        "bias_per_sample": case.ours("bias_per_sample")(dy),
    }


def by_autograd(case: Case, x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The same through the forward pass."""
    b = dy.new_zeros(dy.shape[1])
    x, w, b = (t.detach().requires_grad_() for t in (x, w, b))
    y = case.forward(x, w, b)
    whole = torch.autograd.grad(y, (x, w, b), dy, retain_graph=True)
    product = y * dy.conj()
    each = definition((product.real if dy.is_complex() else product).flatten(1).sum(1), {"w": w, "b": b})
    return dict(zip(KINDS, (whole[0], whole[1][None], each["w"], whole[2][None], each["b"]), strict=True))


def tensors(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and a gradient at the output."""
    torch.manual_seed(0)
    x, w = case.random(*case.input_size), case.random(*case.weight_size)
    return x, w, case.random(*case.forward(x, w).shape)


def check(case: Case, rtol: float = 1e-9) -> None:
    x, w, dy = tensors(case)
    assert_same(every_gradient(case, x, w, dy), by_autograd(case, x, w, dy), rtol=rtol)


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


X, W, DY = torch.zeros(2, 4, 8, 7), torch.zeros(6, 4, 3, 2), torch.zeros(2, 6, 6, 6)
TW = torch.zeros(4, 6, 3, 2)
WRONG_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"stride": 0}, ValueError, "stride must be 1 or more, got 0"),
    ({"stride": (1, -2)}, ValueError, r"stride must be 1 or more, got \(1, -2\)"),
    ({"stride": (1, 1, 1)}, ValueError, r"stride must be a number or 2 numbers, got 3: \(1, 1, 1\)"),
    ({"stride": ()}, ValueError, r"stride must be a number or 2 numbers, got 0: \(\)"),
    ({"stride": 1.0}, TypeError, r"stride must be whole numbers, got \(1.0,\)"),
    ({"stride": "same"}, TypeError, "stride must be whole numbers, got 'same'"),
    ({"stride": None}, TypeError, r"stride must be whole numbers, got \(None,\)"),
    ({"dilation": 0}, ValueError, "dilation must be 1 or more, got 0"),
    ({"padding": -1}, ValueError, "padding must be 0 or more, got -1"),
    ({"padding": (1, 1, 1)}, ValueError, r"padding must be a number or 2 numbers, got 3"),
    ({"groups": 0}, ValueError, "groups must be 1 or more, got 0"),
    ({"groups": (1, 1)}, TypeError, "groups must be whole numbers, got"),
]


@pytest.mark.parametrize("kind", ["input", "weight", "weight_per_sample"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("options", "error", "text"), WRONG_OPTIONS, ids=lambda v: str(v) if isinstance(v, dict) else ""
)
def test_wrong_options(family: str, kind: str, options: dict[str, Any], error: type[Exception], text: str) -> None:
    w = TW if family == "conv_transpose" else W
    arguments = (X.shape, w, DY) if kind == "input" else (X, w.shape, DY)
    name = f"{family}2d_{kind}"
    with pytest.raises(error, match=f"^{name}: {text}"):
        getattr(grad, name)(*arguments, **options)


@pytest.mark.parametrize(
    ("name", "arguments", "options", "text"),
    [
        (
            "conv2d_input",
            (X.shape, W, DY[:, :, :5]),
            {},
            r"shape \(2, 6, 6, 6\), got \(2, 6, 5, 6\): an input of \(2, 4, 8",
        ),
        ("conv2d_input", ((2, 4, 9, 7), W, DY), {}, r"grad_output must have shape \(2, 6, 7, 6\), got \(2, 6, 6, 6\)"),
        ("conv2d_input", ((3, 4, 8, 7), W, DY), {}, r"grad_output must have shape \(3, 6, 6, 6\), got \(2, 6, 6, 6\)"),
        ("conv2d_input", ((2, 5, 8, 7), W, DY), {}, r"input must have shape \(2, 4, 8, 7\), got \(2, 5, 8, 7\)"),
        (
            "conv2d_input",
            (X.shape[1:], W, DY),
            {},
            r"input must be batched, \(B, C_in, H, W\), so 4 dims, got 3: \(4, 8",
        ),
        ("conv2d_input", ((-2, 4, 8, 7), W, DY), {}, r"sizes must be .* got an input of \(-2, 4, 8, 7\)"),
        ("conv2d_weight", (X[0], W.shape, DY), {}, r"input must be batched, .* got 3: \(4, 8, 7\); a single image"),
        (
            "conv2d_weight",
            (X, W.shape, DY[0]),
            {},
            r"grad_output must be batched, \(B, C_out, H, W\), .* got 3: \(6, 6, 6\)",
        ),
        (
            "conv2d_weight",
            (X, W.shape, DY[:, :5]),
            {},
            r"grad_output must have shape \(2, 6, 6, 6\), got \(2, 5, 6, 6\)",
        ),
        ("conv2d_weight", (X, (6, 4, 3), DY), {}, r"of a weight, 4 numbers .* got an .* \(2, 4, 8, 7\) .* \(6, 4, 3\)"),
        ("conv2d_weight", (X, (6, 4, 3, 0), DY), {}, r"a kernel of 1 or more, got .* weight of \(6, 4, 3, 0\)"),
        ("conv2d_weight", (X, (6, -4, 3, 2), DY), {}, r"got .* weight of \(6, -4, 3, 2\)"),
        ("conv2d_weight", (X, W.shape, DY), {"groups": 2}, r"shape \(2, 8, 8, 7\), got \(2, 4, 8, 7\): .* groups=2"),
        (
            "conv2d_weight",
            (X, (6, 1, 3, 2), DY),
            {"groups": 4},
            r"output channels, must be divisible by groups=4, got 6",
        ),
        (
            "conv2d_weight",
            (X, (6, 4, 9, 2), DY),
            {},
            r"no output: its size would be \(2, 6, 0, 6\); grad_output .* \(2, 6",
        ),
        ("conv2d_weight", (X, W.shape, DY), {"padding": "reflect"}, "numbers, 'same' or 'valid', got 'reflect'"),
        (
            "conv2d_weight",
            (X, W.shape, DY),
            {"padding": "same", "stride": 2},
            r"'same' needs stride 1, got stride=\(2, 2\)",
        ),
        (
            "conv2d_weight",
            (X, W.shape, DY),
            {"padding": "same"},
            r"\(2, 6, 8, 7\), got .* and \(0, 1\) more at the far ends",
        ),
        (
            "conv1d_input",
            (X.shape, W, DY),
            {},
            r"input must be batched, \(B, C_in, L\), so 3 dims, got 4: \(2, 4, 8, 7\)",
        ),
        (
            "conv3d_bias",
            (DY,),
            {},
            r"grad_output must be batched, \(B, C_out, D, H, W\), so 5 dims, got 4: \(2, 6, 6, 6\)",
        ),
        ("conv2d_bias_per_sample", (DY[0],), {}, r"grad_output must be batched, .* got 3: \(6, 6, 6\)"),
        (
            "conv_transpose2d_input",
            (X.shape, TW, DY),
            {},
            r"shape \(2, 6, 10, 8\), got \(2, 6, 6, 6\): .* output_padding=",
        ),
        ("conv_transpose2d_input", (X.shape, W, DY), {}, r"input must have shape \(2, 6, 8, 7\), got \(2, 4, 8, 7\)"),
        (
            "conv_transpose2d_weight",
            (X, TW.shape, DY),
            {"groups": 3},
            r"input channels, must be divisible by groups=3, got 4",
        ),
        (
            "conv_transpose2d_weight",
            (X, TW.shape, DY),
            {"padding": 9},
            r"no output: its size would be \(2, 6, -8, -10\)",
        ),
        (
            "conv_transpose2d_weight",
            (X, TW.shape, DY),
            {"output_padding": 1},
            r"\(1, 1\) must be smaller than stride=\(1, 1\)",
        ),
        (
            "conv_transpose2d_weight",
            (X, TW.shape, DY),
            {"output_padding": -1},
            "output_padding must be 0 or more, got -1",
        ),
    ],
)
def test_wrong_shapes(name: str, arguments: tuple[Any, ...], options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: .*{text}"):
        getattr(grad, name)(*arguments, **options)


@pytest.mark.parametrize(
    ("name", "arguments", "options", "text"),
    [
        ("conv2d_weight", (X, W, DY), {}, r"weight_size must be whole numbers, got a tensor of shape \(6, 4, 3, 2\)"),
        ("conv2d_input", (X.shape, W.shape, DY), {}, "weight must be a tensor, got Size"),
        ("conv2d_input", (X.shape, W, None), {}, "grad_output must be a tensor, got NoneType"),
        ("conv2d_bias", (3,), {}, "grad_output must be a tensor, got int"),
        (
            "conv2d_input",
            (X.shape, W.double(), DY),
            {},
            "weight must be torch.float32 on cpu .* got torch.float64 on cpu",
        ),
        (
            "conv2d_weight",
            (X.to("meta"), W.shape, DY),
            {},
            "input must be torch.float32 on cpu .* got torch.float32 on meta",
        ),
        (
            "conv2d_weight",
            (X.long(), W.shape, DY.long()),
            {},
            "input must be floating-point or complex, got torch.int64",
        ),
        ("conv2d_input", ((2, 4, 8.0, 7), W, DY), {}, r"input_size must be whole numbers, got \(2, 4, 8.0, 7\)"),
        ("conv2d_input", (8, W, DY), {}, "input_size must be whole numbers, got 8"),
        (
            "conv_transpose2d_weight",
            (X, TW.shape, DY),
            {"padding": "same"},
            "padding must be whole numbers, got 'same'",
        ),
    ],
)
def test_wrong_types(name: str, arguments: tuple[Any, ...], options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}: {text}"):
        getattr(grad, name)(*arguments, **options)


def test_missing_and_unknown_arguments_name_the_function() -> None:
    with pytest.raises(TypeError, match=r"^convNd_input\(\) missing 1 required positional argument: 'grad_output'"):
        grad.conv2d_input(X.shape, W)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^conv_transposeNd_weight\(\) got an unexpected keyword argument 'strides'"):
        grad.conv_transpose1d_weight(X, W.shape, DY, strides=1)  # type: ignore[call-arg]


def test_every_function_is_public() -> None:
    assert sorted(grad.__all__) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_function_is_documented(name: str) -> None:
    fn = getattr(grad, name)
    doc = inspect.getdoc(fn) or ""
    assert doc.splitlines()[0].endswith(".")
    assert "Returns:" in doc
    assert "Nd" not in doc
    assert "* N" not in doc
    assert re.findall(r"^    (\w+): ", doc, re.MULTILINE) == list(inspect.signature(fn).parameters)
    assert len(doctest.DocTestParser().get_examples(doc)) >= 2
    assert pickle.loads(pickle.dumps(fn)) is fn
