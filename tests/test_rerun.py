"""Recording calls of modules, and comparing them with calls on fewer samples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from persample.rerun import CallRecorder, RecordedCall, compare_with_fewer_samples, rounding_tolerance


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_outermost_calls_are_recorded_in_their_order() -> None:
    model, x = mlp(), torch.randn(5, 3)
    recorder = CallRecorder(model)
    recorder.start()
    model[0](x)
    model(x)
    calls = recorder.stop()
    assert [call.name for call in calls] == ["0", ""]
    assert all(call.args[0] is x and not call.buffers_before for call in calls)
    assert [str(call) for call in calls] == ["module '0' (Linear)", "the model (Sequential)"]


def test_inner_calls_are_recorded_if_asked_for() -> None:
    model = mlp()
    recorder = CallRecorder(model, inner=True)
    recorder.start()
    model(torch.randn(5, 3))
    assert [call.name for call in recorder.stop()] == ["", "0", "1", "2"]


def test_buffers_are_copied_before_and_after_a_call() -> None:
    model = mlp()
    recorder = CallRecorder(model, buffers=True)
    recorder.start()
    model(torch.randn(5, 3))
    (call,) = recorder.stop()
    assert int(call.buffers_before["1.num_batches_tracked"]) == 0
    assert int(call.buffers_after["1.num_batches_tracked"]) == 1


def test_a_call_that_fails_or_began_earlier_disturbs_nothing() -> None:
    model = mlp()
    recorder = CallRecorder(model)
    handle = model[0].register_forward_hook(lambda *_: recorder.start())
    model(torch.randn(5, 3))
    handle.remove()
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.randn(5, 7))
    model(torch.randn(5, 3))
    assert [call.name for call in recorder.stop()] == ["1", "2", "", ""]
    assert not recorder.is_recording
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_outputs_that_depend_on_the_batch_differ() -> None:
    x = torch.randn(6, 3)
    alone = compare_with_fewer_samples(RecordedCall("", nn.Tanh(), (x,), {}), 6)
    assert alone is not None
    assert alone.difference < 1e-6
    centred = compare_with_fewer_samples(RecordedCall("", Centred(), (x,), {}), 6)
    assert centred is not None
    assert centred.difference > 0.01


def test_one_sample_proves_nothing() -> None:
    assert compare_with_fewer_samples(RecordedCall("", Centred(), (torch.randn(1, 3),), {}), 1) is None


def test_autocast_on_the_cpu_is_coarse() -> None:
    model = nn.Linear(2, 2)
    exact = rounding_tolerance(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert rounding_tolerance(model) > 10 * exact
    assert rounding_tolerance(nn.Linear(2, 2).bfloat16()) > 10 * exact
