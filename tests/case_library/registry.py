"""What a case is, the decorator that registers one, and the few helpers that cases share."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from tests.modes import default_dtype
from tests.reference import Params

Program: TypeAlias = tuple[Params, Callable[[], Tensor]]

REGISTRY: dict[str, Case] = {}


@dataclass(frozen=True)
class Case:
    """One program: `build(B)` makes parameters, fixed data and a function that returns losses (B,)."""

    name: str
    build: Callable[[int], Program]
    dtype: torch.dtype = torch.float64
    batches: tuple[int, ...] = (4, 1, 0)  # the B this program is defined for
    interacts: bool = False  # a loss depends on other samples
    slow_path: bool = False  # no fast rule can exist: a PerformanceWarning is in order
    rtol: float = 1e-8
    zeros: tuple[str, ...] = ()  # parameters whose gradient is meant to be zero throughout
    nodes: tuple[str, ...] = ()  # autograd nodes the case exists for: they must be in its graph

    def __str__(self) -> str:
        return self.name


def case(
    variants: Mapping[str, Mapping[str, Any]] | None = None, **flags: Any
) -> Callable[[Callable[..., Program]], Callable[..., Program]]:
    """Register `fn(B)`, or `fn(B, **kwargs)` once per named variant, under the function's name."""

    def register(fn: Callable[..., Program]) -> Callable[..., Program]:
        for suffix, kwargs in (variants or {"": {}}).items():
            name = f"{fn.__name__}-{suffix}" if suffix else fn.__name__
            if name in REGISTRY:
                raise ValueError(f"two cases are called {name}")
            made = Case(name, partial(fn, **kwargs), **flags)
            REGISTRY[name] = replace(made, build=partial(_build, made))
        return fn

    return register


def _build(made: Case, B: int) -> Program:
    """Build in the case's dtype with its own random numbers; every run of the program repeats them."""
    with _surroundings(made):
        params, program = made.build(B)

    def losses() -> Tensor:
        with _surroundings(made):
            return program()

    return params, losses


def in_half(case: Case, dtype: torch.dtype, *, autocast: bool) -> Callable[[int], Program]:
    """The case's program in half precision: by autocast, or because all its parameters and data have that dtype."""
    made = replace(case.build.args[0], dtype=torch.float32 if autocast else dtype)  # type: ignore[attr-defined]

    def build(B: int) -> Program:
        params, program = _build(made, B)

        def losses() -> Tensor:
            with torch.autocast("cpu", dtype=dtype, enabled=autocast):
                return program()

        return params, losses

    return build


def compiled(case: Case, backend: str, **options: Any) -> Callable[[int], Program]:
    """The case's program, compiled as a whole: whatever the compiler makes of it."""
    made = case.build.args[0]  # type: ignore[attr-defined]

    def build(B: int) -> Program:
        with _surroundings(made):
            params, program = made.build(B)
        fast = torch.compile(program, backend=backend, **options)

        def losses() -> Tensor:
            with _surroundings(made):
                return fast()

        return params, losses

    return build


@contextmanager
def _surroundings(made: Case) -> Iterator[None]:
    """The case's default dtype and seed; PyTorch's own warnings are not what a case is about."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), default_dtype(made.dtype):
        warnings.simplefilter("ignore")
        torch.manual_seed(zlib.crc32(made.name.encode()))
        yield


def score(h: Tensor) -> Tensor:
    """(B, ...) -> (B,): a quadratic that gives every element of h another cotangent."""
    flat = h.unsqueeze(-1).flatten(1)
    return (flat * torch.linspace(-1, 1, flat.shape[1]).to(flat) + 0.3 * flat.square()).sum(1)


def param(*shape: int, scale: float = 0.5) -> nn.Parameter:
    """A random trainable tensor."""
    return nn.Parameter(torch.randn(shape) * scale)


def ints(high: int, *shape: int) -> Tensor:
    """Random integers below `high`."""
    return torch.randint(high, shape)


def shaken(module: nn.Module) -> nn.Module:
    """Move every parameter off its initial value, so that scales of one and biases of zero are not."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return module
