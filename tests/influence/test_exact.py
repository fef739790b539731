"""Conjugate gradients and the dual, against matrices written out in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import persample as ps
from persample import influence as pi
from persample.influence.sampling import generator_of

Batch = tuple[Tensor, Tensor]


def model_and_data() -> tuple[nn.Module, list[Batch], Batch]:
    """A small net with a parameter that nothing uses, training batches of different sizes, and queries."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model.register_parameter("unused", nn.Parameter(torch.ones(2).double()))

    def batch(n: int) -> Batch:
        return torch.randn(n, 4).double(), torch.randint(3, (n,))

    return model, [batch(7), batch(7), batch(4)], batch(3)


def losses_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def logits_fn(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch[0])  # type: ignore[no-any-return]


SAMPLED = pi.categorical(logits_fn)
NEWTON = pi.GaussNewton(logits_fn, lambda z, batch: F.cross_entropy(z, batch[1], reduction="none"))


def flat(gradients: Any) -> Tensor:
    return torch.cat([g.flatten(1) for g in gradients.values()], 1)


def whole(batches: list[Batch]) -> Batch:
    return torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])


def fisher(model: nn.Module, data: list[Batch], draws: int) -> Tensor:
    rows = []
    for number, batch in enumerate(data):
        for draw in range(max(draws, 1)):
            losses = SAMPLED(model, batch, generator_of(0, number, draw)) if draws else losses_fn(model, batch)
            rows.append(flat(ps.grad(losses, model)))
    g = torch.cat(rows)
    return g.t() @ g / len(g)


def newton(model: nn.Module, data: list[Batch]) -> Tensor:
    x, _ = whole(data)
    jacobian = torch.cat([j.flatten(2) for j in ps.jacobian(model(x), model).values()], 2)
    p = model(x).detach().softmax(1)
    bend = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return torch.einsum("nci,ncd,ndj->ij", jacobian, bend, jacobian) / len(x)


def hessian(model: nn.Module, data: list[Batch]) -> Tensor:
    params = list(model.parameters())
    first = torch.autograd.grad(losses_fn(model, whole(data)).mean(), params, create_graph=True, allow_unused=True)
    flat_first = torch.cat([(0 * p if g is None else g).flatten() for p, g in zip(params, first, strict=True)])
    rows = [torch.autograd.grad(e, params, retain_graph=True, allow_unused=True) for e in flat_first]
    return torch.stack(
        [torch.cat([(0 * p if g is None else g).flatten() for p, g in zip(params, r, strict=True)]) for r in rows]
    ).detach()


def expected(model: nn.Module, data: list[Batch], queries: Batch, curvature: Tensor, damping: float) -> Tensor:
    a, b = (flat(ps.grad(losses_fn(model, each), model)) for each in (queries, whole(data)))
    return a @ torch.linalg.solve(curvature + damping * torch.eye(len(curvature)).double(), b.t())


@pytest.mark.parametrize("preconditioner", [None, pi.KFAC(), pi.Covariance(labels="sampled")])
@pytest.mark.parametrize("kind", ["newton", "fisher", "given", "hessian"])
def test_solved_to_the_end_it_is_the_inverse(kind: str, preconditioner: Any) -> None:
    model, data, queries = model_and_data()
    products, matrix, damping = {
        "newton": (NEWTON, newton(model, data), 1e-2),
        "fisher": (pi.Fisher(SAMPLED, draws=2), fisher(model, data, 2), 1e-2),
        "given": (pi.Fisher(), fisher(model, data, 0), 1e-2),
        "hessian": (pi.Hessian(), hessian(model, data), 1.0),
    }[kind]
    scores = pi.exact(
        model,
        losses_fn,
        data,
        queries,
        product=products,
        sample_losses_fn=SAMPLED,
        preconditioner=preconditioner,
        damping=damping,
        products=200,
        tolerance=1e-11,
    )
    assert scores.shape == (3, 18)
    torch.testing.assert_close(scores, expected(model, data, queries, matrix, damping), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("draws", [0, 1, 3])
def test_the_dual_is_the_inverse(draws: int) -> None:
    model, data, queries = model_and_data()
    sampled = {"sample_losses_fn": SAMPLED, "draws": draws} if draws else {}
    scores = pi.dual(model, losses_fn, data, queries, damping=1e-2, **sampled)  # type: ignore[arg-type]
    want = expected(model, data, queries, fisher(model, data, draws), 1e-2)
    torch.testing.assert_close(scores, want, rtol=1e-7, atol=1e-8)


def test_the_damping_that_is_chosen() -> None:
    """The mean eigenvalue of the Fisher information, which is its trace over the number of parameters."""
    model, data, queries = model_and_data()
    matrix = fisher(model, data, 0)
    want = float(matrix.trace()) / len(matrix)
    solution = pi.solve(model, losses_fn, data, queries, products=100, tolerance=1e-11)
    assert solution.damping == pytest.approx(want)
    assert float(solution.residuals.max()) <= 1e-11
    torch.testing.assert_close(
        pi.dual(model, losses_fn, data, queries),
        pi.exact(model, losses_fn, data, queries, products=100, tolerance=1e-11),
    )


def test_a_fitted_curvature_is_that_of_the_gradients() -> None:
    """The way by factors, against the same class with gradients written out."""
    model, data, _ = model_and_data()
    gradients = {n: g.reshape(len(g), g.shape[1], -1) for n, g in ps.grad(losses_fn(model, whole(data)), model).items()}
    for kind in (pi.Shampoo, pi.KFAC, pi.Covariance):
        fitted, by_hand = pi.fit(kind(), model, losses_fn, data), kind()
        by_hand.start({n: (g.shape[1], g.shape[2]) for n, g in gradients.items()})
        for _ in range(by_hand.passes):
            by_hand.add(gradients)
            by_hand.end_pass()
        want = by_hand.fitted().apply(gradients)
        for name, found in fitted.apply(gradients).items():
            torch.testing.assert_close(found, want[name], rtol=1e-6, atol=1e-9)


def test_sampled_labels_give_gauss_newton_on_average() -> None:
    """Also for the mean over several predictions, and for squared errors."""
    torch.manual_seed(0)
    model, x = nn.Linear(2, 3).double(), torch.randn(1, 4, 2).double()
    jacobian = torch.cat([j.flatten(2) for j in ps.jacobian(model(x).flatten(1), model).values()], 2)[0]
    p = model(x).detach()[0].softmax(1)
    bend = torch.block_diag(*(torch.diag_embed(p) - p[:, :, None] * p[:, None, :])) / 4
    squares = torch.eye(12).double() / 12  # the mean over all outputs
    for sample, inner in (
        (pi.categorical(lambda m, b: m(b), "mean"), bend),
        (pi.gaussian(lambda m, b: m(b), "mean"), squares),
    ):
        many = x.expand(20000, 4, 2)
        g = flat(ps.grad(sample(model, many, torch.Generator().manual_seed(1)), model))
        want = jacobian.t() @ inner @ jacobian
        assert float((g.t() @ g / len(g) - want).norm() / want.norm()) < 0.05


def test_negative_curvature_is_told() -> None:
    model, data, queries = model_and_data()
    with torch.no_grad():
        model[2].weight.mul_(20)  # type: ignore[operator,union-attr,index]
    with pytest.warns(UserWarning, match="curvature is negative"):
        pi.exact(model, losses_fn, data, queries, product=pi.Hessian(), damping=1e-6, products=60)


def test_bad_input() -> None:
    model, data, queries = model_and_data()
    empty = queries[0][:0], queries[1][:0]
    with pytest.raises(ValueError, match="no queries"):
        pi.exact(model, losses_fn, data, empty)
    with pytest.raises(ValueError, match="loader is empty"):
        pi.exact(model, losses_fn, [], queries)
    with pytest.raises(ValueError, match="no samples"):
        pi.exact(model, losses_fn, [empty], queries)
    with pytest.raises(TypeError, match="only once"):
        pi.exact(model, losses_fn, iter(data), queries)
    with pytest.raises(ValueError, match="not negative"):
        pi.exact(model, losses_fn, data, queries, damping=-1.0)
    with pytest.raises(ValueError, match=r"queries \[1\] are infinite or NaN"):
        pi.exact(model, losses_fn, data, (queries[0].index_fill(0, torch.tensor([1]), torch.nan), queries[1]))
    with pytest.raises(ValueError, match="needs sample_losses_fn"):
        pi.fit(pi.Shampoo(labels="sampled"), model, losses_fn, data)
    with pytest.raises(ValueError, match="positive damping"):
        pi.dual(model, losses_fn, data, queries, damping=0.0)
    with pytest.raises(ValueError, match="requires gradients"):
        pi.exact(model.requires_grad_(False), losses_fn, data, queries)
    with pytest.raises(ValueError, match="draws"):
        pi.Fisher(draws=0)
    with pytest.raises(ValueError, match="'sum' or 'mean'"):
        pi.categorical(logits_fn, over="max")  # type: ignore[arg-type]
    shuffled = DataLoader(TensorDataset(*data[0]), 2, shuffle=True)
    for ask in (pi.exact, pi.dual):
        with pytest.raises(ValueError, match=r"the loader shuffles \(RandomSampler\).*shuffle=False"):
            ask(model.requires_grad_(True), losses_fn, shuffled, queries)
    for wrong in ({"product": pi.GaussNewton}, {"preconditioner": [pi.KFAC()]}):
        with pytest.raises(TypeError, match=r"must be one such as pi\..*, not (the class GaussNewton itself|a list)"):
            pi.exact(model, losses_fn, data, queries, **wrong)
    with pytest.raises(TypeError, match=r"curvature must be one such as pi.Shampoo\(\), not a str"):
        pi.fit("kfac", model, losses_fn, data)  # type: ignore[arg-type]
    turned = nn.Linear(2, 2)
    turned.register_parameter("phase", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    with pytest.raises(TypeError, match="complex"):
        pi.fit(pi.KFAC(), turned, losses_fn, data)


def test_a_model_in_training_mode_is_evaluated_and_left_as_it_was() -> None:
    """Dropout would make every pass another curvature."""
    model, data, queries = model_and_data()
    model = nn.Sequential(*model, nn.Dropout(0.5))
    for ask in (partial(pi.exact, product=NEWTON), partial(pi.exact, product=pi.Hessian()), pi.dual):
        want, found = (ask(model.train(mode), losses_fn, data, queries, damping=0.5) for mode in (False, True))
        assert torch.equal(found, want)
        assert all(module.training for module in model)


class Attention(nn.Module):
    """Fused attention, whose derivative has no derivative of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v).squeeze(1).mean(1)


@pytest.mark.parametrize("kind", ["newton", "hessian"])
def test_attention_is_differentiated_twice(kind: str) -> None:
    torch.manual_seed(0)
    model, data = Attention(), [(torch.randn(5, 3, 4), torch.randint(4, (5,))) for _ in range(2)]
    losses = lambda z, b: F.cross_entropy(z, b[1], reduction="none")  # noqa: E731
    outputs = lambda m, b: m(b[0])  # noqa: E731
    product = pi.GaussNewton(outputs, losses) if kind == "newton" else pi.Hessian()
    found = pi.exact(model, lambda m, b: losses(m(b[0]), b), data, data[0], product=product, damping=1.0)
    assert found.shape == (5, 10)
    assert bool(found.isfinite().all())
