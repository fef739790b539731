"""Programs of the case library as compiled steps, built on some data and run on others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import persample as ps
from persample.compiled.region import Call
from tests.case_library.registry import Case, _surroundings
from tests.reference import Params, named


def program_of(case: Case, B: int) -> tuple[Params, Callable[[], Tensor]]:
    """Parameters and losses of a case, without what the library puts around them, which Dynamo cannot capture."""
    made = case.build.args[0]  # type: ignore[attr-defined]
    with _surroundings(made):
        params, program = made.build(B)
    return params, program


def around(case: Case) -> Any:
    """Seed and default dtype of a case, for calls of its program."""
    return _surroundings(case.build.args[0])  # type: ignore[attr-defined]


class Inputs:
    """Inside, writes down the tensors that a captured program is given."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def __enter__(self) -> Inputs:
        self._run = Call.run
        inputs, run = self.tensors, Call.run

        def noting(call: Call, fn: Any, args: Any, kwargs: Any) -> Any:
            result = run(call, fn, args, kwargs)
            inputs[:] = [t for t in call.inputs if isinstance(t, Tensor)]
            return result

        Call.run = noting  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Call.run = self._run  # type: ignore[method-assign]


def other_numbers(tensors: list[Tensor], params: Params, *, integers: bool = True) -> None:
    """Change data and weights in place: floating-point numbers by some percent, integers and bools by their order."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for t in {id(t): t for t in [*tensors, *named(params).values()]}.values():
            if any(n > 1 and step == 0 for n, step in zip(t.shape, t.stride(), strict=True)):
                continue  # its elements are one
            if t.is_floating_point() or t.is_complex():
                t.mul_(1 + 0.2 * torch.rand(t.shape, generator=generator).to(t.dtype))
            elif integers and t.ndim and len(t) > 1 and t.dtype != torch.bool:
                t.copy_(t.flip(0).clone())


def compiled_twice(
    case: Case, B: int, *reductions: ps.Reduction, backend: str
) -> tuple[ps.CompiledStep, tuple[Any, ...], tuple[Any, ...]]:
    """A step that was built on a case's data and run on others; what it gives there, and the eager engine's answer."""
    params, program = program_of(case, B)
    with warnings.catch_warnings(), around(case):
        warnings.simplefilter("ignore")
        step = ps.compile(program, params, *reductions, backend=backend, verbose=False)
        with Inputs() as inputs:
            step()
        other_numbers(inputs.tensors, params, integers="offset" not in case.name)
        with around(case):
            got = step()
        with around(case):
            want = ps.reduce(program(), params, *reductions)
    return step, got, want
