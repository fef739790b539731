"""What hooks compute on other streams than the caller's is waited for, and not overwritten too early."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import persample as ps
from persample.kernels.streams import Streams
from tests.device.backend import DEVICE, Stream

WIDTH = {"one use": 1, "bundles": 3}  # how many layers are alike


@pytest.mark.parametrize("kind", WIDTH)
def test_the_callers_stream_waits_for_the_hooks_and_they_for_it(kind: str) -> None:
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(WIDTH[kind])], nn.Linear(4, 2)).to(DEVICE)
    losses = net(torch.randn(5, 4, device=DEVICE)).square().sum(1)
    caller: Stream = torch.get_device_module(DEVICE).current_stream(DEVICE)
    caller.waited_for.clear()
    ps.norms(losses, net)
    (hooks,) = caller.waited_for
    assert hooks is not caller
    assert hooks.waited_for[-1] is caller


def test_streams_of_one_call_are_not_those_of_the_next() -> None:
    assert Streams.of_call() is not Streams.of_call()
    assert Streams.of_call().noting(print) is print
