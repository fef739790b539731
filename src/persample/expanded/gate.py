"""A call whose graph is kept apart from the user's, and asked for factors when the user's backward comes by.

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
from torch import Tensor, nn

from .._errors import InteractionError, PerformanceWarning
from ..factors import Dense, combine
from ..graph.capture import Sink
from ..graph.entry import Check, capture_from
from ..graph.plan import CapturePlan, plan
from ..graph.roots import Roots, slot_of
from ..graph.saved import keeps_graph, version, will_run
from ..graph.tape import Graph, Tape, read
from .contributions import contributions
from .samples import Samples
from .tables import interact_without
from .tried import Tried
from .verdicts import Disagreement, Reading, UnknownBatch


class Receiver(NamedTuple):
    """Who is given the factors of one backward, and is told before how much memory the call has kept."""

    sink: Sink
    tell_bytes: Callable[[int], None] | None = None


@dataclass
class Flag:
    """Up while gradients may come to a leaf: the gate works on its graph, or the call itself does."""

    up: bool = False

    def __enter__(self) -> None:
        self.up = True

    def __exit__(self, *error: object) -> None:
        self.up = False


@dataclass(frozen=True)
class _Backward:
    """What the user's backward brought, and wants."""

    outputs: Sequence[Tensor]  # those it came to
    cotangents: Sequence[Tensor]
    receiver: Receiver
    keep: bool  # the graph
    plain: Sequence[Tensor]  # inputs whose ordinary gradients are wanted


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

    def input_gradients(self, grads: Sequence[Tensor | None], keep: bool) -> tuple[Tensor | None, ...]:
        """An ordinary backward that nobody asked for weights."""
        live = [(slot_of(y), g) for y, g in zip(self.outputs, grads, strict=True) if g is not None]
        if not live or not self.inputs:
            return (None,) * len(self.inputs)
        roots = Roots([slot for slot, _ in live], [], self.samples.batch, [g for _, g in live])
        return roots.backward([slot_of(x) for x in self.inputs], retain_graph=keep)

    def gradients(self, grads: Sequence[Tensor | None], keep: bool) -> tuple[Tensor | None, ...]:
        """Hand over the factors of all weights; the gradients of the inputs come back."""
        live = [(y, g) for y, g in zip(self.outputs, grads, strict=True) if g is not None]
        outputs = [y for y, _ in live]
        cotangents = [g if self.scale == 1 else g * self.scale for _, g in live]
        with self.receive() as receiver:
            if not outputs:
                return (None,) * len(self.inputs)
            if not self.samples.batch:
                return self.input_gradients(grads, keep)
            run = self._one if self.samples.batch == 1 else self._several
            if self.scale == 1:
                return run(_Backward(outputs, cotangents, receiver, keep, self.inputs))
            found = self.input_gradients(grads, keep=True)  # which are not to be scaled
            run(_Backward(outputs, cotangents, receiver, keep, ()))
        return found

    def _several(self, asked: _Backward) -> tuple[Tensor | None, ...]:
        """The engine's work, for the first reading of the outputs that agrees with what is known inside."""
        graph = self.graph or read([slot_of(y)[0] for y in asked.outputs])
        tape = graph.tape([*self.leaves.values(), *self.inputs])
        tape.data = graph.leaves_of(self._data)
        self._settle(tape)
        tried = Tried()
        try:
            for readings in self.samples.readings(asked.outputs, asked.cotangents, tape):
                for reading in readings:
                    try:
                        return self._capture(reading, asked, tape)
                    except Disagreement as error:
                        tried.disagrees(reading, error)
                    except InteractionError as error:
                        wrong = self._contradiction(reading, tape)
                        if wrong is None and self._is_by_coincidence(reading, tape):
                            with warnings.catch_warnings():
                                warnings.filterwarnings("ignore", "samples interact in", PerformanceWarning)
                                return self._capture(reading, asked, tape, independent=False)
                        tried.interacts(reading, error, wrong)
                if ops := tried.certain():
                    raise self._interaction(ops)
        except UnknownBatch as error:
            raise UnknownBatch(f"{self.what}: {error}") from error
        if ops := tried.likeliest():
            raise self._interaction(ops)
        raise UnknownBatch(
            f"cannot tell the samples apart in what {self.what} returned, of shapes "
            f"{[tuple(y.shape) for y in asked.outputs]}: expected dim {self.samples.dim} to be the batch of "
            f"{self.samples.batch}, as it is in the inputs"
            + (". A weight that is not expanded is told from data if it is an nn.Parameter" if self.follow else "")
        )

    def _capture(
        self, reading: Reading, asked: _Backward, tape: Tape, independent: bool = True
    ) -> tuple[Tensor | None, ...]:
        """One backward; raises before anything is run if the reading is wrong, or samples are not ``independent``."""
        if self.follow:
            self.samples.verify(self._plan(reading), reading, follow=True)
        test = partial(self.samples.verify, reading=reading, follow=False)
        known = {**self.samples.evidence(), **self.samples.pooled_below(reading, tape)}
        check = Check(test, known, tuple(reading.promised))
        return capture_from(
            reading.roots,
            self.leaves,
            asked.receiver.sink,
            retain_graph=asked.keep,
            independent=independent,
            trust_unseen=True,
            tell_bytes=asked.receiver.tell_bytes,
            check=None if self.follow else check,
            ordinary=[slot_of(x) for x in asked.plain],
            graph=self.graph if set(reading.roots.slots) == {slot_of(y) for y in self.outputs} else None,
        )

    @property
    def _data(self) -> list[Tensor]:
        return [x for x in self.inputs if not isinstance(x, nn.Parameter)]

    def _plan(self, reading: Reading) -> CapturePlan:
        """All that leads to weights or inputs."""
        return plan(reading.roots, [*self.leaves.values(), *self.inputs], data=self._data)

    def _contradiction(self, reading: Reading, tape: Tape) -> Disagreement | None:
        """What is known inside may show that it is the reading that is wrong, and not the samples that interact."""
        try:
            self.samples.compare(self._plan(reading))
        except Disagreement as error:
            return error
        return None

    def _is_by_coincidence(self, reading: Reading, tape: Tape) -> bool:
        """Is all that looks like an interaction a table that is as long as the batch? Then rows are exact anyway."""
        found = self._plan(reading)
        try:
            self.samples.verify(found, reading, follow=False)
        except (Disagreement, InteractionError):
            return False
        tensors = [*self.leaves.values(), *self.inputs]
        return not interact_without(self.samples.tables, found.tape, reading.roots, tensors)

    def _settle(self, tape: Tape) -> None:
        """Find out where data carry their samples, and refuse functions of data in which they meet."""
        try:
            self.samples.settle(tape)
        except InteractionError as error:
            raise self._interaction(error.ops) from None

    def _interaction(self, ops: tuple[str, ...]) -> InteractionError:
        found = InteractionError(
            f"samples interact in {', '.join(ops)}, of {self.what}: one sample's loss depends on another sample "
            f"(or the op's backward is not linear). Use layers that keep samples apart (GroupNorm for BatchNorm, or "
            f"model.eval()), do to data what mixes them before the call, or use ps.grad, which gives the exact "
            f"Jacobian rows"
        )
        found.ops = ops
        return found

    def _one(self, asked: _Backward) -> tuple[Tensor | None, ...]:
        """One sample: an ordinary backward."""
        slots = {name: slot_of(leaf) for name, leaf in self.leaves.items()}
        roots = Roots([slot_of(y) for y in asked.outputs], [], 1, asked.cotangents)
        with contributions([node for node, _ in slots.values()]) as given:
            grads = roots.backward([*slots.values(), *[slot_of(x) for x in asked.plain]], retain_graph=asked.keep)
        for (name, (leaf, _)), g in zip(slots.items(), grads, strict=False):
            terms = given[leaf]
            if g is not None:
                terms.append(Dense.of_one(g))
            if terms:
                asked.receiver.sink([name], combine(terms))
        return grads[len(slots) :]


class _Ask(torch.autograd.Function):
    """Stands between the gate and the weights, so that a backward which does not want weights can be told."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        ctx.count = len(weights)
        return weights[0].new_empty(0)

    @staticmethod
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
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        recording, keep = ctx.recording, keeps_graph()
        if torch.is_grad_enabled():
            raise RuntimeError(
                "per-sample gradients of a call cannot be differentiated again (create_graph=True): use ps.grad's "
                "definition, torch.autograd.grad(losses[i], params, create_graph=True), for gradients of gradients"
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
            found = (recording.gradients if wanted else recording.input_gradients)(grads, keep)
        return None, None, *found[: len(ctx.next_functions) - 1]


@contextmanager
def _apart(recording: Recording, grads: Sequence[Tensor | None]) -> Iterator[None]:
    """The caller's modes stay out, and everybody knows who is at work."""
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
