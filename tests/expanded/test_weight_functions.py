"""Functions of expanded weights alone, and of data, outside any recorded module."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps
from persample.expanded import ExpandedWeight
from tests.expanded.helpers import both_reductions, ids, r, squares
from tests.expanded.weights import Fn, Shape, check
from tests.reference import assert_same, definition

pytestmark = pytest.mark.usefixtures("float64")

Case = tuple[Fn, Callable[[], Tensor], list[Shape]]
rows = lambda: r(5, 4)  # noqa: E731


def normalised(x: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return F.linear(x, g * v / v.norm(dim=1, keepdim=True))


WEIGHTS_ALONE: dict[str, Case] = {
    "t": (lambda x, w: x @ w.t(), rows, [(3, 4)]),
    "T": (lambda x, w: x @ w.T, rows, [(3, 4)]),
    "mT": (lambda x, w: x @ w.mT, rows, [(3, 4)]),
    "H": (lambda x, w: x @ w.H, rows, [(3, 4)]),
    "T-twice": (lambda x, w: x @ w.T.T, rows, [(4, 3)]),
    "view": (lambda x, w: x @ w.view(4, 3), rows, [(12,)]),
    "reshape": (lambda x, w: x * w.reshape(-1), rows, [(2, 2)]),
    "permute": (lambda x, w: F.conv1d(x[:, :, None], w.permute(2, 1, 0)), rows, [(1, 4, 3)]),
    "index": (lambda x, w: x @ w[1], rows, [(2, 4, 3)]),
    "slices": (lambda x, w: x[:, 1:] @ w[1:, ::2], rows, [(4, 3)]),
    "mask": (lambda x, w: x @ w[torch.tensor([True, False] * 4)], rows, [(8, 3)]),
    "list-index": (lambda x, w: x @ w[[3, 0, 0, 1]], rows, [(4, 3)]),
    "loop": (lambda x, w: sum(x * row for row in w), rows, [(3, 4)]),
    "unbind": (lambda x, w: x * w.unbind()[1] + w.unbind()[0], rows, [(2, 4)]),
    "chunk": (lambda x, w: x @ w.chunk(2, 1)[0] + x @ w.chunk(2, 1)[1], rows, [(4, 6)]),
    "float": (lambda x, w: x @ w.double(), rows, [(4, 3)]),
    "to": (lambda x, w: x @ w.to(torch.float64).to(w.device), rows, [(4, 3)]),
    "type_as": (lambda x, w: x @ w.type_as(x), rows, [(4, 3)]),
    "type_as-as-long-as-the-batch": (lambda x, w: F.linear(x, w.type_as(x)), rows, [(5, 4)]),
    "to-as": (lambda x, w: x @ w.to(x), rows, [(4, 3)]),
    "clone": (lambda x, w: x @ w.clone().contiguous(), rows, [(4, 3)]),
    "numbers": (lambda x, w: x @ (2 * w + 1 - w / 3), rows, [(4, 3)]),
    "reversed": (lambda x, w: x * (1 - w) / (2 + (1 / (w**2 + 1))), rows, [(4,)]),
    "two-weights": (lambda x, w, v: x @ (w * v + v), rows, [(4, 3), (4, 3)]),
    "product": (lambda x, w, v: x @ (w @ v), rows, [(4, 2), (2, 3)]),
    "constant": (lambda x, w: x @ (w * torch.arange(3.0)), rows, [(4, 3)]),
    "stack": (lambda x, w, v: x @ torch.stack([w, v]).sum(0), rows, [(4, 3), (4, 3)]),
    "cat": (lambda x, w, v: x @ torch.cat([w, v], 1), rows, [(4, 3), (4, 2)]),
    "cat-constant": (lambda x, w: x @ torch.cat([w, torch.ones(1, 3)]), rows, [(3, 3)]),
    "pad": (lambda x, w: x @ F.pad(w, (1, 0, 1, 0)), rows, [(3, 3)]),
    "softmax": (lambda x, w: x * w.softmax(0), rows, [(4,)]),
    "exp-sum": (lambda x, w: x * w.exp().sum(), rows, [(3,)]),
    "normalised": (normalised, rows, [(3, 4), (3, 1)]),
    "weight-norm": (lambda x, v, g: F.linear(x, torch._weight_norm(v, g, 0)), rows, [(3, 4), (3, 1)]),
    "tril": (lambda x, w: x @ w.tril(), rows, [(4, 4)]),
    "diag": (lambda x, w: x @ torch.diag(w), rows, [(4,)]),
    "bias": (lambda x, w, b: F.linear(x, w, b * 2), rows, [(3, 4), (3,)]),
    "low-rank": (lambda x, w, a, b: F.linear(x, w + b @ a), rows, [(3, 4), (2, 4), (3, 2)]),
    "kernel": (lambda x, w: F.conv2d(x[:, None, None], w.flip(3)), rows, [(2, 1, 1, 3)]),
    "table": (lambda x, w: F.embedding(x, w.t()), lambda: ids(5, 2), [(3, 6)]),
    "used-twice": (lambda x, w: (x @ w).tanh() @ w.t(), rows, [(4, 3)]),
    "computed-once-used-twice": (lambda x, w: (lambda v: (x @ v).tanh() @ v.t())(w * 2), rows, [(4, 3)]),
    "penalty-per-sample": (lambda x, w: squares(x @ w) + w.square().sum(), rows, [(4, 3)]),
}

# Functions without any rule of their own: the graph engine follows the samples.
WITH_DATA: dict[str, Case] = {
    "where-data": (lambda x, w: torch.where(x > 0, x, w), rows, [(4,)]),
    "where-weights": (lambda x, w, v: torch.where(x > 0, w, v), rows, [(4,), (4,)]),
    "maximum": (torch.maximum, rows, [(4,)]),
    "pow": (lambda x, w: x.square() ** w, rows, [(4,)]),
    "lerp": (lambda x, w: torch.lerp(x, 2 * x + 1, w), rows, [(4,)]),
    "addcmul": (lambda x, w: torch.addcmul(w, x, x), rows, [(4,)]),
    "atan2": (torch.atan2, rows, [(4,)]),
    "rsub": (lambda x, w: 1 - w * x, rows, [(4,)]),
    "expand": (lambda x, w: torch.cat([x, w.expand(len(x), 4)], 1), rows, [(4,)]),
    "expand_as": (lambda x, w: x * w.expand_as(x), rows, [(4,)]),
    "expand-token": (lambda x, w: torch.cat([w.expand(len(x), 1, 4), x], 1), lambda: r(5, 3, 4), [(4,)]),
    "repeat": (lambda x, w: torch.stack([x, w.repeat(len(x), 1)], 1), rows, [(4,)]),
    "bmm-expand": (lambda x, w: torch.bmm(x, w.expand(len(x), 4, 2)), lambda: r(5, 3, 4), [(4, 2)]),
    "mv": (torch.mv, rows, [(4,)]),
    "inner": (torch.inner, rows, [(3, 4)]),
    "tensordot": (lambda x, w: torch.tensordot(x, w, 1), rows, [(4, 3)]),
    "multi_dot": (lambda x, w, v: torch.linalg.multi_dot([x, w, v]), rows, [(4, 3), (3, 2)]),
    "left": (lambda x, w: w @ x[:, :, None], rows, [(3, 4)]),
    "outer": (torch.outer, lambda: r(5), [(3,)]),
    "cosine": (lambda x, w: F.cosine_similarity(x, w, dim=1), rows, [(1, 4)]),
    "distance": (F.pairwise_distance, rows, [(4,)]),
    "solve": (lambda x, w: torch.linalg.solve(w @ w.T + torch.eye(4), x[:, :, None]), rows, [(4, 4)]),
    "rows-of-a-weight": (lambda i, w: w[i], lambda: ids(5), [(6, 2)]),
    "more-rows": (lambda i, w: w[i], lambda: ids(5, 3), [(6, 2)]),
    "index_select": (lambda i, w: w.index_select(0, i), lambda: ids(5), [(6, 2)]),
    "gather": (lambda i, w: w.gather(0, i), lambda: ids(5, 3), [(6, 3)]),
    "take": (lambda i, w: w.take(i), lambda: ids(5, 3), [(6,)]),
    "masked": (lambda x, w: (x * w).masked_fill(x > 0, 0), rows, [(4,)]),
    "cdist": (torch.cdist, rows, [(3, 4)]),
    "cdist-T=B": (torch.cdist, lambda: r(5, 5, 4), [(5, 4)]),
    "square-weight": (lambda x, w: x @ w, lambda: r(5, 5), [(5, 5)]),
    "weight-as-long-as-the-batch": (lambda x, w: x + w, lambda: r(5, 5), [(5,)]),
}
ALL = {**WEIGHTS_ALONE, **WITH_DATA}


@both_reductions
@pytest.mark.parametrize("name", ALL)
def test_functions(name: str, reduction: str) -> None:
    fn, data, shapes = ALL[name]
    check(fn, data(), *shapes, reduction=reduction)


@pytest.mark.parametrize("B", [1, 0])
@pytest.mark.parametrize("name", ALL)
def test_functions_of_few_samples(name: str, B: int) -> None:
    fn, data, shapes = ALL[name]
    check(fn, data()[:B], *shapes)


BATCH_SECOND: dict[str, tuple[Fn, list[Shape]]] = {
    "linear": (F.linear, [(3, 4), (3,)]),
    "matmul": (torch.matmul, [(4, 3)]),
    "mul": (torch.mul, [(4,)]),
    "layer_norm": (lambda x, w: F.layer_norm(x, (4,), w), [(4,)]),
    "where": (lambda x, w: torch.where(x > 0, x, w), [(4,)]),
    "einsum": (lambda x, w: torch.einsum("tbi,oi->tbo", x, w), [(3, 4)]),
    "conv_tbc": (lambda x, w, b: torch.conv_tbc(x, w, b, 1), [(2, 4, 3), (3,)]),
}


@pytest.mark.parametrize("shape", [(3, 5, 4), (5, 5, 4), (3, 1, 4), (3, 0, 4)], ids=["T=3", "T=B", "B=1", "B=0"])
@pytest.mark.parametrize("name", BATCH_SECOND)
def test_batch_second(name: str, shape: Shape) -> None:
    fn, shapes = BATCH_SECOND[name]
    check(fn, r(*shape), *shapes, dim=1)


SLOW: dict[str, tuple[Fn, Callable[[int], Tensor], list[Shape], int]] = {
    "table-first": (lambda x, w: torch.cdist(w, x).mT, lambda B: r(3, B, 4), [(2, 4)], 1),
    "table-first-T=B": (lambda x, w: torch.cdist(w, x).mT, lambda B: r(5, B, 4), [(2, 4)], 1),
}


@pytest.mark.parametrize("B", [5, 1, 0])
@both_reductions
@pytest.mark.parametrize("name", SLOW)
def test_functions_without_a_rule(name: str, B: int, reduction: str) -> None:
    """The exact fallback, which says that it is slow."""
    fn, data, shapes, dim = SLOW[name]
    if B > 1:
        with pytest.warns(ps.PerformanceWarning, match="Cdist"):
            check(fn, data(B), *shapes, reduction=reduction, dim=dim)
    else:
        check(fn, data(B), *shapes, reduction=reduction, dim=dim)


class TestPlainWeightAsLongAsTheBatch:
    """Beside an expanded one: a parameter is no data, of any other tensor nobody knows."""

    def setup_method(self) -> None:
        self.x, self.w, self.b = (torch.randn(shape, dtype=torch.float64) for shape in [(3, 3), (3, 2), (2,)])
        self.b.requires_grad_()

    def test_a_parameter(self) -> None:
        w = nn.Parameter(self.w)
        want = definition(torch.addmm(self.b, self.x, w).square().sum(1), [self.b, w])
        torch.addmm(ExpandedWeight(self.b, 3, "sum"), self.x, w).square().sum().backward()
        assert_same([self.b.grad_sample, w.grad[None]], {"0": want["0"], "1": want["1"].sum(0, keepdim=True)})

    def test_another_tensor(self) -> None:
        out = torch.addmm(ExpandedWeight(self.b, 3, "sum"), self.x, self.w.requires_grad_())
        with pytest.raises(ps.UnsupportedError, match=r"addmm returned.*is told from data if it is an nn.Parameter"):
            out.square().sum().backward()
        assert not hasattr(self.b, "grad_sample")

    def test_samples_that_are_a_parameter(self) -> None:
        """Codes that are trained with the model, a row for every sample."""
        x, w = nn.Parameter(self.x), self.w.requires_grad_()
        want = definition(torch.addmm(self.b, x, w).square().sum(1), [w])
        torch.addmm(self.b.detach(), x, ExpandedWeight(w, 3, "sum")).square().sum().backward()
        assert_same([w.grad_sample], want)
