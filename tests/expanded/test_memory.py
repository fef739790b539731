"""What a call through call_for_per_sample_grads keeps, and until when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import persample as ps
from persample import call_for_per_sample_grads
from tests.expanded.helpers import Run, r


@pytest.mark.usefixtures("no_garbage_collector")
class TestMemory:
    def setup_method(self) -> None:
        self.module, self.kept = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 2)).double(), []
        self.module[1].register_forward_hook(lambda m, a, out: self.kept.append(StorageWeakRef(out.untyped_storage())))

    def _released(self) -> bool:
        assert self.kept
        return all(ref.expired() for ref in self.kept)

    @pytest.mark.parametrize("options", [{}, {"reductions": [ps.Norms()]}], ids=["stacks", "reductions"])
    def test_released_by_the_backward(self, options: dict[str, Any]) -> None:
        """Even while the loss, the outputs and the callable are held."""
        call = call_for_per_sample_grads(self.module, **options)
        out = call(r(4, 3))
        loss = out.square().sum()
        assert not self._released()
        loss.backward()
        assert self._released()

    def test_kept_when_asked(self) -> None:
        loss = call_for_per_sample_grads(self.module)(r(4, 3)).square().sum()
        loss.backward(retain_graph=True)
        assert not self._released()
        del loss
        assert self._released()

    @pytest.mark.parametrize("options", [{}, {"reductions": [ps.Norms()]}], ids=["stacks", "reductions"])
    def test_released_without_a_backward(self, options: dict[str, Any]) -> None:
        call = call_for_per_sample_grads(self.module, **options)
        out = call(r(4, 3))
        assert not self._released()
        del out
        assert self._released()

    def test_input_released(self) -> None:
        call, x = call_for_per_sample_grads(self.module), r(4, 3)
        ref = StorageWeakRef(x.untyped_storage())
        loss = call(x).square().sum()
        loss.backward()
        del x
        assert ref.expired()

    def test_stacks_share_nothing(self) -> None:
        """A stack that is changed, as clipping does, changes no other one and no gradient of the user's."""
        module = Run(lambda m, x: m.a(x) + m.b(x) + m.c, a=nn.Linear(3, 3), b=nn.Linear(3, 3), c=torch.ones(3)).double()
        x, added = r(4, 3), torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
        (call_for_per_sample_grads(module)(x) + added).square().sum().backward()
        tensors = [added.grad, *(p.grad_sample for p in module.parameters())]
        assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)
        assert all(t.is_contiguous() for t in tensors), "no element stands for several"
