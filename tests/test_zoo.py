"""Every architecture of the zoo agrees with the definition."""

from __future__ import annotations

import pytest

import persample
from tests.reference import assert_same, definition
from tests.zoo import ENTRIES, FAST, Entry

FAMILIES = {"text", "vision", "audio", "ssm", "moe", "seq2seq"}


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
@pytest.mark.parametrize(
    "entry",
    [pytest.param(e, id=e.name, marks=[] if e.name in FAST else [pytest.mark.slow]) for e in ENTRIES],
)
def test_agrees_with_the_definition(entry: Entry) -> None:
    model, losses_fn = entry.build()
    losses = losses_fn()
    want = definition(losses, model)
    assert_same(persample.grad(losses, model), want, rtol=entry.rtol)


def test_the_fast_ones_span_the_families() -> None:
    names = [e.name for e in ENTRIES]
    fast = [e for e in ENTRIES if e.name in FAST]
    assert len(set(names)) == len(names)
    assert set(FAST) <= set(names)
    assert {e.family for e in fast} == {e.family for e in ENTRIES} == FAMILIES


@pytest.mark.parametrize("name", ["mixtral", "swin", "whisper", "llama/float32"])
def test_losses_are_the_same_on_every_call(name: str) -> None:
    entry = next(e for e in ENTRIES if e.name == name)
    _, losses_fn = entry.build()
    _, again = entry.build()
    assert losses_fn().tolist() == losses_fn().tolist() == again().tolist()
