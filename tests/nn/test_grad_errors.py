"""What `persample.nn.grad` refuses, and what its functions say of themselves."""

from __future__ import annotations

import doctest
import inspect
import pickle
import re
from typing import Any

import pytest
import torch

from persample.nn import grad
from tests.nn.convolutions import FAMILIES, NAMES

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
