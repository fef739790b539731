"""Where samples change places, or meet."""

from __future__ import annotations

from .values import Value
from .writer import CannotBeWritten, Writer, mixing, op

MATRICES = (
    "torch.eye({n}) torch.eye({n})[torch.randperm({n})] torch.eye({n}).roll(1,0) torch.zeros({n},{n}) torch.eye({n})*2 "
    "torch.eye({n})+1e-8*torch.eye({n}).roll(1,0) torch.ones({n},{n}).tril() draw({n},{n}) torch.ones({n},{n}) "
    "torch.eye({n})*1e-8 torch.eye({n})+torch.eye({n}).roll(1,0) torch.eye({n}).cumsum(0).flip(0) "
    "torch.full(({n},{n}),0.25) "
    "torch.block_diag(torch.ones(2,2),torch.eye({n}))[:{n},:{n}] torch.eye({n})[torch.zeros({n},dtype=torch.long)]"
).split()


@op
def order(w: Writer) -> Value:
    """Samples in another order, some of them left out or twice."""
    v = w.take()
    form = w.pick(["{}.flip({})", "{}.roll(1, {})", "torch.cat({}.split(1, {})[::-1], {})", "index", "twice"])
    if form == "index":
        form = "{}.index_select({}, torch.randperm({}.shape[{}]))"
        return w.keep(v, form.format(v.name, v.at, v.name, v.at))
    if form == "twice":
        return (
            w.put(f"torch.cat([{v.name}, {v.name}.sin()], {v.at})", v.at, 2 * v.outer, v.inner) if v.outer == 1 else v
        )
    return w.keep(v, form.format(v.name, v.at, v.at))


@op
def matrix(w: Writer) -> Value:
    """A constant matrix along any dim."""
    v = w.take(anywhere=True)
    d = v.at if v.at >= 0 and (w.chance(w.mix) or not v.free) else w.pick(v.free or [-1])
    if d < 0:
        raise CannotBeWritten
    kinds = MATRICES if w.mix or d != v.at else MATRICES[:5]
    a = w.named("c", w.pick(kinds).format(n=f"{v.name}.shape[{d}]"))
    if d == 0 and v.ndim == 2:
        return w.keep(v, f"{a} @ {v.name}")
    return w.keep(v, f"torch.tensordot({a}, {v.name}, ([1], [{d}])).movedim(0, {d})")


@mixing
def meet(w: Writer) -> Value:
    v = w.take()
    form = w.pick(
        [
            "{h} - {h}.mean({d}, keepdim=True)", "{h}.softmax({d})", "{h} + {h}.roll(1, {d})", "{h}.cumsum({d})",
            "{h} + 0.5 * {h}.flip({d})", "{h}.cummax({d}).values", "{h}.sort({d}).values", "{h}.logcumsumexp({d})",
            "{h} + {h}.sum()", "{h} / {h}.norm()", "{h} * {h}.amax({d}, keepdim=True)", "{h} + 1e-8 * {h}.roll(1, {d})",
            "{h}.renorm(2, {d}, 0.7)", "{h}.expand_as({h}) - {h}.sum({d}, keepdim=True) * 0",
            "F.normalize({h}, dim={d})",
        ]
    )  # fmt: skip
    return w.keep(v, form.format(h=v.name, d=v.at))


@mixing
def layer_along(w: Writer) -> Value:
    """A layer with weights along the samples' dim."""
    v = w.take(1, seen=False)
    kind, n = w.whole(0, 3), f"{v.name}.shape[{v.at}]"
    if kind == 0:
        t = w.put(f"{v.name}.transpose({v.at}, -1)", v.ndim - 1, v.outer, v.inner)
        return w.keep(t, f"F.layer_norm({t.name}, ({n},), {w.weight(n)}, {w.maybe(n)}, eps=0.1)")
    if kind == 1:
        t = w.put(f"{v.name}.transpose({v.at}, -1)", v.ndim - 1, v.outer, v.inner)
        return w.put(f"F.linear({t.name}, {w.weight(w.size(), n)})", t.at, v.outer, v.inner)
    if v.ndim != 2:
        raise CannotBeWritten
    t = w.put(f"{v.name}.transpose({v.at}, 1).unsqueeze(0)", 2, v.outer, v.inner)
    if kind == 2:
        c = f"{t.name}.shape[1]"
        return w.put(f"F.conv1d({t.name}, {w.weight(c, c, w.pick([1, 3]))}, padding='same')[0]", 1, v.outer, v.inner)
    t = w.put(f"{v.name}.transpose({v.at}, 0).unsqueeze(0)", 1, v.outer, v.inner)
    return w.put(f"F.group_norm({t.name}, 1, {w.weight(n)}, {w.weight(n)}, eps=0.1)[0]", 0, v.outer, v.inner)


@mixing
def similarity(w: Writer) -> Value:
    """Every sample with every other."""
    v = w.take()
    if v.ndim != 2 or v.at != 0:
        raise CannotBeWritten
    form = w.pick(["{h} @ {h}.t()", "torch.cdist({h}, {h} + 0.1)", "F.cosine_similarity({h}[:, None], {h}[None], -1)"])
    return w.keep(v, form.format(h=v.name))
