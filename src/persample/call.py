"""Per-sample gradients of a module by an ordinary ``loss.backward()``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import update_wrapper
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence

from .expanded.data import Followed
from .expanded.gate import Receiver, Recording, attach
from .expanded.inputs import StandIns, batch_of, holds_batch
from .expanded.samples import Samples, of_packed
from .expanded.trees import leaves, tree_map
from .expanded.weight import ExpandedWeight
from .factors import Factor
from .graph.roots import slot_of
from .graph.tape import Tape, leaf_of, walk
from .params import named
from .reduce import check_reductions, start
from .reductions import Reduction


def call_for_per_sample_grads(
    module: nn.Module,
    *,
    batch_size: int | None = None,
    loss_reduction: str = "sum",
    batch_first: bool = True,
    reductions: Sequence[Reduction] | None = None,
    max_memory: int | None = None,
) -> PerSampleCall:
    """Call a module so that the backward of its loss gives every sample's gradient.

    >>> import torch, persample as ps
    >>> model = torch.nn.Linear(3, 2)
    >>> ps.call_for_per_sample_grads(model)(torch.ones(5, 3)).square().sum().backward()
    >>> model.weight.grad_sample.shape, model.weight.grad
    (torch.Size([5, 2, 3]), None)

    With ``reductions``, they are computed during the backward and nothing is written out:

    >>> call = ps.call_for_per_sample_grads(model, reductions=[ps.Norms(), ps.ClippedSum(1.0)])
    >>> call(torch.ones(5, 3)).square().sum().backward()
    >>> norms, total = call.results()
    >>> norms.shape, total["weight"].shape
    (torch.Size([5]), torch.Size([2, 3]))

    Args:
        module: any module that keeps samples apart.
        batch_size: the number of samples; by default that of the tensors the module is called with.
        loss_reduction: ``"sum"``, or ``"mean"`` if the loss is divided by the batch size: gradients are then
            multiplied by it.
        batch_first: whether the batch is dim 0 of inputs and outputs, or dim 1.
        reductions: what to compute in place of ``grad_sample``, as for ``ps.reduce``.
        max_memory: as for ``ps.reduce``; for ``reductions`` only.

    Returns:
        A callable with the signature of ``module.forward``. After a backward of what it returned, each trainable
        parameter has ``grad_sample`` of shape (B, *shape), and ``grad`` as before; or the results of ``reductions``
        can be fetched by its method ``results()``.
    """
    if loss_reduction not in ("sum", "mean"):
        raise RuntimeError(f"loss_reduction must be 'sum' or 'mean', but is {loss_reduction!r}")
    if not isinstance(cast(object, module), nn.Module):
        raise RuntimeError(f"module must be an nn.Module, but is a {type(module).__name__}")
    if any(hasattr(part, "_orig_mod") for part in module.modules()):
        raise RuntimeError("module was made by torch.compile, which does not know expanded weights: pass the original")
    if batch_size is not None and (not isinstance(cast(object, batch_size), int) or isinstance(batch_size, bool)):
        raise RuntimeError(f"batch_size must be None or an int, but is a {type(batch_size).__name__}")
    if batch_size is not None and batch_size < 1:
        raise RuntimeError(f"batch_size must be at least 1, but is {batch_size}")
    if isinstance(reductions, Reduction):
        raise TypeError(f"reductions must be a sequence: write reductions=[{type(reductions).__name__}(...)]")
    check_reductions(reductions or (), max_memory)
    if reductions is None:
        _check_clear(module.named_parameters())
    return PerSampleCall(module, batch_size, loss_reduction, batch_first, reductions, max_memory)


class PerSampleCall:
    """A module to be called; made by `call_for_per_sample_grads`."""

    def __init__(
        self,
        module: nn.Module,
        batch_size: int | None,
        loss_reduction: str,
        batch_first: bool,
        reductions: Sequence[Reduction] | None,
        max_memory: int | None,
    ) -> None:
        self.module = module
        self._batch_size, self._loss_reduction, self._dim = batch_size, loss_reduction, 0 if batch_first else 1
        self._reductions, self._max_memory = reductions, max_memory
        self._results: tuple[Any, ...] | None = None
        update_wrapper(cast(Callable[..., Any], self), module.forward)

    def results(self) -> tuple[Any, ...]:
        """One result per reduction, of the last backward; they are handed over once."""
        if self._reductions is None:
            raise RuntimeError("there are results where reductions=[...] were asked for; here, look at p.grad_sample")
        if self._results is None:
            raise RuntimeError("no backward has come by since results were last taken")
        found, self._results = self._results, None
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, and wait for the backward."""
        params = named(self.module)
        if not params or not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        batch = batch_of((args, kwargs), self._batch_size, self._dim)
        self._check_clear(params)
        _refuse_batch_norms(self.module)
        weights = {name: ExpandedWeight(p, batch, self._loss_reduction) for name, p in params.items()}
        by_id, stand_ins = {id(p): weights[name] for name, p in params.items()}, StandIns()
        args, kwargs = tree_map(lambda leaf: _replaced_input(leaf, by_id, stand_ins), (args, kwargs))
        samples = self._samples(weights.values(), (args, kwargs), batch)
        samples.data = followed = Followed(samples.inputs, batch, self._dim)
        with _working(weights.values()), followed:  # a forward may take gradients itself
            result = functional_call(self.module, _everywhere(self.module, by_id), args, kwargs, tie_weights=False)
        outputs = _outputs(result, samples)
        if not outputs:
            return result
        tape = self._let_in_others(outputs, weights, params, stand_ins)
        recording = Recording(
            what=type(self.module).__name__,
            leaves={name: weight.leaf for name, weight in weights.items()},
            inputs=[leaf for _, leaf in stand_ins.pairs()],
            outputs=outputs,
            samples=samples,
            tape=tape,
            scale=batch if self._loss_reduction == "mean" else 1,
            receive=lambda: self._receive(params, batch),
            working=[weight.working for weight in weights.values()],
        )
        attached = attach(recording, list(params.values()), [x for x, _ in stand_ins.pairs()])
        return _replaced(result, dict(zip(map(id, outputs), attached, strict=True)))

    def _let_in_others(
        self,
        outputs: Sequence[Tensor],
        weights: Mapping[str, ExpandedWeight],
        params: Mapping[str, Tensor],
        stand_ins: StandIns,
    ) -> Tape | None:
        """Tensors that the module uses though they are neither parameters nor inputs, and that want a gradient.

        The graph comes back, if it leads to weights alone.
        """
        known = [*[weight.leaf for weight in weights.values()], *[leaf for _, leaf in stand_ins.pairs()]]
        tape = walk([slot_of(y)[0] for y in outputs], known)
        found = [leaf_of(node) for node in tape.others]
        names = {id(p): name for name, p in params.items()}
        past = sorted(names[id(t)] for t in found if id(t) in names)
        if past:
            raise RuntimeError(
                f"{type(self.module).__name__} uses parameters {past} by another way than its attributes of that name "
                f"(kept in a list or a closure), so that this use was not recorded: read them off the module in forward"
            )
        for plain in found:
            stand_ins.let_in(plain)
        return None if stand_ins.pairs() else tape

    def _samples(self, weights: Any, arguments: Any, batch: int) -> Samples:
        """What is known before the call; the weights are told to record on it."""
        found = leaves(arguments)
        packed = [leaf for leaf in found if isinstance(leaf, PackedSequence)]
        inputs = [leaf for leaf in found if type(leaf) is Tensor and holds_batch(leaf, batch, self._dim)]
        samples = Samples(batch, self._dim, inputs=inputs, packed=packed[0] if len(packed) == 1 else None)
        for weight in weights:
            weight.samples = samples
            weight.set_batch_first(self._dim == 0)
        return samples

    def _check_clear(self, params: Mapping[str, Tensor]) -> None:
        if self._reductions is None:
            _check_clear(params.items())
        elif self._results is not None:
            raise RuntimeError("the results of an earlier backward are still there: take them by results() first")

    @contextmanager
    def _receive(self, params: Mapping[str, Tensor], batch: int) -> Iterator[Receiver]:
        """Write ``grad_sample`` during one backward, or feed the reductions."""
        self._check_clear(params)
        if self._reductions is None:
            with _writing(params, batch) as write:
                yield Receiver(write)
        else:
            device = next(iter(params.values())).device
            run, tell_bytes = start(self._reductions, self.module, params, batch, device, self._max_memory)
            yield Receiver(run.add, tell_bytes)
            with torch.no_grad():
                self._results = tuple(r.result() for r in run.reductions)


def _everywhere(module: nn.Module, by_id: Mapping[int, ExpandedWeight]) -> dict[str, Tensor]:
    """The weight for every attribute that is a parameter, by one name for each."""
    return {
        f"{path}.{name}" if path else name: by_id[id(p)]
        for path, part in module.named_modules()
        for name, p in part._parameters.items()
        if id(p) in by_id
    }


@contextmanager
def _working(weights: Iterable[ExpandedWeight]) -> Iterator[None]:
    with ExitStack() as stack:
        for weight in weights:
            stack.enter_context(weight.working)
        yield


@contextmanager
def _writing(params: Mapping[str, Tensor], batch: int) -> Iterator[Callable[[str, Factor], None]]:
    """All parameters get their ``grad_sample``, or none: zeros where the loss does not reach them."""
    stacks: dict[str, Tensor] = {}

    def write(name: str, factor: Factor) -> None:
        p = params[name]
        stacks[name] = factor.stack(torch.empty((batch, *p.shape), dtype=p.dtype, device=p.device))

    yield write
    for name, p in params.items():
        stack = stacks.get(name)
        p.grad_sample = p.detach().new_zeros(batch, *p.shape) if stack is None else stack  # type: ignore[attr-defined]


def _check_clear(params: Iterable[tuple[str, Tensor]]) -> None:
    for name, p in params:
        if getattr(p, "grad_sample", None) is not None:
            raise RuntimeError(
                f"parameter {name!r} still holds a grad_sample, to which other samples' gradients would be added: "
                f"set it to None first"
            )


def _refuse_batch_norms(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and (part.training or part.running_mean is None):
            raise RuntimeError(
                f"samples interact in batch_norm: {type(part).__name__} {name!r} normalises by the statistics of the "
                f"batch, so that a sample has no gradient of its own. Put it into eval mode, or use GroupNorm"
            )


def _outputs(result: Any, samples: Samples) -> list[Tensor]:
    """The results that a gradient can come to, each once."""
    found: dict[int, Tensor] = {}
    for leaf in leaves(result):
        if isinstance(leaf, PackedSequence):
            if int(leaf.batch_sizes[0]) == samples.batch and leaf.data.requires_grad:
                samples.tell(leaf.data, of_packed(leaf.batch_sizes, leaf.sorted_indices, leaf.data, samples.batch))
            leaf = leaf.data
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            found[id(leaf)] = leaf
    return list(found.values())


def _replaced_input(leaf: Any, weights: Mapping[int, ExpandedWeight], stand_ins: StandIns) -> Any:
    """An argument as the module sees it: a weight where it is a parameter, another leaf where it wants a gradient."""
    if id(leaf) in weights:
        return weights[id(leaf)]
    if isinstance(leaf, PackedSequence) and leaf.data.requires_grad:
        return PackedSequence(stand_ins[leaf.data], *leaf[1:])
    return stand_ins[leaf] if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def _replaced(result: Any, attached: Mapping[int, Tensor]) -> Any:
    """The results, on the user's graph."""

    def replace(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return PackedSequence(attached.get(id(leaf.data), leaf.data), *leaf[1:])
        return attached.get(id(leaf), leaf)

    return tree_map(replace, result)
