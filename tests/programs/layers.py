"""Ops with parameters: products, convolutions, norms, tables, recurrence, attention."""

from __future__ import annotations

from .values import Value
from .writer import CannotBeWritten, Writer, op

FEATURE = "{}.shape[-1]"


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0] or [1]


@op
def new_data(w: Writer) -> Value:
    """More of the samples' data, wherever the batch lies, sometimes as a parameter."""
    sizes = [str(w.size()) for _ in range(w.whole(0, 3))]
    at = 0 if w.chance(0.6) else w.whole(0, len(sizes))
    sizes.insert(at, "B")
    text = f"data({', '.join(sizes)}{f', batch={at}' if at else ''})"
    asked = w.chance(0.12) and not w.separate
    name = w.named("x", text + (".requires_grad_()" if asked else ""))
    if asked:
        w.leaves.append(name)
    value = Value(name, w.env[name], at)
    w.values.append(value)
    return value


@op
def linear(w: Writer) -> Value:
    v = w.last(w.take(1, seen=False, anywhere=True))
    p, d = w.size(), FEATURE.format(v.name)
    kind = w.whole(0, 7)
    if kind <= 2:
        return w.keep(v, f"F.linear({v.name}, {w.weight(p, d)}, {w.maybe(p)})")
    if kind == 3:
        return w.keep(v, f"{v.name} @ {w.weight(d, p)}")
    if kind == 4 and v.at >= 0:
        return w.put(f"{v.name} @ {w.weight(d)}", v.at, v.outer, v.inner)
    if kind == 5:
        name = w.named("m", f"fresh(nn.Linear({d}, {p}))")
        w.leaves.append(name)
        return w.keep(v, f"{name}({v.name})")
    if kind == 6:
        return w.keep(v, f"torch.tensordot({v.name}, {w.weight(d, 2, 2)}, 1).flatten(-2)")
    return w.keep(v, f"F.bilinear({v.name}, {v.name}.tanh(), {w.weight(2, d, d)}, {w.maybe(2)})")


@op
def left_product(w: Writer) -> Value:
    """W @ h, with the samples in columns or before."""
    v = w.take(1, seen=False)
    if v.ndim < 2 or v.at == v.ndim - 2:
        raise CannotBeWritten
    return w.keep(v, f"{w.weight(w.size(), f'{v.name}.shape[-2]')} @ {v.name}")


@op
def addmm(w: Writer) -> Value:
    v = w.last(w.take(1, seen=False, anywhere=True))
    if v.ndim != 2:
        raise CannotBeWritten
    p, d = w.size(), FEATURE.format(v.name)
    if w.chance():
        return w.keep(v, f"torch.addmm({w.weight(p)}, {v.name}, {w.weight(d, p)}, beta=0.5, alpha=2)")
    return w.keep(v, f"torch.addmm({w.weight(p, 1)}, {w.weight(p, d)}, {v.name}.t()).t()")


@op
def bmm(w: Writer) -> Value:
    v = w.last(w.take(2, seen=False))
    if v.ndim != 3:
        raise CannotBeWritten
    p, d, n = w.size(), f"{v.name}.shape[2]", f"{v.name}.shape[0]"
    kind = w.whole(0, 3)
    if kind == 0:
        return w.keep(v, f"torch.bmm({v.name}, {w.weight(d, p)}.expand({n}, -1, -1))")
    if v.at == 0:
        v = w.put(f"{v.name}.transpose(0, 1)", 1, v.outer, v.inner)
        n = f"{v.name}.shape[0]"
    if kind == 1:
        return w.keep(v, f"torch.bmm({v.name}, {w.weight(n, d, p)})")
    if kind == 2:
        return w.keep(v, f"torch.baddbmm({w.weight(n, 1, p)}, {v.name}, {w.weight(n, d, p)}, beta=0.5, alpha=2)")
    return w.put(f"torch.bmm({w.weight(n, p, d)}, {v.name}.mT)", 2, v.outer, v.inner)


@op
def einsum(w: Writer) -> Value:
    """Contract some dims, share others, add new ones, in any order."""
    v = w.take(1, seen=False, anywhere=True)
    mine = "abcde"[: v.ndim]
    role = [0 if d not in v.free and not w.chance(w.mix / 3) else w.whole(0, 2) for d in range(v.ndim)]
    for d in range(v.ndim):
        if d not in v.free and role[d] == 0 and w.chance(0.1):
            role[d] = 2
    contracted = [c for c, r in zip(mine, role, strict=True) if r == 1]
    shared = [c for c, r in zip(mine, role, strict=True) if r == 2]
    new = list("xy"[: w.whole(0, 1)])
    theirs = contracted + shared + new
    result = [c for c in mine if c not in contracted] + new
    w.random.shuffle(theirs)
    w.random.shuffle(result)
    if not theirs:
        raise CannotBeWritten
    sizes = [f"{v.name}.shape[{mine.index(c)}]" if c in mine else str(w.size()) for c in theirs]
    at = result.index(mine[v.at]) if v.at >= 0 and mine[v.at] in result else -1
    formula = f"{mine},{''.join(theirs)}->{''.join(result)}"
    expression = f'torch.einsum("{formula}", {v.name}, {w.weight(*sizes)})'
    if not v.samples:
        return w.put(expression, at, v.outer, v.inner)
    name, t = w.computed(expression)
    kept = [c for c in mine if c not in contracted] + new
    selected = "".join(f".select({mine.index(c)}, 0)" for c in reversed(contracted))
    label = v.samples + selected + ".unsqueeze(-1)" * len(new)
    order = ", ".join(str(kept.index(c)) for c in result)
    samples = w.named("s", f"{label}.permute({order}).expand({name}.shape)" if order else label)
    return w.added(w.placed(name, t, samples))


@op
def convolution(w: Writer) -> Value:
    rank = w.pick([1, 1, 2, 2, 3])
    v = w.images(w.take(0, seen=False, anywhere=True), rank)
    channels, groups = f"{v.name}.shape[1]", w.pick(divisors(v.shape[1]))
    padding = w.whole(0, 1)
    kernel = [w.whole(1, min(3, n + 2 * padding)) for n in v.shape[2:]]
    if rank == 2 and w.chance(0.2):
        v = w.keep(v, f"{v.name}.contiguous(memory_format=torch.channels_last)")
    options = f"stride={w.whole(1, 2)}, padding={padding}, dilation={w.pick([1, 1, 2])}, groups={groups}"
    per = w.whole(1, 2)
    if w.chance(0.3):
        kernel_w = w.weight(channels, per, *kernel)
        return w.keep(v, f"F.conv_transpose{rank}d({v.name}, {kernel_w}, {w.maybe(per * groups)}, {options})")
    kernel_w = w.weight(per * groups, f"{channels} // {groups}", *kernel)
    return w.keep(v, f"F.conv{rank}d({v.name}, {kernel_w}, {w.maybe(per * groups)}, {options})")


@op
def layer_norm(w: Writer) -> Value:
    count = w.whole(1, 2)
    v = w.last(w.take(count, seen=False, anywhere=True), count)
    sizes = [f"{v.name}.shape[{d - count}]" for d in range(count)]
    shape = f"({', '.join(sizes)},)"
    if w.chance():
        return w.keep(v, f"F.layer_norm({v.name}, {shape}, {w.maybe(*sizes)}, {w.maybe(*sizes)}, eps=0.1)")
    return w.keep(v, f"F.rms_norm({v.name}, {shape}, {w.weight(*sizes)}, eps=0.1)")


@op
def channel_norm(w: Writer) -> Value:
    v = w.images(w.take(0, seen=False, anywhere=True), w.whole(0, 2))
    c, kind = f"{v.name}.shape[1]", w.whole(0, 4)
    if kind == 0 or kind == 1:
        groups = w.pick(divisors(v.shape[1]))
        return w.keep(v, f"F.group_norm({v.name}, {groups}, {w.maybe(c)}, {w.maybe(c)}, eps=0.1)")
    if kind == 2:
        return w.keep(v, f"F.instance_norm({v.name}, weight={w.weight(c)}, bias={w.weight(c)}, eps=0.1)")
    if kind == 3:
        return w.keep(v, f"F.local_response_norm({v.name}, 2, alpha=0.5)")
    if w.mix and w.chance():
        training = w.pick(["True", "flag"])
    else:
        training = "False"
    stats = f"draw({c}), draw({c}).square() + 0.5"
    options = f"{stats}, {w.maybe(c)}, {w.maybe(c)}, training={training}, eps=0.1"
    return w.keep(v, in_order(v, f"F.batch_norm({v.name}.contiguous(), {options})"))


def in_order(v: Value, expression: str) -> str:
    """PyTorch's batch norm on CPU gets some transposed inputs and cotangents wrong: here they never are."""
    return f"{expression}.flatten().view({v.name}.shape)"


@op
def embedding(w: Writer) -> Value:
    """Tables read by ids, and bags of them."""
    high, d = w.size() + 1, w.size()
    sizes = [str(w.size()) for _ in range(w.whole(0, 2))]
    at = 0 if w.chance(0.7) else w.whole(0, len(sizes))
    sizes.insert(at, "B")
    bag = len(sizes) == 2 and at == 0 and w.chance()
    name = w.named("i", f"ids({', '.join(sizes)}, high={high}{f', batch={at}' if at else ''})")
    padding = w.pick(["", "", ", padding_idx=0", ", padding_idx=1"])
    if bag:
        mode = w.pick(["sum", "mean", "max"])
        weights = ""
        if mode == "sum" and w.chance(0.4):
            weights = f", per_sample_weights={w.weight(f'{name}.shape[1]')}.expand({name}.shape)"
        options = f"{padding}{weights}"
        return w.put(f'F.embedding_bag({name}, {w.weight(high, d)}, mode="{mode}"{options})', 0)
    more = w.pick(["", "", "", ", scale_grad_by_freq=True", ", max_norm=0.5"])
    table = w.leaf(str(high), str(d)) if "max_norm" in more else w.weight(high, d)
    return w.put(f"F.embedding({name}, {table}{padding}{more})", at)


@op
def recurrent(w: Writer) -> Value:
    v = w.take(2, seen=False)
    if v.ndim != 3 or v.at == 2 or not v.tensor.numel():
        raise CannotBeWritten
    kind, hidden = w.pick(["LSTM", "GRU", "RNN"]), w.whole(1, 3)
    options = w.pick(["", "", ", bidirectional=True", ", num_layers=2", ", bias=False"])
    first = ", batch_first=True" if v.at == 0 else ""
    name = w.named("m", f"fresh(nn.{kind}({FEATURE.format(v.name)}, {hidden}{options}{first}))")
    w.leaves.append(name)
    if w.chance(0.3):
        state = "[1][0][-1]" if kind == "LSTM" else "[1][-1]"
        return w.put(f"{name}({v.name}){state}", 0, v.outer, v.inner)
    return w.keep(v, f"{name}({v.name})[0]")


@op
def cell(w: Writer) -> Value:
    """A cell written by hand, step by step along a free dim."""
    v = w.last(w.take(2, seen=False))
    if v.ndim != 3 or v.at not in (0, 1):
        raise CannotBeWritten
    p, time = w.whole(1, 3), 1 - v.at
    a, b = w.weight(FEATURE.format(v.name), p), w.weight(p, p)
    s = w.named("h", f"{v.name}.select({time}, 0) @ {a}")
    w.line(f"for t in {v.name}.unbind({time})[1:]: {s} = torch.tanh(t @ {a} + {s} @ {b})")
    return w.put(f"{s} * 1", 0, v.outer, v.inner)


@op
def attention(w: Writer) -> Value:
    v = w.last(w.take(2, seen=False, anywhere=True), 2)
    d, p = FEATURE.format(v.name), w.pick([1, 2, 4])
    if v.ndim == 3 and v.at == 0 and w.chance(0.3):
        name = w.named("m", f"fresh(nn.MultiheadAttention({d}, 1, batch_first=True))")
        w.leaves.append(name)
        return w.keep(v, f"{name}({v.name}, {v.name}, {v.name}, need_weights={w.chance()})[0]")
    q, k, u = (f"{v.name} @ {w.weight(d, p)}" for _ in range(3))
    how = w.pick(["", ", is_causal=True", "mask", "hand"])
    if how == "hand":
        return w.keep(v, f"torch.softmax(({q}) @ ({k}).mT, -1) @ ({u})")
    if how == "mask":
        how = f", attn_mask={w.weight(f'{v.name}.shape[-2]', f'{v.name}.shape[-2]')}"
    return w.keep(v, f"F.scaled_dot_product_attention({q}, {k}, {u}{how})")


@op
def broadcast(w: Writer) -> Value:
    """A raw parameter along any dims, now and then the samples' too."""
    v = w.take(0, seen=False, anywhere=True)
    everywhere = w.chance(0.15)
    sizes: list[str] = []
    for d in range(v.ndim):
        own = (d in v.free or everywhere) and w.chance(0.6)
        sizes.append(f"{v.name}.shape[{d}]" if own else "1")
    while sizes and sizes[0] == "1" and w.chance():
        sizes.pop(0)
    p = w.weight(*sizes)
    form = w.pick(
        [
            "{h} * {p}", "{h} * {p}", "{h} + {p}", "{p} - 0.7 * {h}", "{h} / (1 + {p}.square())",
            "torch.lerp({h}, {p}.expand_as({h}), 0.3)", "torch.addcmul({h}, {p}, {h}.tanh(), value=0.5)",
            "torch.maximum({h}, {p})", "torch.where({h} > 0, {h}, {p})", "torch.atan2({h}, 2 + {p}.square())",
            "torch.hypot({h}, {p})", "{h} * {p} + {p}", "torch.logaddexp({h}, {p})",
        ]
    )  # fmt: skip
    return w.keep(v, form.format(h=v.name, p=p))


@op
def prelu(w: Writer) -> Value:
    v = w.images(w.take(0, seen=False, anywhere=True), w.whole(0, 1))
    return w.keep(v, f"F.prelu({v.name}, {w.weight(w.pick([1, f'{v.name}.shape[1]']))})")


@op
def loop(w: Writer) -> Value:
    """One sample after the other."""
    v = w.apart(w.take(1, seen=False))
    if v.at != 0 or not w.batch:
        raise CannotBeWritten
    a = w.weight(FEATURE.format(v.name), w.size())
    return w.put(f"torch.stack([torch.tanh({v.name}[i] @ {a}) for i in range(B)])", 0)
