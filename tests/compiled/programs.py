"""Programs as compiled steps, built on some numbers and run on others: nothing of the first may survive in the code."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
        program: tuple[Params, Callable[[], Tensor]] = made.build(B)
    return program


def around(case: Case) -> AbstractContextManager[None]:
    """Seed and default dtype of a case, for calls of its program."""
    return _surroundings(case.build.args[0])  # type: ignore[attr-defined]


@contextmanager
def inputs_of_calls() -> Iterator[list[Tensor]]:
    """Inside, the list holds the tensors that the last captured program was given."""
    tensors: list[Tensor] = []
    run = Call.run

    def noting(call: Call, *args: Any) -> Any:
        result = run(call, *args)
        tensors[:] = [t for t in call.inputs if isinstance(t, Tensor)]
        return result

    Call.run = noting  # type: ignore[method-assign]
    try:
        yield tensors
    finally:
        Call.run = run  # type: ignore[method-assign]


def change_numbers(tensors: list[Tensor], params: Params, *, integers: bool) -> None:
    """Change data and weights in place: floating-point numbers by some percent, integers by their order."""
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
) -> tuple[ps.CompiledStep, tuple[Any, ...], Tensor, Params]:
    """A step that was built on a case's numbers and run on others: what it gives there, and losses to compare with."""
    params, program = program_of(case, B)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = ps.compile(program, params, *reductions, backend=backend, verbose=False)
        with inputs_of_calls() as inputs, around(case):
            step()
        change_numbers(inputs, params, integers="offset" not in case.name)
        with around(case):
            got = step()
        with around(case):
            losses = program()
    return step, got, losses, params
