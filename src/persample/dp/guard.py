"""Looking for samples that interact where the graph does not show it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn

from .._errors import InteractionError
from ..rerun import CallRecorder, RecordedCall, compare_with_fewer_samples, rounding_tolerance
from .errors import PrivacyError

_CONCLUSIVE_AT_FIRST = 2  # conclusive checks before they become rare
_INCONCLUSIVE_AT_MOST = 5  # inconclusive checks before the user is warned


class Guard:
    """Records what the model is called with in some of the steps, and runs it again on parts of it.

    A sample's output must not depend on which other samples are in the batch. Statistics that are detached
    (``h - h.mean(0).detach()``) leave no trace in the graph, but do change outputs. What is computed outside of the
    model is not seen, nor interaction that the tried samples do not show: this finds mistakes, it proves nothing.
    """

    def __init__(self, model: nn.Module, every: int) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 0:
            raise ValueError(f"check_every must be a number of steps, or 0 for never, not {every!r}")
        self._model, self._every = model, every
        self._recorder = CallRecorder(model, buffers=True)
        self._conclusive, self._inconclusive = 0, 0
        self._held: Sequence[RecordedCall] | None = None

    def watch(self, step: int) -> None:
        """Record calls from now on, if a check is due at this step."""
        self._recorder.stop()
        starting = self._conclusive < _CONCLUSIVE_AT_FIRST and self._inconclusive < _INCONCLUSIVE_AT_MOST
        if self._every and (starting or step % self._every == 0):
            self._recorder.start()

    @property
    def is_due(self) -> bool:
        """Are calls recorded, to be checked?"""
        return self._recorder.is_recording

    def hold(self) -> None:
        """Record no more calls: what follows is not to be checked."""
        self._held = self._recorder.stop() if self.is_due else None

    def check(self, batch: int, users: Sequence[int] | None = None) -> None:
        """Run the calls again that were recorded until `hold`; refuse the step if samples interact.

        Where ``users`` are how many of the samples each user has, samples of one user may.
        """
        calls, self._held = self._held, None
        if calls is None:
            return
        conclusive = [self._check_call(call, batch, users) for call in calls]
        if any(conclusive):
            self._conclusive += 1
        elif (batch if users is None else len(users)) > 1:
            self._inconclusive += 1
            self._warn_if_nothing_was_proven(calls)

    def _check_call(self, call: RecordedCall, batch: int, users: Sequence[int] | None) -> bool:
        """Whether running the call again was conclusive."""
        comparison = compare_with_fewer_samples(call, batch, users)
        if comparison is None:
            return False
        if comparison.buffers:
            raise PrivacyError(
                f"{call} keeps what it has seen of the data in its buffers {', '.join(comparison.buffers)}, without "
                f"noise: put it into eval mode, or use a layer without running statistics. What is set once, by the "
                f"first batch, has to be set by made-up data before dp.Private is made"
            )
        if comparison.difference > rounding_tolerance(self._model):
            raise InteractionError(
                f"samples interact in {call}: run again on a few samples of the batch, their outputs changed by "
                f"{comparison.difference:.2g} of the largest, though their inputs did not. One example would have "
                f"moved the gradients of others, which clipping does not bound. Look for statistics of the batch, "
                f"detached or not"
            )
        return True

    def _warn_if_nothing_was_proven(self, calls: Sequence[RecordedCall]) -> None:
        if self._inconclusive == _INCONCLUSIVE_AT_MOST and not self._conclusive:
            which = ", ".join(sorted({str(call) for call in calls})) or "the model, which was not called,"
            warnings.warn(
                f"{which} could not be run again on a few samples of its batch, so that samples that interact through "
                f"detached values would not be found: make sure that there are none. check_every=0 silences this",
                stacklevel=4,
            )
