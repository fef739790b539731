"""The linear layer and cross entropy in one: every reduction, in chunks or not, against the two of them one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import persample as ps
from persample.graph.ops import fused
from tests.reference import assert_same, definition, vectors

if not hasattr(F, "linear_cross_entropy"):
    pytest.skip("this torch has no F.linear_cross_entropy", allow_module_level=True)

B, T, D, V = 4, 3, 5, 7
CHUNKS = pytest.mark.parametrize("chunk", [None, 1, 2, 5, 12, 100])  # of 12 rows; None is as the options choose


def options(chunk: int | None = None, **more: Any) -> Any:
    return nn.LinearCrossEntropyOptions(batch_chunk_size=chunk, **more)  # type: ignore[attr-defined]


class Model(nn.Module):
    """A body, and a head that is a loss."""

    def __init__(self, dtype: torch.dtype = torch.float64, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.body = nn.Embedding(V, D, dtype=dtype), nn.Linear(D, D, dtype=dtype)
        self.head = nn.Linear(D, V, bias=bias, dtype=dtype)

    def hidden(self, ids: Tensor) -> Tensor:
        found: Tensor = self.body(self.table(ids)).tanh()
        return found

    def loss(self, h: Tensor, y: Tensor, **more: Any) -> Tensor:
        found: Tensor = F.linear_cross_entropy(h, self.head.weight, y, linear_bias=self.head.bias, **more)  # type: ignore[attr-defined]
        return found

    def per_row(self, ids: Tensor, y: Tensor, **more: Any) -> Tensor:
        rows = self.loss(self.hidden(ids).flatten(0, 1), y.flatten(), reduction="none", **more)
        return rows.view(y.shape).sum(1)

    def one_by_one(self, ids: Tensor, y: Tensor, **more: Any) -> Tensor:
        h = self.hidden(ids)
        return torch.stack([self.loss(h[i], y[i], **more) for i in range(len(y))])


@pytest.fixture
def tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, y = torch.randint(V, (2, B, T), generator=generator).unbind()
    y[0, 1] = y[2, 2] = -100
    return ids, y


def check(found: Tensor, want: dict[str, Tensor], params: Any, rtol: float = 1e-8) -> None:
    """Gradients, norms and clipped sums; nothing may be slow, as warnings are errors."""
    assert_same(ps.grad(found, params, retain_graph=True, independent=True), want, rtol=rtol)
    norms = vectors(want).norm(dim=1)
    assert_same([ps.norms(found, params, retain_graph=True).double()], {"0": norms}, rtol=rtol)
    total = ps.clipped_sum(found, params, max_norm=0.5)
    flat = torch.cat([value.double().flatten() for value in (total.values() if isinstance(total, dict) else total)])
    weights = (0.5 / norms).clamp(max=1)
    assert_same([flat.unsqueeze(0)], {"0": (weights @ vectors(want)).unsqueeze(0)}, rtol=rtol)


@CHUNKS
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("classes", [False, True], ids=["", "class weights"])
def test_a_loss_for_every_row(chunk: int | None, bias: bool, classes: bool, tokens: tuple[Tensor, Tensor]) -> None:
    model = Model(bias=bias)
    more = {"weight": torch.linspace(0.1, 2, V, dtype=torch.float64)} if classes else {}
    want = definition(model.per_row(*tokens, **more), model)
    check(model.per_row(*tokens, options=options(chunk), **more), want, model)


@pytest.mark.parametrize("ignored", [-100, 2, 99])
@pytest.mark.parametrize("chunk", [2, 100])
def test_ignored_rows(chunk: int, ignored: int, tokens: tuple[Tensor, Tensor]) -> None:
    model, (ids, y) = Model(), tokens
    y = y.masked_fill(y == -100, ignored)
    want = definition(model.per_row(ids, y, ignore_index=ignored), model)
    check(model.per_row(ids, y, ignore_index=ignored, options=options(chunk)), want, model)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("chunk", [2, 100])
def test_other_dtypes(dtype: torch.dtype, rtol: float, chunk: int, tokens: tuple[Tensor, Tensor]) -> None:
    model = Model(dtype)
    found = model.per_row(*tokens, options=options(chunk))
    check(found, definition(found, model), model, rtol)


def test_half_precision_is_nearer_to_the_truth_than_pytorchs_own(tokens: tuple[Tensor, Tensor]) -> None:
    """Logits are computed in float32, and gradients rounded once."""
    model, exact = Model(torch.bfloat16), Model()
    exact.load_state_dict(model.state_dict())
    truth = definition(exact.per_row(*tokens), exact)["head.weight"]
    found = model.per_row(*tokens, options=options(2))
    own = definition(found, model)["head.weight"]
    ours = ps.grad(found, model)["head.weight"]
    assert (ours.double() - truth).abs().max() <= 1.5 * (own.double() - truth).abs().max()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("retain", [False, True], ids=["", "allow_retain_graph"])
@pytest.mark.parametrize("chunk", [1, 100])
def test_a_reduced_loss_for_every_sample(
    reduction: str, retain: bool, chunk: int, tokens: tuple[Tensor, Tensor]
) -> None:
    """Gradients were computed in the forward pass; they are not used up by being asked for several times."""
    model = Model()
    want = definition(model.one_by_one(*tokens, reduction=reduction), model)
    given = options(chunk, allow_retain_graph=retain)
    check(model.one_by_one(*tokens, reduction=reduction, options=given), want, model)
    bias = {"bias": model.head.bias}
    check(model.one_by_one(*tokens, reduction=reduction, options=given), {"bias": want["head.bias"]}, bias)


def test_reduced_losses_are_used_up_as_pytorch_has_it(tokens: tuple[Tensor, Tensor]) -> None:
    """A call that does not keep the graph leaves the nodes as an ordinary backward would."""
    model = Model()
    found = model.one_by_one(*tokens, reduction="sum", options=options(2))
    ps.grad(found, model, retain_graph=True)
    found.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="called twice"):
        found.sum().backward()


@pytest.mark.parametrize("chunk", [2, 100])
def test_one_row_for_every_sample(chunk: int) -> None:
    model, x, y = Model(), torch.randn(B, D, dtype=torch.float64), torch.arange(B)
    losses = lambda **more: model.loss(model.body(x), y, reduction="none", **more)  # noqa: E731
    params = {name: p for name, p in model.named_parameters() if "table" not in name}
    check(losses(options=options(chunk)), definition(losses(), params), params)
    alone = lambda **more: torch.stack([model.loss(model.body(x[i]), y[i], **more) for i in range(B)])  # noqa: E731
    want = definition(alone(), params)
    for reduction in ("none", "mean"):
        check(alone(reduction=reduction, options=options(chunk)), want, params)


PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "time first": lambda rows: rows.view(B, T).t().reshape(-1),
    "backwards": lambda rows: rows.flip(0),
    "any order": lambda rows: rows[torch.tensor([3, 11, 0, 7, 1, 2, 10, 8, 4, 6, 5, 9])],
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("chunk", [2, 100])
def test_samples_in_any_place(place: str, chunk: int, tokens: tuple[Tensor, Tensor]) -> None:
    model, (ids, y) = Model(), tokens
    order = PLACES[place](torch.arange(B * T))
    sample = torch.tensor([0, 2, 1, 1, 0, 3, 3, 3, 3, 1, 0, 0])  # ragged

    def losses(**more: Any) -> Tensor:
        rows = model.loss(model.hidden(ids.flatten())[order], y.flatten()[order], reduction="none", **more)
        return torch.zeros(B, dtype=rows.dtype).index_add(0, sample[order], rows)

    check(losses(options=options(chunk)), definition(losses(), model), model)


@pytest.mark.parametrize("chunk", [2, 100])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_head_that_is_tied_to_the_table(chunk: int, checkpointed: bool, tokens: tuple[Tensor, Tensor]) -> None:
    model, (ids, y) = Model(bias=False), tokens
    model.head.weight = model.table.weight

    def losses(**more: Any) -> Tensor:
        if not checkpointed:
            return model.per_row(ids, y, **more)
        found: Tensor = checkpoint(lambda ids: model.per_row(ids, y, **more), ids, use_reentrant=False)
        return found

    check(losses(options=options(chunk)), definition(losses(), model), model)


@pytest.mark.parametrize("part", ["head", "body"])
def test_a_part_is_frozen(part: str, tokens: tuple[Tensor, Tensor]) -> None:
    model = Model()
    getattr(model, part).requires_grad_(False)
    model.table.requires_grad_(False)
    want = definition(model.per_row(*tokens), model)
    check(model.per_row(*tokens, options=options(2)), want, model)


@pytest.mark.filterwarnings("ignore:linear_cross_entropy:UserWarning", "ignore::persample.PerformanceWarning")
@pytest.mark.parametrize("given", [None, options(2)], ids=["no options", "options ignored"])
def test_what_is_not_done_in_chunks(given: Any, tokens: tuple[Tensor, Tensor]) -> None:
    """Smoothed labels and probabilities are ordinary ops; from torch 2.15 on, probabilities are one without a rule."""
    model, (ids, y) = Model(), tokens
    want = definition(_smoothed(model, ids, y), model)
    check(model.per_row(ids, y, label_smoothing=0.1, options=given), want, model)
    target = torch.rand(B * T, V, dtype=torch.float64)
    rows = model.loss(model.hidden(ids).flatten(0, 1), target, reduction="none", options=given)
    found = rows.view(B, T).sum(1)
    check(found, definition(found, model), model)


def _smoothed(model: Model, ids: Tensor, y: Tensor) -> Tensor:
    logits = model.head(model.hidden(ids)).flatten(0, 1)
    return F.cross_entropy(logits, y.flatten(), reduction="none", label_smoothing=0.1).view(B, T).sum(1)


@pytest.mark.parametrize("given", [None, options(2)], ids=["", "chunks"])
@pytest.mark.parametrize("bias", [False, True])
def test_as_a_module(given: Any, bias: bool, tokens: tuple[Tensor, Tensor]) -> None:
    make = nn.LinearCrossEntropyLoss  # type: ignore[attr-defined]
    loss = make(D, V, bias=bias, reduction="none", options=given).double()
    model, (ids, y) = Model(), tokens
    params = dict(loss.named_parameters()) | {"body": model.body.weight}
    found = loss(model.hidden(ids).flatten(0, 1), y.flatten()).view(B, T).sum(1)
    logits = F.linear(model.hidden(ids), loss.linear.weight, loss.linear.bias).flatten(0, 1)
    want = definition(F.cross_entropy(logits, y.flatten(), reduction="none").view(B, T).sum(1), params)
    check(found, want, params)


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
def test_one_loss_for_all_samples(tokens: tuple[Tensor, Tensor]) -> None:
    """Exact where the loss of every sample holds it, and nothing that could be taken apart."""
    model, (ids, y) = Model(), tokens

    def losses(**more: Any) -> Tensor:
        return model.per_row(ids, y) + model.loss(model.hidden(ids).flatten(0, 1), y.flatten(), **more)

    want = definition(losses(), model)
    assert_same(ps.grad(losses(options=options(2)), model), want)


@pytest.mark.parametrize("trained", [False, True], ids=["of data", "of a layer"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_one_loss_for_all_samples_is_an_interaction(reduction: str, trained: bool) -> None:
    """The op that reduces saves no data by which one could tell."""
    model, x, y = Model(), torch.randn(B, T, D, dtype=torch.float64), torch.arange(B * T) % V
    h = (model.body(x) if trained else x).flatten(0, 1)
    together = model.loss(h, y, reduction=reduction, options=options(2)).sum()
    losses = model.body(x).square().sum((1, 2)) + together
    params = {name: p for name, p in model.named_parameters() if "table" not in name}
    with pytest.raises(ps.InteractionError, match="samples interact in"):
        ps.norms(losses, params, independent=True)


def test_beside_a_function_that_has_to_be_asked(tokens: tuple[Tensor, Tensor]) -> None:
    """Real backwards run before the one that counts: they leave the gradients where they are."""

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g

    model, (ids, y) = Model(), tokens

    def losses(**more: Any) -> Tensor:
        h = Same.apply(model.hidden(ids))
        return torch.stack([model.loss(h[i], y[i], **more) for i in range(B)])

    check_once = ps.grad(losses(options=options(2)), model)
    assert_same(check_once, definition(losses(), model))


def test_an_op_that_takes_something_else_is_asked(
    monkeypatch: pytest.MonkeyPatch, tokens: tuple[Tensor, Tensor]
) -> None:
    """Another release may smooth labels in chunks, say: the rule does not know, and the answer is right."""
    monkeypatch.setattr(fused, "arguments", lambda name: (*fused._ARGUMENTS, "label_smoothing"))
    model = Model()
    found = model.per_row(*tokens, options=options(2))
    with pytest.warns(ps.PerformanceWarning, match="no fast rule for custom torch_nn::_linear_cross_entropy"):
        assert_same(ps.grad(found, model, retain_graph=True), definition(found, model))


def test_the_rule_is_taken(tokens: tuple[Tensor, Tensor]) -> None:
    model = Model()
    for chunk, form in [(100, "Outer"), (2, "Deferred")]:
        text = str(ps.explain(model.per_row(*tokens, options=options(chunk)), model))
        (line,) = [line for line in text.splitlines() if line.startswith("head.weight")]
        assert f"rule: {form}" in line
