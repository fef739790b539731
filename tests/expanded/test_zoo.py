"""Every architecture of the zoo, called for per-sample gradients."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from persample import call_for_per_sample_grads
from tests.reference import assert_same, definition, named
from tests.zoo import ENTRIES, FAST, Entry

# What is refused, and why.
REFUSED = {
    "levit": "by another way",  # keeps biases that an earlier call computed from its parameters
    "clip": "interact",
    "siglip": "interact",
    "encodec": "batch",  # its inputs disagree on the batch size
}


def record(model: nn.Module) -> None:
    """Let the model's calls from outside be calls for per-sample gradients."""
    kind, call, inside = type(model), call_for_per_sample_grads(model), False

    class Recorded(kind):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if self is not model or inside:
                return super().__call__(*args, **kwargs)
            inside = True
            try:
                return call(*args, **kwargs)
            finally:
                inside = False

    Recorded.__name__ = kind.__name__
    model.__class__ = Recorded


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
@pytest.mark.parametrize(
    "entry",
    [pytest.param(e, id=e.name, marks=[] if e.name in FAST else [pytest.mark.slow]) for e in ENTRIES],
)
def test_agrees_with_the_definition(entry: Entry) -> None:
    model, losses = entry.build()
    want = definition(losses(), model)
    record(model)
    if entry.name in REFUSED:
        with pytest.raises(RuntimeError, match=REFUSED[entry.name]):
            losses().sum().backward()
        return
    losses().sum().backward()
    assert_same({name: p.grad_sample for name, p in named(model).items()}, want, rtol=entry.rtol)
