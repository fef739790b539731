"""One run from the data to the report."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from .causes import find_causes
from .data import Digits, load
from .findings import Findings, Trained
from .noise_scale import noise_scale
from .picture import picture
from .private import PrivateRun, plan_for, run_privately
from .progress import Parts
from .report import render
from .scores import look_at_all, scores
from .settings import Settings
from .training import Epoch, accuracy, train
from .verify import verify


def run(settings: Settings, seed: int, out: Path, drawn: Path | None = None) -> int:
    """Do everything, write the report, and say where it is; 1 if something differs from the definition."""
    console = Console()
    parts = Parts(console)
    findings = find(settings, seed, parts)
    out.write_text(render(findings), encoding="utf-8")
    if drawn is not None:
        picture(findings, drawn)
    summarise(findings, console)
    console.print(f"report: {out.resolve()}", soft_wrap=True, highlight=False)
    return 0 if findings.verdict.ok else 1


def find(settings: Settings, seed: int, parts: Parts) -> Findings:
    """Train, explain wrong answers, rank, train privately, and check."""
    digits = load(settings.test, settings.flipped, seed)
    steps = settings.epochs * -(-len(digits.x) // settings.batch)
    with tempfile.TemporaryDirectory() as folder:
        with parts.part("training", steps) as advance:
            epochs = train(digits, settings, seed, Path(folder), advance)
        model = epochs[-1].model
        causes = find_causes(model, Path(folder), digits, settings, seed, parts)
    trained = look_back(epochs, digits, parts)
    ranked = scores(trained.history, [epoch.lr for epoch in epochs])
    private = train_for_each_epsilon(digits, settings, seed, parts)
    with parts.part("checking", 1) as advance:
        suspects = ranked["influence"].order[: settings.checked]
        verdict = verify(model, digits.x[suspects], digits.y[suspects], settings.max_norm)
        advance()
    return Findings(settings, seed, digits, trained, causes, ranked, private, verdict, parts.seconds)


def look_back(epochs: list[Epoch], digits: Digits, parts: Parts) -> Trained:
    """Every training example's gradient at every checkpoint."""
    history, exact = [], []
    with parts.part("looking at gradients", len(epochs)) as advance:
        for epoch in epochs:
            evidence, moments = look_at_all(epoch.model, digits)
            history.append(evidence)
            exact.append(noise_scale([moments]))
            advance()
    last = epochs[-1].model
    with torch.no_grad():
        predicted = last(digits.x).argmax(1)
    right = accuracy(last, digits.test_x, digits.test_y)
    return Trained(right, predicted, history, exact, [noise_scale(epoch.batches) for epoch in epochs])


def train_for_each_epsilon(digits: Digits, settings: Settings, seed: int, parts: Parts) -> list[PrivateRun]:
    """Private runs for each epsilon, the first of each from the same weights as the ordinary training."""
    wanted = [(epsilon, seed + i) for epsilon in settings.epsilons for i in range(settings.repeats)]
    steps = plan_for(settings.epsilons[-1], digits, settings).length
    with parts.part("private training", steps * len(wanted)) as advance:
        return [run_privately(epsilon, digits, settings, its_seed, advance) for epsilon, its_seed in wanted]


def summarise(findings: Findings, console: Console) -> None:
    """The main figures, in the terminal."""
    say_causes(findings, console)
    table = Table(
        title=f"Precision at k: {findings.flips} flipped labels among {len(findings.digits.x)}, "
        f"chance {findings.chance:.1%}"
    )
    table.add_column("score")
    for k in findings.depths:
        table.add_column(f"k = {k}", justify="right")
    for name, score in findings.scores.items():
        table.add_row(score.title, *(f"{p:.1%}" for p in findings.precisions(name)))
    console.print(table)
    console.print(f"test accuracy: {findings.trained.accuracy:.1%}", highlight=False)
    for epsilon, (mean, _, _) in findings.private_accuracy.items():
        console.print(f"    private, epsilon {epsilon:g}: {mean:.1%}", highlight=False)
    scale = findings.trained.exact
    console.print(
        f"gradient noise scale: {scale[0]:.0f} samples after epoch 1, {scale[-1]:.0f} at the end", highlight=False
    )
    checked = f"{findings.verdict.gradients.batch} samples, largest error {findings.verdict.gradients.max_error:.1e}"
    console.print(
        f"against the definition: {'all agree' if findings.verdict.ok else 'WRONG'} ({checked})", highlight=False
    )


def say_causes(findings: Findings, console: Console) -> None:
    """Wrong answers, and what training without their causes did."""
    causes, s = findings.causes, findings.settings
    console.print(
        f"wrong answers: {causes.wrong} of {len(findings.digits.test_y)}. Without the {s.removed} most harmful images "
        f"of each of {len(causes.asked)}, losses change by {causes.without.actual.mean():+.2f} on average "
        f"({causes.without.predicted.mean():+.2f} predicted); right for certain then: {causes.corrected}",
        highlight=False,
    )
    for title, score in causes.trials.items():
        console.print(f"    {title}: {score}, {s.subsets} subsets", highlight=False)
