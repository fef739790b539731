"""What may be asked of devices."""

from __future__ import annotations

import threading

import pytest
import torch

from persample.kernels.devices import can_look, full_precision, has_fast_float64, has_float64, looking

CPU, CUDA, MPS = (torch.device(kind) for kind in ("cpu", "cuda", "mps"))


def test_only_the_cpu_can_be_looked_at() -> None:
    assert [can_look(device) for device in (CPU, CUDA, MPS)] == [True, False, False]


@pytest.mark.parametrize("allowed", [True, False])
def test_looking_holds_inside_for_all_devices(allowed: bool) -> None:
    with looking(not allowed), looking(allowed):
        assert [can_look(device) for device in (CPU, CUDA, MPS)] == [allowed] * 3
    assert can_look(CPU)


def test_looking_is_of_one_thread() -> None:
    found: list[bool] = []
    with looking(False):
        thread = threading.Thread(target=lambda: found.append(can_look(CPU)))
        thread.start()
        thread.join()
    assert found == [True]


def test_float64() -> None:
    assert (has_float64(CPU), has_fast_float64(CPU)) == (True, True)
    assert (has_float64(MPS), has_fast_float64(MPS)) == (False, False)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9)])
def test_few_gpus_have_fast_float64(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_fast_float64(torch.device("cuda", capability[1])) == (capability == (8, 0))


def test_full_precision_is_set_and_reset() -> None:
    conv = torch.backends.cudnn.conv
    before = conv.fp32_precision
    with full_precision(CUDA):
        assert (conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision) == ("ieee", "ieee")
    assert conv.fp32_precision == before
    with full_precision(CPU):
        assert conv.fp32_precision == before
