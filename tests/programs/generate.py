"""A random program from a seed."""

from __future__ import annotations

from collections.abc import Collection

import torch

from tests.modes import default_dtype

from . import arrangements, layers, meetings, modules, moves  # noqa: F401  (their ops register themselves)
from .endings import end
from .script import CHECKS, Run, Script
from .writer import MIXING, OPS, Writer

LONGEST = 12
COMMON = ["linear", "broadcast", "elementwise"]
ARRANGING = {name for name, fn in OPS.items() if fn.__module__ == arrangements.__name__}
ENTRIES = {"new_data", "embedding", "by_mask", "bag"}


def enter(w: Writer) -> None:
    """All the data there are, in one statement, and batch first."""
    sizes = [str(w.size()) for _ in range(w.whole(0, 3))]
    if w.chance(0.2):
        i, x = w.named("i", f"ids({', '.join(['B', *sizes[:2]])}, high=3)"), w.named("x", "data(B)")
        more = w.pick(["", "", ", padding_idx=0", ", scale_grad_by_freq=True"])
        own = f"{x}.view({', '.join(['B', *['1'] * (len(sizes[:2]) + 1)])})"
        v = w.put(f"F.embedding({i}, {w.leaf('3', '2')}{more}) * {own}", 0)
    else:
        x = w.named("x", f"data({', '.join(['B', *sizes])})")
        v = w.put(f"{x} * {w.leaf(*[w.pick([n, '1']) for n in sizes])}", 0)
    w.anchor = v.name


def generate(seed: int, apart: bool = False, without: Collection[str] = ()) -> Script | None:
    """A program, or None if nothing came of this seed; on request, samples never meet, or some ops are left out."""
    with default_dtype(torch.float64):
        torch.default_generator.manual_seed(seed)
        w = Writer(seed)
        w.env["flag"] = True
        w.mix, w.separate = (0.0, True) if apart else (w.mix, False)
        anchored = w.chance(0.4)
        left_out = {*without, *([] if w.mix else MIXING), *(ENTRIES if anchored else [])}
        names = [name for name in OPS if name not in left_out]
        # Few kinds of ops in each program: they meet more often than if all were equally likely.
        chosen = w.random.sample(names, min(len(names), w.whole(3, 12))) + w.random.sample(COMMON, 1)
        scattered = w.chance(0.3)  # samples that lie along one dim no more, and what is then done with them
        if scattered:
            chosen = w.random.sample(sorted(ARRANGING - left_out), 3) + chosen[-4:]
        if not (anchored and w.attempt(enter)):
            w.attempt(OPS["new_data"])
        for _ in range(w.pick([1, 1, 2, 2, 3, 3, 4, 5, 6, 8, LONGEST]) + 2 * scattered):
            w.step(chosen)
        if not any(v.tensor.requires_grad for v in w.values):
            w.attempt(OPS[w.pick(COMMON[:2])])
        if not any(w.attempt(end) for _ in range(6)):
            return None
    return Script(tuple(w.lines), _asked(w), _runs(w, seed), _checks(w))


def _asked(w: Writer) -> tuple[str, ...]:
    """Which parameters are asked for: most of them."""
    if w.chance(0.7):
        return tuple(w.leaves)
    return tuple(p for p in w.leaves if w.chance(0.6)) or tuple(w.leaves[:1])


def _runs(w: Writer, seed: int) -> tuple[Run, ...]:
    dtype = "float64" if w.chance(0.85) else w.pick(["float32", "float32", "float32", "bfloat16"])
    runs = [Run(seed, True, dtype)]
    changing = any("flag" in line for line in w.lines)
    if w.chance(0.7 if changing else 0.25):
        runs.append(Run(seed + 1, not changing, w.pick([dtype, dtype, "float64"])))
    return tuple(runs)


def _checks(w: Writer) -> tuple[str, ...]:
    others = [name for name in CHECKS if name not in ("grad", "independent", "alarm", "claims", "spoilt", "traced")]
    return ("grad", w.pick(others), *(["independent"] if w.anchor else []))
