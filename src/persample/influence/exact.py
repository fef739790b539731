"""Influence without an index: `exact`, by preconditioned conjugate gradients, and `dual`, by a kernel of gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.norms import row_norms
from ..shortcuts import dot, gram
from ..verbs import grad, reduce
from .curvature.base import WHOLE_DAMPING, Curvature, check_damping
from .curvature.kinds import FittedBlocks, OfBlocks, Shampoo
from .products import Fisher, Product
from .sampling import LossesFn, SampleLossesFn, generator_of
from .subject import evaluating
from .vectors import Fit, applied, batches, joined, matrix_of, parted, trainable


@dataclass(frozen=True)
class Solution:
    """(curvature + damping)⁻¹ times every query's gradient."""

    directions: dict[str, Tensor]  # (Q, *shape) by parameter
    residuals: Tensor  # (Q,): how much of the gradient is not explained, as a norm relative to its own
    products: int  # how often the data were gone through for products
    damping: float


def fit(
    curvature: Curvature,
    model: nn.Module,
    losses_fn: LossesFn,
    loader: Iterable[Any],
    *,
    sample_losses_fn: SampleLossesFn | None = None,
    damping: float | None = None,
    seed: int = 0,
) -> Any:
    """Fit a curvature to whole gradients of a model, without sketches.

    Args:
        curvature: as ``pi.Shampoo()``; with ``labels="sampled"`` it needs ``sample_losses_fn``.
        model: whose trainable parameters are meant.
        losses_fn: from the model and a batch to losses (B,).
        loader: batches, gone through ``curvature.passes`` times.
        sample_losses_fn: losses with labels drawn from the model, see `categorical`.
        damping: added to every eigenvalue; None for a tenth of the mean one of every parameter.
        seed: of the labels.
    """
    check_damping(damping)
    _check_kind("curvature", curvature, Curvature, "pi.Shampoo()")
    params, sampled = trainable(model), curvature.labels == "sampled"
    if sampled and sample_losses_fn is None:
        raise ValueError("labels='sampled' needs sample_losses_fn, for classifiers pi.categorical(logits_fn)")
    curvature.start(matrix_of(params))
    for _ in range(curvature.passes):
        with evaluating(model):
            for number, batch in batches(loader):
                if sampled and sample_losses_fn is not None:
                    losses = sample_losses_fn(model, batch, generator_of(seed, number))
                else:
                    losses = losses_fn(model, batch)
                reduce(losses, params, Fit(curvature))
        curvature.end_pass()
    return curvature.fitted(damping)


def solve(
    model: nn.Module,
    losses_fn: LossesFn,
    loader: Iterable[Any],
    queries: Any,
    *,
    product: Product | None = None,
    sample_losses_fn: SampleLossesFn | None = None,
    preconditioner: OfBlocks | None = None,
    damping: float | None = None,
    products: int = 8,
    tolerance: float = 1e-4,
) -> Solution:
    """(curvature + damping)⁻¹ times the gradient of every query, by conjugate gradients; arguments as for `exact`."""
    check_damping(damping)
    _check_kind("preconditioner", preconditioner, OfBlocks, "pi.KFAC()", optional=True)
    _check_kind("product", product, Product, "pi.GaussNewton(outputs_fn, output_losses_fn)", optional=True)
    params = trainable(model)
    with evaluating(model):
        given = joined(grad(losses_fn(model, queries), params), params)
    if not len(given):
        raise ValueError("no queries: the batch of queries is empty")
    if not bool(torch.isfinite(given).all()):
        wrong = (~torch.isfinite(given).all(1)).nonzero().squeeze(1).tolist()
        raise ValueError(f"the gradients of queries {wrong[:10]} are infinite or NaN: leave them out")
    wanted = given.to(torch.promote_types(given.dtype, torch.float32))
    chosen = preconditioner or Shampoo(labels="given" if sample_losses_fn is None else "sampled")
    fitted: FittedBlocks = fit(chosen, model, losses_fn, loader, sample_losses_fn=sample_losses_fn)
    damping = WHOLE_DAMPING * fitted.mean_eigenvalue if damping is None else float(damping)
    fitted, operator = fitted.with_damping(damping), product or Fisher(sample_losses_fn)

    sizes: dict[int, int] = {}

    def times(vectors: Tensor) -> Tensor:
        total = vectors.new_zeros(vectors.shape)
        for number, batch in batches(loader):
            total += operator.of_batch(model, params, losses_fn, batch, number, vectors)
            if number not in sizes:
                sizes[number] = size_of(losses_fn, model, batch)
        return total / sum(sizes.values()) + damping * vectors

    with evaluating(model):
        solved, residuals, used = conjugate_gradients(
            times, lambda v: applied(fitted, v, params), wanted, products, tolerance
        )
    return Solution(parted(solved, params), residuals, used, damping)


def size_of(losses_fn: LossesFn, model: nn.Module, batch: Any) -> int:
    """How many samples a batch has: as many as losses."""
    with torch.no_grad():
        return len(losses_fn(model, batch))


def exact(
    model: nn.Module,
    losses_fn: LossesFn,
    loader: Iterable[Any],
    queries: Any,
    *,
    product: Product | None = None,
    sample_losses_fn: SampleLossesFn | None = None,
    preconditioner: OfBlocks | None = None,
    damping: float | None = None,
    products: int = 8,
    tolerance: float = 1e-4,
) -> Tensor:
    """The influence of every training sample on every query: g_qᵀ (C + λ)⁻¹ g_i, without an index.

    Positive scores are helpful: with sample i left out of N, the query's loss grows by about score / N. All queries
    are solved for together; each product is one pass over the data.

    >>> import torch
    >>> from torch.nn import functional as F
    >>> from persample import influence as pi
    >>> model = torch.nn.Linear(3, 2)
    >>> data = [(torch.randn(6, 3), torch.randint(2, (6,))) for _ in range(4)]
    >>> def losses_fn(model, batch):
    ...     return F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    >>> newton = pi.GaussNewton(lambda m, b: m(b[0]), lambda z, b: F.cross_entropy(z, b[1], reduction="none"))
    >>> pi.exact(model, losses_fn, data, data[0], product=newton, damping=1e-2).shape
    torch.Size([6, 24])

    Args:
        model: whose trainable parameters are meant; it is in evaluation mode meanwhile.
        losses_fn: from the model and a batch to losses (B,).
        loader: batches of training data, in the same order every time it is gone through.
        queries: a batch, as ``losses_fn`` takes it.
        product: the curvature C, summed over samples and divided by their number: `GaussNewton`, `Fisher` or
            `Hessian`. Without it, the Fisher information: the true one with ``sample_losses_fn``, else the empirical.
        sample_losses_fn: losses with labels drawn from the model, ``(model, batch, generator) -> (B,)``.
        preconditioner: a curvature by blocks that is fitted first; by default ``pi.Shampoo``.
        damping: λ, best the weight decay of the training; None for the mean eigenvalue of the Fisher information.
        products: passes over the data at most.
        tolerance: of the residual, relative to the query's gradient, at which to stop before.

    Returns:
        (Q, N) in the order of the loader.
    """
    solution = solve(
        model,
        losses_fn,
        loader,
        queries,
        product=product,
        sample_losses_fn=sample_losses_fn,
        preconditioner=preconditioner,
        damping=damping,
        products=products,
        tolerance=tolerance,
    )
    params = trainable(model)
    with evaluating(model):
        return torch.cat([dot(losses_fn(model, b), params, solution.directions) for _, b in batches(loader)]).t()


def conjugate_gradients(
    times: Callable[[Tensor], Tensor],
    precondition: Callable[[Tensor], Tensor],
    wanted: Tensor,
    products: int,
    tolerance: float,
) -> tuple[Tensor, Tensor, int]:
    """Solve A x = b for every row b (Q, P), and return x, relative residuals (Q,) and how many products it took."""
    if products < 0:
        raise ValueError(f"products must not be negative, not {products}")
    if not products:
        return precondition(wanted), torch.full((len(wanted),), torch.nan), 0
    size = row_norms(wanted).unsqueeze(1)
    size = torch.where(size > 0, size, 1)
    x, r = torch.zeros_like(wanted), (wanted / size).to(wanted.dtype)  # squares of very small numbers would vanish
    z = precondition(r)
    direction, rz = z.clone(), (r * z).sum(1)
    used = 0
    bent = torch.zeros(len(wanted), dtype=torch.bool, device=wanted.device)  # where A is not positive
    for _ in range(products):
        if bool(((r.norm(dim=1) <= tolerance) | bent).all()):
            break
        product, used = times(direction), used + 1
        along = (direction * product).sum(1)
        bent |= (along <= 0) & (rz > 0)
        step = torch.where(bent | (along <= 0), 0, rz / torch.where(along > 0, along, 1)).unsqueeze(1)
        x, r = x + step * direction, r - step * product
        z = precondition(r)
        new = (r * z).sum(1)
        direction = z + (new / torch.where(rz > 0, rz, 1)).unsqueeze(1) * direction
        rz = new
    if bool(bent.any()):
        warnings.warn(
            f"the curvature is negative in a direction that {int(bent.sum())} queries need, where they stopped: pass a "
            f"larger damping, or product=pi.GaussNewton(...) or pi.Fisher(...), which cannot be negative",
            stacklevel=2,
        )
    return (x * size).to(x.dtype), r.norm(dim=1), used


def dual(
    model: nn.Module,
    losses_fn: LossesFn,
    loader: Iterable[Any],
    queries: Any,
    *,
    sample_losses_fn: SampleLossesFn | None = None,
    draws: int = 1,
    damping: float | None = None,
    seed: int = 0,
) -> Tensor:
    """The same scores with the Fisher information F = Φᵀ Φ / M, exactly, from inner products of gradients alone.

    (F + λ)⁻¹ = (1 - Φᵀ (Φ Φᵀ + M λ)⁻¹ Φ) / λ, where Φ has the M = draws · N gradients of labels that are drawn, or the
    N given ones. No gradient is kept, but M x M inner products are: for thousands of samples, not for millions.

    Args:
        model: whose trainable parameters are meant.
        losses_fn: from the model and a batch to losses (B,).
        loader: batches of training data, in the same order every time it is gone through.
        queries: a batch, as ``losses_fn`` takes it.
        sample_losses_fn: losses with labels drawn from the model; without it, the empirical Fisher.
        draws: labels per sample.
        damping: λ, best the weight decay of the training; None for the mean eigenvalue.
        seed: of the labels.

    Returns:
        (Q, N) in the order of the loader.
    """
    check_damping(damping)
    if damping == 0:
        raise ValueError("the dual needs a positive damping: pass one, or None to have it chosen")
    params = trainable(model)

    def drawn() -> Iterable[Tensor]:
        for number, batch in batches(loader):
            for draw in range(draws if sample_losses_fn is not None else 1):
                if sample_losses_fn is None:
                    yield losses_fn(model, batch)
                else:
                    yield sample_losses_fn(model, batch, generator_of(seed, number, draw))

    def given() -> Iterable[Tensor]:
        return (losses_fn(model, batch) for _, batch in batches(loader))

    def asked() -> Iterable[Tensor]:
        yield losses_fn(model, queries)

    def between(rows: Callable[[], Iterable[Tensor]], columns: Callable[[], Iterable[Tensor]]) -> Tensor:
        with evaluating(model):
            found = [torch.cat([gram(a, params, b, retain_graph=True) for b in columns()], 1) for a in rows()]
        return torch.cat(found).double()

    kernel = between(drawn, drawn)
    count, size = len(kernel), sum(p.numel() for p in params.values())
    damping = WHOLE_DAMPING * float(kernel.diagonal().mean()) / size if damping is None else damping
    if damping <= 0:
        raise ValueError("all gradients are zero, so that no damping can be chosen: pass one")
    system = kernel + count * damping * torch.eye(count, dtype=kernel.dtype, device=kernel.device)
    explained = between(asked, drawn) @ torch.linalg.solve(system, between(drawn, given))
    scores: Tensor = (between(asked, given) - explained) / damping
    return scores


def _check_kind(name: str, value: object, kind: type, example: str, *, optional: bool = False) -> None:
    if not isinstance(value, kind) and not (optional and value is None):
        got = f"the class {value.__name__} itself" if isinstance(value, type) else f"a {type(value).__name__}"
        raise TypeError(f"{name} must be one such as {example}, not {got}")
