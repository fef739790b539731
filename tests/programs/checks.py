"""What is asked of every program. A printed program carries the text of what it failed."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import persample as ps
from persample.compiled.compilers import traced_graph
from persample.kernels.certificates import traced

from .vocabulary import BAD, NOISE, POKE, REPLAY

Make = Callable[[], tuple[Tensor, list[Tensor]]]


def one_row(loss: Tensor, params: list[Tensor]) -> list[Tensor | None]:
    """One loss's gradients. Reentrant checkpoints know a plain backward only, or hide the weights that they use."""
    try:
        found = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
        if all(g is not None for g in found):
            return list(found)
    except RuntimeError as error:
        if "When use_reentrant=True" not in str(error):
            raise
    for p in params:
        p.grad = None
    loss.backward(retain_graph=True)
    return [p.grad for p in params]


def rows(losses: Tensor, params: list[Tensor]) -> list[Tensor]:
    """The definition: one backward per loss."""
    found = [one_row(loss, params) for loss in losses.unbind()]
    dense = [[torch.zeros_like(p) if g is None else g for p, g in zip(params, row, strict=True)] for row in found]
    return [torch.stack(stack) for stack in zip(*dense, strict=True)] or [p.new_zeros((0, *p.shape)) for p in params]


def same(what: str, got: Tensor, want: Tensor, slack: Tensor | float = 0.0) -> None:
    """Raise unless every row is within rounding of its own largest element, or within the slack."""
    assert got.shape == want.shape, f"{what} has shape {tuple(got.shape)}, not {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{what} has dtype {got.dtype}, not {want.dtype}"
    if got.numel():
        error = torch.where(got.isnan() & want.isnan(), 0, (got - want).abs()).unsqueeze(-1).flatten(1).amax(1).double()
        allowed = 1e-7 * want.abs().nan_to_num(0.0).unsqueeze(-1).flatten(1).amax(1).double() + 1e-12 + slack
        if not bool((error <= allowed.nan_to_num(0.0)).all()):
            raise AssertionError(
                f"{what} differs by {error.tolist()}, and {allowed.tolist()} is allowed:\n{got}\nnot\n{want}"
            )


def rounding(make: Make, want: list[Tensor]) -> list[Tensor]:
    """What rounding may do to each row: how far the definition moves with the dtype and the last digits."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        moved = [rows(*make())] if dtype != torch.float64 else []
        for size in (1e-14, -3e-14):
            NOISE.append(size)
            moved.append(rows(*make()))
            NOISE.clear()
    finally:
        NOISE.clear()
        torch.set_default_dtype(dtype)
    least = torch.finfo(dtype).eps / 8 if dtype != torch.float64 else 0.0  # terms of about 1 may have cancelled
    worst = torch.full((len(want[0]),), least, dtype=torch.float64)
    for other in moved:
        for g, e in zip(want, other, strict=True):
            if g.numel():
                size = (g.to(e.dtype) - e).abs() + torch.finfo(dtype).eps * e.abs()
                worst = torch.maximum(worst, size.unsqueeze(-1).flatten(1).amax(1))
    return [64 * worst] * len(want)


def flat_norms(want: list[Tensor]) -> Tensor:
    """The norm of every sample's gradient."""
    wide = [g.abs().unsqueeze(-1).flatten(1).to(torch.promote_types(g.abs().dtype, torch.float32)) for g in want]
    return torch.cat(wide, 1).norm(dim=1)


def check_grad(losses: Tensor, params: list[Tensor], want: list[Tensor], slack: list[Tensor], make: Make) -> None:
    """Every row of every parameter."""
    got = ps.grad(losses, params, retain_graph=True)
    for k, (g, e) in enumerate(zip(got, want, strict=True)):
        same(f"ps.grad of parameter {k}", g, e, slack[k] if slack else 0.0)


def check_part(losses: Tensor, params: list[Tensor], want: list[Tensor], slack: list[Tensor], make: Make) -> None:
    """One parameter alone."""
    for k in range(0, len(params), 2):
        same(
            f"ps.grad of parameter {k} alone",
            ps.grad(losses, [params[k]], retain_graph=True)[0],
            want[k],
            slack[k] if slack else 0.0,
        )


def check_fresh(losses: Tensor, params: list[Tensor], want: list[Tensor], slack: list[Tensor], make: Make) -> None:
    """A graph that no backward has seen, and that is not kept."""
    others, leaves = make()
    for k, (g, e) in enumerate(zip(ps.grad(others, leaves), want, strict=True)):
        same(f"ps.grad of parameter {k} of a fresh graph", g, e, slack[k] if slack else 0.0)


def check_memory(losses: Tensor, params: list[Tensor], want: list[Tensor], slack: list[Tensor], make: Make) -> None:
    """Norms of a fresh graph in as little memory as one sample needs, or a little more."""
    others, leaves = make()
    size = sum(p.numel() for p in params)
    got = ps.norms(others, leaves, max_memory=20 * size + 100)
    same("ps.norms with max_memory", got, flat_norms(want).to(got.dtype), 10 * size * slack[0] if slack else 1e-9)


def check_norms(losses: Tensor, params: list[Tensor], want: list[Tensor], slack: list[Tensor], make: Make) -> None:
    """Norms, which are computed without the rows where that is faster."""
    size = sum(p.numel() for p in params) ** 0.5
    got = ps.norms(losses, params, retain_graph=True)
    same("ps.norms", got, flat_norms(want).to(got.dtype), 10 * size * slack[0] if slack else 1e-9)


def check_clipped(losses: Tensor, params: list[Tensor], want: list[Tensor], slack: list[Tensor], make: Make) -> None:
    """A clipped sum that clips about half of the samples."""
    norms = flat_norms(want)
    bound = float(norms.median()) + 1e-3 if len(norms) else 1.0
    weights = (bound / norms).clamp(max=1)
    got = ps.clipped_sum(losses, params, max_norm=bound, retain_graph=True)
    for k, (g, e) in enumerate(zip(got, want, strict=True)):
        total = torch.tensordot(weights.to(e.dtype), e, 1)
        same(
            f"ps.clipped_sum of parameter {k}",
            g.flatten()[None],
            total.flatten()[None],
            10 * slack[k].sum() if slack else 1e-8,
        )


def check_backward(losses: Tensor, params: list[Tensor], want: list[Tensor], slack: list[Tensor], make: Make) -> None:
    """A clipped sum that is left in `.grad`."""
    for p in params:
        p.grad = None
    ps.backward(losses, params, ps.ClippedSum(1.0), retain_graph=True)
    weights = (1 / flat_norms(want)).clamp(max=1)
    for k, (p, e) in enumerate(zip(params, want, strict=True)):
        got = torch.zeros_like(p) if p.grad is None else p.grad
        total = torch.tensordot(weights.to(e.dtype), e, 1)
        same(
            f"ps.backward of parameter {k}",
            got.flatten()[None],
            total.flatten()[None],
            10 * slack[k].sum() if slack else 1e-8,
        )


def check_reduce(losses: Tensor, params: list[Tensor], want: list[Tensor], slack: list[Tensor], make: Make) -> None:
    """Several reductions of one backward."""
    coefficients = torch.linspace(-1, 1, len(losses), dtype=losses.dtype)
    stack, norms, total, gram = ps.reduce(
        losses, params, ps.Stack(), ps.Norms("parameter"), ps.WeightedSum(coefficients), ps.Gram(), retain_graph=True
    )
    loose = 10 * slack[0].sum() if slack else 1e-8
    flat = torch.cat(
        [torch.view_as_real(e).flatten(1) if e.is_complex() else e.unsqueeze(-1).flatten(1) for e in want], 1
    )
    for k, e in enumerate(want):
        same(f"ps.Stack of parameter {k}", stack[k], e, slack[k] if slack else 0.0)
        same(
            f"ps.Norms of parameter {k}",
            norms[k],
            flat_norms([e]).to(norms[k].dtype),
            (e[0].numel() if len(e) else 1) * loose,
        )
        summed = torch.tensordot(coefficients.to(e.dtype), e, 1)
        same(f"ps.WeightedSum of parameter {k}", total[k].flatten()[None], summed.flatten()[None], loose)
    same("ps.Gram", gram, (flat @ flat.t()).to(gram.dtype), loose * (1 + float(flat.abs().sum())))


def check_several(losses: Tensor, params: list[Tensor], want: list[Tensor], slack: list[Tensor], make: Make) -> None:
    """Two losses of each sample, in one portion and in two."""
    pairs = torch.stack([losses, -2 * losses], 1)
    both = rows(pairs.flatten(), params)
    loose = [2 * s.repeat_interleave(2) for s in slack]
    size = sum(p.numel() for p in params) ** 0.5
    for memory in (None, 1):
        *stack, norms = [
            *ps.jacobian(pairs, params, retain_graph=True, max_memory=memory),
            ps.norms(pairs, params, retain_graph=True, max_memory=memory),
        ]
        for k, (g, e) in enumerate(zip(stack, both, strict=True)):
            same(f"ps.jacobian of parameter {k}", g.flatten(0, 1), e, loose[k] if slack else 0.0)
        exact = flat_norms(both).to(norms.dtype)
        same("ps.norms of pairs", norms.flatten(), exact, 10 * size * loose[0] if slack else 1e-9)


def check_claims(losses: Tensor, params: list[Tensor], want: list[Tensor], slack: list[Tensor], make: Make) -> None:
    """Each loss alone reaches only those elements of cotangents that the plan says are its own sample's."""
    from persample.graph.execute.plan import plan
    from persample.graph.read.roots import Roots
    from tests.graph.claims import refuted_cotangents

    refuted = refuted_cotangents(plan(Roots.of_losses(losses), params), losses, floor=1e-12)
    assert not refuted, "\n".join(refuted)


def check_spoilt(losses: Tensor, params: list[Tensor], want: list[Tensor], slack: list[Tensor], make: Make) -> None:
    """With NaN for all data of one sample, those whose losses are still finite get the gradients that they got."""
    bad = len(losses) // 2
    BAD.update(sample=bad, value=torch.nan)
    try:
        spoilt, leaves = make()
    finally:
        BAD.clear()
    with warnings.catch_warnings(record=True) as slow:
        warnings.simplefilter("always")
        got = ps.grad(spoilt, leaves)
    others = spoilt.isfinite() & (torch.arange(len(losses)) != bad)
    if any(issubclass(w.category, ps.PerformanceWarning) for w in slow):
        return  # one op at a time, 0 · NaN is NaN
    for k, (g, e) in enumerate(zip(got, want, strict=True)):
        same(f"ps.grad of parameter {k} beside a sample of NaN", g[others], e[others])


def affected(
    losses: Tensor, want: list[Tensor], make: Make, places: tuple[float, ...] = (0.2, 0.8)
) -> dict[str, list[int]]:
    """The losses that change, in value or gradient, when one element of the data does: for some elements."""
    found = {}
    for tensor, place in [(t, p) for t in (1, 2, 3) for p in places]:
        POKE.update(tensor=tensor, place=place, seen=0)
        try:
            others, params = make()
            if POKE["seen"] < tensor:
                break
            moved = [others.detach(), *rows(others, params)]
        finally:
            POKE.clear()
        pairs = [(a, b) for a, b in zip([losses.detach(), *want], moved, strict=True) if a.numel()]
        changed = [
            any(((a - b)[i].abs() > 1e-11 + 1e-9 * a[i].abs().amax()).any() for a, b in pairs)
            for i in range(len(losses))
        ]
        found[f"element {place} of data {tensor}"] = [i for i, yes in enumerate(changed) if yes]
    return found


def check_independent(
    losses: Tensor, params: list[Tensor], want: list[Tensor], slack: list[Tensor], make: Make
) -> None:
    """Samples that pass as independent are."""
    got = ps.norms(losses, params, retain_graph=True, independent=True)
    same("ps.norms with independent=True", got, flat_norms(want).to(got.dtype), 1e-9)
    meet = {place: who for place, who in affected(losses, want, make).items() if len(who) > 1}
    assert not meet, f"independent=True raised nothing, but several losses depend on the same data: {meet}"


def check_alarm(losses: Tensor, params: list[Tensor], want: list[Tensor], slack: list[Tensor], make: Make) -> None:
    """Samples that are said to interact do."""
    try:
        ps.norms(losses, params, retain_graph=True, independent=True)
        return
    except ps.InteractionError as error:
        told = str(error)
    meet = any(len(who) > 1 for who in affected(losses, want, make, tuple(k / 16 for k in range(16))).values())
    assert meet, f"no loss is seen to depend on another's data, but there was an InteractionError: {told}"


class Recorded(nn.Module):
    """A program as a module that is called with its data."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.make = make
        REPLAY["notes"] = notes = {"weights": [], "modules": [], "data": []}
        try:
            make()
        finally:
            REPLAY.clear()
        self.data = notes["data"]
        self.count = len(notes["weights"])
        self.parts = nn.ModuleList(notes["modules"])
        for k, w in enumerate(notes["weights"]):
            setattr(self, f"w{k}", nn.Parameter(w.detach()))

    def forward(self, *data: Tensor) -> Tensor:
        weights = (getattr(self, f"w{k}") for k in range(self.count))
        REPLAY.update(weights=weights, modules=iter(self.parts), data=iter(data))
        try:
            return self.make()[0]
        finally:
            REPLAY.clear()


def check_call(losses: Tensor, params: list[Tensor], want: list[Tensor], slack: list[Tensor], make: Make) -> None:
    """The second way in, by an ordinary backward."""
    module = Recorded(make)
    if not len(losses) or not module.data or any(len(x) != len(losses) for x in module.data):
        return
    try:
        rows_of_module = rows(module(*module.data), list(module.parameters()))
        module(*module.data).sum().backward()
        module.zero_grad()
    except Exception:  # PyTorch's own
        return
    ps.call_for_per_sample_grads(module)(*module.data).sum().backward()
    for (name, p), e in zip(module.named_parameters(), rows_of_module, strict=True):
        got = getattr(p, "grad_sample", None)
        same(f"grad_sample of {name}", torch.zeros_like(e) if got is None else got, e, 1e-9)
    meet = {place: who for place, who in affected(losses, want, make).items() if len(who) > 1}
    assert not meet, f"the gate let pass that several losses depend on the same data: {meet}"


def check_traced(losses: Tensor, params: list[Tensor], want: list[Tensor], slack: list[Tensor], make: Make) -> None:
    """The graph of compiled steps, traced on some numbers and run on others."""
    module = Recorded(make)
    if len(losses) < 2 or not module.data:
        return
    weights, count = dict(module.named_parameters()), len(module.data)

    def step(*given: Tensor) -> list[Tensor]:
        leaves = {name: t.detach().requires_grad_() for name, t in zip(weights, given[count:], strict=True)}
        with torch.enable_grad(), traced() as certificates:
            found = torch.func.functional_call(module, leaves, given[:count])
            stacks, norms = ps.reduce(found, leaves, ps.Stack(), ps.Norms())
        return [norms, *stacks.values(), *[c.holds.all() for c in certificates]]

    tensors = [*module.data, *[w.detach() for w in weights.values()]]
    try:
        rows(module(*module.data), list(weights.values()))
        graph = traced_graph(step, tensors)
    except Exception:  # PyTorch's own, or said to be impossible: the eager engine answers
        return
    others = [t * (1 + 0.1 * torch.cos(t)) if t.is_floating_point() else t for t in tensors]
    fresh_weights = [t.requires_grad_() for t in others[count:]]
    torch.default_generator.manual_seed(torch.initial_seed())
    try:
        with torch.no_grad():  # as compiled steps run it
            norms, *stacks = graph(*others)
    except RuntimeError as error:
        if "view size is not compatible" in str(error):  # PyTorch foretold other strides: the eager engine answers
            return
        raise
    expected = torch.func.functional_call(module, dict(zip(weights, fresh_weights, strict=True)), tuple(others[:count]))
    every = rows(expected, fresh_weights)
    if not all(bool(t) for t in stacks[len(every) :]) or not all(bool(e.isfinite().all()) for e in every):
        return
    for name, got, e in zip(weights, stacks, every, strict=False):
        same(f"traced gradient of {name}", got, e, 1e-9 if e.dtype == torch.float64 else 1e-2)
    exact = flat_norms(every).to(norms)
    tolerance = 1e-6 if norms.dtype == torch.float64 else 1e-2  # of rows that half precision has rounded
    same("traced norms", norms.unsqueeze(1), exact.unsqueeze(1), tolerance * (1 + exact.double()))
