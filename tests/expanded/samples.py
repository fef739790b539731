"""PyTorch's own operator and module samples, and losses whose share of every sample is known.

The samples ship with torch for its own tests. `Case` is one call of a function with roles given to its arguments: data,
which carry the batch, and parameters, which are expanded. `definition_of` and `expanded_run` are the two sides of the
comparison; both make fresh leaves of every tensor, so that nothing one side leaves behind helps the other.
"""

from __future__ import annotations

import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from persample.expanded import ExpandedWeight
from tests.reference import assert_same, definition

Slot = int | str


@lru_cache
def databases() -> tuple[list[Any], list[Any]]:
    """`op_db` and `module_db`; imported by the first test that asks, because that takes seconds.

    The import wants `expecttest` as the base class of test cases that no sample uses: a stand-in serves where it is
    not installed. It also freezes the flags of `torch.backends` for the whole process, which is undone.
    """
    absent = types.ModuleType("expecttest")
    absent.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    added = sys.modules.setdefault("expecttest", absent) is absent
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.testing._internal.common_methods_invocations import op_db
            from torch.testing._internal.common_modules import module_db
    finally:
        if added:
            del sys.modules["expecttest"]
        setattr(torch.backends, "__allow_nonbracketed_mutation_flag", True)
    return op_db, module_db


def operator_samples(name: str, variant: str = "") -> list[tuple[list[Any], dict[str, Any]]]:
    """Positional and keyword arguments of the samples of one OpInfo, the same ones in every run."""
    (info,) = [op for op in databases()[0] if op.name == name and op.variant_test_name == variant]
    torch.manual_seed(0)
    found = info.sample_inputs("cpu", torch.float64, requires_grad=True)
    return [([sample.input, *sample.args], dict(sample.kwargs)) for sample in found]


def module_samples(name: str, training: bool, dtype: torch.dtype = torch.float64) -> tuple[type, list[Any]]:
    """The class of one ModuleInfo and its samples, the same ones in every run."""
    (info,) = [info for info in databases()[1] if info.name == name]
    torch.manual_seed(0)
    make = info.module_inputs_func
    with warnings.catch_warnings():  # TransformerEncoder's samples build modules that warn about nested tensors
        warnings.simplefilter("ignore", UserWarning)
        return info.module_cls, list(make(info, device="cpu", dtype=dtype, requires_grad=True, training=training))


@dataclass(frozen=True)
class Case:
    """One call `fn(*args, **kwargs)`, which of its arguments are data and parameters, and where the batch lies."""

    label: str
    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    data: tuple[Slot, ...]
    params: tuple[Slot, ...]
    batch: int
    out_dim: int = 0
    batch_first: bool = True

    def fresh(self) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with every tensor a leaf of its own; layouts and `requires_grad` stay."""
        return [leaf(a) for a in self.args], {key: leaf(a) for key, a in self.kwargs.items()}

    def constant_data(self) -> Case:
        """The same call with data that require no gradient, as in ordinary training."""
        args = [a.detach() if i in self.data else a for i, a in enumerate(self.args)]
        kwargs = {key: a.detach() if key in self.data else a for key, a in self.kwargs.items()}
        return replace(self, args=args, kwargs=kwargs)


@dataclass
class Outcome:
    """What one side of the comparison gives; every mapping is by argument."""

    output: Tensor
    per_sample: dict[str, Tensor]
    inputs: dict[str, Tensor]
    others: dict[str, Tensor]
    totals: dict[str, Tensor] = field(default_factory=dict)


def definition_of(case: Case, mean: bool) -> Outcome:
    """One graph with plain tensors: a backward per sample, and one for the data arguments."""
    args, kwargs = case.fresh()
    output = first(case.fn(*args, **kwargs))
    losses = sample_losses([(output, case.out_dim)])
    if len(losses) != case.batch:
        raise ValueError(f"{len(losses)} losses for {case.batch} samples; the case is wrong")
    params = pick(args, kwargs, case.params)
    data = {name: t for name, t in pick(args, kwargs, case.data).items() if t.requires_grad}
    _assert_independent(case, losses, data)
    stacks = definition(losses, params)
    total = losses.mean() if mean else losses.sum()
    grads = torch.autograd.grad(total, list(data.values()), allow_unused=True) if data else ()
    inputs = {name: torch.zeros_like(t) if g is None else g for (name, t), g in zip(data.items(), grads, strict=True)}
    totals = {name: stack.sum(0) / (case.batch if mean else 1) for name, stack in stacks.items()}
    return Outcome(output.detach(), stacks, inputs, _others(case, args, kwargs), totals)


def expanded_run(case: Case, reduction: str, expand: Iterable[Slot] | None = None) -> Outcome:
    """The same call with expanded parameters (`expand`: only these, the others are parameters) and one backward.

    `totals` holds what arrives in `.grad` of the parameters that are not expanded.
    """
    args, kwargs = case.fresh()
    chosen = case.params if expand is None else tuple(expand)
    originals = pick(args, kwargs, case.params)
    data = {name: t for name, t in pick(args, kwargs, case.data).items() if t.requires_grad}
    others = _others(case, args, kwargs)
    for slot in case.params:
        given: Any = kwargs if isinstance(slot, str) else args
        if slot in chosen:
            given[slot] = ExpandedWeight(originals[str(slot)], case.batch, reduction)
            given[slot].set_batch_first(case.batch_first)
        else:
            given[slot] = originals[str(slot)] = nn.Parameter(originals[str(slot)].detach())
    output = first(case.fn(*args, **kwargs))
    losses = sample_losses([(output, case.out_dim)]) if output.dim() else output
    (losses.mean() if reduction == "mean" else losses.sum()).backward()
    names = [str(slot) for slot in chosen]
    touched = [name for name in names if originals[name].grad is not None]
    assert not touched, f".grad was written for {touched}"
    plain = {name: p for name, p in originals.items() if name not in names}
    leaked = [name for name, p in plain.items() if hasattr(p, "grad_sample")]
    assert not leaked, f"grad_sample was written for {leaked}, which are not expanded"
    per_sample = {name: originals[name].grad_sample for name in names}
    inputs = {name: torch.zeros_like(t) if t.grad is None else t.grad for name, t in data.items()}
    totals = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in plain.items()}
    return Outcome(output.detach(), per_sample, inputs, others, totals)


def assert_agree(got: Outcome, want: Outcome, rtol: float = 1e-9) -> None:
    """Output, per-sample gradients, gradients of data and of plain parameters, and buffers changed by the call."""
    assert_same({"output": got.output[None]}, {"output": want.output[None]}, rtol)
    assert_same(got.per_sample, {name: want.per_sample[name] for name in got.per_sample}, rtol)
    for side in ("inputs", "totals", "others"):
        left, right = getattr(got, side), getattr(want, side)
        assert_same({k: t[None] for k, t in left.items()}, {k: right[k][None] for k in left}, rtol)


def for_every(cases: Sequence[Any], check: Callable[[Any], None]) -> None:
    """Run `check` on every case (which has a label) and raise one error that lists all that failed."""
    problems: list[str] = []
    for case in cases:
        try:
            check(case)
        except (Exception, pytest.fail.Exception) as error:
            problems.append(f"{case.label}\n    {type(error).__name__}: {error}")
    if problems:
        raise AssertionError(f"{len(problems)} of {len(cases)} samples failed\n" + "\n".join(problems))


def sample_losses(outputs: Iterable[tuple[Tensor, int]]) -> Tensor:
    """(B,) losses: each output (given with its batch dim) weighted by fixed random numbers and summed per sample."""
    generator = torch.Generator().manual_seed(1)
    total: Tensor | None = None
    for output, dim in outputs:
        # Between 0.5 and 1.5 with random signs: no weight is near zero, and no two are alike.
        weights = torch.rand(output.shape, generator=generator, dtype=torch.float64) + 0.5
        signs = torch.randint(0, 2, output.shape, generator=generator) * 2 - 1
        share = (output * (weights * signs).to(output.dtype)).movedim(dim, 0).unsqueeze(-1).flatten(1).sum(1)
        total = share if total is None else total + share
    assert total is not None
    return total


def first(output: Any) -> Tensor:
    """The output itself, or the first one of several."""
    return output[0] if isinstance(output, tuple) else output


def pick(args: Sequence[Any], kwargs: dict[str, Any], slots: Iterable[Slot]) -> dict[str, Tensor]:
    """The arguments at `slots`, by name."""
    return {str(slot): kwargs[slot] if isinstance(slot, str) else args[slot] for slot in slots}


def describe(value: Any) -> str:
    """A short text for an argument: tensors by shape."""
    if isinstance(value, Tensor):
        return str(tuple(value.shape))
    if isinstance(value, tuple | list):
        return f"({', '.join(map(describe, value))})"
    if isinstance(value, dict):
        return ", ".join(f"{key}={describe(item)}" for key, item in value.items())
    if isinstance(value, nn.Module):
        return type(value).__name__
    return getattr(value, "__name__", None) or repr(value)


def leaf(value: Any) -> Any:
    """A leaf with the same values, or the value itself if it is no tensor."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone(memory_format=torch.preserve_format).requires_grad_(value.requires_grad)


def _others(case: Case, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors that are neither data nor parameter: buffers, which the call may update."""
    named = {**dict(enumerate(args)), **kwargs}
    return {
        str(slot): t.detach()
        for slot, t in named.items()
        if isinstance(t, Tensor) and slot not in case.data and slot not in case.params
    }


def _assert_independent(case: Case, losses: Tensor, data: dict[str, Tensor]) -> None:
    """Each loss depends on its own sample of the data alone; otherwise the roles given to the arguments are wrong."""
    for i, loss in enumerate(losses.unbind() if data else ()):
        for name, grad in definition(loss[None], data).items():
            rows = grad[0].movedim(0 if case.batch_first else 1, 0)
            if len(rows) != case.batch:  # one weight per index of a bag of any length: no batch dim to look at
                continue
            strangers = torch.cat([rows[:i], rows[i + 1 :]])
            assert not bool(strangers.any()), f"loss {i} depends on other samples of {name}"


@dataclass(frozen=True)
class ModuleCase:
    """A module and a call of it; `batch_first` tells dim 0 or 1 of inputs and outputs, `batch` is None without one."""

    label: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: int | None
    batch_first: bool = True
    prepare: Callable[[tuple[Any, ...]], tuple[Any, ...]] = lambda args: args


def built(make: Callable[[], nn.Module], training: bool, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The module, with parameters moved off their initial zeros and ones."""
    torch.manual_seed(0)
    with warnings.catch_warnings():  # TransformerEncoder warns that it will not use nested tensors
        warnings.simplefilter("ignore", UserWarning)
        module = make().to(dtype).train(training)
    with torch.no_grad():
        for p in module.parameters():
            if not nn.parameter.is_lazy(p):
                p.add_(0.2 * torch.randn_like(p))
    return module


def with_batch(case: ModuleCase, batch: int) -> ModuleCase:
    """The same call for `batch` samples: other values for each, masks repeated."""
    dim = 0 if case.batch_first else 1
    generator = torch.Generator().manual_seed(2)

    def wider(t: Tensor, at: int) -> Tensor:
        shape = (*t.shape[:at], batch, *t.shape[at:])
        return torch.randn(shape, generator=generator, dtype=t.dtype).requires_grad_(t.requires_grad)

    first, *rest = case.args
    if isinstance(case.module, nn.RNNCellBase):
        args = tree_map_only(Tensor, lambda t: wider(t, 0), case.args)
    elif isinstance(case.module, nn.RNNBase):  # hidden states are (layers, B, hidden) whatever batch_first says
        args = (wider(first, dim), *tree_map_only(Tensor, lambda t: wider(t, 1), tuple(rest)))
    else:
        args = tuple(wider(t, dim) for t in case.args)
    kwargs = {key: repeated_mask(key, mask, batch) for key, mask in case.kwargs.items()}
    return replace(case, label=f"{case.label} x{batch}", args=args, kwargs=kwargs, batch=batch)


def repeated_mask(key: str, mask: Tensor | None, batch: int) -> Tensor | None:
    """Padding masks get a row per sample; attention masks have heads in front, or are shared by all samples."""
    if mask is None:
        return None
    if key.endswith("key_padding_mask"):
        return mask.expand(batch, -1).clone()
    return mask.repeat(batch, 1, 1) if mask.dim() == 3 else mask
