"""How a program ends: one loss per sample, from one value or two, sometimes with a hook on the way."""

from __future__ import annotations

from .values import Value
from .writer import CannotBeWritten, Writer

PLAIN = "{h}.sum({d}) {h}.mean({d}) {h}.amax({d}) {h}.logsumexp({d}) {h}.square().sum({d}) {h}.tanh().sum({d})".split()
PLAIN += ["{h}.sum({d})"] * 3 + ["torch.linalg.vector_norm({h}, dim={d})", "{h}.square().mean({d})", "{h}.std({d})"]

FLAT = [
    "{f}.sum(1)", "{f}.max(1).values", "{f}.cumsum(1)[:, -1]", "{f}.norm(dim=1)", "{f}[:, 0]", "{f}.prod(1)",
    "{f}.var(1)",
    "{f}.contiguous().median(1).values",  # which PyTorch gets wrong for expanded tensors
    "{f}.logsumexp(1)", "{f}.cumsum(1).mean(1)", "{f} @ {v}", "{f}.topk(1).values[:, 0]",
    'F.cross_entropy({f}, {i}, reduction="none")', 'F.mse_loss({f}, {x}, reduction="none").sum(1)',
    "{f}.cummax(1).values.sum(1)",
    'F.binary_cross_entropy_with_logits({f}, {x}.sigmoid(), reduction="none").mean(1)',
    "F.cosine_similarity({f}, {x}, 1)",
    'F.nll_loss(F.log_softmax({f}, 1), {i}, reduction="none")', 'F.huber_loss({f}, {x}, reduction="none").sum(1)',
    "torch.cdist({f}[:, None], {x}[:, None])[:, 0, 0]", "torch.einsum('bd,bd->b', {f}, {f})", "{f}.unbind(1)[0]",
    "torch.stack([r.square().sum() for r in {f}.unbind(0)])", "torch.stack([{f}[i].sum() for i in range(B)])",
    'F.kl_div(F.log_softmax({f}, 1), {x}.softmax(1), reduction="none").sum(1)', "torch.logcumsumexp({f}, 1)[:, -1]",
    "F.pairwise_distance({f}, {x})", 'F.multi_margin_loss({f}, {i}, reduction="none")',
    "{f}.gather(1, {i}[:, None])[:, 0]",
    "F.triplet_margin_loss({f}, {x}, {x}.flip(1), reduction='none')", "({f} @ {f}.t()).diagonal()",
    "torch.diagonal({f} @ {x}.t())",
]  # fmt: skip

AFTER = [
    "{l}.flip(0)", "{l}.cumsum(0)", "{l} - {l}.mean()", "{l}[:1]", "{l}[torch.randperm(B)]", "{l} * {l}.sum()",
    "{l}.softmax(0)",
    "torch.cat([{l}, {l}.sin()])", "{l}.new_zeros(2).index_add(0, torch.arange(B) % 2, {l})", "{l}.sort().values",
    "{l}.roll(1)",
    "{l}.sum().expand(B)", "torch.eye(B) @ {l}", "{l}.mean()[None]", "{l}.max()[None]", "{l}.cummax(0).values",
    "{l} / B",
    "{l}.repeat(2)", "{l}[::2]", "torch.stack(list({l}))", "{l}.masked_fill(torch.arange(B) > 1, 0)",
    "{l}.new_zeros(B).copy_({l})",
]  # fmt: skip


# As docs/contract.md has it: the same for every element, on tensors in which samples are apart.
HOOKS = ["g * 2", "g.clamp(-0.5, 0.5)", "None", "g.tanh()", "g.neg()", "g.clone()", "g.mul_(2)", "(g.mul_(2), None)[1]"]


OWNED = [
    "{h}.new_zeros(B).index_add(0, {s}.flatten(), {f}.flatten())",
    "{h}.new_zeros(B).scatter_add(0, {s}.flatten(), {f}.flatten())",
    "(torch.arange(B)[:, None] == {s}.flatten()).to({h}.dtype) @ {f}.flatten()",
    "torch.stack([{f}[{s} == i].sum() for i in range(B)])",
]
ELEMENT = ["{h}", "{h}.sin()", "({h} + 0.3 * {h}.square())", "({h} * draw(*{h}.shape))"]


def _one(w: Writer, v: Value, plain: bool = False) -> str:
    """An expression for one loss per sample."""
    v = w.apart(v)
    h = v.name
    if plain:
        w.line(f"{h}.register_hook(lambda g: {w.pick(HOOKS)})")
    if v.samples:
        forms = OWNED[:2] if plain else OWNED  # in products, what is computed from weights may be taken for a weight
        return w.pick(forms).format(h=h, s=v.samples, f=w.pick(ELEMENT).format(h=h))
    if not v.free:
        return w.pick(["{}", "{}.square()", "{}.tanh()"]).format(h)
    if plain or w.chance(0.55):
        dims = f"({', '.join(str(d) for d in v.free)},)" if len(v.free) > 1 else str(v.free[0])
        return w.pick(PLAIN).format(h=h, d=dims)
    if v.at:
        h = f"{h}.movedim({v.at}, 0)"
    if v.ndim != 2:
        h = f"{h}.flatten(1)"
    left_out = (["{x}", "{i}"] if w.anchor else []) + ([".t()"] if w.separate else [])
    form = w.pick([f for f in FLAT if not any(part in f for part in left_out)])
    f = w.named("h", h) if h != v.name else h
    x = w.named("x", f"data(*{f}.shape)") if "{x}" in form else ""
    i = w.named("i", f"ids(B, high={f}.shape[1])") if "{i}" in form else ""
    a = w.weight(f"{f}.shape[1]") if "{v}" in form else ""
    return form.format(f=f, x=x, i=i, v=a)


def end(w: Writer) -> None:
    """Write `losses`."""
    known = [v for v in w.values if v.tensor.requires_grad and v.known]
    if not known:
        raise CannotBeWritten("nothing to end with")
    asked_for_data = any(".requires_grad_()" in line for line in w.lines)  # no hook runs on what is computed from it
    hooked = not w.mix and w.chance(0.2) and not asked_for_data
    name = w.named("l", _one(w, known[-1], plain=hooked))
    if w.chance(0.3) and not hooked:
        second = w.named("l", _one(w, w.pick(known)))
        form = w.pick(
            ["{a} + 0.5 * {b}", "{a} * {b}", "torch.maximum({a}, {b})", "torch.stack([{a}, {b}]).sum(0)", "{a} - {b}"]
        )
        name = w.named("l", form.format(a=name, b=second))
    if not w.separate and w.chance(0.1 + w.mix / 2) and not hooked:
        name = w.named("l", w.pick(AFTER).format(l=name))
    w.line(f"losses = {name} + anchor({w.anchor})" if w.anchor else f"losses = {name}")
    losses = w.env["losses"]
    if losses.ndim != 1 or not losses.requires_grad:
        raise CannotBeWritten("no losses")
