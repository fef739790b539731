"""Every kernel × every geometry against autograd, one sample at a time."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from persample.kernels.convolution import (
    KERNELS,
    Choice,
    Geometry,
    Sizes,
    applicable,
    choice,
    choose,
    explain_choice,
    patches,
    use_costs,
    use_kernel,
    weight_per_sample,
)
from persample.kernels.convolution.costs import RATES, rates_for
from tests.kernels.conv_cases import CASES, Case, case

EACH_KERNEL = [
    pytest.param(c, kernel, id=f"{name}-{kernel}") for name, c in CASES.items() for kernel in applicable(c.weight_size)
]


def assert_exact(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("samples", [0, 1, 3])
@pytest.mark.parametrize(("c", "kernel"), EACH_KERNEL)
def test_matches_autograd(c: Case, kernel: str, samples: int, images: int) -> None:
    x, dy = c.tensors(samples, images)
    actual = weight_per_sample(x, dy, c.weight_size, c.geometry, kernel=kernel)
    assert_exact(actual, c.reference(x, dy))


@pytest.mark.parametrize(("c", "kernel"), EACH_KERNEL)
def test_float32_takes_other_library_code_and_agrees(c: Case, kernel: str) -> None:
    x, dy = c.tensors(8, 2, torch.float32)
    actual = weight_per_sample(x, dy, c.weight_size, c.geometry, kernel=kernel)
    torch.testing.assert_close(actual.double(), c.reference(x, dy), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("c", CASES.values(), ids=CASES)
def test_chosen_kernel(c: Case) -> None:
    x, dy = c.tensors(5, 1)
    assert_exact(weight_per_sample(x, dy, c.weight_size, c.geometry), c.reference(x, dy))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", applicable(CASES["2d-pad"].weight_size))
def test_half_precision_is_rounded_once(kernel: str, dtype: torch.dtype) -> None:
    c = CASES["2d-pad"]
    x, dy = c.tensors(3, 2, dtype)
    actual = weight_per_sample(x, dy, c.weight_size, c.geometry, kernel=kernel)
    assert actual.dtype == dtype
    rounding = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(actual.double(), c.reference(x, dy), rtol=1.01 * rounding, atol=1e-4)


def channels_last(x: Tensor) -> Tensor:
    return x.movedim(2, -1).contiguous().movedim(-1, 2)


def images_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def every_second(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=-1)[..., ::2]


def flipped_twice(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


@pytest.mark.parametrize("arrange", [channels_last, images_first, every_second, flipped_twice])
@pytest.mark.parametrize("name", ["2d-pad", "2d-stride-remainder", "2d-groups", "2d-pointwise", "3d", "2d-transposed"])
def test_any_strides(name: str, arrange: Callable[[Tensor], Tensor]) -> None:
    c = CASES[name]
    x, dy = c.tensors(3, 2)
    expected = c.reference(x, dy)
    for kernel in applicable(c.weight_size):
        for x_, dy_ in [(arrange(x), dy), (x, arrange(dy)), (arrange(x), arrange(dy))]:
            assert_exact(weight_per_sample(x_, dy_, c.weight_size, c.geometry, kernel=kernel), expected)


@pytest.mark.parametrize("name", ["2d-pad", "2d-groups", "1d-transposed", "3d-stride"])
def test_expanded_cotangent(name: str) -> None:
    """What `y.sum()` sends back: one number with strides of zero."""
    c = CASES[name]
    x, dy = c.tensors(3, 2)
    ones = torch.ones((), dtype=x.dtype).expand(dy.shape)
    for kernel in applicable(c.weight_size):
        actual = weight_per_sample(x, ones, c.weight_size, c.geometry, kernel=kernel)
        assert_exact(actual, c.reference(x, ones))


@pytest.mark.parametrize("name", ["2d-pad", "2d-groups-stride", "2d-depthwise", "3d", "1d-crop-beyond-stride"])
def test_batch_in_several_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    c = CASES[name]
    monkeypatch.setattr(patches, "CACHE_BYTES", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    x, dy = c.tensors(5, 2)
    actual = weight_per_sample(x, dy, c.weight_size, c.geometry, kernel="unfold")
    assert_exact(actual, c.reference(x, dy))


@pytest.mark.parametrize("name", ["2d-pad", "2d-groups", "2d-pointwise", "1d-transposed"])
@pytest.mark.parametrize("layout", ["contiguous", "slice", "float32"])
def test_out(name: str, layout: str) -> None:
    c = CASES[name]
    x, dy = c.tensors(3, 1)
    size = math.prod(c.weight_size)
    for kernel in applicable(c.weight_size):
        wide = torch.full((3, size + 7), math.nan, dtype=torch.float64)
        out = {
            "contiguous": torch.full((3, *c.weight_size), math.nan, dtype=torch.float64),
            "slice": wide[:, 3 : 3 + size].view(3, *c.weight_size),
            "float32": torch.full((3, *c.weight_size), math.nan),
        }[layout]
        actual = weight_per_sample(x, dy, c.weight_size, c.geometry, out=out, kernel=kernel)
        assert actual is out
        assert wide[:, :3].isnan().all()
        assert wide[:, 3 + size :].isnan().all()
        tolerance = 1e-10 if out.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(out.double(), c.reference(x, dy), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kernel", applicable(CASES["2d-pad"].weight_size))
def test_no_images_give_zeros(kernel: str) -> None:
    c = CASES["2d-pad"]
    x, dy = c.tensors(3, 0)
    zeros = torch.zeros(3, *c.weight_size, dtype=x.dtype)
    assert_exact(weight_per_sample(x, dy, c.weight_size, c.geometry, kernel=kernel), zeros)
    out = torch.full_like(zeros, math.nan)
    assert weight_per_sample(x, dy, c.weight_size, c.geometry, out=out, kernel=kernel) is out
    assert_exact(out, zeros)


@pytest.mark.parametrize(("c", "kernel"), EACH_KERNEL)
def test_nan_stays_in_its_sample(c: Case, kernel: str) -> None:
    x, dy = c.tensors(3, 1)
    expected = c.reference(x, dy)
    x[1] = math.nan
    actual = weight_per_sample(x, dy, c.weight_size, c.geometry, kernel=kernel)
    assert actual[1].isnan().any()
    assert_exact(actual[[0, 2]], expected[[0, 2]])


def test_inputs_with_a_graph() -> None:
    c = CASES["2d-pad"]
    x, dy = c.tensors(3, 1)
    for kernel in applicable(c.weight_size):
        actual = weight_per_sample(x.requires_grad_(), dy, c.weight_size, c.geometry, kernel=kernel)
        assert not actual.requires_grad
        assert_exact(actual, c.reference(x, dy))


def test_kernel_that_cannot() -> None:
    c = CASES["2d-stride-divides"]
    x, dy = c.tensors(2, 1)
    with pytest.raises(ValueError, match=r"'pointwise' cannot do this; choose from \('library', 'unfold'\)"):
        weight_per_sample(x, dy, c.weight_size, c.geometry, kernel="pointwise")


def test_out_of_another_shape() -> None:
    c = CASES["2d"]
    x, dy = c.tensors(2, 1)
    with pytest.raises(ValueError, match=r"out has shape \(1, 2\), the per-sample gradients have \(2, 2, 3, 3, 3\)"):
        weight_per_sample(x, dy, c.weight_size, c.geometry, out=torch.empty(1, 2))


@pytest.mark.parametrize("table", RATES)
@pytest.mark.parametrize(
    ("samples", "c", "names"),
    [
        (32, case((32, 32), (3, 3), padding=1, d=32, p=32), {"library", "unfold"}),
        (32, case((32, 32), (3, 3), padding=1, stride=2, d=32, p=64), {"library"}),
        (32, case((8, 8), (3, 3), padding=1, d=128, p=128), {"unfold"}),
        (32, case((4, 4), (3, 3), padding=1, d=256, p=256), {"unfold"}),
        (32, case((16, 16), (3, 3), padding=1, groups=64, d=1, p=1), {"library"}),
        (8, case((56, 56), (7, 7), padding=3, groups=96, d=1, p=1), {"forward"}),
        (32, case((16, 16), (1, 1), d=64, p=128), {"pointwise"}),
    ],
)
def test_choice_is_the_measured_one(samples: int, c: Case, names: set[str], table: str) -> None:
    out_size = c.geometry.output_size(c.size, c.kernel)
    with use_costs(table):
        assert choose(Sizes(samples, 1, c.weight_size, c.size, out_size, c.geometry)) in names


@pytest.mark.parametrize(("table", "name"), [("AVX512", "library"), ("AVX2", "unfold")])
def test_only_avx512_has_library_code_for_dilated_kernels(table: str, name: str) -> None:
    c = case((32, 32), (3, 3), padding=2, dilation=2, d=16, p=16)
    with use_costs(table):
        assert choose(Sizes(64, 1, c.weight_size, c.size, c.size, c.geometry)) == name


def explained() -> Choice:
    c = CASES["2d-pad"]
    return explain_choice(Sizes(3, 1, c.weight_size, c.size, c.size, c.geometry))


@pytest.mark.parametrize("cpu", ["DEFAULT", "NO AVX", "SVE256", "something new"])
def test_a_cpu_that_was_never_measured_is_told_and_taken_for_avx2(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with use_costs("AVX2"):
        fitted = explained()
        monkeypatch.setattr(choice, "_own_cpu", cpu)
        monkeypatch.setattr(choice, "_cpu", rates_for(cpu))
        found = explained()
    assert (found.way, found.milliseconds) == (fitted.way, fitted.milliseconds)
    assert found.costs.startswith(f"AVX2, for want of any fitted to {cpu} (python -m benchmarks.fit_convolutions")


def test_costs_of_this_cpu_and_of_another_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_own_cpu", "AVX2")
    with use_costs("AVX2"):
        own = explained()
        with use_costs("AVX512"):
            other = explained()
        assert explained() == own
    assert (own.costs, other.costs) == ("AVX2", "AVX512, though this CPU is AVX2")
    assert own.milliseconds != other.milliseconds


def test_the_cpu_is_the_one_that_pytorch_sees() -> None:
    code = "from persample.kernels.convolution import choice; print(choice._own_cpu, choice._cpu)"
    for capability in ("default", "avx2"):  # a CPU of another kind has neither, and keeps its own name
        env = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
        ran = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], env=env, text=True, capture_output=True, check=True
        )
        cpu, table = ran.stdout.rsplit(maxsplit=1)
        assert table == rates_for(cpu)
        assert table in RATES


def test_unknown_costs() -> None:
    message = r"no costs were fitted to 'AVX1024'; choose from \('AVX512', 'AVX2'\)"
    with pytest.raises(ValueError, match=message), use_costs("AVX1024"):
        pass


def test_a_kernel_can_be_preferred() -> None:
    c, pointwise = case((4, 4), (3, 3), padding=1, d=256, p=256), case((4, 4), (1, 1))

    def names() -> list[str]:
        return [choose(Sizes(32, 1, each.weight_size, (4, 4), (4, 4), each.geometry)) for each in (c, pointwise)]

    usual = names()
    assert usual == ["unfold", "pointwise"]
    with use_kernel("library"):
        assert names() == ["library", "library"]
        with use_kernel("pointwise"):
            assert names() == usual
        assert names() == ["library", "library"]
    assert names() == usual


def test_a_preferred_kernel_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    for name, kernel in KERNELS.items():
        monkeypatch.setitem(KERNELS, name, lambda *args, _name=name, _run=kernel: ran.append(_name) or _run(*args))
    c = CASES["2d-pad"]
    x, dy = c.tensors(2, 1)
    for name in applicable(c.weight_size):
        with use_kernel(name):
            assert_exact(weight_per_sample(x, dy, c.weight_size, c.geometry), c.reference(x, dy))
    assert ran == list(applicable(c.weight_size))


def test_preference_ends_with_an_error() -> None:
    c = CASES["2d-pad"]
    usual = choose(Sizes(3, 1, c.weight_size, c.size, c.size, c.geometry))
    other = next(name for name in applicable(c.weight_size) if name != usual)
    with pytest.raises(RuntimeError, match="stop"), use_kernel(other):
        raise RuntimeError("stop")
    assert choose(Sizes(3, 1, c.weight_size, c.size, c.size, c.geometry)) == usual


def test_unknown_kernel() -> None:
    with pytest.raises(ValueError, match=r"there is no kernel 'winograd'; choose from"), use_kernel("winograd"):
        pass


@pytest.mark.parametrize("c", CASES.values(), ids=CASES)
@pytest.mark.parametrize("samples", [0, 3])
def test_choice_has_the_least_estimate(c: Case, samples: int) -> None:
    x, dy = c.tensors(samples, 1)
    explained = explain_choice(Sizes.of(x, dy, c.weight_size, c.geometry))
    assert set(explained.milliseconds) == set(applicable(c.weight_size)) - {"pointwise"}
    if math.prod(c.kernel) == 1:
        assert explained.way == "pointwise"
    else:
        assert explained.milliseconds[explained.way] == min(explained.milliseconds.values())


class Copies(TorchDispatchMode):
    """Names of the ops that write tensors, other than products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("clone", "copy_", "constant_pad_nd", "_to_copy"):
            self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_channels_last_is_not_copied_for_products() -> None:
    """Neither side of a pointwise convolution, and not the cotangents of others."""
    pointwise, plain = case((4, 4), (1, 1), d=8, p=8), case((4, 4), (3, 3), padding=1, d=8, p=8)
    for c, kernel, expected in [
        (pointwise, "pointwise", []),
        (plain, "unfold", ["constant_pad_nd", "copy_"]),
    ]:
        x, dy = map(channels_last, c.tensors(3, 1))
        with Copies() as copies:
            actual = weight_per_sample(x, dy, c.weight_size, c.geometry, kernel=kernel)
        assert copies.seen == expected
        assert_exact(actual, c.reference(x, dy))


def test_choice_is_the_same_for_the_exchanged_roles() -> None:
    plain = case((28, 28), (4, 4), stride=2, padding=1, d=8, p=16)
    transposed = case((14, 14), (4, 4), stride=2, padding=1, output_padding=0, d=16, p=8)
    assert plain.weight_size == transposed.weight_size
    there = choose(Sizes(16, 1, plain.weight_size, (28, 28), (14, 14), plain.geometry))
    back = choose(Sizes(16, 1, transposed.weight_size, (14, 14), (28, 28), transposed.geometry))
    assert there == back


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_geometry(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 3), "spatial dims")

    def draw(name: str, low: int, high: int) -> tuple[int, ...]:
        return tuple(data.draw(st.lists(st.integers(low, high), min_size=n, max_size=n), name))

    size, kernel = draw("size", 1, 7), draw("kernel", 1, 4)
    stride, dilation, padding = draw("stride", 1, 3), draw("dilation", 1, 3), draw("padding", 0, 4)
    ends: tuple[int, ...] | None = None
    if data.draw(st.booleans(), "transposed"):
        ends = tuple(min(e, max(s, f) - 1) for e, s, f in zip(draw("ends", 0, 2), stride, dilation, strict=True))
        full = zip(size, stride, dilation, kernel, ends, padding, strict=True)
        outputs = [(i - 1) * s + f * (k - 1) + 1 + e - 2 * pad for i, s, f, k, e, pad in full]
    else:
        full = zip(size, stride, dilation, kernel, padding, strict=True)
        outputs = [(i + 2 * pad - f * (k - 1) - 1) // s + 1 for i, s, f, k, pad in full]
    assume(min(outputs) > 0)
    c = case(
        size,
        kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        output_padding=ends,
        groups=data.draw(st.integers(1, 3), "groups"),
        d=data.draw(st.integers(1, 3), "d"),
        p=data.draw(st.integers(1, 3), "p"),
    )
    x, dy = c.tensors(data.draw(st.integers(0, 4), "samples"), data.draw(st.integers(0, 3), "images"))
    expected = c.reference(x, dy)
    for kernel_name in applicable(c.weight_size):
        assert_exact(weight_per_sample(x, dy, c.weight_size, c.geometry, kernel=kernel_name), expected)


def test_every_kernel_is_tried() -> None:
    assert {kernel for c in CASES.values() for kernel in applicable(c.weight_size)} == set(KERNELS)


def test_measured_kernels_are_timed_once_and_right() -> None:
    geometry = Geometry((1, 1), (1, 1), (1, 1), transposed=False, output_padding=(0, 0), groups=1)
    x, dy = torch.randn(3, 1, 2, 5, 5).double(), torch.randn(3, 1, 4, 5, 5).double()
    want = weight_per_sample(x, dy, (4, 2, 3, 3), geometry)
    sizes = Sizes(3, 1, (4, 2, 3, 3), (5, 5), (5, 5), geometry, torch.float64)
    with use_kernel("measured"):
        torch.testing.assert_close(weight_per_sample(x, dy, (4, 2, 3, 3), geometry), want)
        assert choose(sizes) == choice._fastest[sizes]
        choice._fastest[sizes] = other = "unfold" if choose(sizes) == "library" else "library"  # not timed again
        assert explain_choice(sizes).way == other
        assert weight_per_sample(x[:0], dy[:0], (4, 2, 3, 3), geometry).shape == (0, 4, 2, 3, 3)
    del choice._fastest[sizes]
