"""Curvatures against the matrices that they stand for, written out in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from persample import influence as pi
from persample.influence.curvature import DAMPING, load

KINDS: dict[str, Callable[[], pi.Curvature]] = {
    "shampoo": pi.Shampoo,
    "diagonal": lambda: pi.Shampoo(max_side=0),
    "one side": lambda: pi.Shampoo(max_side=4),
    "kfac": pi.KFAC,
    "kfac, one side": lambda: pi.KFAC(max_side=4),
    "covariance": pi.Covariance,
    "small covariances": lambda: pi.Covariance(max_size=6),
}


def gradients(B: int = 40, seed: int = 0) -> dict[str, Tensor]:
    """Blocks whose rows and columns are correlated, one of them a vector, one a number."""
    g = torch.Generator().manual_seed(seed)

    def block(n: int, m: int) -> Tensor:
        mixed = torch.randn(n, n, generator=g).double() @ torch.randn(B, n, m, generator=g).double()
        return mixed @ torch.randn(m, m, generator=g).double()

    return {"a.weight": block(4, 6), "a.bias": block(5, 1), "scale": block(1, 1)}


def run(curvature: pi.Curvature, blocks: dict[str, Tensor], size: int = 7) -> pi.Curvature:
    """All passes, in batches of ``size``."""
    curvature.start({name: (b.shape[1], b.shape[2]) for name, b in blocks.items()})
    for _ in range(curvature.passes):
        for start in range(0, len(next(iter(blocks.values()))), size):
            curvature.add({name: b[start : start + size] for name, b in blocks.items()})
        curvature.end_pass()
    return curvature


def eigenbasis(moment: Tensor, turned: bool) -> Tensor:
    return torch.linalg.eigh(moment)[1].contiguous() if turned else torch.eye(len(moment)).double()


def matrix(kind: str, g: Tensor) -> Tensor:
    """(l·r, l·r): what the curvature of a block is by definition."""
    B, n, m = g.shape
    left, right = torch.einsum("bij,bkj->ik", g, g) / B, torch.einsum("bij,bik->jk", g, g) / B
    if kind == "covariance" or (kind == "small covariances" and n * m <= 6):
        return g.flatten(1).t() @ g.flatten(1) / B
    limit = {"diagonal": 0, "one side": 4, "kfac, one side": 4}.get(kind, 99)
    if kind.startswith("kfac"):
        sides = [s if len(s) <= limit else torch.diag(s.diagonal()) for s in (left, right)]
        return torch.kron(sides[0], sides[1]) / left.trace()
    basis = torch.kron(eigenbasis(left, n <= limit), eigenbasis(right, m <= limit))
    return basis @ torch.diag((g.flatten(1) @ basis).square().mean(0)) @ basis.t()


@pytest.mark.parametrize("damping", [None, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_inverse_of_what_it_stands_for(kind: str, damping: float | None) -> None:
    blocks, queries = gradients(), gradients(3, seed=1)
    fitted = run(KINDS[kind](), blocks).fitted(damping)
    divided = fitted.apply(queries)
    for name, g in blocks.items():
        whole = matrix(kind, g)
        added = DAMPING * whole.trace() / len(whole) if damping is None else damping
        want = torch.linalg.solve(whole + added * torch.eye(len(whole)).double(), queries[name].flatten(1).t()).t()
        torch.testing.assert_close(divided[name].flatten(1), want, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_processes_and_storage_do_not_matter(kind: str) -> None:
    blocks, queries = gradients(), gradients(3, seed=1)
    want = run(KINDS[kind](), blocks).fitted().apply(queries)
    ranks = [KINDS[kind](), KINDS[kind]()]
    for rank in ranks:
        rank.start({name: (b.shape[1], b.shape[2]) for name, b in blocks.items()})
    for _ in range(ranks[0].passes):
        for r, rank in enumerate(ranks):
            rank.add({name: b[r::2] for name, b in blocks.items()})
        sums = [rank.sums() for rank in ranks]
        for name in sums[0]:
            total = sums[0][name] + sums[1][name]
            for each in sums:
                each[name].copy_(total)
        for rank in ranks:
            rank.end_pass()
    fitted = ranks[1].fitted()
    again = load({name: t.clone() for name, t in fitted.tensors().items()}, fitted.settings())
    for found in (fitted, again):
        for name, block in found.apply(queries).items():
            torch.testing.assert_close(block, want[name])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_never_reached_is_divided_by_nothing(kind: str) -> None:
    """A block without any gradient, one sample, float16 queries."""
    blocks = {"a": torch.zeros(1, 3, 3), "b": torch.ones(1, 2, 2)}
    divided = run(KINDS[kind](), blocks).fitted().apply({"a": torch.ones(1, 3, 3), "b": torch.ones(1, 2, 2).half()})
    assert bool((divided["a"] == 0).all())
    assert bool(torch.isfinite(divided["b"]).all())


def test_bad_input() -> None:
    blocks = gradients()
    for damping, match in ((-1.0, "not negative"), (float("nan"), "finite")):
        with pytest.raises(ValueError, match=match):
            run(pi.KFAC(), blocks).fitted(damping)
    with pytest.raises(TypeError, match="damping must be a number"):
        run(pi.KFAC(), blocks).fitted("0.1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'given'"):
        pi.Shampoo(labels="true")  # type: ignore[arg-type]
    curvature = pi.Shampoo()
    curvature.start({"a": (2, 2)})
    with pytest.raises(RuntimeError, match="2 passes"):
        curvature.fitted()
    with pytest.raises(ValueError, match="empty loader"):
        curvature.end_pass()
    with pytest.raises(ValueError, match="unknown block 'b'"):
        curvature.add({"b": torch.ones(1, 2, 2)})
    with pytest.raises(ValueError, match="same number of samples"):
        curvature.add({"a": torch.ones(1, 2, 2), "b": torch.ones(2, 2, 2)})
    curvature.add({"a": torch.full((1, 2, 2), torch.nan)})
    with pytest.raises(ValueError, match="'a' are infinite or NaN"):
        curvature.end_pass()
    with pytest.raises(ValueError, match="not fitted for"):
        run(pi.KFAC(), blocks).fitted().apply({"other": torch.ones(1, 2, 2)})
    with pytest.raises(ValueError, match="unknown kind"):
        load({}, {"kind": "other"})


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_divides_as_the_optimizer_does(kind: type[torch.optim.Optimizer]) -> None:
    """With β1 = 0, a step is the rate times gradient times scale, and the scale is that of `Adam`."""
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1, betas=(0.0, 0.9), weight_decay=0.0)  # type: ignore[call-arg]
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        before = model.weight.detach().clone()
        optimizer.step()
    fitted = pi.Adam(optimizer, model).fitted()
    assert model.weight.grad is not None
    torch.testing.assert_close(before - 0.1 * model.weight.grad * fitted.scales["weight"], model.weight.detach())
    again = load(fitted.tensors(), fitted.settings())
    torch.testing.assert_close(again.scales["bias"], fitted.scales["bias"])
    assert pi.Adam(optimizer, model).passes == 0


def test_adam_without_moments() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="exp_avg_sq"):
        pi.Adam(torch.optim.Adam(model.parameters()), model).fitted()


def test_identity_changes_nothing() -> None:
    fitted = run(pi.Identity(), gradients()).fitted()
    queries = gradients(2)
    assert all(torch.equal(v, queries[n]) for n, v in load({}, fitted.settings()).apply(queries).items())
