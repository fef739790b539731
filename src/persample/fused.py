"""Reductions inside a compiled graph, where one region that the user has compiled makes all factors.

Between the region's backward and the results, Python costs as much per parameter as a small layer. So, from the third
call on that is like earlier ones, all from the tensors that the backward is given to the results of the reductions is
traced as one graph and compiled. It answers once it has given the engine's own answer; and wherever numbers turn up
for which its shorter ways are not exact, the engine answers that call.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .factors import Workspace
from .graph.compiled.entry import Whole
from .graph.read.compiled import as_written, compiled_by_inductor, retraced
from .kernels.certificates import is_traced, traced
from .kernels.devices import looking
from .kernels.differentiable import is_differentiable
from .numberless import has_numbers, shapes_alone
from .reductions import Call, ClippedSum, Gram, Norms, Reduction, Run, SecondMoment, Stack, Variance
from .reductions.answers import Rebuild, differing, take_apart
from .refusal import NotCompiled

_FEW = 3  # calls like one another before it pays to compile for them
_MOST = 16  # of what is compiled for one region
_DOUBTS = 8  # answers one after another that were of no use, before no more are asked for
_KINDS = (ClippedSum, Gram, Norms, SecondMoment, Stack, Variance)  # those that are known to be traced
_LARGEST = 2**26  # bytes of gradients written out: of larger ones, Python costs little, and twice as many much
_LONGEST = 2**14  # calls in a graph
_PLAIN = (type(None), bool, int, float, str)


@dataclass(slots=True)
class _Code:
    """From tensors to results, compiled."""

    run: Callable[..., Sequence[Tensor]]
    rebuild: Rebuild
    certified: bool  # whether the last tensor says if the results are to be used
    shared: Sequence[int] | None = None  # results that lie in the memory of what it is given: the same in all calls

    def answer(self, tensors: Sequence[Tensor]) -> Any:
        """The results, in memory of their own; None if they are not to be used."""
        with as_written(tensors[:1]):
            results = list(self.run(*tensors))
        if self.certified and not bool(results.pop()):
            return None
        if self.shared is None:
            taken = {t.untyped_storage().data_ptr() for t in tensors}
            self.shared = [i for i, t in enumerate(results) if t.untyped_storage().data_ptr() in taken]
        for i in self.shared:
            results[i] = results[i].clone()
        return self.rebuild(iter(results))


@dataclass(slots=True)
class _Kept:
    """What is known of calls that are like one another."""

    calls: int = 0
    code: _Code | None = None
    trusted: bool = False  # it has given the engine's answer
    doubts: int = 0  # answers in a row that were not to be used
    refused: bool = False

    def answer(self, tensors: Sequence[Tensor]) -> Any:
        """What the code gives; None where that is not to be used."""
        assert self.code is not None
        results = self.code.answer(tensors)
        self.doubts = 0 if results is not None else self.doubts + 1
        self.refused = self.doubts >= _DOUBTS
        return results


_KEPT: WeakKeyDictionary[type, OrderedDict[Hashable, _Kept]] = WeakKeyDictionary()


class Fused:
    """One call of `reduce`, whose factors may be taken at once."""

    def __init__(self, run: Run, max_memory: int | None, as_sequence: bool, settings: Hashable) -> None:
        self._run, self._max_memory, self._as_sequence, self._settings = run, max_memory, as_sequence, settings
        self._results: Any = None
        self._to_compare: tuple[_Kept, Whole] | None = None

    @classmethod
    def of(
        cls, run: Run, losses: Tensor, max_memory: int | None, *, as_sequence: bool, independent: bool
    ) -> Fused | None:
        """A call whose results are made of tensors and plain numbers alone; None of any other."""
        if independent or run.call.ranks is not None or is_traced() or is_differentiable() or not has_numbers(losses):
            return None
        settings = [_settings(reduction) for reduction in run.given]
        if not settings or None in settings or _is_large(run):
            return None
        return cls(run, max_memory, as_sequence, tuple(settings))

    def take(self, whole: Whole) -> bool:
        """Compute all results from what a region is given, if there is code for that which has proved right."""
        kept = self._kept(whole)
        kept.calls += 1
        if kept.refused or kept.calls < _FEW:
            return False
        if not kept.trusted:
            self._to_compare = kept, whole
            return False
        self._results = kept.answer(whole.tensors)
        return self._results is not None

    def results(self) -> tuple[Any, ...]:
        """One result per reduction, after the backward."""
        if self._results is not None:
            return self._results  # type: ignore[no-any-return]
        results = self._run.results()
        if self._to_compare is not None:
            with warnings.catch_warnings(action="ignore"):
                self._compare(*self._to_compare, results)
        return results

    def _kept(self, whole: Whole) -> _Kept:
        call = self._run.call
        key = whole.key, tuple(call.params), call.space.limit, self._settings, self._as_sequence, _modes()
        kept = _KEPT.setdefault(whole.region, OrderedDict())
        found = kept.pop(key, None) or _Kept()
        kept[key] = found  # as the last one used
        if len(kept) > _MOST:
            kept.popitem(last=False)
        return found

    def _compare(self, kept: _Kept, whole: Whole, want: tuple[Any, ...]) -> None:
        """Let code answer the same call, and trust it from then on if that is the engine's answer."""
        try:
            if kept.code is None:
                kept.code = self._compiled(whole)
            got = kept.answer(whole.tensors)
            kept.trusted = got is not None and differing(got, want) is None
            kept.refused |= got is not None and not kept.trusted
        except Exception:  # whatever cannot be traced or compiled: the engine has answered
            kept.refused = True

    def _compiled(self, whole: Whole) -> _Code:
        made: list[Rebuild] = []
        certified: list[bool] = []

        def step(*given: Tensor) -> list[Tensor]:
            with shapes_alone(given), looking(False), traced() as certificates:
                tensors, rebuild = take_apart(self._reduced(whole, given))
                made.append(rebuild)
                certified.append(bool(certificates))
                holds = [torch.stack([c.holds.all() for c in certificates]).all()] if certificates else []
            return [t.detach() for t in (*tensors, *holds)]

        graph = retraced(step, whole.tensors, {})
        graph.graph.eliminate_dead_code()
        graph.recompile()
        if len(graph.graph.nodes) > _LONGEST:
            raise NotCompiled("a graph that takes too long to compile")
        return _Code(compiled_by_inductor(graph, whole.tensors), made[-1], certified[-1])

    def _reduced(self, whole: Whole, given: Sequence[Tensor]) -> tuple[Any, ...]:
        """The results, of tensors in place of the region's and of parameters without numbers."""
        call = self._run.call
        params = {name: torch.empty(p.shape, dtype=p.dtype, device=p.device) for name, p in call.params.items()}
        space = Workspace.on(call.device, call.space.limit)
        run = Run(self._run.given, Call(params, call.batch, call.device, self._packed, space))
        for name, factor in whole.factors(given).items():
            run.add([name], factor)
        return run.results()

    def _packed(self, results: Any) -> Any:
        return tuple(results.values()) if self._as_sequence else dict(results)


def _settings(reduction: Reduction) -> Hashable:
    """What a reduction was made with; None if that is more than numbers and words."""
    held = vars(reduction)
    if type(reduction) not in _KINDS or not all(isinstance(value, _PLAIN) for value in held.values()):
        return None
    return type(reduction), tuple(held.items())


def _is_large(run: Run) -> bool:
    """Are there results that nobody would want to have twice, to compare them?"""
    stacks = sum(isinstance(reduction, Stack) for reduction in run.given)
    return stacks > 0 and stacks * run.call.batch * sum([p.nbytes for p in run.call.params.values()]) > _LARGEST


def _modes() -> Hashable:
    """What else a traced graph depends on."""
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )
