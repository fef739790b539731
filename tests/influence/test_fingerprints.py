"""Fingerprints of models: every bit counts, and what is known is not hashed again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from persample.influence.store import fingerprints as module
from persample.influence.store.fingerprints import Known, of_tensors

TENSORS: dict[str, Callable[[], Tensor]] = {
    "float32": lambda: torch.randn(70, 9),
    "bfloat16": lambda: torch.randn(301, 7).bfloat16(),
    "float64": lambda: torch.randn(128),
    "complex": lambda: torch.randn(300, dtype=torch.cfloat).conj(),
    "transposed": lambda: torch.randn(40, 50).t(),
    "expanded": lambda: torch.randn(40, 1).expand(40, 50),
    "sliced": lambda: torch.randn(3000)[1:-1],
    "bool": lambda: torch.rand(2000) < 0.5,
    "small": lambda: torch.randn(3),
    "none": lambda: torch.empty(0, 3),
}


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_known_is_what_hashing_every_bit_says(make: Callable[[], Tensor]) -> None:
    tensors, known = {"a": make(), "b": torch.randn(5)}, Known()
    for _ in range(2):
        assert known.of(tensors) == of_tensors(tensors)
    tensors["b"][3] += 1
    assert known.of(tensors) == of_tensors(tensors)


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "one bit": lambda t: t.view(torch.int32)[777].bitwise_xor_(1),
    "the last number": lambda t: t[-1].add_(1),
    "an exchange": lambda t: t.index_copy_(0, torch.tensor([5, 6]), t[[6, 5]]),
    "the other way round": lambda t: t.copy_(t.flip(0)),
    "rolled": lambda t: t.copy_(t.roll(128)),
    "signs": lambda t: t.neg_(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_that_no_version_tells_of(change: Callable[[Tensor], object]) -> None:
    p = torch.nn.Parameter(torch.randn(2**11 + 3))
    known = Known()
    before, version = known.of({"p": p}), p._version
    change(p.data)
    assert p._version == version
    assert known.of({"p": p}) == of_tensors({"p": p}) != before


REGULAR: dict[str, Callable[[Tensor], object]] = {  # changes whose differences are multiples of powers of two
    "signs": lambda t: t.neg_(),
    "two signs": lambda t: t[1:4:2].neg_(),
    "every second sign": lambda t: t[1::2].neg_(),
    "every fourth sign": lambda t: t[3::4].neg_(),
    "twice": lambda t: t.mul_(2),
    "half": lambda t: t.mul_(0.5),
    "ones": lambda t: t.fill_(1),
    "minus zeros": lambda t: t.zero_().neg_(),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", REGULAR.values(), ids=REGULAR)
def test_changes_that_are_regular(change: Callable[[Tensor], object], dtype: torch.dtype) -> None:
    for make in (torch.randn, torch.zeros):
        t, known = make(4096).to(dtype), Known()
        before = known.of({"p": t})
        change(t)
        assert known.of({"p": t}) == of_tensors({"p": t})
        assert make is torch.zeros or before != known.of({"p": t})


def test_every_bit_is_hashed_once_for_every_state(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed, states = [], [{"p": torch.randn(999)} for _ in range(2)]
    monkeypatch.setattr(module, "of_tensors", lambda tensors: hashed.append(1) or of_tensors(tensors))
    known = Known()
    found = [known.of(state) for _ in range(3) for state in states]
    assert len(hashed) == len(set(found)) == 2


def test_names_and_shapes_count() -> None:
    t, known = torch.randn(6), Known()
    same = [{"a": t}, {"b": t}, {"a": t.view(2, 3)}, {"a": t.view(torch.int32)}, {"a": t[:3], "b": t[3:]}]
    assert len({known.of(tensors) for tensors in same}) == len(same)
