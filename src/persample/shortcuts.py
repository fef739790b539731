"""One verb for each thing that is often asked alone. All are `reduce` with one reduction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from torch import Tensor

from .checks import boundary, check_differentiable, check_losses, check_reductions
from .distributed import Ranks, undisturbed
from .graph.read.compiled import break_graph
from .graph.read.nodes import share_nodes
from .kernels.differentiable import differentiable
from .params import Params, named
from .reductions import ClippedSum, Dot, Gram, Norms, Project, Projection, SecondMoment, Stack, Variance
from .reductions.clipping import Bounds
from .reductions.groups import Per
from .reductions.products import CrossGram, Directions, KeptFactors
from .reductions.sums import Buffers
from .verbs import begin_run, reduce, run_backward, several_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # which some builds of torch lack


class Options(TypedDict, total=False):
    """What every verb takes as ``ps.reduce`` does."""

    retain_graph: bool
    create_graph: bool
    independent: bool
    max_memory: int | None
    process_group: ProcessGroup | None


@break_graph
def jacobian(
    outputs: Tensor,
    params: Params,
    *,
    out: Buffers | None = None,
    retain_graph: bool = False,
    independent: bool = False,
    max_memory: int | None = None,
) -> Any:
    """The derivative of every output of every sample with respect to every parameter.

    The same as ``ps.grad`` of losses (B, K…), by the name that outputs of a model go by: logits, predictions, tasks.

    >>> import torch, persample as ps
    >>> model = torch.nn.Linear(3, 2)
    >>> {name: tuple(j.shape) for name, j in ps.jacobian(model(torch.ones(5, 3)), model).items()}
    {'weight': (5, 2, 2, 3), 'bias': (5, 2, 2)}

    Args:
        outputs: what the model returns for B samples, (B, K…), with its graph.
        params: an ``nn.Module``, a mapping from names to leaf tensors, or a sequence.
        out: buffers from an earlier call, to be written again instead of allocating new ones.
        retain_graph: keep the graph for another backward, as in ``torch.autograd.grad``.
        independent: raise ``InteractionError`` if one sample's outputs are seen to depend on another sample.
        max_memory: as for ``ps.reduce``, beside the result.

    Returns:
        (B, K…, *shape) per parameter: a dict for a module or a mapping, a tuple for a sequence.
    """
    options = Options(retain_graph=retain_graph, independent=independent, max_memory=max_memory)
    return reduce(outputs, params, Stack(out), **options)[0]


@break_graph
def norms(losses: Tensor, params: Params, *, per: Per = None, **options: Unpack[Options]) -> Any:
    """The norm of every sample's gradient.

    >>> import torch, persample as ps
    >>> model = torch.nn.Linear(3, 2)
    >>> losses = model(torch.ones(5, 3)).square().sum(1)
    >>> ps.norms(losses, model, retain_graph=True).shape
    torch.Size([5])
    >>> {name: tuple(n.shape) for name, n in ps.norms(losses, model, per="parameter").items()}
    {'weight': (5,), 'bias': (5,)}

    Args:
        losses: one loss per sample, of shape (B,), or several, of shape (B, K…), with their graph.
        params: an ``nn.Module``, a mapping from names to leaf tensors, or a sequence.
        per: None for one norm over all parameters; "parameter" for one each, in the parameters' container; or groups:
            a list gives a tuple, a dict a dict. A group is a module, or a list of names, parameters or modules.
        options: ``retain_graph``, ``create_graph``, ``independent`` and ``max_memory``, as for ``ps.reduce``.

    Returns:
        One norm per loss: (B,) or (B, K…), or that per parameter or group, in float32 or wider.
    """
    return reduce(losses, params, Norms(per), **options)[0]


@break_graph
def clipped_sum(
    losses: Tensor,
    params: Params,
    max_norm: Bounds,
    *,
    per: Per = None,
    nonfinite: Literal["raise", "drop"] = "raise",
    **options: Unpack[Options],
) -> Any:
    """The sum of all gradients, each scaled down to a norm of at most ``max_norm``: Σ_i min(1, C / ‖g_i‖) g_i.

    With several losses per sample, (B, K…), the gradient of every loss is clipped by itself.

    >>> import torch, persample as ps
    >>> model = torch.nn.Linear(3, 2)
    >>> losses = model(torch.ones(5, 3)).square().sum(1)
    >>> total = ps.clipped_sum(losses, model, max_norm=1.0)
    >>> total["weight"].shape, total.clipping.weights.shape
    (torch.Size([2, 3]), torch.Size([5]))

    Args:
        losses: one loss per sample, of shape (B,), or several, of shape (B, K…), with their graph.
        params: an ``nn.Module``, a mapping from names to leaf tensors, or a sequence.
        max_norm: the bound, or one for each parameter or group of ``per``.
        per: what is clipped together: None for everything, "parameter", or groups that hold every parameter once.
        nonfinite: "raise" names the samples whose gradients are infinite or NaN, "drop" leaves them out.
        options: ``retain_graph``, ``create_graph``, ``independent``, ``max_memory`` and ``process_group``, as for
            ``ps.reduce``.

    Returns:
        One tensor like each parameter, in the parameters' container; its ``clipping`` holds the norms, the weights and
        the dropped samples. `ClippedSum` has more ways to clip.
    """
    return reduce(losses, params, ClippedSum(max_norm, per=per, nonfinite=nonfinite), **options)[0]


@break_graph
def second_moment(losses: Tensor, params: Params, **options: Unpack[Options]) -> Any:
    """The mean over samples of the squared gradient, element by element; over all losses, if there are several each.

    >>> import torch, persample as ps
    >>> model = torch.nn.Linear(3, 2)
    >>> losses = model(torch.ones(5, 3)).square().sum(1)
    >>> ps.second_moment(losses, model)["weight"].shape
    torch.Size([2, 3])

    Args:
        losses: one loss per sample, of shape (B,), or several, of shape (B, K…), with their graph.
        params: an ``nn.Module``, a mapping from names to leaf tensors, or a sequence.
        options: ``retain_graph``, ``create_graph``, ``independent``, ``max_memory`` and ``process_group``, as for
            ``ps.reduce``.

    Returns:
        One tensor like each parameter, in the parameters' container; NaN for an empty batch.
    """
    return reduce(losses, params, SecondMoment(), **options)[0]


@break_graph
def variance(losses: Tensor, params: Params, *, correction: int = 1, **options: Unpack[Options]) -> Any:
    """The variance over samples of the gradient, element by element, as ``torch.var`` of the stack.

    With several losses per sample, (B, K…), it is over all B·K of them.

    >>> import torch, persample as ps
    >>> model = torch.nn.Linear(3, 2)
    >>> losses = model(torch.ones(5, 3)).square().sum(1)
    >>> bool(ps.variance(losses, model)["weight"].max() < 1e-6)  # five equal samples
    True

    Args:
        losses: one loss per sample, of shape (B,), or several, of shape (B, K…), with their graph.
        params: an ``nn.Module``, a mapping from names to leaf tensors, or a sequence.
        correction: the sum of squares is divided by B - correction, where B counts all losses.
        options: ``retain_graph``, ``create_graph``, ``independent``, ``max_memory`` and ``process_group``, as for
            ``ps.reduce``.

    Returns:
        One tensor like each parameter, in the parameters' container; NaN if B is not above ``correction``.
    """
    return reduce(losses, params, Variance(correction), **options)[0]


@break_graph
def gram(losses: Tensor, params: Params, other: Tensor | None = None, **options: Unpack[Options]) -> Tensor:
    """The inner product of every two samples' gradients: the empirical neural tangent kernel of the losses.

    >>> import torch, persample as ps
    >>> model = torch.nn.Linear(3, 2)
    >>> train, test = (model(torch.ones(n, 3)).square().sum(1) for n in (5, 4))
    >>> ps.gram(train, model, test).shape
    torch.Size([5, 4])

    Args:
        losses: one loss per sample, of shape (B,), or several, of shape (B, K…), with their graph.
        params: an ``nn.Module``, a mapping from names to leaf tensors, or a sequence.
        other: the losses of a second batch, to be compared with the first instead of the first with itself.
        options: ``retain_graph``, ``create_graph``, ``independent`` and ``max_memory``, as for ``ps.reduce``.

    Returns:
        (B, B), or (B, B') with ``other``. With several losses per sample, (B, K…, B, K…), the kernel between all of
        them; ``products.reshape(losses.numel(), -1)`` is the matrix.
    """
    if other is None:
        products: Tensor = reduce(losses, params, Gram(), **options)[0]
        return products
    check_losses(losses, several=True)
    check_losses(other, several=True)
    check_reductions([Gram()], options.get("max_memory"), Ranks.of(options.get("process_group")))
    independent, max_memory = options.get("independent", False), options.get("max_memory")
    create_graph = options.get("create_graph", False)
    keep_graph = create_graph or options.get("retain_graph", False) or share_nodes(losses, other)
    with undisturbed(losses, named(params), last=not keep_graph) as leaves:
        with boundary(losses), differentiable(create_graph):
            if create_graph:
                check_differentiable(losses, leaves, None)
            if losses.ndim > 1:
                several = several_of(
                    losses, params, leaves.full, max_memory, retain_graph=keep_graph, independent=independent
                )
                (factors,) = several.reduce([KeptFactors()])
            else:
                run = begin_run([KeptFactors()], params, leaves.full, len(losses), losses.device, max_memory)
                run_backward(losses, leaves.full, run, retain_graph=keep_graph, independent=independent)
                (factors,) = run.results()
        products = reduce(other, params, CrossGram(factors, tuple(losses.shape)), **options)[0]
    return products


@break_graph
def dot(losses: Tensor, params: Params, direction: Directions, **options: Unpack[Options]) -> Tensor:
    """The inner product of every sample's gradient with a direction: how each loss changes along it.

    >>> import torch, persample as ps
    >>> model = torch.nn.Linear(3, 2)
    >>> losses = model(torch.ones(5, 3)).square().sum(1)
    >>> direction = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    >>> ps.dot(losses, model, direction).shape
    torch.Size([5])

    Args:
        losses: one loss per sample, of shape (B,), or several, of shape (B, K…), with their graph.
        params: an ``nn.Module``, a mapping from names to leaf tensors, or a sequence.
        direction: one tensor like each parameter, in the parameters' container, or a sequence in their order; for k
            directions, each with one more dim at the front, of size k.
        options: ``retain_graph``, ``create_graph``, ``independent`` and ``max_memory``, as for ``ps.reduce``.

    Returns:
        (B,) or (B, K…), like the losses; with one more dim at the end, of size k, for k directions.
    """
    products: Tensor = reduce(losses, params, Dot(direction), **options)[0]
    return products


@break_graph
def project(losses: Tensor, params: Params, projection: Projection, **options: Unpack[Options]) -> Tensor:
    """Every sample's gradient under a random projection that keeps inner products.

    >>> import torch, persample as ps
    >>> model = torch.nn.Linear(3, 2)
    >>> losses = model(torch.ones(5, 3)).square().sum(1)
    >>> ps.project(losses, model, ps.Projection(dim=16, seed=0)).shape
    torch.Size([5, 16])

    Args:
        losses: one loss per sample, of shape (B,), or several, of shape (B, K…), with their graph.
        params: an ``nn.Module``, a mapping from names to leaf tensors, or a sequence.
        projection: a `Projection`.
        options: ``retain_graph``, ``create_graph``, ``independent`` and ``max_memory``, as for ``ps.reduce``.

    Returns:
        (B, dim) or (B, K…, dim).
    """
    projected: Tensor = reduce(losses, params, Project(projection), **options)[0]
    return projected
