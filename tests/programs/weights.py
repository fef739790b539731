"""What a program uses as a weight and is none itself: computed from parameters alone, in a few ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .writer import Writer

Sizes = list[str]


def low_rank(w: Writer, n: Sizes) -> str:
    return f"({w.leaf(*n[:-1], '2')} @ {w.leaf(*n[:-2], '2', n[-1])})"


def masked(w: Writer, n: Sizes) -> str:
    mask = w.named("c", f"draw({', '.join(n)}) > 0")
    return f"({w.leaf(*n)} * {mask})"


def rows_of_a_table(w: Writer, n: Sizes) -> str:
    table = w.leaf("4", *n[1:])
    return f"{table}[torch.tensor({[w.whole(0, 3) for _ in range(eval(n[0], w.env))]})]"


def scaled_to_length(w: Writer, n: Sizes) -> str:
    a, b = w.leaf(*n), w.leaf(*n[:-1], "1")
    return f"({a} / ({a}.square().sum(-1, keepdim=True) + 1).sqrt() * {b})"


def changed(w: Writer, n: Sizes) -> str:
    return w.leaf(*n) + w.pick([".tanh()", ".mul(0.5)", ".detach()", ".float().to(torch.get_default_dtype())"])


# The ranks that a way is for, and the expression that it writes for a weight of these sizes.
COMPUTED: list[tuple[range, Callable[[Writer, Sizes], str]]] = [
    (range(2, 3), lambda w, n: f"{w.leaf(n[1], n[0])}.t()"),
    (range(2, 9), low_rank),
    (range(1, 9), lambda w, n: f"{w.leaf(f'{n[0]} + 1', *n[1:])}[1:]"),
    (range(1, 9), lambda w, n: f"{w.leaf(*n)}.flip(0)"),
    (range(1, 9), lambda w, n: f"{w.leaf(' * '.join(n))}.view({', '.join(n)})"),
    (range(1, 9), lambda w, n: f"torch.cat([{w.leaf('1', *n[1:])}, {w.leaf(*n)}])[1:]"),
    (range(1, 9), lambda w, n: f"{w.leaf('1', *n[1:])}.expand({', '.join(n)})"),
    (range(1, 9), lambda w, n: f"F.normalize({w.leaf(*n)}, dim=0)"),
    (range(1, 9), masked),
    (range(1, 9), rows_of_a_table),
    (range(1, 9), lambda w, n: f"{w.leaf(*n)}.contiguous().clone()"),
    (range(1, 9), lambda w, n: f"({w.leaf(*n)} + {w.leaf(*n)})"),
    (range(1, 9), lambda w, n: f"draw({', '.join(n)})"),  # frozen
    (range(1, 9), scaled_to_length),
    *[(range(1, 9), changed)] * 3,
]
