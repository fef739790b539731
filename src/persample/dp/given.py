"""What a step is given: losses, or the batch that compiled steps compute them from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..checks import check_losses
from .binding import is_older
from .errors import PrivacyError


@dataclass(frozen=True)
class Given:
    """Arguments of a step."""

    args: Sequence[Any]
    options: Mapping[str, Any]

    @classmethod
    def of(cls, args: Sequence[Any], options: Mapping[str, Any], *, compiled: bool) -> Given:
        """Refuse a batch where losses are asked for, and losses where a batch is."""
        every = [*args, *options.values()]
        if compiled:
            if len(every) == 1 and isinstance(every[0], Tensor) and every[0].grad_fn is not None:
                raise TypeError(
                    "compiled steps take the batch, not its losses: with compile=losses_fn, write "
                    "private.step(*batch), which computes them"
                )
        elif len(every) != 1 or set(options) - {"losses"}:
            raise TypeError(
                f"a step takes the losses of its batch, one tensor, but got {len(every)} arguments: give it "
                f"losses_fn(*batch), or the batch itself to steps of dp.Private(..., compile=losses_fn)"
            )
        return cls(args, options)

    @property
    def losses(self) -> Any:
        """The only argument."""
        return self.args[0] if self.args else self.options["losses"]

    def check(self, samples: int, marked: int) -> None:
        """Refuse what are not losses, one for each sample, computed since a mark was set."""
        check_one_per_sample(self.losses)
        check_count(len(self.losses), samples)
        if is_older(self.losses, marked):
            raise PrivacyError("these losses were computed before the batch was drawn: compute them from the batch")


def check_one_per_sample(losses: Tensor) -> None:
    """Refuse several losses per sample: each would be clipped by itself, and a sample could add K times the bound."""
    check_losses(
        losses,
        why_one="each of a sample's K losses would be clipped by itself, and the sample could add K times the bound "
        "that is accounted for;",
    )


def check_count(losses: int, samples: int) -> None:
    """Refuse more or fewer losses than samples."""
    if losses != samples:
        raise PrivacyError(
            f"there are {losses} losses, but the batch has {samples} samples: give one loss for each of them"
        )
