"""The modules with parameters of PyTorch's module database, and one of them compared with the definition.

Samples that the database gives without a batch dim (all of the recurrent and attention ones) are used twice: as they
are, to be refused, and with a batch of three put in, which is also their number of steps: sizes that coincide must not
confuse. Where a module has very many samples, `MOST` of them are drawn.
"""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves, tree_map_only

import persample as ps
from tests.expanded.helpers import total
from tests.expanded.samples import ModuleCase, built, describe, leaf, module_samples, sample_losses, with_batch
from tests.reference import assert_same, definition

B, MOST = 3, 8
Outputs = list[tuple[Tensor, int]]

# At least so many samples are compared in each mode.
MODULES = {
    **dict.fromkeys("nn.Linear nn.Bilinear nn.Embedding nn.GRUCell nn.LSTMCell".split(), 2),
    **dict.fromkeys("nn.Conv1d nn.Conv2d nn.Conv3d nn.LazyConv1d nn.LazyConv2d nn.LazyConv3d".split(), 2),
    **dict.fromkeys("nn.ConvTranspose1d nn.ConvTranspose2d nn.ConvTranspose3d".split(), 1),
    **dict.fromkeys("nn.LazyConvTranspose1d nn.LazyConvTranspose2d nn.LazyConvTranspose3d".split(), 1),
    **dict.fromkeys("nn.InstanceNorm1d nn.InstanceNorm2d nn.InstanceNorm3d".split(), 2),
    **dict.fromkeys("nn.BatchNorm1d nn.BatchNorm2d nn.BatchNorm3d nn.RMSNorm".split(), 4),
    **{"nn.RNNCell": 3, "nn.LayerNorm": 5, "nn.GroupNorm": 6, "nn.PReLU": 7},
    **dict.fromkeys("nn.RNN nn.GRU nn.LSTM nn.MultiheadAttention".split(), MOST),
    **dict.fromkeys("nn.TransformerEncoderLayer nn.TransformerDecoderLayer".split(), MOST),
    **dict.fromkeys("nn.TransformerEncoder nn.Transformer".split(), MOST),
}
NEW_LOSS = pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="this PyTorch does not have it")
if hasattr(nn, "LinearCrossEntropyLoss"):
    MODULES["nn.LinearCrossEntropyLoss"] = MOST
TIMED = ("RNN", "GRU", "LSTM", "MultiheadAttention", "Transformer")  # have batch_first, and samples without a batch
BATCH_NORMS = ("nn.BatchNorm1d", "nn.BatchNorm2d", "nn.BatchNorm3d")
DIFFER = ("nn.RNN", "nn.GRU", "nn.LSTM", "nn.MultiheadAttention", "nn.TransformerEncoder", "nn.TransformerEncoderLayer")
REFUSE_EMPTY = ("nn.InstanceNorm1d", "nn.InstanceNorm2d", "nn.InstanceNorm3d")  # themselves, whatever is around them


@lru_cache
def cases(name: str, training: bool) -> tuple[list[ModuleCase], list[ModuleCase]]:
    """The cases of a module to compare, and those to refuse."""
    cls, found = module_samples(name, training)
    batched: list[ModuleCase] = []
    unbatched: list[ModuleCase] = []
    for number, sample in enumerate(found):
        make, call = sample.constructor_input, sample.forward_input
        if make.kwargs.get("reduction", "none") != "none" or make.kwargs.get("options"):
            continue  # `test_losses_reduced_inside_the_module`, `test_loss_fused_with_its_gradient`
        module = built(lambda make=make: cls(*make.args, **make.kwargs), training)
        if name.startswith("nn.Lazy"):
            module(*call.args, **call.kwargs)  # gives the parameters their shapes
        if not any(p.requires_grad for p in module.parameters()):
            continue
        if name in BATCH_NORMS and not training and not module.track_running_stats:
            continue  # statistics of the batch: `test_batch_norm_with_statistics_of_the_batch_is_refused`
        label = f"{name}[{number}] {describe(make.args)} {describe(make.kwargs)} of {describe(call.args)}"
        case = ModuleCase(label, module, call.args, call.kwargs, None, getattr_deep(module, "batch_first", True))
        if has_batch(case, sample.desc):
            batched.append(replace(case, batch=length(case.args or tuple(case.kwargs.values()), case.batch_first)))
            continue
        unbatched.append(case)
        if name.removeprefix("nn.").startswith(TIMED):
            batched.append(with_batch(case, B))
    return selection(batched), selection(unbatched)


def selection(items: list[Any]) -> list[Any]:
    """At most `MOST`, drawn so that options which alternate in the list all occur; always the same ones."""
    chosen = sorted(random.Random(0).sample(range(len(items)), min(MOST, len(items))))
    return [items[i] for i in chosen]


def getattr_deep(module: nn.Module, name: str, default: Any) -> Any:
    """The attribute of the module or of the first part that has it."""
    return next((getattr(part, name) for part in module.modules() if hasattr(part, name)), default)


def has_batch(case: ModuleCase, desc: str) -> bool:
    """Does the sample have a batch dim? The database says it in the description, or by the number of dims."""
    x = tree_leaves((case.args, case.kwargs))[0]
    if isinstance(case.module, nn.PReLU):
        return x.dim() > 0  # a row of numbers is a batch of scalars
    if isinstance(case.module, nn.RNNBase | nn.MultiheadAttention):
        return x.dim() == 3
    if isinstance(case.module, nn.RNNCellBase) or hasattr(case.module, "linear"):
        return x.dim() == 2
    return "no_batch_dim" not in desc


def length(args: tuple[Any, ...], batch_first: bool) -> int:
    return int(args[0].shape[0 if batch_first else 1])


def outputs_of(case: ModuleCase, out: Any) -> Outputs:
    """The tensors a module returns, each with its batch dim."""
    dim = 0 if case.batch_first else 1
    if isinstance(case.module, nn.RNNBase):
        sequence, hidden = out
        if isinstance(sequence, PackedSequence):
            sequence, dim = pad_packed_sequence(sequence, batch_first=True)[0], 0
        return [(sequence, dim), *[(h, 1) for h in tree_leaves(hidden)]]
    if isinstance(case.module, nn.MultiheadAttention):
        return [(out[0], dim), (out[1], 0)]
    if isinstance(case.module, nn.RNNCellBase):
        return [(h, 0) for h in tree_leaves(out)]
    return [(out, dim)]


def losses_of(case: ModuleCase, module: nn.Module, args: Any, kwargs: Any) -> tuple[Outputs, Tensor]:
    outputs = outputs_of(case, module(*case.prepare(args), **kwargs))
    return outputs, sample_losses(outputs)


def fresh(case: ModuleCase) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
    """The arguments with leaves of their own, and those of the leaves that require a gradient."""
    args, kwargs = tree_map_only(Tensor, leaf, (case.args, case.kwargs))
    return args, kwargs, [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]


def constant(case: ModuleCase) -> ModuleCase:
    """The same call with inputs that require no gradient."""
    args, kwargs = tree_map_only(Tensor, Tensor.detach, (case.args, case.kwargs))
    return replace(case, args=args, kwargs=kwargs)


def batch_size_of(case: ModuleCase) -> int | None:
    """None where every tensor tells the batch size by its dim 0 (1), so that it is inferred; else the number itself."""
    dim = 0 if case.batch_first else 1
    tensors = [t for t in tree_leaves((case.args, case.kwargs)) if isinstance(t, Tensor)]
    told = all(t.dim() > dim and t.shape[dim] == case.batch for t in tensors)
    return None if told else case.batch


def compare(case: ModuleCase, reduction: str = "sum", rtol: float = 1e-9) -> None:
    """Outputs, per-sample gradients, gradients of the inputs, buffers; `.grad` of parameters stays None."""
    plain, module = copy.deepcopy(case.module), copy.deepcopy(case.module)
    args, kwargs, inputs = fresh(case)
    outputs, losses = losses_of(case, plain, args, kwargs)
    assert len(losses) == case.batch, "the case is wrong"
    want = definition(losses, plain)
    total(losses, reduction).backward()

    args, kwargs, ours = fresh(case)
    call = ps.call_for_per_sample_grads(
        module, batch_size=batch_size_of(case), loss_reduction=reduction, batch_first=case.batch_first
    )
    got_outputs, losses = losses_of(case, call, args, kwargs)
    total(losses, reduction).backward()

    pairs = {str(i): (a[None], b[None]) for i, ((a, _), (b, _)) in enumerate(zip(got_outputs, outputs, strict=True))}
    assert_same({k: a.detach() for k, (a, _) in pairs.items()}, {k: b.detach() for k, (_, b) in pairs.items()}, rtol)
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    assert_same({name: p.grad_sample for name, p in trained}, want, rtol)
    assert [name for name, p in trained if p.grad is not None] == []
    assert_same(
        {str(i): grad_of(t) for i, t in enumerate(ours)}, {str(i): grad_of(t) for i, t in enumerate(inputs)}, rtol
    )
    buffers = [{k: b[None] for k, b in m.named_buffers()} for m in (module, plain)]
    assert_same(buffers[0], buffers[1], rtol)


def of_size(name: str, batch: int) -> list[ModuleCase]:
    """The cases of a module with `batch` samples; of more samples the first ones."""
    batched, unbatched = cases(name, training=name not in BATCH_NORMS)
    if name.removeprefix("nn.").startswith(TIMED):
        return [with_batch(case, batch) for case in unbatched]

    def cut(t: Tensor) -> Tensor:
        return t.detach()[:batch].requires_grad_(t.requires_grad)

    return [
        replace(
            case,
            args=tree_map_only(Tensor, cut, case.args),
            kwargs=tree_map_only(Tensor, cut, case.kwargs),
            batch=batch,
        )
        for case in batched
        if case.batch >= batch
    ]


def runs(case: ModuleCase) -> bool:
    """Does the module itself take this call?"""
    try:
        losses_of(case, copy.deepcopy(case.module), case.args, case.kwargs)
    except (RuntimeError, ValueError, IndexError):
        return False
    return True


def grad_of(t: Tensor) -> Tensor:
    """What arrived at an input, as one row."""
    return (torch.zeros_like(t) if t.grad is None else t.grad)[None]


def runs_of(name: str) -> list[Any]:
    """Both reductions, and both modes where the mode can make a difference."""
    if name in BATCH_NORMS:  # in training mode they mix samples
        modes = [(False, "sum"), (False, "mean")]
    else:
        modes = [(True, "sum"), (name not in DIFFER, "mean")]
    return [pytest.param(name, t, r, id=f"{name}-{'train' if t else 'eval'}-{r}") for t, r in modes]
