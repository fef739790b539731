"""A call whose graph is kept apart from the user's, and asked for factors when the user's backward comes to it.

The call's results hang on one node of the user's graph, the *gate*. Behind it lies the call's own graph, with other
leaves in place of weights and inputs. The gate gets the cotangents of all results at once, runs one capture on the
graph behind it, hands every weight's factor over, and lets the gradients of the inputs through.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .._errors import InteractionError, PerformanceWarning
from ..factors import Dense, Factor, combine
from ..graph.entry import Check, capture_from
from ..graph.execute.capture import Sink
from ..graph.execute.plan import CapturePlan
from ..graph.read.compiled import break_graph
from ..graph.read.roots import Roots, slot_of
from ..graph.read.saved import keeps_graph, version, will_run
from ..graph.read.tape import Graph
from .engine import CallGraph
from .guesses import Guess, Guesses, Refused, UnknownBatch
from .samples import Contradiction, Samples, interaction

_Gradients = tuple[Tensor | None, ...]  # of the inputs


class Receiver(NamedTuple):
    """Who is given the factors of one backward, and is told before how much memory the call has kept."""

    sink: Sink
    tell_bytes: Callable[[int], int] | None = None


@dataclass
class Flag:
    """Up while gradients may come to a leaf: the gate works on its graph, or the call itself does."""

    up: bool = False

    def __enter__(self) -> None:
        self.up = True

    def __exit__(self, *error: object) -> None:
        self.up = False


@dataclass
class Recording:
    """One call."""

    what: str  # for messages
    leaves: Mapping[str, Tensor]  # in place of the weights
    inputs: Sequence[Tensor]  # in place of the inputs that want gradients
    outputs: Sequence[Tensor]  # with the graph apart
    samples: Samples
    receive: Callable[[], AbstractContextManager[Receiver]]
    working: Sequence[Flag]
    scale: int = 1  # of the weights' gradients, to undo what the user's loss was divided by
    graph: Graph | None = None  # below the outputs, if it has been read
    follow: bool = False  # are samples known in the inputs alone?
    shared: bool = False  # is part of the graph other calls' too?

    def overlapping(self) -> list[Tensor]:
        """Outputs that share memory with another one: views of each other, as far as the user's graph does not know."""
        places = [y.untyped_storage().data_ptr() if y.layout == torch.strided else id(y) for y in self.outputs]
        return [y for y, place in zip(self.outputs, places, strict=True) if places.count(place) > 1]

    def input_gradients(self, grads: Sequence[Tensor | None], keep: bool) -> _Gradients:
        """An ordinary backward that nobody asked for weights."""
        live = [(slot_of(y), g) for y, g in zip(self.outputs, grads, strict=True) if g is not None]
        if not live or not self.inputs:
            return (None,) * len(self.inputs)
        roots = Roots([slot for slot, _ in live], [], self.samples.batch, [g for _, g in live])
        return roots.backward([slot_of(x) for x in self.inputs], retain_graph=keep)

    def gradients(self, grads: Sequence[Tensor | None], keep: bool) -> _Gradients:
        """Hand over the factors of all weights; the gradients of the inputs come back."""
        live = [(y, g) for y, g in zip(self.outputs, grads, strict=True) if g is not None]
        outputs = [y for y, _ in live]
        cotangents = [g if self.scale == 1 else g * self.scale for _, g in live]
        with self.receive() as receiver:
            if not outputs:
                return (None,) * len(self.inputs)
            if not self.samples.batch:
                return self.input_gradients(grads, keep)
            unscaled = None if self.scale == 1 else self.input_gradients(grads, keep=True)
            run = _Backward(self, outputs, cotangents, receiver, keep, self.inputs if unscaled is None else ())
            gradients = run.of_one_sample() if self.samples.batch == 1 else run.of_several_samples()
        return gradients if unscaled is None else unscaled


@dataclass(frozen=True)
class _Backward:
    """A backward of the user's that came to a call."""

    call: Recording
    outputs: Sequence[Tensor]  # those it came to
    cotangents: Sequence[Tensor]
    receiver: Receiver
    keep: bool  # the graph
    inputs: Sequence[Tensor]  # whose ordinary gradients are wanted

    def of_one_sample(self) -> _Gradients:
        """An ordinary backward."""
        leaves = {name: slot_of(leaf) for name, leaf in self.call.leaves.items()}
        roots = Roots([slot_of(y) for y in self.outputs], [], 1, self.cotangents)
        with contributions([node for node, _ in leaves.values()]) as given:
            grads = roots.backward([*leaves.values(), *map(slot_of, self.inputs)], retain_graph=self.keep)
        for (name, (leaf, _)), g in zip(leaves.items(), grads, strict=False):
            terms = given[leaf]
            if g is not None:
                terms.append(Dense.of_one(g))
            if terms:
                self.receiver.sink([name], combine(terms))
        return grads[len(leaves) :]

    def of_several_samples(self) -> _Gradients:
        """The engine's work, for the first guess where the samples lie that agrees with the evidence."""
        call, samples, refused = self.call, self.call.samples, Refused()
        graph = CallGraph(self.outputs, list(call.leaves.values()), call.inputs, call.graph)
        try:
            samples.learn(graph)
            for guesses in Guesses.of(samples, graph, self.outputs, self.cotangents):
                for guess in guesses:
                    try:
                        return self._try(guess, graph)
                    except Contradiction as error:
                        refused.contradicted(guess, error)
                    except InteractionError as error:
                        refused.met(guess, error.ops)
                if ops := refused.certain():
                    raise interaction(ops)
            if ops := refused.likeliest():
                raise interaction(ops)
        except InteractionError as error:
            raise _for_users(error, call.what) from None
        except UnknownBatch as error:
            raise UnknownBatch(f"{call.what}: {error}") from error
        raise UnknownBatch(
            f"cannot tell the samples apart in what {call.what} returned, of shapes "
            f"{[tuple(y.shape) for y in self.outputs]}: expected dim {samples.dim} to be the batch of "
            f"{samples.batch}, as it is in the inputs"
            + (". A weight that is not expanded is told from data if it is an nn.Parameter" if call.follow else "")
        )

    def _try(self, guess: Guess, graph: CallGraph) -> _Gradients:
        """One backward; raises before anything is run if the guess is wrong, or samples meet."""
        try:
            return self._capture(guess, graph)
        except InteractionError:
            plan = graph.plan(guess.roots)
            self.call.samples.compare(plan, may_meet=True)  # perhaps the guess is wrong, and samples do not meet
            if not self._is_coincidence(guess, graph, plan):
                raise
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "samples interact in", PerformanceWarning)
            return self._capture(guess, graph, independent=False)

    def _is_coincidence(self, guess: Guess, graph: CallGraph, plan: CapturePlan) -> bool:
        """Do samples seem to meet in nothing but tables as long as the batch? Then rows of the Jacobian are right."""
        samples = self.call.samples
        try:
            samples.verify(plan, guess.beyond_contract)
        except (Contradiction, InteractionError):
            return False
        return not graph.interact_without(samples.tables, plan, guess.roots)

    def _capture(self, guess: Guess, graph: CallGraph, independent: bool = True) -> _Gradients:
        call, samples = self.call, self.call.samples
        if call.follow:
            samples.verify(graph.plan(guess.roots), guess.roots.slots if samples.evidence else guess.beyond_contract)
        test = partial(samples.verify, beyond_contract=guess.beyond_contract)
        return capture_from(
            guess.roots,
            call.leaves,
            self.receiver.sink,
            retain_graph=self.keep,
            independent=independent,
            trust_unseen=True,
            tell_bytes=self.receiver.tell_bytes,
            check=None if call.follow else Check(test, samples.known(), tuple(guess.by_contract)),
            ordinary=[slot_of(x) for x in self.inputs],
            graph=call.graph if set(guess.roots.slots) == {slot_of(y) for y in call.outputs} else None,
        )


def _for_users(error: InteractionError, what: str) -> InteractionError:
    """What to say of samples that meet, and what to do."""
    told = InteractionError(
        f"samples interact in {', '.join(error.ops)}, of {what}: one sample's loss depends on another sample "
        f"(or the op's backward is not linear). Use layers that keep samples apart (GroupNorm for BatchNorm, or "
        f"model.eval()), do to data what mixes them before the call, or use ps.grad, which gives the exact "
        f"Jacobian rows"
    )
    told.ops = error.ops
    return told


class _Ask(torch.autograd.Function):
    """Stands between the gate and the weights, so that a backward which does not want weights can be told."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        ctx.count = len(weights)
        return weights[0].new_empty(0)

    @staticmethod
    @break_graph
    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
        return tuple([None] * int(ctx.count))


class _Gate(torch.autograd.Function):
    """The one node of a call in the user's graph."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, ask: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.recording = recording
        ctx.set_materialize_grads(False)
        ctx.versions = [version(y) for y in recording.overlapping()]
        return tuple(y.detach() for y in recording.outputs)

    @staticmethod
    @break_graph
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        recording, keep = ctx.recording, keeps_graph()
        if torch.is_grad_enabled():
            raise RuntimeError(
                "per-sample gradients of a call cannot be differentiated again (create_graph=True): use "
                "ps.grad(losses, module, create_graph=True) for gradients of gradients"
            )
        if recording is None:
            raise RuntimeError(
                "this backward comes to a call for per-sample gradients a second time, and the first freed its graph: "
                "call again, or pass retain_graph=True to every backward but the last"
            )
        if ctx.versions != [version(y) for y in recording.overlapping()]:
            raise RuntimeError(
                f"results of {recording.what} that share memory were changed in place: which of them was meant "
                f"cannot be seen. Clone them first, or use the form that returns a new tensor"
            )
        if not keep:
            ctx.recording = None
        keep = keep or recording.shared
        with _apart(recording, grads):
            wanted = will_run(ctx.next_functions[0][0])
            gradients = (recording.gradients if wanted else recording.input_gradients)(grads, keep)
        return None, None, *gradients[: len(ctx.next_functions) - 1]


@contextmanager
def _apart(recording: Recording, grads: Sequence[Tensor | None]) -> Iterator[None]:
    """Run apart from the caller's autocast, with the flags of all weights up."""
    with ExitStack() as stack:
        for flag in recording.working:
            stack.enter_context(flag)
        for kind in {g.device.type for g in grads if g is not None}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def attach(recording: Recording, weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results of a call as the user's graph sees them."""
    ask = _Ask.apply(*weights)  # type: ignore[no-untyped-call]
    results: tuple[Tensor, ...] = _Gate.apply(recording, ask, *inputs)  # type: ignore[no-untyped-call]
    return results


_COLLECTING: dict[Node, list[Factor]] = {}  # by the node of the weight's leaf, which belongs to one call


@contextmanager
def contributions(leaves: Sequence[Node]) -> Iterator[dict[Node, list[Factor]]]:
    """Collect what registered rules contribute to these leaves meanwhile."""
    factors: dict[Node, list[Factor]] = {leaf: [] for leaf in leaves}
    _COLLECTING.update(factors)
    try:
        yield factors
    finally:
        for leaf in leaves:
            _COLLECTING.pop(leaf, None)


def contribute(leaf: Node, factor: Factor) -> None:
    """A part of a weight's factor; nobody collects it while the engine only passes, or asks where samples lie."""
    if leaf in _COLLECTING:
        _COLLECTING[leaf].append(factor)
