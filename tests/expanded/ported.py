"""The names that programs for expanded weights import, PyTorch's and ours."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.utils import _expanded_weights, _per_sample_grad
from torch.nn.utils._expanded_weights import expanded_weights_impl, expanded_weights_utils

import persample as ps
from tests.expanded.helpers import taken, total

HELPERS = """
forward_helper is_batch_first maybe_scale_by_batch_size set_grad_sample_if_exists standard_kwargs
sum_over_all_but_batch_and_last_n unpack_expanded_weight_or_tensor
""".split()

PEER = SimpleNamespace(
    call_for_per_sample_grads=_per_sample_grad.call_for_per_sample_grads,
    ExpandedWeight=_expanded_weights.ExpandedWeight,
    implements_per_sample_grads=expanded_weights_impl.implements_per_sample_grads,
    **{name: getattr(expanded_weights_utils, name) for name in HELPERS},
)
OURS = SimpleNamespace(
    call_for_per_sample_grads=ps.call_for_per_sample_grads,
    ExpandedWeight=ps.expanded.ExpandedWeight,
    implements_per_sample_grads=ps.expanded.implements_per_sample_grads,
    **{name: getattr(ps.expanded, name) for name in HELPERS},
)
both = pytest.mark.parametrize("api", [pytest.param(PEER, id="peer"), pytest.param(OURS, id="ours")])


def stacks_of_a_call(
    api: Any, module: nn.Module, x: Tensor, losses: Callable[[Any], Tensor], **options: Any
) -> dict[str, Tensor]:
    loss = losses(api.call_for_per_sample_grads(module, **options)(x))
    total(loss, options.get("loss_reduction", "sum")).backward()
    return taken(module)
