"""Whole modules, packed sequences, bags with offsets, functions written by hand, and what changes between runs."""

from __future__ import annotations

from .layers import FEATURE, in_order
from .values import Value
from .writer import CannotBeWritten, Writer, op


@op
def flagged(w: Writer) -> Value:
    """Numbers that are others in the second run, in the same places of the graph."""
    v = w.take(1)
    d, other = w.pick(v.free), w.whole(0, v.ndim - 1)
    last = w.pick([0, -1])
    either = f"({d} if flag else {other if w.mix else w.pick(v.free)})"
    form = w.pick(
        [
            "{h}.flip({e})", "{h}.roll(1, {e})", "{h}.softmax({e})", "{h}.cumsum({e})",
            "{h}.narrow({d}, 0 if flag else {l}, 1)",
            "{h}.select({d}, 0 if flag else {l}).unsqueeze({d})", "{h}.sum({e}, keepdim=True) + {h}",
            "{h} * (2 if flag else 3)",
            "F.dropout({h}, 0.5, training=flag)", "{h}.amax({e}, keepdim=True) * {h}",
            "({h} if flag else {h} * 1.5) + 1",
            "{h}.masked_fill({h} > (0 if flag else 0.3), 0.1)", "{h}.clamp(-1 if flag else -0.1, 1)",
            "{h}.sort({e}).values",
            "torch.eye({h}.shape[-1]).roll(1 if flag else 0, 0).matmul({h}.unsqueeze(-1)).squeeze(-1)",
            "F.leaky_relu({h}, 0.1 if flag else 0.7)", "F.softplus({h}, 1 if flag else 2)", "{h}.pow(2 if flag else 3)",
        ]
    )  # fmt: skip
    return w.keep(v, form.format(h=v.name, d=d, e=either, l=last))


@op
def turned(w: Writer) -> Value:
    """Equal sizes, in another order in the second run."""
    v = w.take(2)
    pairs = [(a, b) for a in v.free for b in v.free if a < b and v.shape[a] == v.shape[b]]
    if not pairs:
        raise CannotBeWritten
    a, b = w.pick(pairs)
    return w.keep(v, f"{v.name}.transpose({a}, {b} if flag else {a})")


@op
def packed(w: Writer) -> Value:
    """A recurrent layer on sequences of different lengths."""
    v = w.apart(w.take(2, seen=False))
    if v.ndim != 3 or v.at != 0 or not v.tensor.numel():
        raise CannotBeWritten
    time = v.shape[1]
    lengths = [w.whole(1, time) for _ in range(w.batch)]
    kind = w.pick(["LSTM", "GRU", "RNN"])
    m = w.named("m", f"fresh(nn.{kind}({v.name}.shape[-1], 2, batch_first=True))")
    w.leaves.append(m)
    rnn = "nn.utils.rnn"
    p = w.named("p", f"{rnn}.pack_padded_sequence({v.name}, torch.tensor({lengths}), True, enforce_sorted=False)")
    return w.put(f"{rnn}.pad_packed_sequence({m}({p})[0], True)[0]", 0)


@op
def transformer(w: Writer) -> Value:
    v = w.apart(w.take(2, seen=False))
    if v.ndim != 3 or v.at > 1 or not v.tensor.numel():
        raise CannotBeWritten
    options = f"1, 3, 0.0, batch_first={v.at == 0}, norm_first={w.chance()}"
    m = w.named("m", f"fresh(nn.TransformerEncoderLayer({v.name}.shape[-1], {options}))")
    w.leaves.append(m)
    return w.keep(v, f"{m}({v.name})")


@op
def bag(w: Writer) -> Value:
    """A bag per sample, of different sizes."""
    if not w.batch:
        raise CannotBeWritten
    sizes = [w.whole(0, 3) for _ in range(w.batch)]
    offsets = [sum(sizes[:k]) for k in range(w.batch)]
    i = w.named("i", f"ids({max(sum(sizes), 1)}, high=4)")
    options = w.pick(["", ", padding_idx=1", ", scale_grad_by_freq=True"])
    mode = w.pick(["sum", "mean", "max"])
    return w.put(f'F.embedding_bag({i}, {w.weight(4, w.size())}, torch.tensor({offsets}), mode="{mode}"{options})', 0)


@op
def norm_module(w: Writer) -> Value:
    """Norms as modules, in either mode."""
    v = w.images(w.take(0, seen=False, anywhere=True), w.whole(0, 2))
    rank, c = v.ndim - 2, f"{v.name}.shape[1]"
    choices = [f"nn.GroupNorm(1, {c})", f"nn.BatchNorm{max(rank, 1)}d({c})"]
    if rank:
        choices += [
            f"nn.InstanceNorm{rank}d({c}, affine=True)",
            f"nn.InstanceNorm{rank}d({c}, True, track_running_stats=True)",
        ]
    m = w.named("m", f"fresh({w.pick(choices)})")
    if not w.mix or w.chance():
        w.line(f"{m}.eval()")
    w.leaves.append(m)
    return w.keep(v, in_order(v, f"{m}({v.name}.contiguous())"))


@op
def own_names(w: Writer) -> Value:
    """Weights put together in ways that views and copies hide."""
    v = w.last(w.take(1, seen=False, anywhere=True))
    d, p = f"{v.name}.shape[-1]", w.size()
    form = w.pick(
        [
            "F.linear({h}, {a}.as_strided(({p}, {d}), ({d}, 1)))",
            "F.linear({h}, torch.stack([{a}[k] for k in range({p})]))",
            "{h} @ torch.kron({a}, torch.ones(1, 1)).t()", "F.linear({h}, torch.tril({a}))",
            "F.linear({h}, {a}.roll(1, 0))",
            "F.linear({h}, {a}.unbind(0)[0][None])", "F.linear({h}, torch.where({a} > 0, {a}, 0.1 * {a}))",
            "F.linear({h}, {a}.softmax(-1))", "F.linear({h}, {a} / {a}.norm())",
            "F.linear({h}, {a}.cumsum(0), {a}.sum(1))",
            "F.linear({h}, torch.outer({a}[:, 0], {a}[0]))", "F.linear({h}, {a}, {a}.mean(1))",
            "{h} @ torch.linalg.qr({a}.t())[0]",
            "F.linear({h}, F.dropout({a}, 0.5))", "F.linear({h}, {a}.sign() * {a}.square())", "{h} @ {a}.t() @ {a}",
        ]
    )  # fmt: skip
    return w.keep(v, form.format(h=v.name, a=w.leaf(str(p), d), p=p, d=d))


@op
def reparametrised(w: Writer) -> Value:
    v = w.last(w.take(1, seen=False, anywhere=True))
    d, p = FEATURE.format(v.name), w.size()
    which = w.pick(["weight_norm", "spectral_norm"])
    name = w.named("m", f"torch.nn.utils.parametrizations.{which}(fresh(nn.Linear({d}, {p})))")
    if w.chance(0.2):
        w.line(f"{name}.eval()")
    w.leaves.append(name)
    return w.keep(v, f"{name}({v.name})")


@op
def custom(w: Writer) -> Value:
    """Functions written by hand."""
    kind = w.whole(0, 5)
    v = w.last(w.take(1, seen=kind > 1, anywhere=True))
    d = FEATURE.format(v.name)
    if kind == 0:
        return w.keep(v, f"Mm.apply({v.name}, {w.weight(d, w.size())})")
    if kind == 1:
        return w.keep(v, f"{w.pick(['Mul', 'NativeLayerNorm'])}.apply({v.name}, {w.weight(d)})")
    functions = ["Scale", "Shorten", "InPlace"] + ([] if w.separate else ["Whole"])
    return w.keep(v, f"{w.pick(functions)}.apply({v.name})")


@op
def checkpointed(w: Writer) -> Value:
    v = w.last(w.take(1, seen=False, anywhere=True))
    d, kind = FEATURE.format(v.name), w.pick(["False", "False", "False", "True"])
    if kind == "True" and not v.tensor.requires_grad:
        raise CannotBeWritten
    body = w.pick(
        ["torch.tanh(t @ {a})", "F.linear(t, {a}.t()).relu() * {b}", "F.layer_norm(t, t.shape[-1:], {c}) @ {a}"]
    )
    p = w.size()
    text = body.format(a=w.weight(d, p), b=w.weight(p), c=w.weight(d))
    return w.keep(v, f"checkpoint(lambda t: {text}, {v.name}, use_reentrant={kind})")
