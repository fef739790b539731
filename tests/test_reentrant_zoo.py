"""Gradient checkpointing as ``transformers`` turns it on, of both kinds, in training mode."""

from __future__ import annotations

from dataclasses import replace

import pytest

import persample as ps
from tests.reference import assert_same, definition
from tests.zoo import ENTRIES
from tests.zoo.build import build, precision, quiet

FAST = ("gpt2", "bert", "bart", "llama", "vit")
# In the backward of a checkpoint, casts to float32 are not turned into casts to float64: asked for in float32.
FLOAT32 = {("llama", False), ("bloom", True)}
MORE = "roberta opt mistral qwen2 t5 whisper mixtral mixtral/batched glm_moe_dsa mbart bloom falcon gemma2 phi"
NAMES = [*FAST, *[pytest.param(name, marks=pytest.mark.slow) for name in MORE.split()]]
# Models whose layers get computed tensors by name, which ``transformers`` does not give to a reentrant checkpoint.
REFUSED = [
    pytest.param("mlcd_vision_model", r"a result of Cat of shape \(17, 8\)", marks=pytest.mark.slow),
    pytest.param("deformable_detr", r"a result of Cat of shape \(3, 20, 32\)", marks=pytest.mark.slow),
]


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
@pytest.mark.parametrize("name", NAMES)
def test_reentrant_checkpoints_are_exact(name: str) -> None:
    _agrees(name, use_reentrant=True)


@pytest.mark.parametrize("name", FAST)
def test_ordinary_checkpoints_are_exact(name: str) -> None:
    _agrees(name, use_reentrant=False)


@pytest.mark.parametrize(("name", "words"), REFUSED)
def test_a_region_that_uses_what_it_was_not_given_is_refused(name: str, words: str) -> None:
    model, losses = next(e for e in ENTRIES if e.name == name).build()
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})  # type: ignore[operator]
    graph = losses()
    with precision(False), quiet(), pytest.raises(ps.UnsupportedError, match=words + " without being given it"):
        ps.grad(graph, model)


def _agrees(name: str, use_reentrant: bool) -> None:
    entry = next(e for e in ENTRIES if e.name == name)
    float32 = entry.rtol > 1e-6 or (name, use_reentrant) in FLOAT32
    (spec,) = entry.build.args  # type: ignore[attr-defined]
    model, losses = build(replace(spec, float32=float32))
    model.train()  # with dropout
    want = definition(losses(), model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})  # type: ignore[operator]
    graph = losses()
    with precision(float32), quiet():  # regions are run again here
        assert_same(ps.grad(graph, model), want, rtol=1e-4 if float32 else entry.rtol)
