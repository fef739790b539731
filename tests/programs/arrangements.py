"""Ops that move elements anywhere, with constants for their indices; the sample of every element goes with it."""

from __future__ import annotations

from collections.abc import Callable

from .values import Value
from .writer import CannotBeWritten, Writer, op


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0] or [1]


def any_dim(w: Writer, v: Value, least: int = 0) -> tuple[int, int]:
    """A dim of at least this size, the samples' own too, and its size."""
    dims = [d for d, n in enumerate(v.shape) if n >= least]
    if not dims:
        raise CannotBeWritten
    d = w.pick(dims)
    return d, v.shape[d]


def numbers(w: Writer, high: int, *shape: int) -> str:
    """Constant whole numbers below `high`."""
    if not high:
        raise CannotBeWritten
    return w.named("c", f"torch.randint({high}, {shape})")


def some_rows(w: Writer, n: int) -> str:
    """All of n rows in another order, or a choice among them with repeats."""
    return w.named("c", f"torch.randperm({n})") if w.chance() else numbers(w, n, w.whole(0, n + 1))


def before(d: int, key: str) -> str:
    """An index along dim d."""
    return f"[{':, ' * d}{key}]"


# ------------------------------------------------------------------------------------------------ shapes


def folded(w: Writer, v: Value) -> str:
    d = w.whole(0, v.ndim - 2)
    return f"{{}}.flatten({d}, {d + 1})"


def unfolded(w: Writer, v: Value) -> str:
    d, n = any_dim(w, v, 2)
    a = w.pick(divisors(n))
    return f"{{}}.unflatten({d}, ({a}, {n // a}))"


def any_shape(w: Writer, v: Value) -> str:
    count, sizes = v.tensor.numel(), []
    for _ in range(w.whole(1, 3)):
        sizes.append(w.pick(divisors(count)))
        count //= sizes[-1]
    return f"{{}}.reshape({', '.join(map(str, [*sizes, count]))})"


def windows(w: Writer, v: Value) -> str:
    """(N, H, C) -> (N·nW, H/nW, C) and the like, with the parts in either order."""
    d, n = any_dim(w, v, 2)
    size = w.pick(divisors(n))
    swap, front = w.pick(["", f".transpose({d}, {d + 1})"]), w.pick(["", f".movedim({d}, 0)"])
    return f"{{}}.unflatten({d}, ({n // size}, {size})){swap}{front}.flatten(0, 1)"


def turned(w: Writer, v: Value) -> str:
    return f"{{}}.permute({', '.join(map(str, w.random.sample(range(v.ndim), v.ndim)))})"


def one_more_dim(w: Writer, v: Value) -> str:
    d = w.whole(0, v.ndim)
    return f"{{}}.squeeze({d})" if d < v.ndim and v.shape[d] == 1 else f"{{}}.unsqueeze({d})"


def repeated(w: Writer, v: Value) -> str:
    (d, _), times = any_dim(w, v), w.whole(1, 3)
    each = ", ".join(str(times if e == d else 1) for e in range(v.ndim))
    sizes = ", ".join(["-1"] * d + [str(times)] + ["-1"] * (v.ndim - d))
    return w.pick(
        [f"{{}}.repeat({each})", f"{{}}.repeat_interleave({times}, {d})", f"{{}}.unsqueeze({d}).expand({sizes})"]
    )


# ------------------------------------------------------------------------------------------------ order


def reordered(w: Writer, v: Value) -> str:
    """Flip, roll, cut and put together again."""
    d, n = any_dim(w, v, 1)
    cut, to = w.whole(0, n), w.whole(0, v.ndim - 1)
    return w.pick(
        [
            f"{{}}.flip({d})", f"{{}}.roll({cut}, {d})", f"torch.stack({{}}.unbind({d}), {to})",
            f"torch.cat([{{0}}.narrow({d}, {cut}, {n - cut}), {{0}}.narrow({d}, 0, {cut})], {d})",
            f"torch.cat({{}}.split({max(cut, 1)}, {d})[::-1], {d})",
        ]
    )  # fmt: skip


def part(w: Writer, v: Value) -> str:
    """Part of a dim; now and then of the samples' own, and the losses of the others are zero then."""
    dims = [d for d in (range(v.ndim) if w.chance(0.25) else v.free) if v.shape[d]]
    if not dims:
        raise CannotBeWritten
    d = w.pick(dims)
    start = w.whole(0, v.shape[d] - 1)
    size = w.whole(1, v.shape[d] - start)
    return w.pick([f"{{}}.select({d}, {start})", "{}" + before(d, f"{start}::2"), f"{{}}.narrow({d}, {start}, {size})"])


ORDERLY = [folded, unfolded, any_shape, windows, turned, one_more_dim, repeated, reordered]


@op
def arrange(w: Writer) -> Value:
    """Another shape, order or number of copies."""
    v = w.take(anywhere=True)
    if not v.tensor.numel() or v.ndim < 1:
        raise CannotBeWritten
    return w.move(v, w.pick(ORDERLY)(w, v))


@op
def section(w: Writer) -> Value:
    v = w.take(anywhere=True)
    return w.move(v, part(w, v))


# ------------------------------------------------------------------------------------------------ indices


@op
def select_rows(w: Writer) -> Value:
    v = w.take(anywhere=True)
    d, n = any_dim(w, v, 1)
    c = some_rows(w, n)
    if v.ndim == 2 and d == 0 and w.chance(0.3):
        return w.move(v, f"F.embedding({c}, {{}})", f"{{}}[{c}]")
    shape = ", ".join("-1" if e == d else "1" for e in range(v.ndim))
    sizes = ", ".join("-1" if e == d else str(m) for e, m in enumerate(v.shape))
    gathered = f"{{}}.gather({d}, {c}.view({shape}).expand({sizes}))"
    return w.move(v, w.pick([f"{{}}.index_select({d}, {c})", "{}" + before(d, c), gathered]))


@op
def select_places(w: Writer) -> Value:
    """Two dims indexed at once, next to each other or not; or a mask."""
    v = w.take(anywhere=True)
    if v.ndim < 2 or not v.tensor.numel():
        raise CannotBeWritten
    if w.chance(0.3):
        mask = w.named("c", f"draw(*{v.name}.shape[:{w.whole(1, v.ndim)}]) > -0.5")
        return w.move(v, f"{{}}[{mask}]")
    count, d = w.whole(1, 4), w.whole(0, v.ndim - 2)
    e = w.whole(d + 1, v.ndim - 1)
    i = numbers(w, v.shape[d], count)
    j = numbers(w, v.shape[e], *w.pick([(count,), (count, count)]))
    keys = [i if k == d else j if k == e else ":" for k in range(v.ndim)]
    return w.move(v, f"{{}}[{', '.join(keys)}]")


@op
def gather_anywhere(w: Writer) -> Value:
    """Every element of the result from anywhere along one dim, or from anywhere at all."""
    v = w.take(anywhere=True)
    if w.chance(0.3):
        return w.move(v, f"{{}}.take({numbers(w, v.tensor.numel(), w.whole(1, 8))})")
    d, n = any_dim(w, v, 1)
    c = numbers(w, n, *[m if e != d else w.whole(1, 4) for e, m in enumerate(v.shape)])
    return w.move(v, f"{{}}.gather({d}, {c})")


@op
def scatter_rows(w: Writer) -> Value:
    """Rows written to other places of a larger, empty tensor."""
    v = w.take(anywhere=True)
    d, n = any_dim(w, v)
    if not w.batch:
        raise CannotBeWritten
    size = n + w.whole(0, 2)
    c = w.named("c", f"torch.randperm({size})[:{n}]")
    empty = f"{{0}}.new_zeros({', '.join(str(size if e == d else m) for e, m in enumerate(v.shape))})"
    index = f"{c}.view({', '.join('-1' if e == d else '1' for e in range(v.ndim))}).expand({{0}}.shape)"
    forms = [f"index_add({d}, {c}, {{0}})", f"index_copy({d}, {c}, {{0}})", f"scatter({d}, {index}, {{0}})"]
    if d == 0:
        forms.append(f"index_put(({c},), {{0}})")
    return w.move(v, f"{empty}.{w.pick(forms)}")


# ------------------------------------------------------------------------------------------------ products that move


@op
def rows_by_matrix(w: Writer) -> Value:
    """A matrix of zeros and ones, which chooses rows or turns them round, along any dim."""
    v = w.take(anywhere=True)
    d, n = any_dim(w, v, 1)
    if d != v.ndim - 1:
        v = w.move(v, f"{{}}.movedim({d}, -1)")
    c = some_rows(w, n)
    return w.move(v, f"{{}} @ F.one_hot({c}, {n}).to({v.tensor.dtype}).t()", f"{{}}[..., {c}]")


@op
def one_of_each_row(w: Writer) -> Value:
    """A square of which one element per row is left: (h · mask).sum()."""
    v = w.take(anywhere=True)
    pairs = [(d, e) for d in range(v.ndim) for e in range(v.ndim) if d != e and v.shape[d] == v.shape[e] > 1]
    if not pairs:
        raise CannotBeWritten
    chosen = w.pick(pairs)
    order = [*(k for k in range(v.ndim) if k not in chosen), *chosen]
    v = w.move(v, f"{{}}.permute({', '.join(map(str, order))})")
    mask = w.named("c", f"F.one_hot(torch.randperm({v.shape[-1]}), {v.shape[-1]})")
    form = w.pick([f'torch.einsum("...ij,ij->...i", {{}}, {mask}.to({v.tensor.dtype}))', f"({{}} * {mask}).sum(-1)"])
    return w.move(v, form, f"({{}} * {mask}).sum(-1)")


# ------------------------------------------------------------------------------------------------ layers on parts


@op
def experts(w: Writer) -> Value:
    """Every row goes to one of two experts, or to none, and comes back to its place."""
    v = w.last(w.take(1, seen=False, anywhere=True))
    if v.ndim < 2 or not v.tensor.numel():
        raise CannotBeWritten
    d, rows = f"{v.name}.shape[-1]", w.named("h", f"{v.name}.reshape(-1, {v.name}.shape[-1])")
    c = w.named("c", f"torch.randint({w.pick([3, 3, 1])}, (len({rows}),))")
    out = w.named("h", rows if w.separate or w.chance() else f"torch.zeros_like({rows})")  # where some rows are lost
    for e in range(2):
        i = w.named("c", f"({c} == {e}).nonzero().squeeze(1)")
        answer = f"({rows}[{i}] @ {w.weight(d, d)} + {w.weight(d)}).tanh() * {w.weight()}"
        out = w.named("h", f"{out}.index_add(0, {i}, {answer})")
    return w.keep(v, f"{out}.reshape({v.name}.shape)")


@op
def shuffle_and_back(w: Writer) -> Value:
    """Rows in another order for one layer."""
    v = w.last(w.take(1, seen=False, anywhere=True))
    if v.ndim < 2:
        raise CannotBeWritten
    d, c = f"{v.name}.shape[-1]", w.named("c", f"torch.randperm(len({v.name}))")
    h = w.named("h", f"{v.name}[{c}] @ {w.weight(d, d)} + {w.weight(d)}")
    return w.keep(v, w.pick([f"{h}[{c}.argsort()]", f"torch.zeros_like({v.name}).index_add(0, {c}, {h})"]))


@op
def slice_by_slice(w: Writer) -> Value:
    """Every slice along a dim goes its own way: some deeper than others, some with a weight of their own."""
    v = w.last(w.take(1, seen=False, anywhere=True))
    if v.ndim < 2 or not 0 < v.shape[-2] < 6:
        raise CannotBeWritten
    a = w.named("h", f"{w.weight(f'{v.name}.shape[-1]', f'{v.name}.shape[-1]')} * 1")
    ways: list[Callable[[str], str]] = [
        lambda x: x,
        lambda x: f"({x} @ {a}).tanh()",
        lambda x: f"(({x} @ {a}).tanh() @ {a}).tanh()",
        lambda x: f"{x} * {w.weight()}",
    ]
    same = w.pick(ways) if w.chance() else None
    slices = [(same or w.pick(ways))(f"{v.name}.select(-2, {k})") for k in range(v.shape[-2])]
    return w.keep(v, f"torch.stack([{', '.join(slices)}], -2)")


@op
def table_of_places(w: Writer) -> Value:
    """A table read by constant ids, at every place of some of the leading dims."""
    v = w.last(w.take(1, seen=False, anywhere=True))
    c = numbers(w, 4, *[n if w.chance() else 1 for n in v.shape[:-1]])
    padding = w.pick(["", "", ", padding_idx=0"])
    return w.keep(v, f"{v.name} + F.embedding({c}, {w.weight(4, f'{v.name}.shape[-1]')}{padding})")


@op
def shared_term(w: Writer) -> Value:
    """Something that all samples get whole."""
    v = w.take(seen=False, anywhere=True)
    return w.keep(v, f"{v.name} + {w.weight(2, 3)}.square().mean()")
