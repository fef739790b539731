"""What cannot be differentiated again is refused, with the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import persample as ps
from persample.graph.ops import norms
from tests.second.test_paths import agrees, data, score

B = 3


def attention(model: nn.Linear, x: Tensor) -> Tensor:
    """(B, T, d) -> (B, T, d) by one head."""
    h = model(x).unsqueeze(1)
    found: Tensor = F.scaled_dot_product_attention(h, h, h).squeeze(1)
    return found


def test_fused_attention_is_refused_and_the_remedy_works() -> None:
    model, x = nn.Linear(4, 4).double(), data(B, 5, 4)
    with pytest.raises(ps.UnsupportedError, match=r"FlashAttentionForCpu cannot be differentiated.*SDPBackend.MATH"):
        ps.norms(score(attention(model, x)), model, create_graph=True)
    with sdpa_kernel(SDPBackend.MATH):
        losses = score(attention(model, x))
    agrees(losses, model, [x])


@pytest.mark.parametrize("count", [1, B])
def test_a_reentrant_checkpoint_is_refused_and_the_other_kind_is_not(count: int) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double(), data(count, 4)
    with pytest.raises(
        ps.UnsupportedError, match=r"reentrant checkpoint cannot be differentiated.*use_reentrant=False"
    ):
        ps.grad(score(checkpoint(model, x, use_reentrant=True)), model, create_graph=True)
    agrees(score(checkpoint(model, x, use_reentrant=False)), model, [x])


def test_a_compiled_region_is_refused() -> None:
    model, x = nn.Linear(4, 4).double(), data(B, 4)
    compiled = torch.compile(model, backend="aot_eager")
    with pytest.raises(ps.UnsupportedError, match=r"compiled region cannot be differentiated.*without torch.compile"):
        ps.grad(score(compiled(x)), model, create_graph=True)


def test_gradients_over_frequencies_are_refused() -> None:
    model = nn.Embedding(5, 3, scale_grad_by_freq=True).double()
    with pytest.raises(ps.UnsupportedError, match=r"Embedding cannot be differentiated.*scale_grad_by_freq"):
        ps.grad(score(model(torch.tensor([[1, 2], [1, 1]]))), model, create_graph=True)


def test_buffers_are_refused() -> None:
    model, x = nn.Linear(4, 4).double(), data(B, 4)
    buffers = ps.grad(score(model(x)), model)
    with pytest.raises(ValueError, match=r"out= cannot be written with create_graph=True"):
        ps.grad(score(model(x)), model, out=buffers, create_graph=True)


def test_sums_over_processes_are_refused(tmp_path: Any) -> None:
    model, x = nn.Linear(4, 4).double(), data(B, 4)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        with pytest.raises(
            ps.UnsupportedError, match=r"process group cannot be differentiated: leave out process_group="
        ):
            ps.clipped_sum(score(model(x)), model, 1.0, process_group=group, create_graph=True)
    finally:
        torch.distributed.destroy_process_group()


def test_a_function_that_is_differentiable_once_says_so() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, g: Tensor) -> Any:
            return 3 * ctx.saved_tensors[0] ** 2 * g

    model, x = nn.Linear(4, 4).double(), data(B, 4)
    found = ps.norms(score(Cube.apply(model(x))), model, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        found.sum().backward()


def test_a_rule_that_reads_a_result_without_a_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The net below all rules: here, one that has forgotten to compute the statistics again."""
    monkeypatch.setattr(norms, "is_differentiable", lambda: False)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).double(), data(B, 4)
    with pytest.raises(
        ps.UnsupportedError, match=r"goes by a result \(result1\) that the op has saved without a graph"
    ):
        ps.grad(score(model(x)), model, create_graph=True)


def test_several_losses_per_sample_are_refused_and_the_remedies_work() -> None:
    model, x = nn.Linear(4, 3).double(), data(B, 4)
    outputs = model(x).sin()
    for verb in (ps.norms, ps.grad, ps.gram):
        with pytest.raises(ps.UnsupportedError, match=r"have shape \(3, 3\).*losses\[:, k\].*losses.flatten"):
            verb(outputs, model, create_graph=True)
    with pytest.raises(ps.UnsupportedError, match="one loss per sample"):
        ps.gram(outputs, model, outputs[:, 0], create_graph=True)
    agrees(outputs[:, 1], model, [x])
    agrees(outputs.flatten(), model, [x])
