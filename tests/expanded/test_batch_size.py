"""Where call_for_per_sample_grads finds the batch size, and inputs that do not tell it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from persample import call_for_per_sample_grads
from tests.expanded.helpers import Run, r, says, taken
from tests.reference import assert_same, definition


class TestBatchSizeFromInputs:
    @pytest.mark.parametrize(
        ("args", "kwargs"),
        [
            ((r(4, 3), r(5, 3)), {}),
            ((r(4, 3),), {"y": r(5, 3)}),
            (([r(4, 3), r(5, 3)],), {}),
            (({"a": r(4, 3), "b": {"c": (r(5, 3),)}},), {}),
            ((r(4, 3), "text", None, {"mask": torch.ones(5, dtype=torch.bool)}), {}),
        ],
        ids=["args", "kwargs", "list", "nested", "mask"],
    )
    def test_tensors_disagree(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        called = Run(lambda m, *args, **kwargs: pytest.fail("the module was run"), inner=module)
        with pytest.raises(RuntimeError, match=says(4, 5, "batch_size=")):
            call_for_per_sample_grads(called)(*args, **kwargs)

    def test_tensors_disagree_in_dim_1(self, module: nn.Module) -> None:
        called = Run(lambda m, x, y: m.inner(x), inner=module)
        with pytest.raises(RuntimeError, match=says(4, 6, "batch_size=")):
            call_for_per_sample_grads(called, batch_first=False)(r(5, 4, 3), r(5, 6, 3))

    def test_tensors_agree_in_dim_1_alone(self, module: nn.Module) -> None:
        called, x, y = Run(lambda m, x, y: m.inner(x), inner=module), r(5, 4, 3), r(6, 4)
        call_for_per_sample_grads(called, batch_first=False)(x, y).square().sum().backward()
        assert_same(taken(called), definition(called(x, y).square().sum((0, 2)), called))

    @pytest.mark.parametrize("args", [(), (3, "a", None), ([{}, 1.5],)], ids=["none", "others", "nested"])
    def test_no_tensor(self, module: nn.Module, args: Any) -> None:
        called = Run(lambda m, *args: m.inner(r(4, 3)), inner=module)
        with pytest.raises(RuntimeError, match="batch_size"):
            call_for_per_sample_grads(called)(*args)

    def test_no_tensor_and_batch_size_given(self, module: nn.Module) -> None:
        x = r(4, 3)
        called = Run(lambda m, scale: m.inner(x) * scale, inner=module)
        call_for_per_sample_grads(called, batch_size=4)(2.0).square().sum().backward()
        assert_same(taken(called), definition(called(2.0).square().sum(1), called))

    def test_tensors_disagree_and_batch_size_given(self, module: nn.Module) -> None:
        """A mask (T, T) and positions (1, T) beside the data."""
        x, mask, places = r(4, 5, 3), torch.ones(5, 5).tril().double(), torch.arange(5)[None]
        called = Run(
            lambda m, x, mask, places: mask @ m.inner(x) + m.e(places), inner=module, e=nn.Embedding(5, 2).double()
        )
        call_for_per_sample_grads(called, batch_size=4)(x, mask, places=places).square().sum().backward()
        assert_same(taken(called), definition(called(x, mask, places).square().sum((1, 2)), called))

    @pytest.mark.parametrize("given", [3, 5, 8])
    def test_batch_size_given_is_not_the_inputs(self, module: nn.Module, given: int) -> None:
        """No later than in the backward, and before anything is written."""
        with pytest.raises(RuntimeError, match=says(given, 4)):
            call_for_per_sample_grads(module, batch_size=given)(r(4, 3)).square().sum().backward()
        assert not any(hasattr(p, "grad_sample") for p in module.parameters())

    def test_scalar_beside_the_data(self, module: nn.Module) -> None:
        """A tensor without dims has no place for samples, and says nothing about their number."""
        x, scale = r(4, 3), torch.tensor(2.0, dtype=torch.float64)
        called = Run(lambda m, x, scale: m.inner(x) * scale, inner=module)
        call_for_per_sample_grads(called)(x, scale).square().sum().backward()
        assert_same(taken(called), definition(called(x, scale).square().sum(1), called))

    def test_scalars_alone(self, module: nn.Module) -> None:
        called = Run(lambda m, scale: m.inner(r(4, 3)) * scale, inner=module)
        with pytest.raises(RuntimeError, match="batch_size"):
            call_for_per_sample_grads(called)(torch.tensor(2.0))

    def test_labels_beside_data_in_dim_1(self, module: nn.Module) -> None:
        """A vector has its samples in the only dim there is."""
        called, x, y = Run(lambda m, x, y: m.inner(x) * y[:, None], inner=module), r(5, 4, 3), r(4)
        call_for_per_sample_grads(called, batch_first=False)(x, y).square().sum().backward()
        assert_same(taken(called), definition(called(x, y).square().sum((0, 2)), called))

    def test_output_without_samples(self, module: nn.Module) -> None:
        out = call_for_per_sample_grads(module, batch_first=False)(r(3))
        with pytest.raises(RuntimeError, match=says(3)):
            out.sum().backward()
        assert not any(hasattr(p, "grad_sample") for p in module.parameters())

    @pytest.mark.parametrize("given", [1, 2, 3])
    def test_folded_inputs(self, module: nn.Module, given: int) -> None:
        """Positions of one sample after another, or two crops one after the other: nobody can know."""
        with pytest.raises(RuntimeError, match=says(given, 6)):
            call_for_per_sample_grads(module, batch_size=given)(r(6, 3)).square().sum().backward()
        assert not any(hasattr(p, "grad_sample") for p in module.parameters())

    def test_inputs_of_other_sizes(self, module: nn.Module) -> None:
        """One of them has the samples that were announced."""
        x, lengths, scale = r(4, 5, 3), torch.ones(4, 5), r(5)
        called = Run(lambda m, x, lengths, scale: m.inner(x) * (lengths * scale)[..., None], inner=module)
        call_for_per_sample_grads(called, batch_size=4)(x, lengths, scale).square().sum().backward()
        assert_same(taken(called), definition(called(x, lengths, scale).square().sum((1, 2)), called))

    def test_numpy_integer(self, module: nn.Module) -> None:
        """It is no Python int; the message says what it is."""
        with pytest.raises(RuntimeError, match="int64"):
            call_for_per_sample_grads(module, batch_size=np.int64(4))

    @pytest.mark.parametrize("batch_size", [None, 3])
    @pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
    @pytest.mark.parametrize("asked", ["output", "state"])
    def test_packed_sequence(self, kind: type[nn.Module], batch_size: int | None, asked: str) -> None:
        packed = pack_padded_sequence(r(3, 5, 2), torch.tensor([2, 5, 3]), batch_first=True, enforce_sorted=False)
        called = kind(2, 4, num_layers=3).double()

        def losses(out: tuple[PackedSequence, Any]) -> Tensor:
            if asked == "output":
                return pad_packed_sequence(out[0], batch_first=True)[0].square().sum((1, 2))
            return (out[1][0] if isinstance(out[1], tuple) else out[1]).square().sum((0, 2))

        losses(call_for_per_sample_grads(called, batch_size=batch_size)(packed)).sum().backward()
        assert_same(taken(called), definition(losses(called(packed)), called))
