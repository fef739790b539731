"""Sparse data in every layout, and nested tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps
from tests.reference import assert_same, definition, vectors

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),  # PyTorch has no backward of its own for these
}
PRODUCTS: dict[str, Callable[[Tensor, nn.Linear], Tensor]] = {
    "@": lambda x, layer: x @ layer.weight.t(),
    "linear": lambda x, layer: F.linear(x, layer.weight),
    "linear, bias": lambda x, layer: F.linear(x, layer.weight, layer.bias),
    "addmm": lambda x, layer: torch.addmm(layer.bias.expand(4, 3), x, layer.weight.t(), alpha=2, beta=3),
    "mv": lambda x, layer: (x @ layer.weight[0])[:, None],
    "sparse.mm": lambda x, layer: torch.sparse.mm(x, layer.weight.t()),
    "sparse.addmm": lambda x, layer: torch.sparse.addmm(
        layer.bias.expand(4, 3), x, layer.weight.t(), alpha=2.0, beta=3.0
    ),
}


def data() -> Tensor:
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x * (torch.arange(24).reshape(4, 6) % 3 == 0)


def losses(product: Callable[[Tensor, nn.Linear], Tensor], x: Tensor, model: nn.Sequential) -> Tensor:
    first, second = model
    h = product(x, first).tanh()
    return (h @ second.weight[: h.shape[1]]).square().sum(1)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_sparse_data_are_as_good_as_dense_ones(product: str, layout: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(5, 3)).double()
    dense = PRODUCTS[{"sparse.mm": "@", "sparse.addmm": "addmm"}.get(product, product)]
    want = definition(losses(dense, data(), model), model)
    found = losses(PRODUCTS[product], LAYOUTS[layout](data()), model)
    assert_same(ps.grad(found, model, retain_graph=True), want)
    assert_same([ps.norms(found, model, independent=True)], {"0": vectors(want).norm(dim=1)})


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore::persample.PerformanceWarning")
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_sparse_matrix_that_mixes_samples(layout: str) -> None:
    """A layer of a graph network: exact without a promise, refused with one."""
    w = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    edges = LAYOUTS[layout](torch.tensor([[1.0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0, 1]]).double())
    found = (edges @ (data() @ w)).square().sum(1)
    assert_same(ps.grad(found, [w], retain_graph=True), definition(found, [w]))
    with pytest.raises(ps.InteractionError, match="samples interact in Mm"):
        ps.grad(found, [w], independent=True)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_sparse_parameter_is_refused_by_name(layout: str) -> None:
    w = LAYOUTS[layout](torch.eye(6, dtype=torch.float64)).requires_grad_()
    found = (w @ data().t()).square().sum(0)
    with pytest.raises(ps.UnsupportedError, match=r"parameter 'w' of shape \(6, 6\) is sparse.*to_dense"):
        ps.grad(found, {"w": w})


def nested(layout: torch.layout) -> Tensor:
    rows = [torch.full((n, 6), float(n), dtype=torch.float64) for n in (2, 3, 4)]
    return torch.nested.nested_tensor(rows, layout=layout)


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("independent", [False, True])
def test_nested_tensors_are_refused_with_the_remedy(layout: torch.layout, independent: bool) -> None:
    model = nn.Linear(6, 3).double()
    out = model(nested(layout))
    sums = [
        torch.nested.to_padded_tensor(out, 0.0).square().sum((1, 2)),
        torch.stack([rows.square().sum() for rows in out.unbind()]),
    ]
    for found in sums:
        with pytest.raises(ps.UnsupportedError, match=r"result of Linear is a nested tensor.*to_padded_tensor"):
            ps.grad(found, model, independent=independent)


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_what_the_refusal_of_nested_tensors_tells_one_to_do(layout: torch.layout) -> None:
    model, x = nn.Linear(6, 3).double(), nested(layout)
    want = definition(torch.stack([model(rows).square().sum() for rows in x.unbind()]), model)
    sample = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2])
    flat = torch.cat(x.unbind()) if layout == torch.strided else x.values()
    found = torch.zeros(3, dtype=torch.float64).index_add(0, sample, model(flat).square().sum(1))
    assert_same(ps.grad(found, model, independent=True), want)
    padded = torch.nested.to_padded_tensor(x, 0.0)
    mask = (padded != 0).any(2)
    found = (model(padded).square().sum(2) * mask).sum(1)
    assert_same(ps.grad(found, model, independent=True), want)
