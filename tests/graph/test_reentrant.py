"""What reentrant checkpoints keep, and how PyTorch's engine calls them. Holds for torch 2.13 to 2.15."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import checkpoint

import persample as ps
from persample.graph.read.reentrant import is_reentrant, open_region, run_instead
from persample.graph.read.regions import Regions
from persample.graph.read.saved import in_checkpoint, metadata
from tests.graph.samples.leaves import w


def made(*args: Any, **options: Any) -> Any:
    """The node of a checkpoint."""
    a, *rest = args or (w(3), 2, torch.ones(3))
    result = checkpoint(lambda a, *rest: (a.exp() * 2, "text", a), a, *rest, use_reentrant=True, **options)
    return result[0].grad_fn


def test_the_nodes_are_known_by_their_type() -> None:
    node = made()
    assert is_reentrant(node)
    assert type(node).__name__ == "CheckpointFunctionBackward"
    assert not is_reentrant(w(3).exp().grad_fn)
    assert not is_reentrant(None)


def test_what_a_node_keeps() -> None:
    a, state = w(3), torch.get_rng_state()
    node = made(a, 2, torch.ones(3))
    assert node.inputs == [None, 2, None]
    assert node.tensor_indices == [0, 2]
    assert [t.shape for t in node.saved_tensors] == [(3,), (3,)]
    assert [child is not None for child, _ in node.next_functions] == [True, False]
    assert [tuple(about.shape) for about in metadata(node)] == [(3,), (), (3,)]
    assert node.run_function(a)[1] == "text"
    assert node.preserve_rng_state is True
    assert torch.equal(node.fwd_cpu_state, state)
    assert node.had_device_in_fwd is False
    assert node.device_type == "cpu"
    for casts in (node.device_autocast_kwargs, node.cpu_autocast_kwargs):
        assert set(casts) == {"enabled", "dtype", "cache_enabled"}


def test_a_node_that_keeps_something_else_is_refused() -> None:
    node = made()
    del node.run_function
    with pytest.raises(ps.UnsupportedError, match=r"does not keep 'run_function'.*use_reentrant=False"):
        open_region(node, ())


def test_a_backward_can_be_run_in_a_nodes_place() -> None:
    """Undefined cotangents are None, what it answers goes on, and the node is as before after that."""
    a = w(3)
    given = a.sin()
    y, _, z = checkpoint(lambda a: (a.exp(), "text", a * 2), given, use_reentrant=True)
    node, came = y.grad_fn, list[Any]()

    def backward(grads: Any) -> list[Tensor]:
        came.append(grads)
        return [torch.full((3,), 7.0).to(a)]

    with run_instead(node, backward):
        (g,) = torch.autograd.grad(z.sum(), [GradientEdge(given.grad_fn, 0)], retain_graph=True)
    assert g.tolist() == [7, 7, 7]
    assert [one is None for one in came[0]] == [True, True, False]
    assert "apply" not in vars(node)
    (z + y).sum().backward()
    torch.testing.assert_close(a.grad, (a.sin().exp() + 2).detach() * a.detach().cos())


def test_a_region_shows_what_it_hides() -> None:
    a = w(3)
    given = a.sin()
    y, _, _ = checkpoint(lambda a: (a.exp() * 2, "text", a), given, use_reentrant=True)
    assert y.grad_fn is not None
    regions = Regions([y.grad_fn])
    regions.resolve(y.grad_fn, 0)
    region = regions.opened[y.grad_fn]
    assert [slot and type(slot[0]).__name__ for slot in region.outputs] == ["MulBackward0", None, "ViewBackward0"]
    assert {type(node).__name__ for node in region.own} >= {"MulBackward0", "ExpBackward0"}
    assert [slot and slot[0] for slot in region.inputs] == list(region.leaves)
    assert region.outside == set()
    assert any(in_checkpoint(node) for node in region.own)  # what it computes is not kept


def test_edges_lead_through_regions() -> None:
    a = w(3)
    given = a.sin()
    y = checkpoint(lambda a: a.exp(), given, use_reentrant=True)
    top = (y * 3).grad_fn
    assert top is not None
    regions = Regions([top])
    ((inner, _), _) = regions.below(top)
    assert type(inner).__name__ == "ExpBackward0"
    assert inner is not None
    (view, _), *_ = regions.below(inner)
    assert view is not None
    assert regions.below(view) == ((given.grad_fn, 0),)
    assert regions.owners[inner] is regions.opened[y.grad_fn]  # type: ignore[index]
    assert top not in regions.owners
    assert regions.taken == []


def test_tensors_that_a_region_was_not_given_are_its_end() -> None:
    given, around = w(3).sin(), w(3).cos()
    y = checkpoint(lambda a: a.exp() * around, given, use_reentrant=True)
    assert y.grad_fn is not None
    regions = Regions([y.grad_fn])
    product, _ = regions.resolve(y.grad_fn, 0)
    assert product is not None
    (exp, _), nothing = regions.below(product)
    assert type(exp).__name__ == "ExpBackward0"
    assert nothing == (None, 0)
    assert regions.taken == [(around.grad_fn, 0)]
