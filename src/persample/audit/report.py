"""The result of an audit."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from .._table import render
from ..graph.describe import UNKNOWN
from .costs import Cost
from .estimate import ESTIMATED, Estimate, estimated
from .independence import Seen
from .words import mark, megabytes, milliseconds, number, size_in_words

EXIT_CODES = {
    0: "exact, and samples are independent",
    1: "a gradient differs from the definition",
    2: "the audit could not be run: SPEC or an option is wrong",
    3: "samples interact",
    4: "persample refuses the model",
    5: "exact, but whether samples interact could not be told",
    6: "planned from shapes alone: there are no numbers to compute or compare",
}
_KINDS = {
    "refused": "refused",
    "fallback": "by the exact fallback",
    "rule": "by rule",
    "separable": "separable",
    "zeros": "unreached",
}  # worst first, and in words


@dataclass(frozen=True, slots=True)
class Parameter:
    """How one parameter is covered, and how its gradients compare with the definition."""

    name: str
    shape: tuple[int, ...]
    handled: tuple[str, ...]  # every way in which a use of it is handled
    error: float | None = (
        None  # the largest difference, relative to the sample's largest gradient; None if not compared
    )
    magnitude: float | None = None  # the largest gradient of any sample
    ok: bool | None = None

    @property
    def is_sure(self) -> bool:
        """Is it known how every use is handled, although there were no data?"""
        return not any(how.endswith(UNKNOWN) for how in self.handled)

    @property
    def kind(self) -> str:
        """Refused, fallback, rule, separable or zeros: the first of these that a use of it is."""
        kinds = {how.split(":")[0] for how in self.handled}
        return next((kind for kind in _KINDS if kind in kinds), "separable")


@dataclass(frozen=True, slots=True)
class Report:
    """What an audit found; prints as text, ``as_dict()`` is for JSON."""

    name: str  # SPEC, or the model's class
    how: str  # how the losses were computed
    batch: int
    parameters: tuple[Parameter, ...]
    frozen: int
    refusal: str | None
    tolerance: float | None
    graph: Seen
    rerun: Seen
    costs: tuple[Cost, ...]
    activations: int | None  # bytes that the forward pass holds
    stack_bytes: int  # what all gradients take when they are written out for the whole batch
    notes: tuple[str, ...]
    estimates: tuple[Estimate, ...] = ()  # in place of costs, where tensors have no numbers
    parameter_bytes: int = 0
    has_numbers: bool = True

    @property
    def works(self) -> bool:
        """Did persample give an answer?"""
        return self.refusal is None

    @property
    def exact(self) -> bool:
        """Does every parameter agree with the definition?"""
        return self.works and all(p.ok for p in self.parameters)

    @property
    def independent(self) -> bool | None:
        """Do samples keep apart, by the graph and by running parts of the batch again? None if one cannot tell."""
        answers = {self.graph.answer, self.rerun.answer}
        if "interacting" in answers:
            return False
        return None if "unknown" in answers else True

    @property
    def max_error(self) -> float | None:
        """The largest relative error of any parameter."""
        return max((p.error for p in self.parameters if p.error is not None), default=None)

    @property
    def exit_code(self) -> int:
        """The command's: 0 only if exact and independent."""
        if not self.works:
            return 4
        if not self.has_numbers:
            return 3 if self.independent is False else 6
        if not self.exact:
            return 1
        return {True: 0, False: 3, None: 5}[self.independent]

    @property
    def ok(self) -> bool:
        """Exact and independent."""
        return self.exit_code == 0

    def __bool__(self) -> bool:
        return self.ok

    @property
    def verdict(self) -> str:
        """The result in one line."""
        return EXIT_CODES[self.exit_code]

    def coverage(self) -> dict[str, int]:
        """How many parameters are handled in which way."""
        kinds = [p.kind for p in self.parameters]
        return {kind: kinds.count(kind) for kind in _KINDS if kind in kinds}

    @property
    def covered(self) -> str:
        """How many parameters are handled in which way, in words."""
        kinds = ", ".join(f"{count} {_KINDS[kind]}" for kind, count in self.coverage().items())
        return kinds + (f"; {self.frozen} frozen, left out" if self.frozen else "")

    @property
    def sizes(self) -> str:
        """How much memory the model and its batch are about, in words."""
        held = "" if self.activations is None else f"; the forward pass holds {size_in_words(self.activations)}"
        return (
            f"parameters take {size_in_words(self.parameter_bytes)}, all gradients written out "
            f"{size_in_words(self.stack_bytes)}{held}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything in plain values; numbers that are not finite are strings, as JSON has none."""
        derived = ("works", "exact", "independent", "max_error", "exit_code", "verdict")
        more = [{"kind": p.kind} for p in self.parameters]
        values = {**{name: getattr(self, name) for name in derived}, **asdict(self), "coverage": self.coverage()}
        values["parameters"] = [{**p, **extra} for p, extra in zip(values["parameters"], more, strict=True)]
        return _plain(values)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        rows = [(p.name, str(p.shape), ", ".join(p.handled), number(p.error), mark(p.ok)) for p in self.parameters]
        lines = [
            f"{self.name}: {self.batch} samples, losses = {self.how}",
            render(("parameter", "shape", "handled by", "relative error", ""), rows),
            f"by the graph: {self.graph.answer}, {self.graph.reason}",
            f"by running parts of the batch again: {self.rerun.answer}, {self.rerun.reason}",
        ]
        if self.costs:
            costs = [(c.name, milliseconds(c.ms), f"{c.ratio:.2f}", megabytes(c.bytes_above)) for c in self.costs]
            lines.append(render(("step", "time", "to plain", "memory above forward"), costs))
        if self.estimates:
            lines += [render(ESTIMATED, estimated(self.estimates)), self.sizes]
        lines += [f"note: {note}" for note in self.notes]
        if self.refusal:
            lines.append(f"refused: {self.refusal}")
        return "\n".join([*lines, self.verdict])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
