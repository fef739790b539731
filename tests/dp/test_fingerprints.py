"""Fingerprints change with every value of a tensor and every number of an optimizer, and with nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from persample.dp.fingerprints import Taker, alike, changed, of_settings, of_tensors, same, summary

TENSORS: dict[str, Tensor] = {
    "float32": torch.randn(5, 3),
    "float64": torch.randn(5, 3, dtype=torch.float64),
    "bfloat16": torch.randn(5, 3).bfloat16(),
    "float16": torch.randn(7).half(),
    "complex": torch.randn(4, dtype=torch.complex64),
    "scalar": torch.tensor(1.5),
    "bytes": torch.arange(9, dtype=torch.uint8),
    "whole numbers": torch.arange(9),
    "bool": torch.tensor([True, False]),
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "transposed": torch.randn(5, 3).t(),
    "slice": torch.randn(9)[1::2],
    "not a number": torch.tensor([float("nan"), 1.0]),
}


@pytest.mark.parametrize("t", TENSORS.values(), ids=TENSORS)
def test_every_number_counts(t: Tensor) -> None:
    before = of_tensors({"t": t})
    assert of_tensors({"t": t.clone()}) == before
    for i in range(t.numel()):
        changed = t.clone().contiguous()
        flat = changed.view(-1)
        flat[i] = ~flat[i] if t.dtype is torch.bool else flat[i].nan_to_num(0.0) + 1
        assert of_tensors({"t": changed}) != before


def test_the_last_bit_counts() -> None:
    t = torch.ones(1000)
    before = of_tensors({"t": t})
    t[500] = torch.nextafter(t[500], torch.tensor(2.0))
    assert of_tensors({"t": t}) != before


SIZES = {"small": 10, "large": 2**14}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("way", ["in place", "other memory", "fewer"])
def test_what_has_changed_is_named(size: int, way: str) -> None:
    tensors = {name: torch.nn.Parameter(torch.randn(size)) for name in "abc"}
    taker = Taker(tensors)
    before = taker.take()
    assert same(before, taker.take())
    if way == "in place":
        tensors["b"].data[3] += 1
    else:
        tensors["b"].data = torch.randn(size) if way == "other memory" else tensors["b"].data[: size // 2]
    assert changed(before, taker.take()) == ["b"]
    assert not same(before, taker.take())
    assert changed(before, Taker({"c": tensors["c"], "d": tensors["a"]}).take()) == ["d"]


def test_small_tensors_are_compared_value_by_value() -> None:
    tensors = {"a": torch.arange(4.0), "b": torch.ones(2)}
    taker = Taker(tensors)
    before = taker.take()
    tensors["a"][0], tensors["a"][1] = 1.0, 0.0
    assert changed(before, taker.take()) == ["a"]


def test_nothing_to_compare() -> None:
    assert of_tensors({}) == {}
    assert of_tensors({"none": torch.zeros(0, 3)}) == {"none": 0}


@pytest.mark.parametrize("change", [{"lr": 0.2}, {"momentum": 0.8}, {"nesterov": True}, {"lr": torch.tensor(0.2)}])
def test_every_changed_setting_of_an_optimizer_is_named(change: dict[str, Any]) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    before = of_settings(optimizer)
    assert before == of_settings(torch.optim.SGD([weight.detach().clone().requires_grad_()], lr=0.1, momentum=0.9))
    optimizer.param_groups[0].update(change)
    after = of_settings(optimizer)
    assert [name for name in before if before[name] != after[name]] == [f"{next(iter(change))} of group 0"]
    assert summary(before) != summary(after)


def test_a_run_in_one_number() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    before = summary(alike({"weight": weight}, optimizer))
    assert before == summary(alike({"weight": weight}, optimizer))
    weight.data[1] += 1
    assert before != summary(alike({"weight": weight}, optimizer))
