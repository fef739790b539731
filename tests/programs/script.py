"""A program as text: run, compared with the definition, and printed as a script of its own."""

from __future__ import annotations

import ast
import inspect
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import persample as ps
from tests.modes import default_dtype

from . import checks, vocabulary
from .writer import NAMES

CHECKS: dict[str, Callable[..., None]] = {
    name.removeprefix("check_"): fn for name, fn in vars(checks).items() if name.startswith("check_")
}


@dataclass(frozen=True)
class Run:
    """One run of a program: where its random numbers begin, its flag, its dtype."""

    seed: int
    flag: bool = True
    dtype: str = "float64"


@dataclass(frozen=True)
class Script:
    """Statements that compute `losses`, the parameters asked for, the runs and what is checked in each."""

    lines: tuple[str, ...]
    params: tuple[str, ...]
    runs: tuple[Run, ...]
    checks: tuple[str, ...]

    @property
    def program(self) -> str:
        """The program as a function."""
        listed = ", ".join(f"*{p}.parameters()" if p[0] == "m" else p for p in self.params)
        body = [*self.lines, f"return losses, [{listed}]"]
        return "def program(flag):\n" + "".join(f"    {line}\n" for text in body for line in text.split("\n"))

    @property
    def text(self) -> str:
        """A script of its own that fails as the program did."""
        words = {node.id for node in ast.walk(ast.parse(self.program)) if isinstance(node, ast.Name)}
        words |= {"draw", "poked", "replayed"}
        helpers = [thing for name, thing in vars(vocabulary).items() if name in words and callable(thing)]
        (check,) = self.checks
        used = [
            checks.one_row,
            checks.rows,
            checks.same,
            checks.rounding,
            checks.flat_norms,
            checks.affected,
            checks.Recorded,
        ]
        needed = "\n".join(inspect.getsource(CHECKS[check]) for _ in (0,))
        parts = [fn for fn in used if fn.__name__ in needed or fn in (checks.one_row, checks.rows, checks.same)]
        narrow = any(run.dtype != "float64" for run in self.runs)
        if narrow:
            parts.append(checks.rounding)
        sources = "\n\n".join(inspect.getsource(thing) for thing in dict.fromkeys([*helpers, *parts, CHECKS[check]]))
        runs = ", ".join(f"({run.seed}, {run.flag}, torch.{run.dtype})" for run in self.runs)
        slack = "rounding(make, want) if dtype != torch.float64 else []" if narrow else "[]"
        return (
            f"{IMPORTS}\n\nPOKE, BAD, REPLAY, NOISE = {{}}, {{}}, {{}}, []\n\n\n{sources}\n\n{self.program}\n\n"
            f"for seed, flag, dtype in [{runs}]:\n"
            f"    torch.set_default_dtype(dtype)\n\n"
            f"    def make():\n        torch.manual_seed(seed)\n        losses, params = program(flag)\n"
            f"        return losses, [p for p in params if p.requires_grad]\n\n"
            f"    losses, params = make()\n    want = rows(losses, params)\n"
            f"    check_{check}(losses, params, want, {slack}, make)\n"
        )


IMPORTS = """from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import persample as ps"""


class Finding(Exception):
    """Something is wrong: in which check, and how."""

    def __init__(self, check: str, kind: str, detail: str) -> None:
        super().__init__(check, kind, detail)
        self.check, self.kind, self.detail = check, kind, detail


class Invalid(Exception):
    """The program itself does not run, or its gradients are not finite."""


def maker(script: Script, run: Run) -> checks.Make:
    """Runs the program from the same random state every time."""
    env: dict[str, Any] = dict(NAMES)
    exec(compile(script.program, "<program>", "exec"), env)

    def make() -> tuple[Tensor, list[Tensor]]:
        torch.default_generator.manual_seed(run.seed)
        losses, params = env["program"](run.flag)
        return losses, [p for p in params if p.requires_grad]

    return make


def evaluate(script: Script) -> dict[str, int]:
    """Run all checks; how many were exact and how many refused. Raises Finding or Invalid."""
    counts = dict.fromkeys(["exact", "refused", "interacting", "ill-conditioned"], 0)
    for run in script.runs:
        with default_dtype(getattr(torch, run.dtype)):
            _run(script, run, counts)
    return counts


def computed(script: Script, run: Run) -> tuple[checks.Make, Tensor, list[Tensor], list[Tensor]]:
    """What runs the program again, its losses, its parameters, and the definition's gradients. Raises Invalid."""
    try:
        make = maker(script, run)
        losses, params = make()
        want = checks.rows(losses, params)
        if not len(losses):
            torch.autograd.grad(losses.sum(), params, retain_graph=True, allow_unused=True)
    except Exception as error:
        raise Invalid(str(error)) from error
    if losses.ndim != 1 or not params or not all(bool(g.isfinite().all()) for g in want):
        raise Invalid("no losses, no parameters or no finite gradients")
    return make, losses, params, want


def _run(script: Script, run: Run, counts: dict[str, int]) -> None:
    make, losses, params, want = computed(script, run)
    for name in script.checks:
        if _applies(name, script, run, len(losses)):
            counts[_ask(name, losses, params, want, make)] += 1


def _applies(check: str, script: Script, run: Run, count: int) -> bool:
    """Whether a check says something about such a program."""
    if check == "call":  # modules are taken from where they were made, and would be parametrised once more
        return run.dtype == "float64" and not re.search(r"parametrizations|requires_grad_|detach", script.program)
    if check == "traced":
        return "parametrizations" not in script.program
    if check == "spoilt":
        return run.dtype == "float64" and count > 1
    if check == "claims":  # a backward of its own, from which reentrant checkpoints hide what is in them
        return run.dtype == "float64" and count > 1 and "use_reentrant=True" not in script.program
    return check not in ("independent", "alarm") or (run.dtype == "float64" and anchored(script.lines, count))


def _ask(name: str, losses: Tensor, params: list[Tensor], want: list[Tensor], make: checks.Make) -> str:
    """The outcome of one check; a difference counts if it is more than what rounding may do."""
    narrow = torch.get_default_dtype() != torch.float64
    try:
        return _outcome(name, losses, params, want, _slack(make, want) if narrow else [], make)
    except Finding as finding:
        if narrow or finding.kind != "mismatch" or not len(losses):
            raise
        _outcome(name, losses, params, want, _slack(make, want), make)
        return "ill-conditioned"


def _slack(make: checks.Make, want: list[Tensor]) -> list[Tensor]:
    try:
        return checks.rounding(make, want)
    except Exception as error:
        raise Invalid(str(error)) from error


def _outcome(
    name: str, losses: Tensor, params: list[Tensor], want: list[Tensor], slack: list[Tensor], make: checks.Make
) -> str:
    try:
        CHECKS[name](losses, params, want, slack, make)
    except (ps.UnsupportedError, ps.NonFiniteError):
        return "refused"
    except ps.InteractionError as error:
        if name in ("independent", "call"):
            return "interacting"
        raise Finding(name, "InteractionError", str(error)) from error
    except AssertionError as error:
        ours = traceback.extract_tb(error.__traceback__)[-1].filename == checks.__file__
        raise Finding(name, "mismatch" if ours else _where(error), str(error)) from error
    except Exception as error:
        if "has hooks (register_hook)" in str(error) or (name == "call" and _refusal(error)):
            return "refused"
        raise Finding(name, _where(error), str(error)) from error
    return "exact"


def _refusal(error: Exception) -> bool:
    """Whether the library itself said no, in words."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (
        "/src/persample/" in last.filename
        and isinstance(error, RuntimeError | TypeError | ValueError)
        and len(str(error)) > 30
    )


def _where(error: Exception) -> str:
    """An exception's type and the function of the library that it came from."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/persample/" in f.filename]
    return f"{type(error).__name__} in {frames[-1].name}" if frames else type(error).__name__


def anchored(lines: Sequence[str], count: int) -> bool:
    """Whether all data enter in one statement of which each loss reads its part: the graph shows where samples meet.

    Otherwise it may not: what all losses share may be made of weights and constants, for all that it shows.
    """
    end = re.fullmatch(r"losses = .*anchor\((h\d+)\)", lines[-1])
    uses = [line for line in lines if re.search(r"\b[xi]\d+\b", line.split("=", 1)[-1])]
    if end is None or len(uses) != 1 or lines[0] != f"B = {count}":
        return False
    cut = any(word in line for line in lines for word in ("requires_grad_", "detach"))
    return not cut and re.match(rf"{end[1]} = (?=.*\b[wm]\d+\b).*\bx\d+\b", uses[0]) is not None


def only(script: Script, finding: Finding) -> Script:
    """The script with the one check that failed."""
    return replace(script, checks=(finding.check,))
