"""A whole module, recorded: its parameters replaced by expanded weights, its results put behind one gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence

from ..graph.layout import labels
from ..graph.read.roots import slot_of
from ..graph.read.tape import Graph
from ..trees import LEAVES, leaves, tree_map
from .data import Notes
from .engine import other_leaves, read_outputs
from .gate import Receiver, Recording, attach
from .inputs import StandIns, holds_batch
from .origins import Origin
from .replay import Source
from .samples import Samples, along, of_packed
from .weight import ExpandedWeight


def record_call(
    module: nn.Module,
    params: Mapping[str, Tensor],
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]],
    batch: int,
    dim: int,
    loss_reduction: str,
    scale: int,
    receive: Callable[[], AbstractContextManager[Receiver]],
) -> Any:
    """What the module returns. A backward through it opens ``receive``, and gives it the factors of ``params``."""
    weights = {name: ExpandedWeight(p, batch, loss_reduction) for name, p in params.items()}
    by_id, stand_ins = {id(p): weights[name] for name, p in params.items()}, StandIns()
    args, kwargs = tree_map(lambda leaf: _replaced_input(leaf, by_id, stand_ins), arguments)
    samples, notes = _samples(module, (args, kwargs), batch, dim)
    with ExitStack() as stack:
        for weight in weights.values():
            weight.samples = samples
            weight.set_batch_first(dim == 0)
            stack.enter_context(weight.working)  # a forward may take gradients itself
        stack.enter_context(notes)
        result = functional_call(module, _everywhere(module, by_id), args, kwargs, tie_weights=False)
    returned = _outputs(result, samples, notes)
    outputs = list(returned.values())
    what = type(module).__name__
    if not outputs:
        _refuse_hidden(what, result)
        return result
    recording = Recording(
        what=what,
        leaves={name: weight.leaf for name, weight in weights.items()},
        graph=_let_in_others(what, outputs, weights, params, stand_ins),
        inputs=[leaf for _, leaf in stand_ins.pairs()],
        outputs=outputs,
        samples=samples,
        scale=scale,
        receive=receive,
        working=[weight.working for weight in weights.values()],
    )
    attached = attach(recording, list(params.values()), [x for x, _ in stand_ins.pairs()])
    return _replaced_outputs(result, dict(zip(returned, attached, strict=True)))


def _replaced_input(leaf: Any, weights: Mapping[int, ExpandedWeight], stand_ins: StandIns) -> Any:
    """An argument as the module sees it: a weight where it is a parameter, another leaf where it wants a gradient."""
    if id(leaf) in weights:
        return weights[id(leaf)]
    if isinstance(leaf, PackedSequence) and leaf.data.requires_grad:
        return PackedSequence(stand_ins[leaf.data], *leaf[1:])
    return stand_ins[leaf] if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def _samples(module: nn.Module, arguments: Any, batch: int, dim: int) -> tuple[Samples, Notes]:
    """What is known before the call, and notes of what happens to its data."""
    values = leaves(arguments)
    packed = [leaf for leaf in values if isinstance(leaf, PackedSequence)]
    inputs = [leaf for leaf in values if type(leaf) is Tensor and holds_batch(leaf, batch, dim)]
    samples = Samples(batch, dim, inputs, packed[0] if len(packed) == 1 else None)
    others = [leaf for leaf in values if isinstance(leaf, Tensor) and not isinstance(leaf, ExpandedWeight)]
    samples.notes = notes = Notes(_sources(samples), batch, dim, module, others)
    return samples, notes


def _sources(samples: Samples) -> list[Source]:
    """The call's data, and the sample of every element; nothing can be told from one sample."""
    if samples.batch < 2:
        return []
    sources = []
    if samples.packed is not None and int(samples.packed.batch_sizes[0]) == samples.batch:
        data, sizes, order = samples.packed[:3]
        index = labels(of_packed(sizes, order, data, samples.batch), tuple(data.shape))
        sources.append(Source(data, index, varies=True))
    for x in samples.inputs:  # the first one is taken at its word, where a mask or a state may carry samples elsewhere
        certain = not sources or list(x.shape).count(samples.batch) == 1
        index = labels(along(x.shape, samples.dim, samples.batch), tuple(x.shape))
        sources.append(Source(x, index, certain))
    return sources


def _everywhere(module: nn.Module, by_id: Mapping[int, ExpandedWeight]) -> dict[str, Tensor]:
    """The weight for every attribute that is a parameter, by one name for each."""
    return {
        f"{path}.{name}" if path else name: by_id[id(p)]
        for path, part in module.named_modules()
        for name, p in part.named_parameters(recurse=False, remove_duplicate=False)
        if id(p) in by_id
    }


def _outputs(result: Any, samples: Samples, notes: Notes) -> dict[int, Tensor]:
    """The results that a gradient can come to, by the id of what was returned."""
    outputs: dict[int, Tensor] = {}
    for leaf in leaves(result):
        if isinstance(leaf, PackedSequence):
            if int(leaf.batch_sizes[0]) == samples.batch:
                samples.tell(leaf.data, of_packed(leaf.batch_sizes, leaf.sorted_indices, leaf.data, samples.batch))
            leaf = leaf.data
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            outputs[id(leaf)] = leaf.leaf if isinstance(leaf, ExpandedWeight) else leaf
            if notes.origins.of(leaf) == Origin.WEIGHTS:
                samples.weights.add(slot_of(outputs[id(leaf)]))
    return outputs


def _refuse_hidden(what: str, result: Any) -> None:
    """Results that hold no tensor that wants a gradient are fine, but not those in which none can be seen."""
    hidden = {type(leaf).__name__ for leaf in leaves(result) if not isinstance(leaf, LEAVES)}
    if hidden:
        raise RuntimeError(
            f"{what} returned {', '.join(sorted(hidden))}, in which tensors cannot be seen, and nothing else that "
            f"wants a gradient: return tensors in tuples, lists, mappings or dataclasses"
        )


def _let_in_others(
    what: str,
    outputs: Sequence[Tensor],
    weights: Mapping[str, ExpandedWeight],
    params: Mapping[str, Tensor],
    stand_ins: StandIns,
) -> Graph | None:
    """Tensors that the module uses though they are neither parameters nor inputs, and that want a gradient.

    The graph comes back, if it leads to weights alone.
    """
    known = [*[weight.leaf for weight in weights.values()], *[leaf for _, leaf in stand_ins.pairs()]]
    graph = read_outputs(outputs)
    others, names = other_leaves(graph, known), {id(p): name for name, p in params.items()}
    past = sorted(names[id(t)] for t in others if id(t) in names)
    if past:
        raise RuntimeError(
            f"{what} uses parameters {past} by another way than its attributes of that name (kept in a list or a "
            f"closure), so that this use was not recorded: read them off the module in forward"
        )
    for plain in others:
        stand_ins.let_in(plain)
    return None if stand_ins.pairs() else graph


def _replaced_outputs(result: Any, attached: Mapping[int, Tensor]) -> Any:
    """The results, on the user's graph."""

    def replace(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return PackedSequence(attached.get(id(leaf.data), leaf.data), *leaf[1:])
        return attached.get(id(leaf), leaf)

    return tree_map(replace, result)
