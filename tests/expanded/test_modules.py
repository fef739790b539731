"""`call_for_per_sample_grads` on every module with parameters in PyTorch's module database."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._pytree import tree_leaves, tree_map_only

import persample as ps
from tests.expanded.module_cases import (
    BATCH_NORMS,
    MODULES,
    MOST,
    NEW_LOSS,
    REFUSE_EMPTY,
    batch_size_of,
    cases,
    compare,
    constant,
    fresh,
    of_size,
    runs,
    runs_of,
    selection,
)
from tests.expanded.samples import ModuleCase, built, databases, describe, for_every, module_samples
from tests.reference import assert_same, definition, nodes_behind

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning"),
    pytest.mark.filterwarnings("ignore:linear_cross_entropy:UserWarning"),
]


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
    """One node for the loss and all gradients: by rule when it gives several losses, else refused."""
    options = nn.LinearCrossEntropyOptions(allow_retain_graph=True, batch_chunk_size=2)
    module = built(lambda: nn.LinearCrossEntropyLoss(5, 4, reduction=reduction, options=options), training=True)
    case = ModuleCase("", module, (torch.randn(8, 5, dtype=torch.float64), torch.arange(8) % 4), {}, 8)
    if reduction == "none":
        compare(case)
    else:
        with pytest.raises(RuntimeError, match="linear_cross_entropy"):
            ps.call_for_per_sample_grads(module)(*case.args).backward()


TABLES = {
    "padding": (lambda: nn.Embedding(5, 2, padding_idx=1), {}),
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


@pytest.mark.parametrize("make", [nn.Embedding, partial(nn.EmbeddingBag, mode="mean")], ids=["rows", "bags"])
def test_tables_scaled_by_frequency(make: Callable[..., nn.Module]) -> None:
    """How often an index stands in the whole batch divides every sample's gradient; one sample is nobody else's."""
    module = built(lambda: make(5, 2, scale_grad_by_freq=True), training=True)
    case = ModuleCase("", module, (torch.tensor([[0, 1, 1, 3], [4, 4, 2, 1]]),), {}, 2)
    with pytest.raises(ps.InteractionError, match="samples interact in Embedding"):
        compare(case)
    compare(replace(case, args=(case.args[0][:1],), batch=1))


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
    assert "Mkldnn" in repr(nodes_behind(module(x)[0]))
    compare(ModuleCase("lstm", module, (x,), {}, 4, batch_first), rtol=1e-5)
