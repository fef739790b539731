"""Ops without parameters: views, indexing, reductions, elementwise and in-place ops, complex numbers."""

from __future__ import annotations

from .values import Value
from .writer import CannotBeWritten, Writer, op

ELEMENTWISE = (
    "torch.tanh({}) torch.sin({}) F.gelu({}) F.silu({}) torch.relu({}) {}.abs() F.softplus({}) {}.square() F.elu({}) "
    "F.leaky_relu({}) {}.clamp(-1,1) {}.clone() {}*0.5 {}+1 -{} {}.sigmoid() {}*{} {}.exp().log1p() F.dropout({},0.5) "
    "{}.contiguous() {}.double().to(torch.get_default_dtype()) {}.neg() F.hardtanh({}) {}.sign()*{} "
    "{}.masked_fill({}>0,0.5) "
    "torch.where({}>0,{},0.3*{}) {}.nan_to_num() {}.to(torch.get_default_dtype()) F.threshold({},0.1,0.2) {}.pow(3)"
).split()


@op
def elementwise(w: Writer) -> Value:
    v = w.take(anywhere=True)
    text = w.pick(ELEMENTWISE)
    return w.keep(v, text.format(*[v.name] * 3))


@op
def permute(w: Writer) -> Value:
    v = w.take(1)
    order = list(range(v.ndim))
    w.random.shuffle(order)
    return w.put(f"{v.name}.permute({', '.join(map(str, order))})", order.index(v.at), v.outer, v.inner)


@op
def fold(w: Writer) -> Value:
    """The samples' dim and a neighbour become one, or come apart again."""
    v = w.take(1)
    if v.outer * v.inner != 1:
        return w.apart(v)
    if v.at > 0 and w.chance():
        return w.put(f"{v.name}.flatten({v.at - 1}, {v.at})", v.at - 1, v.shape[v.at - 1])
    if v.at + 1 < v.ndim:
        return w.put(f"{v.name}.flatten({v.at}, {v.at + 1})", v.at, 1, v.shape[v.at + 1])
    raise CannotBeWritten


@op
def reshape_free(w: Writer) -> Value:
    v = w.take(1)
    d = w.pick(v.free)
    kind = w.whole(0, 4)
    if kind == 0:
        return w.put(f"{v.name}.unsqueeze({d})", v.at + (d <= v.at), v.outer, v.inner)
    if kind == 1 and v.shape[d] == 1:
        return w.put(f"{v.name}.squeeze({d})", v.at - (d < v.at), v.outer, v.inner)
    if kind == 2 and v.shape[d] == 4:
        return w.put(f"{v.name}.unflatten({d}, (2, 2))", v.at + (d < v.at), v.outer, v.inner)
    if kind == 3 and d + 1 in v.free:
        return w.put(f"{v.name}.flatten({d}, {d + 1})", v.at - (d < v.at), v.outer, v.inner)
    return w.put(f"{v.name}.transpose({d}, {v.at})", d, v.outer, v.inner)


@op
def expand(w: Writer) -> Value:
    v = w.take()
    d, n = w.whole(0, v.ndim), w.whole(2, 3)
    sizes = ["-1"] * v.ndim
    sizes.insert(d, str(n))
    return w.put(f"{v.name}.unsqueeze({d}).expand({', '.join(sizes)})", v.at + (d <= v.at), v.outer, v.inner)


@op
def strided(w: Writer) -> Value:
    """Parts of free dims, and odd memory."""
    v = w.take(1)
    d = w.pick(v.free)
    before = ":, " * d
    kind = w.whole(0, 7)
    at = v.at - (d < v.at)
    if kind == 0:
        return w.keep(v, f"{v.name}[{before}::2]")
    if kind == 1:
        return w.put(f"{v.name}.select({d}, 0)", at, v.outer, v.inner)
    if kind == 2:
        return w.keep(v, f"{v.name}.narrow({d}, 0, 1)")
    if kind == 3 and v.ndim == 4:
        return w.keep(v, f"{v.name}.contiguous(memory_format=torch.channels_last)")
    if kind == 4 and v.ndim > 1:
        return w.keep(v, f"{v.name}.transpose({d}, {v.at}).contiguous().transpose({d}, {v.at})")
    if kind == 5:
        return w.keep(v, f"{v.name}[{before}1:]")
    if kind == 6:
        return w.keep(v, f"torch.diff({v.name}, dim={d})")
    return w.keep(v, f"{v.name}[..., None].expand(*{v.name}.shape, 2)[..., 0]")


@op
def reduce(w: Writer) -> Value:
    v = w.take(1, anywhere=True)
    d = w.free(v)
    keep = w.chance() or bool(v.samples)
    form = w.pick(
        [
            "{}.sum({}, {})", "{}.mean({}, {})", "{}.amax({}, {})", "{}.logsumexp({}, {})", "{}.var({}, keepdim={})",
            "torch.linalg.vector_norm({}, dim={}, keepdim={})", "{}.max({}, {}).values", "{}.prod({}, {})",
            "{}.contiguous().median({}, {}).values",
            "{}.norm(dim={}, keepdim={})", "{}.amin({}, {})", "{}.std({}, keepdim={})",
            "torch.linalg.vector_norm({}, 1, {}, {})", "{}.kthvalue(1, {}, {}).values", "{}.nansum({}, {})",
        ]
    )  # fmt: skip
    at = v.at if keep else v.at - (d < v.at)
    return w.put(form.format(v.name, d, keep), at if d != v.at else -1, v.outer, v.inner)


@op
def along(w: Writer) -> Value:
    v = w.take(1, anywhere=True)
    form = w.pick(
        [
            "{}.softmax({})", "{}.log_softmax({})", "{}.cumsum({})", "{}.sort({}).values", "{}.cummax({}).values",
            "{}.flip({})", "{}.roll(1, {})", "{}.topk(1, {}).values", "F.glu({}, {})", "{}.cumprod({})",
            "torch.fft.rfft({}, dim={}).abs()", "torch.cat({}.unbind({}), -1)", "F.normalize({}, dim={})",
            "{}.logcumsumexp({})", "{}.repeat_interleave(2, {})", "torch.fft.fft({}, dim={}).real",
            "{}.argsort({}) * 0.1",
            "{0}.index_select({1}, torch.zeros(2, dtype=torch.long))", "{0}.gather({1}, {0}.argsort({1}))",
            "torch.cat([{0}, {0}.tanh()], {1})", "torch.cat({0}.chunk(2, {1})[::-1], {1})",
            "{0}.scatter({1}, {0}.argsort({1}), {0})", "{0}.scatter_add({1}, {0}.argsort({1}), {0})",
            "torch.stack({0}.split(1, {1})).sum(0)",
            "{0}.index_add({1}, torch.zeros({0}.shape[{1}], dtype=torch.long), {0})",
            "{0}.unfold({1}, 2, 1).mean(-1)", "{0} - {0}.mean({1}, keepdim=True)", "{0}.renorm(2, {1}, 0.7)",
            "torch.cumulative_trapezoid({0}, dim={1})", "torch.trapezoid({0}, dim={1}).unsqueeze({1}) + {0}",
            "{0}.index_fill({1}, torch.zeros(1, dtype=torch.long), 0.5)", "{0}.swapaxes({1}, {1})",
            "torch.take_along_dim({0}, {0}.argsort({1}), {1})", "torch.gradient({0}, dim={1})[0]",
        ]
    )  # fmt: skip
    d = w.free(v)
    if w.separate and "renorm" in form:
        raise CannotBeWritten  # whose norms are those of all samples together
    return w.keep(v, form.format(v.name, d))


@op
def pad(w: Writer) -> Value:
    v = w.last(w.take(1, anywhere=True))
    mode = w.pick(["constant", "constant", "reflect", "replicate", "circular"])
    if mode == "constant":
        return w.keep(v, f"F.pad({v.name}, (1, {w.whole(0, 1)}), value=0.5)")
    v = w.images(v, 1)
    return w.keep(v, f'F.pad({v.name}, (1, 1), mode="{mode}")')


@op
def pool(w: Writer) -> Value:
    v = w.images(w.take(1, anywhere=True), w.whole(1, 2))
    rank = v.ndim - 2
    form = w.pick(
        [
            "F.max_pool{r}d({h}, 2, 1)", "F.avg_pool{r}d({h}, 2, 1)", "F.adaptive_avg_pool{r}d({h}, 1)",
            "F.adaptive_max_pool{r}d({h}, 1)", "F.interpolate({h}, scale_factor=2)", "F.lp_pool{r}d({h}, 2, 2, 1)",
            "F.unfold({h}, 2) if {h}.ndim == 4 else {h}", "F.interpolate({h}, size=3, mode='nearest')",
            "F.pixel_shuffle({h}, 2)", "F.interpolate({h}, size=2, mode='linear')", "F.channel_shuffle({h}, 1)",
        ]
    )  # fmt: skip
    return w.keep(v, form.format(h=v.name, r=rank))


@op
def together(w: Writer) -> Value:
    """Two values become one."""
    v = w.take(anywhere=True)
    u = w.pick(w.alike(v))
    kind = w.whole(0, 7)
    if kind <= 3:
        return w.keep(v, f"{v.name} {['+', '*', '-', '+'][kind]} {u.name}")
    if kind == 4 and v.at >= 0:
        return w.put(f"torch.stack([{v.name}, {u.name}])", v.at + 1, v.outer, v.inner)
    if kind == 5 and v.free:
        return w.keep(v, f"torch.cat([{v.name}, {u.name}], {w.pick(v.free)})")
    if kind == 6 and v.at == 0 and v.ndim == 3:
        return w.put(f"torch.bmm({v.name}, {u.name}.mT)", 0, v.outer, v.inner)
    return w.keep(v, f"torch.maximum({v.name}, {u.name})")


@op
def in_place(w: Writer) -> Value:
    v = w.take(anywhere=True)
    u = w.keep(v, f"{v.name}.clone()")
    form = w.pick(
        [
            "{h}.mul_({w})", "{h}.add_({w})", "{h}.tanh_()", "{h}[..., :1] = 0.5", "{h}[..., :1] *= {w}",
            "F.relu_({h})",
            "{h}.masked_fill_({h} > 0, 0.3)", "{h}[..., 0].zero_()", "{h}.copy_({h}.sin() * {w})", "{h}[:1] = {w}",
            "{h}.select(-1, 0).add_({w})", "{h}.add_({v}, alpha=2)", "{h}.transpose(0, -1).mul_({w})",
            "{h}.sub_({v}.sin())",
            "{h}.view(-1)[::2].mul_({w})", "{h}.clamp_(-1, 1)", "{h}.div_({v}.square() + 1)", "{h}.fill_diagonal_(0.2)",
            "{h}.lerp_({v}.sin(), 0.3)", "{h}.index_fill_(-1, torch.zeros(1, dtype=torch.long), 0.1)",
            "{h}.detach_().mul_({w})", "{h}.zero_().add_({w})", "{h}[..., -1:].copy_({v}[..., :1])", "{h}.squeeze_()",
        ]
    )  # fmt: skip
    w.line(form.format(h=u.name, v=v.name, w=w.weight() if "{w}" in form else ""))
    w.env[u.name].sum()
    return w.keep(u, f"{u.name} * 1")


@op
def penalty(w: Writer) -> Value:
    """A gradient with respect to an earlier value, as a value."""
    v = w.take(anywhere=True)
    earlier = [u for u in w.values if u.tensor.requires_grad and u.known and u is not v]
    if not earlier:
        raise CannotBeWritten
    u = w.pick(earlier)
    form = w.pick(["{}.square().sum()", "{}.sum()", "{}.tanh().sum()"]).format(v.name)
    return w.keep(u, f"torch.autograd.grad({form}, {u.name}, create_graph=True)[0]")


@op
def complex_numbers(w: Writer) -> Value:
    v = w.last(w.take(1, anywhere=True))
    p = w.named("w", f"complex_weight({v.name}.shape[-1], {w.size()})")
    w.leaves.append(p)
    c = f"(torch.complex({v.name}, {v.name}.sin()) @ {p})"
    form = w.pick(
        [
            "{}.real", "{}.imag", "{}.abs()", "{}.conj().imag", "torch.view_as_real({}).sum(-1)", "{}.angle()",
            "({0} * {0}.conj()).real", "torch.view_as_real({}.conj().resolve_conj())[..., 0]",
            "torch.fft.ifft({}, dim=-1).real", "torch.polar({0}.abs(), {0}.angle()).real", "({} * 1j).imag",
            "{}.mH.mH.real",
            "({0}.conj() * 2).sum(-1, keepdim=True).real", "torch.linalg.vector_norm({}, dim=-1, keepdim=True)",
        ]
    )  # fmt: skip
    return w.keep(v, form.format(c))


@op
def by_mask(w: Writer) -> Value:
    """Masks and places that are data of the samples."""
    v = w.apart(w.take(1))
    if v.at != 0 or v.ndim != 2:
        raise CannotBeWritten
    i = w.named("i", f"ids(B, 2, high={v.name}.shape[1])")
    form = w.pick(
        [
            "{h}.gather(1, {i})", "{h}.scatter(1, {i}[:, :1], 0.5)", "{h}[torch.arange(B)[:, None], {i}]",
            "{h} * {i}[:, :1]",
            "{h}.scatter_add(1, {i}[:, :1], {h}[:, :1])", "torch.where({i}[:, :1] > 0, {h}, {h}.sin())",
            "{h}.masked_fill({i}[:, 1:] > 0, 0.1)", "F.one_hot({i}[:, 0], {h}.shape[1]) * {h}",
            "{h}[{i}[:, 0] % max(B, 1)]",
            "{h}.index_put((torch.arange(B), {i}[:, 0]), torch.tensor(0.5))", "{h}.take_along_dim({i}, 1)",
            "{h}.index_put((torch.arange(B), {i}[:, 0]), {h}[:, 0], accumulate=True)",
            "torch.gather({h}, 1, {i}.sort(1).values)",
        ]
    )  # fmt: skip
    return w.put(form.format(h=v.name, i=i), 0)
