"""Parameters that change between a batch and its step: by the data, then, and without noise."""

from __future__ import annotations

from torch import nn

from ..distributed import owners
from .errors import PrivacyError
from .fingerprints import of_tensors


class Steady:
    """Compares a model's parameters, frozen ones included, between a batch and its step.

    Layers that initialise themselves from the first batch (ActNorm), embeddings that are renormalised when they are
    looked up (``max_norm=``): such values come from single examples, and are published with the weights. Values are
    compared, as not every way of writing leaves a trace. What is changed between a step and the next batch is the
    user's own affair.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[str, int] = {}

    def watch(self) -> None:
        """From now on nothing may change."""
        self._before = self._now()

    def check(self) -> None:
        """Refuse, by name, what has changed."""
        changed = [name for name, found in self._now().items() if self._before.get(name) != found]
        if changed:
            raise PrivacyError(
                f"parameters {changed} were changed between the batch and private.step, not by the optimizer: by what "
                f"the forward pass has seen of the data, without noise (layers that initialise themselves from the "
                f"first batch, Embedding(max_norm=)). Initialise them with public or made-up data before dp.Private is "
                f"made; change weights by hand after a step, and before the next batch"
            )

    def _now(self) -> dict[str, int]:
        return of_tensors(owners(dict(self._model.named_parameters())))
