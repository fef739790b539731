"""What is compared: the plain step, the library's functions, and what others offer for the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from torch import Tensor

import persample as ps
from persample.graph.entry import capture, planned
from persample.graph.read.nodes import NodeSlot
from persample.graph.read.roots import Roots

from . import compiled, peers
from .contender import MAX_NORM, Contender, from_losses
from .workloads import Task


@dataclass(frozen=True)
class Method:
    """A way to get ``kind``: "gradients" and "clipped sums" by name, or "norms"."""

    name: str
    title: str
    kind: str
    prepare: Callable[[Task], Contender]
    needs: str = "torch"  # the package that it is part of
    with_forward: bool = True  # is the forward pass part of its time?

    def installed(self) -> bool:
        return find_spec(self.needs) is not None


def _plain(task: Task) -> Contender:
    def gradient(losses: Tensor) -> Mapping[str, Tensor | None]:
        losses.sum().backward()
        return {name: p.grad for name, p in task.params().items()}

    return Contender(task.losses, gradient, lambda: task.model.zero_grad(set_to_none=True))


def _forward(task: Task) -> Contender:
    return from_losses(task, lambda losses: None)


def _plan(task: Task) -> Contender:
    params = task.params()
    return from_losses(task, lambda losses: planned(Roots.of_losses(losses), params))


def _bare(task: Task) -> Contender:
    params = task.params()

    def forward() -> tuple[Roots, list[NodeSlot]]:
        roots = Roots.of_losses(task.losses())
        plan = planned(roots, params)[0]
        return roots, [plan.tape.graph.at(slot) for slot in plan.requested]

    return Contender(forward, lambda found: found[0].backward(found[1], retain_graph=False))


def _capture(task: Task) -> Contender:
    params = task.params()
    return from_losses(task, lambda losses: capture(losses, params, retain_graph=False))


def _grad(task: Task) -> Contender:
    return from_losses(task, lambda losses: ps.grad(losses, task.model))


def _grad_out(task: Task) -> Contender:
    buffers = ps.grad(task.losses(), task.model)
    return from_losses(task, lambda losses: ps.grad(losses, task.model, out=buffers))


def _norms(task: Task) -> Contender:
    return from_losses(task, lambda losses: ps.norms(losses, task.model))


def _clipped_sum(task: Task) -> Contender:
    return from_losses(task, lambda losses: ps.clipped_sum(losses, task.model, max_norm=MAX_NORM))


PLAIN = Method("plain", "plain step", "plain", _plain)
TABLE = [
    Method("forward", "the forward pass", "engine", _forward),
    Method("plan", "the graph read, its plan recalled", "engine", _plan, with_forward=False),
    Method("bare", "PyTorch's backward as far as it is needed", "engine", _bare, with_forward=False),
    Method("capture", "the same with all factors, planning included", "engine", _capture, with_forward=False),
    Method("norms", "ps.norms", "norms", _norms),
    Method("clipped_sum", "ps.clipped_sum", "clipped sums", _clipped_sum),
    Method("grad_out", "ps.grad(out=)", "gradients", _grad_out),
    Method("grad", "ps.grad", "gradients", _grad),
    Method("vmap", "torch.func", "gradients", peers.vmap),
    Method("expanded", "ExpandedWeights", "gradients", peers.expanded),
    Method("opacus-hooks", "Opacus", "gradients", peers.opacus_hooks, needs="opacus"),
    Method("opacus-ghost", "Opacus ghost", "clipped sums", peers.opacus_ghost, needs="opacus"),
    Method("backpack-grad", "BackPACK", "gradients", peers.backpack_grad, needs="backpack"),
    Method("backpack-norms", "BackPACK norms", "norms", peers.backpack_norms, needs="backpack"),
]
COMPILED_TABLE = [
    Method("compiled-plain", "plain step, torch.compile", "plain", compiled.plain),
    Method("compiled-norms", "ps.compile norms", "norms", compiled.norms),
    Method("compiled-clipped_sum", "ps.compile clipped_sum", "clipped sums", compiled.clipped_sum),
    Method("norms-of-compiled", "ps.norms, model compiled", "norms", compiled.norms_of_compiled),
]
METHODS = {m.name: m for m in [PLAIN, *TABLE, *COMPILED_TABLE]}
OURS = ["plain", "plan", "bare", "capture", "norms", "clipped_sum", "grad_out", "grad"]
PARTS = ["plain", *(m.name for m in TABLE if m.kind == "engine"), "norms"]
COMPILED = ["plain", "norms", "clipped_sum", *(m.name for m in COMPILED_TABLE)]
AGAINST_PEERS = ["plain", *(m.name for m in TABLE if m.kind != "engine")]
