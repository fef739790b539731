"""From SPEC, the name of a factory, to the problem that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .._factories import Factories, FactoryError, device_of, seeded
from .errors import AuditError
from .problem import Problem

FORMS = "(model, inputs), (model, inputs, loss), (model, inputs, targets, loss) or a mapping with these names"
_KEYS = ("model", "inputs", "targets", "loss")
_FACTORIES = Factories(FORMS, (("model",), ("inputs", "batch")), ("targets", "loss"), arguments=("batch_size",))


def load(spec: str, *, batch_size: int | None = None, seed: int = 0, device: str | None = None) -> Problem:
    """The problem that SPEC names: ``package.module:factory`` or ``file.py:factory``.

    Without ``:factory`` the function is called ``factory``, or the module or file has ``model`` and ``inputs`` (and
    ``targets`` and ``loss``) at its top.
    """
    given = {} if batch_size is None else {"batch_size": batch_size}
    try:
        place = device_of(device)
        with seeded(seed):
            problem = _read(*_FACTORIES.made(spec, **given), seed)
    except FactoryError as error:
        raise AuditError(str(error)) from error
    return problem if place is None else problem.moved(place)


def _read(made: Any, what: str, seed: int) -> Problem:
    """A problem from what a factory has returned, in any of the accepted forms."""
    if isinstance(made, Mapping):
        parts = dict(made)
        if "batch" in parts and "inputs" not in parts:
            parts["inputs"] = parts.pop("batch")
        if not {"model", "inputs"} <= set(parts) or set(parts) - set(_KEYS):
            raise AuditError(f"{what} gave a mapping with the names {', '.join(map(str, made))}: it must give {FORMS}")
    elif isinstance(made, (tuple, list)) and len(made) in (2, 3, 4):
        names = {2: ("model", "inputs"), 3: ("model", "inputs", "loss"), 4: _KEYS}[len(made)]
        parts = dict(zip(names, made, strict=True))
    elif isinstance(made, (tuple, list)):
        raise AuditError(f"{what} gave {len(made)} values: it must give {FORMS}")
    else:
        kind = "a model without a batch" if isinstance(made, nn.Module) else f"a {type(made).__name__}"
        raise AuditError(f"{what} gave {kind}: it must give {FORMS}")
    try:
        return Problem(parts["model"], parts["inputs"], parts.get("targets"), parts.get("loss"), seed=seed)
    except AuditError as error:
        raise AuditError(f"{what}: {error}") from error
