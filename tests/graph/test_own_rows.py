"""A loop over samples, each of which reads its own rows of one batch tensor: exact, and no interaction."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import persample as ps
from tests.reference import assert_same, definition

B, N = 4, 12
OWNER = torch.arange(N) % B
ROWS = [(i == OWNER).nonzero().squeeze(1) for i in range(B)]
MASK = [(i == OWNER).unsqueeze(1) for i in range(B)]
ONE_HOT = [F.one_hot(rows, N).double() for rows in ROWS]
ONES = torch.ones(3, 3, 3, dtype=torch.float64)

WAYS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "slice": lambda h, i: h[3 * i : 3 * i + 3],
    "narrow": lambda h, i: h.narrow(0, 3 * i, 3),
    "index": lambda h, i: h[ROWS[i]],
    "mask": lambda h, i: h[i == OWNER],
    "index_select": lambda h, i: h.index_select(0, ROWS[i]),
    "split": lambda h, i: h.split(3)[i],
    "tensor_split": lambda h, i: h.tensor_split(B)[i],
    "unbind": lambda h, i: h.reshape(B, 3, 3).unbind()[i],
    "unfold": lambda h, i: h.unfold(0, 3, 3)[i],
    "diagonal": lambda h, i: h.reshape(B, 3, 3).diagonal(0, 1, 2)[i],
    "diagonal of own": lambda h, i: h[3 * i : 3 * i + 3].diagonal(),
    "roll": lambda h, i: h.roll(-3 * i, 0)[:3],
    "flip": lambda h, i: h.flip(0)[3 * i : 3 * i + 3],
    "largest": lambda h, i: h[ROWS[i]].max(0).values,
    "embedding": lambda h, i: F.embedding(ROWS[i], h),
    "bag": lambda h, i: F.embedding_bag(ROWS[i].unsqueeze(0), h, mode="sum"),
    "gather": lambda h, i: h.gather(0, ROWS[i].unsqueeze(1).expand(3, 3)),
    "take": lambda h, i: h.take(ROWS[i] * 3),
    "take_along_dim": lambda h, i: h.take_along_dim(ROWS[i].unsqueeze(1), 0),
    "masked_select": lambda h, i: h.masked_select(MASK[i]),
    "where": lambda h, i: torch.where(MASK[i], h, 0.0),
    "product with mask": lambda h, i: h * MASK[i],
    "masked_fill": lambda h, i: h.masked_fill(~MASK[i], 0.0),
    "index_fill": lambda h, i: h.index_fill(0, (i != OWNER).nonzero().squeeze(1), 0.0),
    "one-hot product": lambda h, i: ONE_HOT[i] @ h,
    "sparse product": lambda h, i: torch.sparse.mm(ONE_HOT[i].to_sparse(), h),
    "weighted sum": lambda h, i: torch.einsum("n,nd->d", MASK[i].squeeze(1).double(), h),
    "negative pad": lambda h, i: F.pad(h, (0, 0, -3 * i, 3 * i - 9)),
    "as_strided": lambda h, i: h.as_strided((3, 3), (3, 1), 9 * i),
    "sum by index": lambda h, i: h.new_zeros(B, 3).index_add(0, OWNER, h)[i],
    "convolution": lambda h, i: F.conv1d(h.t().unsqueeze(0), ONES, stride=3)[0, :, i],
    "pooling": lambda h, i: F.max_pool1d(h.t().unsqueeze(0), 3)[0, :, i],
}


@pytest.mark.parametrize("hidden", [False, True], ids=["linear", "hidden"])
@pytest.mark.parametrize("name", WAYS)
def test_losses_of_own_rows_do_not_interact(name: str, hidden: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (N, 3, 1))
    params = [w.requires_grad_(), b.requires_grad_()]
    h = (x @ w).tanh() * b if hidden else x @ w + b
    losses = torch.stack([WAYS[name](h, i).square().sum() for i in range(B)])
    want = definition(losses, params)
    assert_same(ps.grad(losses, params, independent=True), want)
