"""Every case of the library, collected from the theme modules in `case_library/`, and what holds around each."""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import persample as ps
from tests import case_library
from tests.case_library.registry import REGISTRY, Case
from tests.reference import Params, named

for _module in pkgutil.iter_modules(case_library.__path__):
    importlib.import_module(f"tests.case_library.{_module.name}")

CASES: tuple[Case, ...] = tuple(REGISTRY.values())


@contextmanager
def warnings_of(case: Case) -> Iterator[None]:
    """Every warning is an error, except the one a case is entitled to."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if case.slow_path or case.interacts:
            warnings.simplefilter("ignore", ps.PerformanceWarning)
        yield


@contextmanager
def untouched(params: Params) -> Iterator[None]:
    """The block must not change a parameter, its gradient, or what hangs on parameters and modules."""
    tensors = named(params)
    for p in tensors.values():
        p.grad = torch.full_like(p, 7.0)
    before, grads = _fingerprint(params), {name: p.grad for name, p in tensors.items()}
    yield
    assert _fingerprint(params) == before
    for name, p in tensors.items():
        assert p.grad is grads[name], f"{name}.grad was replaced"
        assert bool((p.grad == 7).all()), f"{name}.grad was changed"


def _fingerprint(params: Params) -> dict[str, Any]:
    """Versions, hooks and attributes of every parameter, attributes and hooks of every module."""
    seen: dict[str, Any] = {
        f"parameter {name}": (
            p._version,
            sorted(vars(p)),
            _keys(p._backward_hooks),
            _keys(p._post_accumulate_grad_hooks),
        )
        for name, p in named(params).items()
    }
    if isinstance(params, nn.Module):
        for name, module in params.named_modules():
            seen[f"module {name}"] = {key: _keys(value) for key, value in vars(module).items()}
    return seen


def _keys(value: object) -> object:
    """A mapping's keys, anything else by identity."""
    return list(value) if isinstance(value, Mapping) else id(value)
