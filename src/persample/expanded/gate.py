"""A call whose graph is kept apart from the user's, and asked for factors when the user's backward comes by.

The call's results hang on one node of the user's graph, the *gate*. Behind it lies the call's own graph, with other
leaves in place of weights and inputs. The gate gets the cotangents of all results at once, runs one capture on the
graph behind it, hands every weight's factor over, and lets the gradients of the inputs through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._errors import InteractionError
from ..factors import Dense, Factor, Masked, combine
from ..graph.capture import Sink
from ..graph.entry import capture_from
from ..graph.plan import Plan
from ..graph.roots import Roots, slot_of
from ..graph.saved import keeps_graph, will_run
from ..graph.tape import Tape, walk
from .contributions import contributions
from .samples import Disagreement, Samples, UnknownBatch


class Receiver(NamedTuple):
    """Who is given the factors of one backward, and is told before how much memory the call has kept."""

    sink: Sink
    tell_bytes: Callable[[int], None] | None = None


@dataclass
class Flag:
    """Raised while the gate itself works on the graph behind it."""

    up: bool = False


@dataclass
class Recording:
    """One call."""

    what: str  # for messages
    leaves: Mapping[str, Tensor]  # in place of the weights
    inputs: Sequence[Tensor]  # in place of the inputs that want gradients
    outputs: Sequence[Tensor]  # with the graph apart
    samples: Samples
    scale: int  # what the user's loss was divided by
    receive: Callable[[], AbstractContextManager[Receiver]]
    working: Sequence[Flag]
    originals: Mapping[int, str] = field(default_factory=dict)  # by id, the names of the weights themselves
    shared: bool = False  # is part of the graph other calls' too?

    def input_gradients(self, grads: Sequence[Tensor | None], keep: bool) -> tuple[Tensor | None, ...]:
        """An ordinary backward that nobody asked for weights."""
        live = [(y, g) for y, g in zip(self.outputs, grads, strict=True) if g is not None]
        found = [None] * len(self.inputs)
        if live and self.inputs:
            outputs, cotangents = zip(*live, strict=True)
            return torch.autograd.grad(outputs, self.inputs, cotangents, retain_graph=keep, allow_unused=True)
        return tuple(found)

    def gradients(self, grads: Sequence[Tensor | None], keep: bool) -> tuple[Tensor | None, ...]:
        """Hand over the factors of all weights; the gradients of the inputs come back."""
        live = [(y, g) for y, g in zip(self.outputs, grads, strict=True) if g is not None]
        outputs = [y for y, _ in live]
        cotangents = [g if self.scale == 1 else g * self.scale for _, g in live]
        found: dict[str, Tensor] = {}
        names = {f"input[{i}]": x for i, x in enumerate(self.inputs)}
        with self.receive() as receiver:

            def sink(name: str, factor: Factor) -> None:
                if name in names:
                    found[name] = _total(factor, names[name], self.scale)
                else:
                    receiver.sink(name, factor)

            if self.samples.batch == 1:
                self._one(outputs, cotangents, names, sink, keep)
            elif outputs and self.samples.batch:
                self._several(outputs, cotangents, names, sink, receiver.tell_bytes, keep)
            elif not self.samples.batch:
                for name, leaf in self.leaves.items():
                    receiver.sink(name, Dense(leaf.detach().new_zeros(0, *leaf.shape)))
        if not self.samples.batch:
            return self.input_gradients(grads, keep)
        return tuple(found.get(name) for name in names)

    def _several(
        self,
        outputs: Sequence[Tensor],
        cotangents: Sequence[Tensor],
        names: Mapping[str, Tensor],
        sink: Sink,
        tell_bytes: Callable[[int], None] | None,
        keep: bool,
    ) -> None:
        """The engine's work, for the first reading of the outputs that agrees with what is known inside."""
        meeting: InteractionError | None = None
        for roots in self.samples.starts(outputs, cotangents, list(self.leaves.values()), self.inputs):
            try:
                capture_from(
                    roots,
                    {**self.leaves, **names},
                    sink,
                    retain_graph=keep,
                    independent=True,
                    trust_unseen=True,
                    tell_bytes=tell_bytes,
                    verify=self._verify,
                )
            except (Disagreement, InteractionError) as error:
                meeting = meeting or (error if isinstance(error, InteractionError) else None)
                continue
            return
        raise meeting or UnknownBatch(
            f"cannot tell the samples apart in what {self.what} returned, of shapes "
            f"{[tuple(y.shape) for y in outputs]}: expected dim {self.samples.dim} to be the batch of "
            f"{self.samples.batch}, as it is in the inputs"
        )

    def _verify(self, plan: Plan) -> None:
        self._refuse_originals(plan.tape)
        self.samples.verify(plan)

    def _refuse_originals(self, tape: Tape) -> None:
        """A weight that was used itself, past the one that stands for it, would miss that use."""
        used = [self.originals.get(id(node.variable)) for node in tape.others]  # type: ignore[attr-defined]
        past = sorted({name for name in used if name is not None})
        if past:
            raise RuntimeError(
                f"{self.what} uses parameters {past} by another way than its attributes of that name (kept in a list, "
                f"a closure, or another module), so that this use was not recorded: read them from the module in forward"
            )

    def _one(
        self,
        outputs: Sequence[Tensor],
        cotangents: Sequence[Tensor],
        names: Mapping[str, Tensor],
        sink: Sink,
        keep: bool,
    ) -> None:
        """One sample: an ordinary backward."""
        tensors = {**self.leaves, **names}
        self._refuse_originals(walk([slot_of(y)[0] for y in outputs], tensors.values()))
        slots = [slot_of(t) for t in tensors.values()]
        with contributions([node for node, _ in slots]) as given:
            roots = Roots([slot_of(y) for y in outputs], [], 1, cotangents)
            grads = roots.backward(slots, retain_graph=keep) if outputs else ()
        for name, (leaf, _), g in zip(tensors, slots, grads, strict=False):
            terms = given[leaf]
            if g is not None:
                terms.append(Dense((g if g.layout == torch.strided else g.to_dense()).detach().unsqueeze(0)))
            if terms:
                sink(name, combine(terms))


def _total(factor: Factor, like: Tensor, scale: int) -> Tensor:
    """The gradient of the whole batch."""
    if isinstance(factor, Masked):
        value = factor.value
    else:
        value = factor.weighted_sum(torch.ones(factor.batch, device=factor.device))
    return (value if scale == 1 else value / scale).to(like.dtype).reshape(like.shape)


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
        return tuple(y.detach() for y in recording.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        recording, keep = ctx.recording, keeps_graph()
        if recording is None:
            raise RuntimeError(
                "this backward comes to a call for per-sample gradients a second time, and the first freed its graph: "
                "call again, or pass retain_graph=True to every backward but the last"
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
            flag.up = True
            stack.callback(setattr, flag, "up", False)
        for kind in {g.device.type for g in grads if g is not None}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def attach(recording: Recording, weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results of a call as the user's graph sees them."""
    ask = _Ask.apply(*weights)  # type: ignore[no-untyped-call]
    results: tuple[Tensor, ...] = _Gate.apply(recording, ask, *inputs)  # type: ignore[no-untyped-call]
    return results
