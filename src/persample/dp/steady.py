"""Parameters that change between a batch and its step: by the data, then, and without noise."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import Tensor

from .errors import PrivacyError, PrivacyWarning
from .fingerprints import Taken, Taker, changed, same


class Steady:
    """Compares a model's parameters, frozen ones included, between a batch and its step.

    Layers that initialise themselves from the first batch (ActNorm), embeddings that are renormalised when they are
    looked up (``max_norm=``): such values come from single examples, and are published with the weights. Values are
    compared, as not every way of writing leaves a trace. What is changed between a step and the next batch is the
    user's own affair.
    """

    def __init__(self) -> None:
        self._taker = Taker({})
        self._before = Taken((), {})
        self._checked = Taken((), {})  # the parameters with which the last step was made
        self._unapplied: Taken | None = None  # the parameters for which a gradient was released

    def watch(self, params: Mapping[str, Tensor]) -> None:
        """Remember the parameters: from now on none may change."""
        self._before = self._take(params)

    def released(self) -> None:
        """Remember that a gradient waits for the optimizer."""
        self._unapplied = self._checked

    def stepped(self) -> None:
        """The optimizer has applied the gradient."""
        self._unapplied = None

    def check(self, params: Mapping[str, Tensor]) -> None:
        """Refuse, by name, what has changed; tell if nothing has since the last release, which is then lost."""
        self._checked = self._take(params)
        if names := changed(self._before, self._checked):
            raise PrivacyError(
                f"parameters {names} were changed between the batch and private.step, not by the optimizer: by what "
                f"the forward pass has seen of the data, without noise (layers that initialise themselves from the "
                f"first batch, Embedding(max_norm=)). Initialise them with public or made-up data before dp.Private is "
                f"made; change weights by hand after a step, and before the next batch"
            )
        if self._unapplied is not None and same(self._unapplied, self._checked):
            self._unapplied = None
            warnings.warn(
                "the gradients of the last private.backward were not applied, and are overwritten now; the step is "
                "spent all the same. Call optimizer.step() after every record that says updated; where batches are too "
                "large for memory, use physical_batch_size=, which adds up exactly",
                PrivacyWarning,
                stacklevel=4,
            )

    def _take(self, params: Mapping[str, Tensor]) -> Taken:
        if params is not self._taker.tensors:
            self._taker = Taker(params)
        return self._taker.take()
