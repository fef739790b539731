"""A convolution known by its sizes and options: whether they agree, and the gradients it has."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.convolution import Geometry, weight_per_sample, weight_summed
from ..kernels.library import input_gradient

Size: TypeAlias = Sequence[int]
Ints: TypeAlias = int | Sequence[int]
Padding: TypeAlias = int | Sequence[int] | str

_SPACE = {1: "L", 2: "H, W", 3: "D, H, W"}


@dataclass(frozen=True, slots=True)
class Problem:
    """A convolution whose sizes agree. `far` zeros follow the input in each spatial dim, on top of the padding."""

    input_size: tuple[int, ...]
    weight_size: tuple[int, ...]
    geometry: Geometry
    far: tuple[int, ...]

    def __str__(self) -> str:
        g, far = self.geometry, f" and {self.far} more at the far ends" if any(self.far) else ""
        return (
            f"an input of {self.input_size} with a weight of {self.weight_size}, stride={g.stride}, "
            f"padding={g.padding}{far}, dilation={g.dilation}, groups={g.groups}"
            + (f", output_padding={g.output_padding}" if g.transposed else "")
        )

    @property
    def padded_size(self) -> tuple[int, ...]:
        """The input's size with the zeros that only follow it."""
        space = zip(self.input_size[2:], self.far, strict=True)
        return *self.input_size[:2], *(size + more for size, more in space)

    def input_gradient(self, weight: Tensor, grad_output: Tensor) -> Tensor:
        """The gradient of the input, without the zeros that followed it."""
        if 0 in (*self.input_size, *self.weight_size, *grad_output.shape):
            return grad_output.new_zeros(self.input_size)

        def product(w: Tensor, dy: Tensor) -> Tensor:
            return input_gradient(dy, w, self.padded_size, self.geometry)

        grad = _times_conjugate(product, weight, grad_output)
        for dim, (size, more) in enumerate(zip(self.input_size[2:], self.far, strict=True), start=2):
            grad = grad.narrow(dim, 0, size) if more else grad
        return grad

    def weight_gradient(self, x: Tensor, grad_output: Tensor, per_sample: bool) -> Tensor:
        """The gradient of the weight, of each sample or summed over them."""
        if any(self.far):
            x = F.pad(x, [pad for more in reversed(self.far) for pad in (0, more)])
        formula = weight_per_sample if per_sample else weight_summed

        def product(x: Tensor, dy: Tensor) -> Tensor:
            return formula(x.unsqueeze(1), dy.unsqueeze(1), self.weight_size, self.geometry)

        return _times_conjugate(product, x, grad_output)


def _times_conjugate(product: Callable[[Tensor, Tensor], Tensor], factor: Tensor, dy: Tensor) -> Tensor:
    """product(factor*, dy) by real products, as complex gradients are defined."""
    if not dy.is_complex():
        return product(factor, dy)
    real = product(factor.real, dy.real) + product(factor.imag, dy.imag)
    return torch.complex(real, product(factor.real, dy.imag) - product(factor.imag, dy.real))


@dataclass(frozen=True, slots=True)
class Caller:
    """The function that was called: its name, for errors, and its number of spatial dims."""

    name: str
    dims: int

    def plain(
        self,
        input_size: Size,
        weight_size: Size,
        grad_output: Tensor,
        stride: Ints,
        padding: Padding,
        dilation: Ints,
        groups: int,
    ) -> Problem:
        """The convolution y[o, t] = Σ w[o, i, k] · x[i, s·t + δ·k] that has this gradient at its output."""
        input_size, weight_size, groups = self._sizes(input_size, weight_size, groups)
        steps, spacing = self._per_dim("stride", stride, 1), self._per_dim("dilation", dilation, 1)
        near, far = self._padding(padding, weight_size[2:], steps, spacing)
        geometry = Geometry(steps, near, spacing, False, (0,) * self.dims, groups)
        problem = Problem(input_size, weight_size, geometry, far)
        self._divisible("weight_size[0], the output channels,", weight_size[0], groups)
        if input_size[1] != weight_size[1] * groups:
            wanted = (input_size[0], weight_size[1] * groups, *input_size[2:])
            raise self._mismatch("input", wanted, input_size, f"a weight of {weight_size} with {groups=} reads")
        space = geometry.output_size(problem.padded_size[2:], weight_size[2:])
        self._output(grad_output, (input_size[0], weight_size[0], *space), problem)
        return problem

    def transposed(
        self,
        input_size: Size,
        weight_size: Size,
        grad_output: Tensor,
        stride: Ints,
        padding: Ints,
        output_padding: Ints,
        groups: int,
        dilation: Ints,
    ) -> Problem:
        """The transposed convolution y[o, s·t + δ·k] += w[i, o, k] · x[i, t] that has this gradient at its output."""
        input_size, weight_size, groups = self._sizes(input_size, weight_size, groups)
        steps, spacing = self._per_dim("stride", stride, 1), self._per_dim("dilation", dilation, 1)
        near, more = self._per_dim("padding", padding, 0), self._per_dim("output_padding", output_padding, 0)
        if any(extra >= max(s, d) for extra, s, d in zip(more, steps, spacing, strict=True)):
            raise self._wrong(f"output_padding={more} must be smaller than stride={steps} or dilation={spacing}")
        geometry = Geometry(steps, near, spacing, True, more, groups)
        problem = Problem(input_size, weight_size, geometry, (0,) * self.dims)
        self._divisible("weight_size[0], the input channels,", weight_size[0], groups)
        if input_size[1] != weight_size[0]:
            wanted = (input_size[0], weight_size[0], *input_size[2:])
            raise self._mismatch("input", wanted, input_size, f"a weight of {weight_size} reads")
        reach = geometry.read_size(input_size[2:], weight_size[2:])
        space = tuple(size - 2 * pad + extra for size, pad, extra in zip(reach, near, more, strict=True))
        self._output(grad_output, (input_size[0], weight_size[1] * groups, *space), problem)
        return problem

    def shape(self, name: str, value: Tensor, grad_output: Tensor) -> tuple[int, ...]:
        """The shape of a tensor that must be of one kind with grad_output."""
        self._check_tensor(name, value)
        self._check_tensor("grad_output", grad_output)
        if value.dtype != grad_output.dtype or value.device != grad_output.device:
            wanted, got = (f"{t.dtype} on {t.device}" for t in (grad_output, value))
            raise TypeError(f"{self.name}: {name} must be {wanted} like grad_output, got {got}")
        return tuple(value.shape)

    def output_shape(self, grad_output: Tensor) -> tuple[int, ...]:
        """The shape of what must be a batch of gradients at outputs."""
        self._check_tensor("grad_output", grad_output)
        if grad_output.ndim != self.dims + 2:
            raise self._not_batched("grad_output", tuple(grad_output.shape), "C_out")
        return tuple(grad_output.shape)

    def _check_tensor(self, name: str, value: Tensor) -> None:
        if not isinstance(value, Tensor):
            raise TypeError(f"{self.name}: {name} must be a tensor, got {type(value).__name__}")
        if not (value.is_floating_point() or value.is_complex()):
            raise TypeError(f"{self.name}: {name} must be floating-point or complex, got {value.dtype}")

    def _sizes(self, input_size: Size, weight_size: Size, groups: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        inputs, weights = self._whole("input_size", input_size), self._whole("weight_size", weight_size)
        if len(inputs) != self.dims + 2:
            raise self._not_batched("input", inputs, "C_in")
        if len(weights) != self.dims + 2 or min(inputs) < 0 or min(weights[:2]) < 0 or min(weights[2:]) < 1:
            raise self._wrong(
                f"sizes must be (B, C_in, {_SPACE[self.dims]}) and, of a weight, {self.dims + 2} numbers with a kernel "
                f"of 1 or more, got an input of {inputs} and a weight of {weights}"
            )
        (count,) = self._whole("groups", (groups,))
        if count < 1:
            raise self._wrong(f"groups must be 1 or more, got {count}")
        return inputs, weights, count

    def _padding(
        self, padding: Padding, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Zeros on both sides, and zeros that follow the far end besides: "same" puts an odd one there."""
        none = (0,) * self.dims
        if not isinstance(padding, str):
            return self._per_dim("padding", padding, 0), none
        if padding == "valid":
            return none, none
        if padding != "same":
            raise self._wrong(f"padding must be numbers, 'same' or 'valid', got {padding!r}")
        if any(s != 1 for s in stride):
            raise self._wrong(f"padding='same' needs stride 1, got stride={tuple(stride)}")
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple(total // 2 for total in totals), tuple(total % 2 for total in totals)

    def _per_dim(self, name: str, value: Padding, least: int) -> tuple[int, ...]:
        """One number per spatial dim; one alone, also in a sequence, stands for all of them."""
        numbers = self._whole(name, value if isinstance(value, Iterable) else (value,))
        if len(numbers) not in (1, self.dims):
            raise self._wrong(f"{name} must be a number or {self.dims} numbers, got {len(numbers)}: {numbers}")
        if min(numbers) < least:
            raise self._wrong(f"{name} must be {least} or more, got {value!r}")
        return numbers * self.dims if len(numbers) == 1 else numbers

    def _whole(self, name: str, value: Iterable[object]) -> tuple[int, ...]:
        """These as ints; sizes that a compiler traces stay symbols."""
        if isinstance(value, Tensor) and value.ndim != 1:
            got = f"a tensor of shape {tuple(value.shape)}"
            raise TypeError(f"{self.name}: {name} must be whole numbers, got {got}; pass the numbers, as of its shape")
        try:
            return tuple(n if isinstance(n, (int, torch.SymInt)) else operator.index(n) for n in value)  # type: ignore[misc, arg-type]
        except TypeError:
            raise TypeError(f"{self.name}: {name} must be whole numbers, got {value!r}") from None

    def _divisible(self, what: str, channels: int, groups: int) -> None:
        if channels % groups:
            raise self._wrong(f"{what} must be divisible by groups={groups}, got {channels}")

    def _output(self, grad_output: Tensor, size: tuple[int, ...], problem: Problem) -> None:
        """Raise unless there is an output, of this size, and grad_output has it."""
        got = self.output_shape(grad_output)
        if min(size[2:]) < 1:
            raise self._wrong(f"{problem} has no output: its size would be {size}; grad_output has shape {got}")
        if got != size:
            raise self._mismatch("grad_output", size, got, f"{problem} gives")

    def _not_batched(self, name: str, got: tuple[int, ...], channels: str) -> ValueError:
        return self._wrong(
            f"{name} must be batched, (B, {channels}, {_SPACE[self.dims]}), so {self.dims + 2} dims, "
            f"got {len(got)}: {got}; a single image has a batch of 1"
        )

    def _mismatch(self, name: str, wanted: tuple[int, ...], got: tuple[int, ...], origin: str) -> ValueError:
        return self._wrong(f"{name} must have shape {wanted}, got {got}: {origin} that shape")

    def _wrong(self, text: str) -> ValueError:
        return ValueError(f"{self.name}: {text}")
