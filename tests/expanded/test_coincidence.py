"""Keys for all samples that are as many as samples: tables of positions pass, the batch's own data never do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import persample as ps
from tests.expanded.helpers import Run, both_reductions, check, r, squares, total

pytestmark = pytest.mark.usefixtures("float64")
B, C = 4, 3
Keys = Callable[[Run, Tensor, Tensor], Tensor]  # of the module, its input, and an activation


def model(keys: Keys, then: Callable[[Tensor], Tensor] = lambda y: y) -> Run:
    """Scores of queries by keys, which are a linear function of something with rows."""

    def body(m: Run, x: Tensor) -> Tensor:
        h = m.q(x)
        return then(h @ m.k(keys(m, x, h)).t())

    parts = {"q": nn.Linear(C, C), "k": nn.Linear(C, C), "e": nn.Embedding(9, C)}
    made = Run(body, **parts)
    made.register_buffer("table", r(B, C))
    made.register_buffer("order", torch.tensor([2, 0, 3, 1]))
    return made


def sines(m: Run, x: Tensor, h: Tensor) -> Tensor:
    places = torch.arange(2 * len(x), dtype=x.dtype)[:, None] / torch.arange(1, C + 1)
    return torch.cat([places.sin()[:B], places.cos()[B:]])


def filled(m: Run, x: Tensor, h: Tensor) -> Tensor:
    """Made in place, in parts."""
    made = torch.zeros(B, C)
    first, second = made.chunk(2)
    first.copy_(m.table[:2])
    second[:] = torch.linspace(0, 1, C)
    return made


TABLES: dict[str, Keys] = {
    "sines": sines,
    "buffer": lambda m, x, h: m.table,
    "buffer-turned": lambda m, x, h: m.table.flip(0).tanh(),
    "filled": filled,
    "noise": lambda m, x, h: torch.randn(B, C, generator=torch.Generator().manual_seed(0)),
    "rows-of-a-weight": lambda m, x, h: m.e(m.order),
    "rows-of-a-weight-in-a-buffers-order": lambda m, x, h: m.e.weight[m.order.flip(0)],
}


@both_reductions
@pytest.mark.parametrize("name", TABLES)
def test_tables_pass(name: str, reduction: str) -> None:
    check(model(TABLES[name]), r(B, C), loss_reduction=reduction)


def written(target: Callable[[Run], Tensor], part: Callable[[Tensor], Tensor], numbers: Keys) -> Keys:
    """Numbers that are written into a part of a table."""

    def keys(m: Run, x: Tensor, h: Tensor) -> Tensor:
        table = target(m)
        place = part(table)
        place.copy_(numbers(m, x, h).detach().reshape(-1)[: place.numel()].reshape(place.shape))
        return table

    return keys


def given_out(m: Run, x: Tensor, h: Tensor) -> Tensor:
    table = torch.zeros(B, C)
    torch.mul(h.detach(), 2, out=table)
    return table


NUMBERS: dict[str, Keys] = {"data": lambda m, x, h: x, "activations": lambda m, x, h: h}
TARGETS: dict[str, Callable[[Run], Tensor]] = {"buffer": lambda m: m.table, "zeros": lambda m: torch.zeros(B, C)}
PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda t: t,
    "view": lambda t: t.view(-1),
    "rows": lambda t: t[1:],
    "chunk": lambda t: t.chunk(2)[1],
    "unbound": lambda t: t.unbind()[2],
    "split": lambda t: torch.split(t, 1)[0],
}
WRITTEN: dict[str, Keys] = {
    f"{numbers}-into-{part}-of-{target}": written(TARGETS[target], PARTS[part], NUMBERS[numbers])
    for numbers in NUMBERS
    for part in PARTS
    for target in TARGETS
}
DATA: dict[str, Keys] = {
    "inputs": lambda m, x, h: x,
    "functions-of-inputs": lambda m, x, h: x.tanh() + m.table,
    "activations": lambda m, x, h: h.detach() * 2,
    "both": lambda m, x, h: torch.cat([x[:2], m.table[:2]]),
    "by-numpy": lambda m, x, h: torch.from_numpy(x.numpy() * 2),
    "by-a-list": lambda m, x, h: torch.tensor(x.tolist()),
    "activations-by-a-list": lambda m, x, h: torch.tensor(h.tolist()),
    "by-items": lambda m, x, h: torch.tensor([[v.item() for v in row] for row in h]),
    "out": given_out,
    "rows-in-the-order-of-data": lambda m, x, h: m.e(x.argsort(0)[:, 0]),
}


@pytest.mark.parametrize("name", [*DATA, *WRITTEN])
def test_the_batchs_own_never_pass(name: str) -> None:
    module = model({**DATA, **WRITTEN}[name]).double()
    loss = total(squares(ps.call_for_per_sample_grads(module)(r(B, C))), "sum")
    with pytest.raises(ps.InteractionError, match="samples interact in"):
        loss.backward()
    assert all(getattr(p, "grad_sample", None) is None for p in module.parameters())


ELSEWHERE: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda y: y - y.mean(0),
    "sort": lambda y: y.sort(0).values,
    "roll": lambda y: y * y.roll(1, 0),
}


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
@pytest.mark.parametrize("name", ["sines", "buffer", "rows-of-a-weight"])
def test_a_table_is_no_excuse_for_what_happens_elsewhere(name: str, elsewhere: str) -> None:
    module = model(TABLES[name], ELSEWHERE[elsewhere]).double()
    loss = total(squares(ps.call_for_per_sample_grads(module)(r(B, C))), "sum")
    with pytest.raises(ps.InteractionError, match="samples interact in"):
        loss.backward()
