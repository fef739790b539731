"""The benchmarks of influence: what they train is what they say, and their pages are made from their figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call

from benchmarks.influence import accuracy, ours, report
from benchmarks.influence.costs import Between
from benchmarks.influence.peers import PEERS, chances, margins
from benchmarks.influence.retrained import Retrained, some_halves, split
from benchmarks.influence.tasks import TASKS, train_many
from benchmarks.processes import ROOT
from benchmarks.tables import MARKED
from benchmarks.workloads import WORKLOADS

PAGE, FIGURES = ROOT / "docs" / "influence-benchmarks.md", ROOT / "docs" / "benchmarks" / "influence.json"


@pytest.mark.parametrize("name", TASKS)
def test_many_at_once_are_each_one_alone(name: str) -> None:
    task = replace(TASKS[name], steps=3)
    train, queries = split(task.data(), task.queries, 0)
    assert len(queries[0]) == task.queries
    subsets = some_halves(3, 0)
    together = train_many(task, train, subsets, [1, 2, 3])
    alone = [train_many(replace(task, forward=None), train, subsets[k : k + 1], [k + 1])[0] for k in range(3)]
    for one, other in zip(together, alone, strict=True):
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.allclose(p, q, atol=1e-5)
    model = together[0]
    if task.forward is not None:
        p = dict(model.named_parameters())
        assert torch.allclose(task.forward(p, train[0][:4]), functional_call(model, p, (train[0][:4],)), atol=1e-5)


def tiny(name: str) -> Retrained:
    task = TASKS[name]
    train, queries = split(task.data(), 4, 0)
    train = (train[0][:30], train[1][:30])
    halves = torch.zeros(5, 30).scatter_(1, torch.stack([torch.randperm(30)[:15] for _ in range(5)]), 1.0)
    return Retrained(train, queries, task.model(0).eval(), task.decay, halves, torch.randn(5, 4))


@pytest.mark.parametrize("name", ["logistic", pytest.param("gpt", marks=pytest.mark.slow)])
def test_every_method_gives_scores(name: str) -> None:
    run = tiny(name)
    for title, method in ours.methods_of(name).items():
        assert method(run).shape == (4, 30), title


def test_right_scores_get_one() -> None:
    run = tiny("logistic")
    scores = torch.randn(4, 30, dtype=torch.float64)
    right = Retrained(run.train, run.queries, run.model, run.decay, run.halves, -run.halves.double() @ scores.t())
    assert right.lds(scores)[0] == pytest.approx(1)


def test_the_best_damping_counts_and_a_peer_that_fails_is_told() -> None:
    run = tiny("logistic")
    scores = {"1": torch.randn(4, 30), "2": torch.randn(4, 30)}
    found = accuracy.row("other", "x", [(d, lambda _, d=d: scores[d]) for d in scores], run)  # type: ignore[misc]
    assert found["lds"] == max(run.lds(s)[0] for s in scores.values())
    assert found["tried"] == {d: run.lds(s)[0] for d, s in scores.items()}

    def fails(_: Any) -> torch.Tensor:
        raise RuntimeError("no such layer")

    assert accuracy.row("other", "x", [("1", fails)], run)["failed"] == "RuntimeError: no such layer"
    with pytest.raises(RuntimeError, match="no such layer"):
        accuracy.row("persample", "x", [("1", fails)], run)


def test_margins_are_log_odds() -> None:
    logits, labels = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    p = chances(logits, labels)
    assert torch.allclose(margins(logits, labels), (p / (1 - p)).log(), atol=1e-5)


def test_plain_steps_lie_between_batches() -> None:
    loader = Between(WORKLOADS["tiny-gpt"].build(), 8)
    for _ in loader:
        pass
    assert set(loader.ratio()) == {"ratio", "with_writing", "plain_ms"}
    assert len(loader.plain) == len(loader.own) + 1


def test_the_page_shows_the_figures() -> None:
    found, page = json.loads(FIGURES.read_text()), PAGE.read_text()
    tables = report.tables(found)
    shown = {match["name"]: match.group(0) for match in MARKED.finditer(page)}
    assert set(shown) == set(tables)
    for name, text in tables.items():
        assert text in shown[name], f"make bench-influence, or report.tables, for {name!r}"
    titles = {row["method"] for task in found["lds"]["rows"] for row in task["rows"]}
    assert set(PEERS) | set(ours.METHODS) == titles


def test_plots(tmp_path: Path) -> None:
    report.plot(json.loads(FIGURES.read_text()), tmp_path)
    for name in ("influence.svg", "influence-growth.svg"):
        assert (tmp_path / name).read_text().startswith("<?xml")
