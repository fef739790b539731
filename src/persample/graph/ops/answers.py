"""Answering in place of a fused node's backward, which computes all of its outputs or none.

The names used here are private to PyTorch. They hold for torch 2.13 to 2.15; ``tests/graph/test_saved.py`` checks that
a node takes such an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...kernels.library import is_fused_lstm_backward

Outputs = tuple[Tensor | None, ...]


class LstmAnswer(Tensor):
    """A cotangent for a fused LSTM node: the backward that is called with it gets its outputs from ``answer``."""

    answer: Callable[[], Outputs]

    @staticmethod
    def __new__(cls, g: Tensor, answer: Callable[[], Outputs]) -> LstmAnswer:
        cotangent = Tensor._make_wrapper_subclass(cls, g.shape, g.stride(), dtype=g.dtype, device=g.device)
        cotangent.answer = answer
        return cotangent

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if not is_fused_lstm_backward(func):
            return NotImplemented
        return next(argument for argument in args if isinstance(argument, cls)).answer()
