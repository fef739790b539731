"""`call_for_per_sample_grads` on every module with parameters in PyTorch's module database.

Samples that the database gives without a batch dim (all of the recurrent and attention ones) are used twice: as they
are, to be refused, and with a batch of three put in, which is also their number of steps: sizes that coincide must not
confuse. Where a module has very many samples, `MOST` of them are drawn.
"""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves, tree_map_only

import persample as ps
from tests.expanded.samples import (
    ModuleCase,
    built,
    databases,
    describe,
    for_every,
    module_samples,
    sample_losses,
    with_batch,
)
from tests.reference import assert_same, definition

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning"),
    pytest.mark.filterwarnings("ignore:linear_cross_entropy:UserWarning"),
]

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

    def leaf(t: Tensor) -> Tensor:
        return t.detach().clone(memory_format=torch.preserve_format).requires_grad_(t.requires_grad)

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
    reduce = torch.mean if reduction == "mean" else torch.sum
    reduce(losses).backward()

    args, kwargs, ours = fresh(case)
    call = ps.call_for_per_sample_grads(
        module, batch_size=batch_size_of(case), loss_reduction=reduction, batch_first=case.batch_first
    )
    got_outputs, losses = losses_of(case, call, args, kwargs)
    reduce(losses).backward()

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


def test_every_module_with_parameters_is_listed() -> None:
    for info in databases()[1]:
        cls, found = module_samples(info.name, training=True)
        first = found[0].constructor_input
        module = built(lambda cls=cls, make=first: cls(*make.args, **make.kwargs), training=True)
        assert info.name in MODULES or not list(module.parameters()), f"{info.name} has parameters and no test"


@pytest.mark.parametrize(("name", "training", "reduction"), [run for name in MODULES for run in runs_of(name)])
def test_equals_the_definition(name: str, training: bool, reduction: str) -> None:
    """With inputs that require a gradient (sum), and with constant ones as in ordinary training (mean)."""
    compared = cases(name, training)[0]
    assert len(compared) >= MODULES[name]
    for_every(compared, lambda case: compare(constant(case) if reduction == "mean" else case, reduction))


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("name", MODULES)
def test_no_sample_and_one(name: str, batch: int) -> None:
    """An empty batch can be inferred but not be given, and not every module takes one."""
    found = [case for case in of_size(name, batch)[:4] if batch or (runs(case) and batch_size_of(case) is None)]
    assert bool(found) == (batch > 0 or name not in REFUSE_EMPTY)
    for_every(found, compare)


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")  # on the way to the refusal
@pytest.mark.parametrize("name", [name for name in MODULES if "Norm" not in name and name != "nn.Embedding"])
def test_data_without_a_batch_are_refused(name: str) -> None:
    """At the call, or at backward when it is the graph that shows that the rows are not samples."""

    def check(case: ModuleCase) -> None:
        for data in (case, constant(case)):
            args, kwargs, _ = fresh(data)
            call = ps.call_for_per_sample_grads(copy.deepcopy(case.module), batch_first=case.batch_first)
            with pytest.raises(RuntimeError):
                sum(t.sum() for t in tree_leaves(call(*args, **kwargs))).backward()

    refused = cases(name, training=True)[1][:2]
    assert refused
    for_every(refused, check)


@pytest.mark.parametrize("name", BATCH_NORMS)
def test_batch_norm_with_statistics_of_the_batch_is_refused(name: str) -> None:
    """In training mode, and in evaluation mode without running statistics; the error names the op and the module."""

    def check(case: ModuleCase) -> None:
        for training in (True, False) if not case.module.track_running_stats else (True,):
            model = nn.Sequential(nn.Identity(), copy.deepcopy(case.module)).train(training)
            with pytest.raises(RuntimeError, match=r"(?s)(?=.*batch_norm)(?=.*\b1\b)"):
                ps.call_for_per_sample_grads(model)(*case.args)

    found = cases(name, training=True)[0]
    assert {case.module.track_running_stats for case in found} == {True, False}
    for_every(found, check)


@NEW_LOSS
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_losses_reduced_inside_the_module(reduction: str) -> None:
    """A sample's share of the sum or mean that a module takes itself is its own loss times a constant."""
    cls, found = module_samples("nn.LinearCrossEntropyLoss", training=True)
    inside: list[ModuleCase] = []
    for sample in found:
        make, x = sample.constructor_input, sample.forward_input.args[0]
        if make.kwargs["reduction"] == reduction and make.kwargs["options"] is None and x.dim() == 2:
            module = built(lambda make=make: cls(*make.args, **make.kwargs), training=True)
            inside.append(ModuleCase(describe(make.kwargs), module, sample.forward_input.args, {}, len(x)))
    assert len(inside) >= MOST

    def check(case: ModuleCase) -> None:
        plain, module = copy.deepcopy(case.module), copy.deepcopy(case.module)
        total = plain(*case.args).detach()
        plain.reduction = "none"
        each = plain(*case.args).unsqueeze(-1).flatten(1).sum(1)
        want = definition(each * (total / each.sum().detach()), plain)
        ps.call_for_per_sample_grads(module)(*case.args).backward()
        assert_same({name: p.grad_sample for name, p in module.named_parameters()}, want)

    for_every(selection(inside), check)


@NEW_LOSS
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_loss_fused_with_its_gradient(reduction: str) -> None:
    """One node for the loss and all gradients: asked sample by sample when it gives several losses, else refused."""
    options = nn.LinearCrossEntropyOptions(allow_retain_graph=True, batch_chunk_size=2)
    module = built(lambda: nn.LinearCrossEntropyLoss(5, 4, reduction=reduction, options=options), training=True)
    case = ModuleCase("", module, (torch.randn(8, 5, dtype=torch.float64), torch.arange(8) % 4), {}, 8)
    if reduction == "none":
        with pytest.warns(ps.PerformanceWarning, match="linear_cross_entropy"):
            compare(case)
    else:
        with pytest.raises(RuntimeError, match="linear_cross_entropy"):
            ps.call_for_per_sample_grads(module)(*case.args).backward()


TABLES = {
    "padding": (lambda: nn.Embedding(5, 2, padding_idx=1), {}),
    "frequency": (lambda: nn.Embedding(5, 2, scale_grad_by_freq=True), {}),
    "sparse": (lambda: nn.Embedding(5, 2, sparse=True), {}),
    "bag-sum": (lambda: nn.EmbeddingBag(5, 2, mode="sum", padding_idx=1), {}),
    "bag-mean": (lambda: nn.EmbeddingBag(5, 2, mode="mean", padding_idx=1), {}),
    "bag-max": (lambda: nn.EmbeddingBag(5, 2, mode="max"), {}),
    "bag-weighted": (
        lambda: nn.EmbeddingBag(5, 2, mode="sum"),
        {"per_sample_weights": torch.rand(3, 4).double() + 0.5},
    ),
}


@pytest.mark.parametrize("option", TABLES)
def test_options_of_embeddings(option: str) -> None:
    make, kwargs = TABLES[option]
    indices = torch.tensor([[0, 1, 1, 3], [4, 4, 2, 1], [3, 3, 3, 0]])
    kwargs = {key: t.requires_grad_() for key, t in kwargs.items()}
    compare(ModuleCase(option, built(make, training=True), (indices,), kwargs, len(indices)))


def test_bags_scaled_by_frequency() -> None:
    """There is no rule for these; the exact slow way is taken and says so."""
    module = built(lambda: nn.EmbeddingBag(5, 2, mode="mean", scale_grad_by_freq=True), training=True)
    with pytest.warns(ps.PerformanceWarning, match="EmbeddingBag"):
        compare(ModuleCase("", module, (torch.tensor([[0, 1, 1, 3], [4, 4, 2, 1]]),), {}, 2))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_between_offsets(mode: str) -> None:
    """Bags of different lengths, an empty one among them."""
    module = built(lambda: nn.EmbeddingBag(5, 2, mode=mode), training=True)
    args = (torch.tensor([0, 1, 1, 3, 4, 2, 2]), torch.tensor([0, 3, 3, 4]))
    compare(ModuleCase(mode, module, args, {}, 4))


RECURRENT = {
    "rnn": partial(nn.RNN, 2, 4),
    "rnn-relu": partial(nn.RNN, 2, 4, nonlinearity="relu"),
    "gru": partial(nn.GRU, 2, 4),
    "lstm": partial(nn.LSTM, 2, 4),
    "lstm-projected": partial(nn.LSTM, 2, 4, proj_size=3),
}


@pytest.mark.parametrize("lengths", [[3, 2, 2, 1], [2, 3, 1, 3], [2]], ids=["sorted", "unsorted", "one"])
@pytest.mark.parametrize("both_ways", [False, True], ids=["forward", "bidirectional"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", RECURRENT)
def test_packed_sequences(kind: str, layers: int, both_ways: bool, lengths: list[int]) -> None:
    """Sequences that end early, in order of length or not, without and with a first hidden state."""
    in_order = lengths == sorted(lengths, reverse=True)

    def prepare(args: tuple[Any, ...]) -> tuple[Any, ...]:
        return pack_padded_sequence(args[0], lengths, batch_first=True, enforce_sorted=in_order), *args[1:]

    module = built(lambda: RECURRENT[kind](num_layers=layers, bidirectional=both_ways), training=True)
    x = torch.randn(len(lengths), max(lengths), 2, dtype=torch.float64).requires_grad_()
    case = ModuleCase(kind, module, (x,), {}, len(lengths), prepare=prepare)
    compare(constant(case), "mean")
    _, hidden = module(*prepare((x,)))
    hidden = tree_map_only(Tensor, lambda t: torch.randn_like(t).requires_grad_(), hidden)
    compare(replace(case, args=(x, hidden)))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="the fused kernel is not built in")
@pytest.mark.parametrize("batch_first", [False, True], ids=["time-first", "batch-first"])
@pytest.mark.parametrize("both_ways", [False, True], ids=["forward", "bidirectional"])
def test_fused_lstm(both_ways: bool, batch_first: bool) -> None:
    """Single precision on the CPU, with an input that needs no gradient, runs one fused kernel per layer."""
    module = built(lambda: nn.LSTM(2, 4, 2, bidirectional=both_ways, batch_first=batch_first), True, torch.float32)
    x = torch.randn(4, 4, 2)
    assert "Mkldnn" in repr(graph_nodes(module(x)[0]))
    compare(ModuleCase("lstm", module, (x,), {}, 4, batch_first), rtol=1e-5)


def graph_nodes(t: Tensor) -> set[Any]:
    """Every node of the graph that ends in `t`."""
    found: set[Any] = set()
    waiting = [t.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [parent for parent, _ in node.next_functions]
    return found
