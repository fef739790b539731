"""Programs that look alike: same node types, edges and shapes, but other views, dims, indices or data.

What was learnt about one must not be taken for another, so they are run in turn, in one process, in changing order.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Hashable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import persample as ps
from persample.graph.execute.plan import plan
from persample.graph.read.roots import Roots
from tests.graph.claims import refuted_cotangents
from tests.reference import assert_same, definition

N = 4  # samples, positions and features alike: sizes say nothing
Step = Callable[[Tensor], Tensor]
FAMILIES: dict[str, Mapping[str, Step]] = {}


def family(fn: Callable[[], Mapping[str, Step]]) -> Callable[[], Mapping[str, Step]]:
    """Register steps (N, N, N) -> (N, N, N) that make the same graph."""
    torch.manual_seed(0)
    FAMILIES[fn.__name__] = fn()
    return fn


def order(*rows: int) -> Tensor:
    """Row i of the result is row rows[i]."""
    return torch.tensor(rows)


ORDERS = {
    "same": order(0, 1, 2, 3),
    "swapped": order(1, 0, 2, 3),
    "turned": order(1, 2, 3, 0),
    "one": order(2, 2, 2, 2),
}
MIXING = torch.randn(N, N, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
MATRICES = {name: F.one_hot(rows, N).double() for name, rows in ORDERS.items()} | {
    "mixing": MIXING,
    "pairs": torch.block_diag(*[torch.ones(2, 2, dtype=torch.float64)] * 2),
    "nothing": torch.zeros(N, N, dtype=torch.float64),
    "half": torch.diag(torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)),
}


@family
def matrix_from_the_left() -> Mapping[str, Step]:
    return {name: lambda h, A=A: torch.einsum("ij,jkl->ikl", A, h) for name, A in MATRICES.items()}


@family
def matrix_on_flat_rows() -> Mapping[str, Step]:
    return {name: lambda h, A=A: (A @ h.reshape(N, N * N)).reshape(N, N, N) for name, A in MATRICES.items()}


@family
def matrix_from_the_right() -> Mapping[str, Step]:
    return {name: lambda h, A=A: h.movedim(0, -1) @ A for name, A in MATRICES.items()}


@family
def mask_of_a_square() -> Mapping[str, Step]:
    """One element of every row with a one-hot mask, sums otherwise."""
    return {name: lambda h, A=A: (h * A.unsqueeze(2)).sum(0) + h for name, A in MATRICES.items()}


@family
def permuted() -> Mapping[str, Step]:
    orders = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    return {str(dims): lambda h, dims=dims: h.permute(dims) for dims in orders}


@family
def transposed() -> Mapping[str, Step]:
    pairs = [(0, 1), (0, 2), (1, 2), (1, 1)]
    return {str(pair): lambda h, pair=pair: h.transpose(*pair) for pair in pairs}


@family
def reduced() -> Mapping[str, Step]:
    return {str(d): lambda h, d=d: h + h.sum(d).unsqueeze(0) for d in range(3)}


@family
def normalised() -> Mapping[str, Step]:
    return {str(d): lambda h, d=d: h.softmax(d) for d in range(3)}


@family
def accumulated() -> Mapping[str, Step]:
    return {str(d): lambda h, d=d: h.cumsum(d) for d in range(3)}


@family
def sorted_along() -> Mapping[str, Step]:
    return {str(d): lambda h, d=d: h.sort(d).values for d in range(3)}


@family
def unbound() -> Mapping[str, Step]:
    pairs = [(d, e) for d in range(3) for e in range(3)]
    return {str(pair): lambda h, pair=pair: torch.stack(h.unbind(pair[0]), pair[1]) for pair in pairs}


@family
def flipped() -> Mapping[str, Step]:
    return {str(d): lambda h, d=d: h.flip(d) for d in range(3)}


@family
def rolled() -> Mapping[str, Step]:
    return {f"{d} by {by}": lambda h, d=d, by=by: h.roll(by, d) for d in range(3) for by in (0, 1, 2)}


@family
def expanded() -> Mapping[str, Step]:
    return {str(d): lambda h, d=d: h.select(d, 1).unsqueeze(0).expand(N, N, N) * h for d in range(3)}


@family
def selected_rows() -> Mapping[str, Step]:
    return {f"{name} {d}": lambda h, i=i, d=d: h.index_select(d, i) for name, i in ORDERS.items() for d in range(3)}


@family
def indexed() -> Mapping[str, Step]:
    return {name: lambda h, i=i: h[i] for name, i in ORDERS.items()}


@family
def indexed_twice() -> Mapping[str, Step]:
    """Rows from one list, columns from another."""
    pairs = {(a, b): (ORDERS[a].unsqueeze(1), ORDERS[b]) for a in ORDERS for b in ORDERS}
    return {" ".join(names): lambda h, key=key: h[key] for names, key in pairs.items()}


@family
def gathered() -> Mapping[str, Step]:
    index = {name: i.reshape(N, 1, 1).expand(N, N, N) for name, i in ORDERS.items()}
    index["any"] = torch.randint(N, (N, N, N), generator=torch.Generator().manual_seed(2))
    return {f"{name} {d}": lambda h, i=i, d=d: h.gather(d, i) for name, i in index.items() for d in range(3)}


@family
def added_by_index() -> Mapping[str, Step]:
    return {name: lambda h, i=i: torch.zeros_like(h).index_add(0, i, h) for name, i in ORDERS.items()}


@family
def scattered() -> Mapping[str, Step]:
    index = {name: i.reshape(N, 1, 1).expand(N, N, N) for name, i in ORDERS.items()}
    return {
        f"{name} {d}": lambda h, i=i, d=d: torch.zeros_like(h).scatter_add(d, i, h)
        for name, i in index.items()
        for d in range(3)
    }


@family
def embedded() -> Mapping[str, Step]:
    """The state itself as a table."""
    return {name: lambda h, i=i: F.embedding(i, h.reshape(N, N * N)).reshape(N, N, N) for name, i in ORDERS.items()}


@family
def chosen() -> Mapping[str, Step]:
    """Elements of a state and of its transpose."""
    rows = torch.tensor([True, False, True, False])
    masks = {
        "all": torch.ones(N, dtype=torch.bool),
        "none": torch.zeros(N, dtype=torch.bool),
        "rows": rows,
    }
    masks = {name: m.reshape(N, 1, 1).expand(N, N, N) for name, m in masks.items()}
    masks["symmetric"] = (rows.unsqueeze(0) ^ rows.unsqueeze(1)).unsqueeze(2).expand(N, N, N)
    masks["diagonal"] = torch.eye(N, dtype=torch.bool).unsqueeze(2).expand(N, N, N)
    return {name: lambda h, m=m: torch.where(m, h, h.transpose(0, 1)) for name, m in masks.items()}


@family
def attended() -> Mapping[str, Step]:
    """Attention over the state by fixed weights."""
    return {name: lambda h, A=A: torch.bmm(A.expand(N, N, N), h.transpose(0, 1)) for name, A in MATRICES.items()}


@family
def convolved() -> Mapping[str, Step]:
    """Channels or images as samples, with a kernel that mixes channels or does not."""
    kernels = {name: A.unsqueeze(2) for name, A in MATRICES.items()}
    return {name: lambda h, k=k: F.conv1d(h.transpose(0, 1), k) for name, k in kernels.items()}


@family
def written_in_place() -> Mapping[str, Step]:
    def write(h: Tensor, d: int, at: int) -> Tensor:
        copy = h.clone()
        copy.select(d, at).copy_(h.select(0, at))
        return copy

    return {f"{d} at {at}": lambda h, d=d, at=at: write(h, d, at) for d in range(3) for at in (0, 3)}


def program(step: Step) -> tuple[list[Tensor], Tensor]:
    """A parameter before, one after, one along every dim; the losses belong to dim 0 of the result."""
    generator = torch.Generator().manual_seed(3)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    before, after, row, column = leaf(N, N), leaf(N, N), leaf(N, 1), leaf(N, 1, 1)
    x = torch.randn(N, N, N, generator=generator, dtype=torch.float64)
    h = step((x @ before).tanh() * column + row).clone(memory_format=torch.contiguous_format)
    h = (h @ after).sin()
    return [before, after, row, column], h.square().sum((1, 2))


def appearance(losses: Tensor) -> Hashable:
    """Node types, edges and shapes of a graph, in one order."""
    found, number, stack = [], {losses.grad_fn: 0}, [losses.grad_fn]
    while stack:
        node = stack.pop()
        below = [(child, nr) for child, nr in node.next_functions if child is not None]
        fresh = [child for child, _ in below if child not in number]
        number.update({child: len(number) + j for j, child in enumerate(dict.fromkeys(fresh))})
        stack += dict.fromkeys(fresh)
        shapes = tuple(tuple(m.shape) for m in node._input_metadata)
        found.append((number[node], node.name(), shapes, tuple((number[child], nr) for child, nr in below)))
    return tuple(found)


@pytest.mark.parametrize("name", FAMILIES)
def test_look_alikes_have_layouts_of_their_own(name: str) -> None:
    steps = FAMILIES[name]
    assert len({appearance(program(step)[1]) for step in steps.values()}) == 1, "they do not look alike"
    turns = [*steps] * 2
    random.Random(name).shuffle(turns)
    for turn in [*steps, *turns]:
        params, losses = program(steps[turn])
        want = definition(losses, params)
        assert refuted_cotangents(plan(Roots.of_losses(losses), params), losses) == [], turn
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ps.PerformanceWarning)
            assert_same(ps.grad(losses, params), want)


@pytest.mark.parametrize("name", ["matrix_from_the_left", "matrix_on_flat_rows"])
def test_interaction_is_told_anew_every_time(name: str) -> None:
    """An identity that becomes a mixing matrix is refused, and the identity after it is not."""
    for turn in ("same", "mixing", "turned", "pairs", "same", "mixing", "half"):
        params, losses = program(FAMILIES[name][turn])
        if turn in ("mixing", "pairs"):
            with pytest.raises(ps.InteractionError):
                ps.grad(losses, params, independent=True)
        else:
            ps.grad(losses, params, independent=True)


@pytest.mark.parametrize(("first", "second"), [(4, 3), (3, 4), (4, 2), (2, 4)])
def test_another_batch_size_of_the_same_model(first: int, second: int) -> None:
    """T stays, B changes to and from T: time-first and batch-first in turn."""
    model = torch.nn.RNN(3, 3, dtype=torch.float64)
    for B in (first, second, first):
        for T in (4, 3, 2):
            for time_first in (True, False):
                x = torch.randn(T, B, 3, dtype=torch.float64) if time_first else torch.randn(B, T, 3).double()
                h = model(x if time_first else x.transpose(0, 1))[0]
                losses = h.square().sum((0, 2))
                want = definition(losses, model)
                assert_same(ps.grad(losses, model), want)
