"""The fuzzer: it finds what is planted, makes it small, and prints a script that shows it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count, islice

import pytest
import torch

import persample as ps
from persample.factors import Dense, Factor
from persample.graph.ops.table import named
from persample.graph.ops.use import Use
from tests.graph.table import plant
from tests.modes import default_dtype
from tests.programs import __main__ as command
from tests.programs.generate import generate
from tests.programs.hunt import Hunt, report
from tests.programs.script import Finding, Invalid, Run, Script, anchored, evaluate
from tests.programs.shrink import shrink
from tests.programs.writer import OPS


def script(*lines: str, params: tuple[str, ...] = ("w1",), check: str = "grad") -> Script:
    """A program that was written by hand."""
    return Script(lines, params, (Run(0),), (check,))


def doubled(rule: Callable[[Use], Factor | None]) -> Callable[[Use], Factor | None]:
    """A wrong rule."""

    def wrong(use: Use) -> Factor | None:
        factor = rule(use)
        return None if factor is None else Dense(2 * factor.stack())

    return wrong


def run_text(text: str) -> None:
    """Run what was printed."""
    with default_dtype(torch.float64):
        exec(compile(text, "<pasted>", "exec"), {"__name__": "pasted"})


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
@pytest.mark.parametrize(
    ("node", "op"), [("NativeLayerNorm", "layer_norm"), ("Embedding", "embedding"), ("Convolution", "conv")]
)
def test_a_planted_bug_is_found_shrunk_and_printed(monkeypatch: pytest.MonkeyPatch, node: str, op: str) -> None:
    plant(monkeypatch, node, rule=doubled(named(node).rule))
    hunt = Hunt(say=lambda text: None)
    using = (seed for seed in count(100) if (s := generate(seed)) and op in s.program and s.runs[0].dtype == "float64")
    for seed in islice(using, 20):
        hunt.one(seed)
        about = [found for found in hunt.found if any(op in called for called in found.signature)]
        if about:
            break
    (small,) = about
    assert len(small.script.lines) <= 7, small.script.program
    printed = report(small).split("# ---- to paste ----\n")[1].split("# ---- end ----")[0]
    with pytest.raises(AssertionError, match="differs by"):
        run_text(printed)
    monkeypatch.undo()
    run_text(printed)


def test_the_command_says_what_it_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fuzz", "--seed", "5", "--programs", "2"])
    assert command.main() == 0
    assert "2 programs" in capsys.readouterr().out
    monkeypatch.setattr(ps, "grad", lambda losses, params, **_: [p.new_zeros((len(losses), *p.shape)) for p in params])
    assert command.main() == 1
    assert "FINDING (seed 5): grad, mismatch" in capsys.readouterr().out


def test_the_same_seed_is_the_same_program() -> None:
    assert [generate(seed) for seed in range(20)] == [generate(seed) for seed in range(20)]


def test_every_op_is_written() -> None:
    missing = dict(OPS)

    def noted(name: str) -> None:
        missing.pop(name, None)

    with pytest.MonkeyPatch.context() as patch:
        for name, fn in OPS.items():
            patch.setitem(OPS, name, lambda w, fn=fn, name=name: (fn(w), noted(name)))
        for seed in range(800):
            generate(seed)
    assert not missing


MEET = ("B = 3", "x1 = data(B, 2)", "w1 = weight(2)", "h1 = x1 * w1", "h2 = h1 - h1.mean(0)")


def test_a_broken_promise_of_independence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    program = script(*MEET, "losses = h2.square().sum(1) + anchor(h1)", check="independent")
    assert anchored(program.lines, 3)
    assert evaluate(program)["interacting"] == 1
    norms = ps.norms
    monkeypatch.setattr(ps, "norms", lambda *given, independent, **options: norms(*given, **options))
    with pytest.warns(ps.PerformanceWarning), pytest.raises(Finding, match="several losses depend on the same data"):
        evaluate(program)


@pytest.mark.parametrize(
    "end", ["losses = h2.sum(1)", "losses = (h2 * x1).sum(1) + anchor(h1)", "losses = h2.sum(1) + anchor(h2)"]
)
def test_independence_is_asked_where_the_graph_shows_it(end: str) -> None:
    assert not anchored([*MEET, end], 3)


def test_numbers_statements_and_expressions_become_simple(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "Mm", rule=doubled(named("Mm").rule))
    lines = ("B = 4", "x1 = data(B, 3)", "w1 = weight(x1.shape[-1], 5)", "w2 = weight(5)", "h1 = torch.tanh(x1 @ w1)")
    program = script(*lines, "h2 = (h1 + w2).relu()", "losses = h2.square().sum(1)", params=("w1", "w2"))
    with pytest.raises(Finding) as found:
        evaluate(program)
    small = shrink(program, found.value)
    assert small.lines[1:] == ("x1 = data(B, 1)", "w1 = weight(1, 1)", "h1 = x1 @ w1", "losses = h1.sum(1)")
    assert small.params == ("w1",)


def test_what_pytorch_refuses_is_no_finding() -> None:
    with pytest.raises(Invalid, match="shapes cannot be multiplied"):
        evaluate(script("x1 = data(2, 3)", "w1 = weight(2, 3)", "losses = (x1 @ w1).sum(1)"))


def test_what_rounding_may_do_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    grad = ps.grad
    monkeypatch.setattr(ps, "grad", lambda *given, **options: [g * 1.0001 for g in grad(*given, **options)])
    with pytest.raises(Finding, match="differs by"):
        evaluate(script("x1 = data(2, 3)", "w1 = weight(3)", "losses = (x1 * w1).sin().sum(1)"))
    wild = evaluate(script("x1 = data(2, 3)", "w1 = weight(3)", "losses = (1e12 * x1 * w1).sin().sum(1)"))
    assert wild["ill-conditioned"] == 1
