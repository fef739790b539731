"""Gradient checkpointing as ``transformers`` turns it on, of both kinds, in training mode."""

from __future__ import annotations

import pytest

import persample as ps
from tests.reference import assert_same, definition
from tests.zoo import ENTRIES
from tests.zoo.build import precision, quiet

FAST = ("gpt2", "bert", "bart", "llama", "vit")
# In the backward of a non-reentrant checkpoint, casts to float32 are not turned into casts to float64.
FLOAT32 = {("llama", False): "llama/float32"}
MORE = "roberta opt mistral qwen2 t5 whisper mixtral mixtral/batched glm_moe_dsa mbart bloom falcon gemma2 phi"
NAMES = [*FAST, *[pytest.param(name, marks=pytest.mark.slow) for name in MORE.split()]]


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
@pytest.mark.parametrize("name", NAMES)
def test_reentrant(name: str) -> None:
    _agrees(name, use_reentrant=True)


@pytest.mark.parametrize("name", FAST)
def test_not_reentrant(name: str) -> None:
    _agrees(FLOAT32.get((name, False), name), use_reentrant=False)


def _agrees(name: str, use_reentrant: bool) -> None:
    entry = next(e for e in ENTRIES if e.name == name)
    model, losses = entry.build()
    model.train()  # with dropout
    want = definition(losses(), model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})  # type: ignore[operator]
    graph = losses()
    with precision(entry.rtol > 1e-6), quiet():  # regions are run again here
        assert_same(ps.grad(graph, model), want, rtol=entry.rtol)
