"""`compile`: losses and reductions as one compiled step, and the eager engine wherever that is not right."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from .._errors import PerformanceWarning
from ..checks import check_reductions
from ..distributed import is_sharded
from ..graph.read.compiled import break_graph
from ..params import Params, named
from ..reductions import Reduction
from ..reductions.answers import differing
from ..refusal import NotCompiled
from ..trees import leaves, tree_map
from ..verbs import reduce
from .build import Answer, Backend, Build, build
from .compilers import (
    alone,
    captured,
    check_backend,
    could_not_capture,
    draws_in_python,
    too_many_captures,
    without_checkpoints,
)
from .facts import Facts, changes, facts_of
from .region import Call, Interrupted, Region, State, tensors_in
from .trace import Problem, check_compilable, computed_before
from .watched import Watched, kinds_of


def compile(
    losses_fn: Callable[..., Tensor],
    params: Params,
    *reductions: Reduction,
    backend: Backend = "inductor",
    dynamic: bool | None = None,
    max_builds: int = 8,
    independent: bool = False,
    max_memory: int | None = None,
    verbose: bool = True,
) -> CompiledStep:
    """``ps.reduce(losses_fn(*batch), params, *reductions)`` as one compiled step.

    >>> import torch, persample as ps
    >>> from torch.nn import functional as F
    >>> model = torch.nn.Linear(3, 2)
    >>> def losses(x, y):
    ...     return F.cross_entropy(model(x), y, reduction="none")
    >>> step = ps.compile(losses, model, ps.Norms(), ps.ClippedSum(1.0), backend="aot_eager", verbose=False)
    >>> norms, total = step(torch.ones(5, 3), torch.zeros(5, dtype=torch.long))
    >>> norms.shape, total["weight"].shape
    (torch.Size([5]), torch.Size([2, 3]))

    The first call for arguments of some shapes, and for modes of the model, builds: it traces the losses and the
    reductions into one graph, compiles it, and compares what it gives with the eager engine. Later calls run the
    compiled code, with the parameters and buffers as they then are. Where numbers turn up for which its shorter ways
    are not exact (infinities, cancellation), the eager engine answers that call; and where something cannot be
    compiled, every call, after a warning that says why.

    Args:
        losses_fn: from a batch to one loss per sample, (B,); several, (B, K…), are left to the eager engine. It is
            captured by ``torch.compile`` (``fullgraph=True``).
        params: an ``nn.Module`` (its trainable parameters), a mapping from names to leaf tensors, or a sequence.
        reductions: what to compute, as for ``ps.reduce``.
        backend: what compiles the graph: the name of a backend of ``torch.compile``, or a function like one.
        dynamic: as for ``torch.compile``; by default, what varies is taken to vary again.
        max_builds: how often to build, before the eager engine answers whatever has not been built.
        independent: refuse samples that interact, as in ``ps.reduce``.
        max_memory: as for ``ps.reduce``.
        verbose: say on standard error when something is built, why, and how long it took.

    Returns:
        A `CompiledStep`: called with a batch, it returns one result per reduction.
    """
    if not callable(losses_fn):
        raise TypeError(f"losses_fn must be a function from a batch to losses, not a {type(losses_fn).__name__}")
    if not reductions:
        raise ValueError("compile needs something to compute: write ps.compile(losses_fn, params, ps.Norms())")
    check_reductions(reductions, max_memory)
    check_compilable(reductions)
    named(params)  # which refuses what has no gradients
    check_backend(backend)
    if not isinstance(max_builds, int) or max_builds < 1:
        raise ValueError(f"max_builds must be a positive integer, not {max_builds!r}")
    asked = Asked(losses_fn, params, reductions, independent, max_memory)
    return CompiledStep(asked, backend, dynamic, max_builds, verbose)


@dataclass(frozen=True)
class Asked:
    """What is to be computed, compiled or not."""

    losses_fn: Callable[..., Tensor]
    params: Params
    reductions: Sequence[Reduction]
    independent: bool
    max_memory: int | None

    def eagerly(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The answer of the eager engine."""
        return self.reduced(self.losses_fn(*args, **kwargs))

    def reduced(self, losses: Tensor) -> tuple[Any, ...]:
        """What the eager engine makes of losses."""
        return reduce(
            losses, self.params, *self.reductions, independent=self.independent, max_memory=self.max_memory
        )  # fmt: skip

    def usual(self, samples: int) -> int:
        """How many samples there usually are, if there were so many in the first call."""
        return samples

    def problem(self, graph: GraphModule, losses_at: int, inputs: Sequence[Any], samples: int) -> Problem:
        """What is to be traced of a captured graph."""
        watched = Watched(self.params)
        sharded = [name for name, p in watched.named.items() if is_sharded(p)]
        if sharded:
            raise NotCompiled(f"parameters {sharded} are sharded")
        if computed_before(inputs):
            raise NotCompiled("losses_fn is given, or reads, a tensor that was computed outside of it with gradients")
        names = {id(p): name for name, p in reversed(watched.named.items())}
        return Problem(
            graph,
            losses_at,
            [names.get(id(t)) for t in inputs],
            watched,
            not isinstance(self.params, (nn.Module, Mapping)),
            self.reductions,
            self.max_memory,
            self.independent,
            kinds_of(self.reductions),
            self.usual(samples),
        )


def _place_of(losses: Tensor, outputs: Sequence[Any]) -> int:
    """Which of a graph's outputs the losses are; others are kept by the losses' function somewhere outside."""
    found = {id(t): i for i, t in enumerate(outputs) if isinstance(t, Tensor) and _are_alike(t, losses)}
    if len(found) != 1:
        raise NotCompiled("losses_fn returns something else than what its captured graph computes, or keeps a copy")
    (place,) = found.values()
    return place


def _are_alike(t: Tensor, losses: Tensor) -> bool:
    kinds = [(each.shape, each.dtype, each.requires_grad) for each in (t, losses)]
    return kinds[0] == kinds[1] and torch.allclose(t, losses, equal_nan=True)


class CompiledStep:
    """A compiled step; made by `compile`.

    Attributes:
        builds: what was built so far, as text: why, and how long it took.
        refused: why nothing is compiled, or None.
        doubts: how many calls the eager engine has answered because of their numbers.
    """

    def __init__(self, asked: Asked, backend: Backend, dynamic: bool | None, max_builds: int, verbose: bool) -> None:
        self.builds: list[str] = []
        self.refused: str | None = None
        self.doubts = 0
        self._asked, self._backend, self._max_builds, self._verbose = asked, backend, max_builds, verbose
        self._dynamic = dynamic
        self._facts: Facts | None = None  # of the last build
        self._full = False  # whether it was said that there are no more builds
        self._captured = captured(asked.losses_fn, self._enter, dynamic=dynamic, limit=max_builds)

    def __reduce__(self) -> Any:
        """A copy is of the losses' function that was copied with it, and has built nothing."""
        return type(self), (self._asked, self._backend, self._dynamic, self._max_builds, self._verbose)

    def _enter(self, graph: Any, _: Sequence[Any]) -> Region:
        if draws_in_python(graph):
            raise NotCompiled("it draws numbers from Python's random, once for each engine; draw from torch")
        return Region(without_checkpoints(graph))

    def __repr__(self) -> str:
        state = f"refused: {self.refused}" if self.refused else f"{len(self.builds)} builds, {self.doubts} doubts"
        return f"CompiledStep({', '.join(type(r).__name__ for r in self._asked.reductions)}; {state})"

    @break_graph
    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """One result per reduction, for a batch."""
        with torch.inference_mode(False), torch.enable_grad():
            args, kwargs = _outside_of_inference(args), _outside_of_inference(kwargs)
            if self.refused is not None:
                return self._asked.eagerly(args, kwargs)
            call = Call()
            try:
                call.run(self._captured, args, kwargs)
            except Interrupted:
                return self._first(call, args, kwargs) if call.answer is None else self._again(call, args, kwargs)
            except Exception as error:
                return self._after_failure(error, call, args, kwargs)
            if call.answer is None:
                answer = self._asked.eagerly(args, kwargs)
                self._refuse("losses_fn computes nothing that could be captured")
                return answer
            return call.answer.results

    def _after_failure(
        self, error: Exception, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """An error of Dynamo's, of the compiled code or of the user's: the eager engine answers, or raises it."""
        call.undo()
        answer = self._asked.eagerly(args, kwargs)
        if too_many_captures(error):
            self._say_full()
        else:
            kind = "cannot be captured" if could_not_capture(error) else "failed when it ran"
            self._refuse(f"losses_fn {kind}: {_first_line(error)}")
        return answer

    def _again(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The numbers of this call are extreme: the eager engine knows what to do, or to say."""
        assert call.answer is not None
        call.undo()
        self.doubts += 1
        if self.doubts == 1:
            self._say(f"the eager engine answers a call: {call.answer.doubt}")
        return self._asked.eagerly(args, kwargs)

    def _first(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The eager engine answers; and a build is made for the next call, if it gives the same answer."""
        call.before = State.of(tensors_in(call.inputs))
        losses = self._asked.losses_fn(*args, **kwargs)
        want = self._asked.reduced(losses)  # which may have something to say of the arguments
        after = State.of(call.before.tensors)
        try:
            with alone():
                self._build(call, losses, want, facts_of(args, kwargs, self._asked.params))
        except NotCompiled as reason:
            self._refuse(str(reason))
        except Exception as error:  # the eager engine has answered: whatever this is, it is about compiling
            self._refuse(f"what was compiled failed when it ran: {_first_line(error)}")
        finally:
            after.restore()
        return want

    def _build(self, call: Call, losses: Tensor, want: tuple[Any, ...], facts: Facts) -> None:
        assert call.before is not None
        if losses.ndim > 1:
            raise NotCompiled(f"there are several losses per sample, {tuple(losses.shape)}")
        (region,) = call.regions
        call.undo()
        outputs = region.plainly(call.inputs)
        region.changed = call.before.changed()
        problem = self._asked.problem(region.graph, _place_of(losses, outputs), call.inputs, len(losses))
        del outputs
        made = region.serving(problem, call.inputs) or self._make(problem, call.inputs, facts, len(losses))
        if made is None:
            return
        call.answer = _checked(made, call, want)
        region.builds[region.sizes(call.inputs)] = replace(made, is_checked=call.answer.doubt is None)
        region.draws = made.draws

    def _make(self, problem: Problem, inputs: Sequence[Any], facts: Facts, samples: int) -> Build | None:
        """A new build, if there may be another one."""
        if len(self.builds) >= self._max_builds:
            self._say_full()
            return None
        why = "first call" if self._facts is None else changes(self._facts, facts)
        self._say(f"compiling {', '.join(type(r).__name__ for r in self._asked.reductions)} ({why})")
        self._facts = facts
        made = build(problem, inputs, self._backend)
        sizes = "all batch sizes" if made.opened else f"{samples} samples"
        self.builds.append(f"{why}: for {sizes}, {made.seconds:.1f} s")
        self._say(f"compiled for {sizes} in {made.seconds:.1f} s" + (f" ({made.closed})" if made.closed else ""))
        return made

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        warnings.warn(f"ps.compile leaves the work to the eager engine: {reason}", PerformanceWarning, stacklevel=5)

    def _say_full(self) -> None:
        if not self._full:
            self._full = True
            warnings.warn(
                f"ps.compile has built {len(self.builds)} times (max_builds={self._max_builds}), the last time because "
                f"{self.builds[-1] if self.builds else 'of nothing'}: the eager engine answers what has not been built",
                PerformanceWarning,
                stacklevel=5,
            )

    def _say(self, message: str) -> None:
        if self._verbose:
            print(f"persample: {message}", file=sys.stderr, flush=True)


def _checked(made: Build, call: Call, want: tuple[Any, ...]) -> Answer:
    """A build's first answer. It must be that of the eager engine, unless it has a doubt itself."""
    call.undo()
    got = made.answer(call.inputs)
    if got.doubt is None and (where := differing(got.results, want, made.narrowest)) is not None:
        raise NotCompiled(f"the compiled step gives another answer than the eager engine: {where}")
    return got


def _outside_of_inference(tree: Any) -> Any:
    """Arguments of which autograd may keep what it needs: copies of tensors that were made in inference mode."""
    if not any(isinstance(leaf, Tensor) and leaf.is_inference() for leaf in leaves(tree)):
        return tree
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf, tree)


def _first_line(error: Exception) -> str:
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, NotCompiled):
        return str(inner)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
