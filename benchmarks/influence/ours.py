"""This library's ways to scores, from the checkpoint that peers see. Nothing is tuned: λ is the weight decay."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

from torch import Tensor

import persample as ps
from persample import influence as pi

from .retrained import Retrained
from .tasks import TASKS, logits_fn, losses_fn, output_losses_fn

SAMPLED = pi.categorical(logits_fn, over="mean")
NEWTON = pi.GaussNewton(logits_fn, output_losses_fn)
LARGEST_DUAL = 3000  # parameters: with more, its kernel takes longer than everything else here


def by_blocks(run: Retrained, curvature: pi.Curvature, damping: float | None) -> Tensor:
    """Scores of a curvature that is fitted to whole gradients."""
    fitted = pi.fit(curvature, run.model, losses_fn, [run.train], sample_losses_fn=SAMPLED, damping=damping)
    params = dict(run.model.named_parameters())
    gradients = ps.grad(losses_fn(run.model, run.queries), params)
    blocks = {n: g.reshape(len(g), g.shape[1], -1) for n, g in gradients.items()}
    divided = {n: b.reshape(gradients[n].shape) for n, b in fitted.apply(blocks).items()}
    return ps.dot(losses_fn(run.model, run.train), params, divided).t()


def by_index(run: Retrained, sketch: pi.Sketch, curvature: pi.Curvature) -> Tensor:
    """Scores from sketches on disk."""
    with tempfile.TemporaryDirectory() as folder:
        index = pi.Index(folder, run.model, losses_fn, sketch=sketch).build([run.train], progress=False)
        index.fit(curvature, [run.train], sample_losses_fn=SAMPLED, damping=run.decay, progress=False)
        return index.scores(run.queries)


def by_products(run: Retrained, product: Any, products: int, chosen: bool = False) -> Tensor:
    return pi.exact(
        run.model, losses_fn, [run.train], run.queries,
        product=product, sample_losses_fn=SAMPLED, products=products, damping=None if chosen else run.decay,
    )  # fmt: skip


def by_dual(run: Retrained, draws: int) -> Tensor:
    return pi.dual(
        run.model, losses_fn, [run.train], run.queries, sample_losses_fn=SAMPLED, draws=draws, damping=run.decay
    )


BLOCKS = pi.Blocks(16, 16, seed=0)
METHODS: dict[str, Callable[[Retrained], Tensor]] = {
    "no curvature": lambda run: by_blocks(run, pi.Identity(), None),
    "index of 16 x 16 blocks, Covariance": lambda run: by_index(run, BLOCKS, pi.Covariance(labels="sampled")),
    "KFAC": lambda run: by_blocks(run, pi.KFAC(labels="sampled"), run.decay),
    "Shampoo": lambda run: by_blocks(run, pi.Shampoo(labels="sampled"), run.decay),
    "Covariance": lambda run: by_blocks(run, pi.Covariance(labels="sampled", max_size=2560), run.decay),
    "dual, 4 labels": lambda run: by_dual(run, 4),
    "exact, Fisher of 4 labels": lambda run: by_products(run, pi.Fisher(SAMPLED, draws=4), 8),
    "exact, Gauss-Newton, 2 products": lambda run: by_products(run, NEWTON, 2),
    "exact, Gauss-Newton": lambda run: by_products(run, NEWTON, 8),
    "exact, Gauss-Newton, chosen damping": lambda run: by_products(run, NEWTON, 8, chosen=True),
}


def methods_of(name: str) -> dict[str, Callable[[Retrained], Tensor]]:
    """Those that a task has time for."""
    size = sum(p.numel() for p in TASKS[name].make().parameters())
    return {title: f for title, f in METHODS.items() if size <= LARGEST_DUAL or not title.startswith("dual")}
