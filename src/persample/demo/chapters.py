"""The report's chapters: what was asked, what came out, and the code that computed it."""

from __future__ import annotations

import math
import platform
from dataclasses import fields
from importlib.metadata import version

import torch

import persample

from . import noise_scale, plots
from .findings import Findings
from .pieces import cards, code, figure, gallery, listing, paragraph, section, table, thumbnail
from .private import train_privately
from .scores import look, mean_cosine, precision, scores
from .training import train_step
from .verify import verify


def summary(findings: Findings) -> str:
    """The figures to remember."""
    at, lds = _at_flips(findings, "influence"), findings.causes.score.score
    epsilon, (private, _, _) = list(findings.private_accuracy.items())[-1]
    return cards(
        [
            (f"{lds:.2f}", "correlation (LDS) of what gradients predict and what training without some images does"),
            (f"{at:.0%}", f"of the {findings.flips} most suspicious labels are wrong; by chance {findings.chance:.0%}"),
            (
                f"{private:.1%}",
                f"test accuracy with privacy, epsilon {epsilon:g}; without, {findings.trained.accuracy:.1%}",
            ),
            ("exact" if findings.verdict.ok else "WRONG", f"largest error {findings.verdict.gradients.max_error:.0e}"),
        ]
    )


def wrong_labels(findings: Findings) -> str:
    """Part (a): ranking examples by their gradients."""
    return section(
        "labels",
        "Finding wrong labels",
        paragraph(
            f"""{findings.flips} of {len(findings.digits.x)} training labels ({findings.chance:.1%}) were replaced
            by wrong ones, and a small CNN was trained on all of them. It was not told which. After each of
            {len(findings.trained.history)} epochs, the gradient g of every single example was looked at, and examples
            were ranked by what it says, the most suspicious first:"""
        ),
        listing((score.title, score.what) for score in findings.scores.values()),
        _precisions(findings),
        paragraph(
            f"""Precision at k is the share of flipped labels among the first k. The last score is for comparison:
            the mean loss needs no single gradients, and finds {_at_flips(findings, "loss"):.1%} at
            k = {findings.flips} where self-influence finds {_at_flips(findings, "influence"):.1%}."""
        ),
        '<div class="plots">',
        figure(
            plots.precision_curves(findings),
            f"Precision at k for every score, up to k = {3 * findings.flips}; the values are in the table above.",
            f"Share of flipped labels among the k most suspicious examples. "
            f"There are only {findings.flips} to be found.",
        ),
        figure(
            plots.norms_over_training(findings),
            "Median gradient norm after every epoch: " + _first_and_last(findings),
            "Norms of single gradients over training: median, and the middle half as a band.",
        ),
        "</div>",
        *_galleries(findings),
        "<h3>The code</h3>",
        code(look, mean_cosine, scores),
    )


def _at_flips(findings: Findings, name: str) -> float:
    return precision(findings.scores[name].order, findings.digits.flipped, findings.flips)


def _precisions(findings: Findings) -> str:
    rows = [(score.title, *(f"{p:.0%}" for p in findings.precisions(name))) for name, score in findings.scores.items()]
    chance = ("chance", *(f"{findings.chance:.0%}" for _ in findings.depths))
    return table("Precision at k", ["score", *(f"k = {k}" for k in findings.depths)], [*rows, chance])


def _first_and_last(findings: Findings) -> str:
    flipped, history = findings.digits.flipped, findings.trained.history
    first, last = (
        f"{e.norms[flipped].median():.2g} for flipped labels and {e.norms[~flipped].median():.2g} for all others"
        for e in (history[0], history[-1])
    )
    return f"{first} after the first epoch, {last} after the last."


def _galleries(findings: Findings) -> list[str]:
    """The most suspicious by each score, and where the ranking goes wrong."""
    shown, flipped = findings.settings.shown, findings.digits.flipped
    by_gradients = {name: score for name, score in findings.scores.items() if score.gradients}
    tops = [
        gallery(f"Most suspicious by {score.title}", [_thumbnail(findings, i) for i in score.order[:shown].tolist()])
        for score in by_gradients.values()
    ]
    order = findings.scores["influence"].order
    alarms = order[: findings.flips][~flipped[order[: findings.flips]]][:shown].tolist()
    missed = order[findings.flips :][flipped[order[findings.flips :]]][:shown].tolist()
    return [
        *tops,
        gallery(
            f"False alarms: among the first {findings.flips} by self-influence, and not flipped", _all(findings, alarms)
        ),
        gallery(f"Missed: flipped, and not among the first {findings.flips} by self-influence", _all(findings, missed)),
    ]


def _all(findings: Findings, examples: list[int]) -> list[str]:
    return [_thumbnail(findings, i) for i in examples] or ["<li>none</li>"]


def _thumbnail(findings: Findings, i: int) -> str:
    given, true, guess = (int(t[i]) for t in (findings.digits.y, findings.digits.true, findings.trained.predicted))
    lines = [f"given {given}", f"true {true}", f"model {guess}"]
    alt = f"A handwritten {true}, labelled {given}"
    return thumbnail(findings.digits.x[i, 0], alt, lines, "flipped" if given != true else "")


def private(findings: Findings) -> str:
    """Part (b): accuracy against epsilon."""
    s = findings.settings
    rows = [_private_row(findings, epsilon) for epsilon in s.epsilons]
    rows.append(("∞", f"{findings.trained.accuracy:.1%}", "", "0", "0%", "∞"))
    return section(
        "private",
        "Training privately",
        paragraph(
            f"""The same model on the same labels (the flipped ones included), with differential privacy: every sample's
            gradient is clipped to norm {s.max_norm:g}, and the sum gets noise. Each epsilon has {s.repeats} runs of its
            own, with other weights, batches and noise, planned for {s.private_epochs} epochs of Poisson batches of
            {s.private_batch} on average at delta {s.delta:g} ({s.accountant.upper()} accountant). Accuracy is that on
            {len(findings.digits.test_y)} test images: the mean of the runs, the lowest and the highest. Learning rate
            and bound were chosen by hand on this dataset, which a real accounting would have to include. In the table,
            noise is the noise multiplier, clipped the mean share of samples that were, and the last row the ordinary
            training. {len(findings.digits.x)} examples are few for privacy: noise that hides each of them hides
            much."""
        ),
        '<div class="plots">',
        figure(
            plots.accuracy_against_epsilon(findings),
            "Test accuracy of the private runs against epsilon; the values are in the table.",
            "Test accuracy against epsilon.",
        ),
        table("Private runs", ["epsilon", "mean", "range", "noise", "clipped", "spent"], rows),
        "</div>",
        "<h3>The code</h3>",
        code(train_privately),
    )


def _private_row(findings: Findings, epsilon: float) -> tuple[str, ...]:
    runs = [run for run in findings.private if run.epsilon == epsilon]
    mean, low, high = findings.private_accuracy[epsilon]
    clipped, spent = sum(run.clipped for run in runs) / len(runs), max(run.spent for run in runs)
    noise = runs[0].noise_multiplier
    return (
        f"{epsilon:g}",
        f"{mean:.1%}",
        f"{100 * low:.0f}–{high:.0%}",
        f"{noise:.2f}",
        f"{clipped:.0%}",
        f"{spent:.2f}",
    )


def noise(findings: Findings) -> str:
    """Part (c): gradient noise scale."""
    t, s = findings.trained, findings.settings
    unknown = sum(math.isnan(v) for v in t.estimated)
    gaps = (
        f" In {unknown} of {len(t.estimated)} epochs the batches' estimate of |G|² was not positive: noise hides the "
        "mean gradient, and no point is drawn."
    )
    return section(
        "noise",
        "Gradient noise scale",
        paragraph(
            """tr(Σ) / |G|², the variance of single gradients over the squared norm of their mean, is about the batch
            size up to which larger batches save steps in proportion (McCandlish et al. 2018, the simple noise
            scale). Norms and mean come from the backward that training makes anyway: the estimate from batches
            needs no other. Both moments are unbiased, and averaged over an epoch before their ratio is taken; the
            model moves meanwhile, so that the lines need not meet."""
        ),
        '<div class="plots">',
        figure(
            plots.noise_over_training(findings),
            f"From all gradients: {t.exact[0]:.0f} samples after the first epoch, {t.exact[-1]:.0f} after the last.",
            f"From all training gradients, and from batches of {s.batch} alone." + (gaps if unknown else ""),
        ),
        table(
            "Noise scale, in samples",
            ["epoch", "all gradients", "batches"],
            [(str(i), _samples(a), _samples(b)) for i, (a, b) in enumerate(zip(t.exact, t.estimated, strict=True), 1)],
        ),
        "</div>",
        "<h3>The code</h3>",
        code(train_step, noise_scale.moments, noise_scale.noise_scale),
    )


def _samples(scale: float) -> str:
    return "unknown" if math.isnan(scale) else f"{scale:,.0f}"


def checked(findings: Findings) -> str:
    """Part (d): against the definition."""
    report, wrong = findings.verdict.gradients, not findings.verdict.ok
    said = "Something is WRONG: see the tables." if wrong else "All agree, up to rounding in float32."
    return section(
        "check",
        "Checked against the definition",
        paragraph(
            f"""The definition is one ordinary backward per sample. It was run for the {report.batch} most suspicious
            examples on the trained model, and compared with every sample's gradient of every parameter, and with the
            reductions used above. {said}"""
        ),
        '<div class="plots">',
        table(
            "Gradients",
            ["parameter", "shape", "relative error", "verdict"],
            [(r.name, "×".join(map(str, r.shape)), f"{r.error:.1e}", "ok" if r.ok else "WRONG") for r in report.rows],
        ),
        table(
            "Reductions",
            ["reduction", "relative error"],
            [(n, f"{e:.1e}") for n, e in findings.verdict.reductions.items()],
        ),
        "</div>",
        "<h3>The code</h3>",
        code(verify),
    )


def made(findings: Findings) -> str:
    """Versions, seed, settings and times."""
    versions = {
        "persample": persample.__version__,
        "torch": torch.__version__,
        **{name: version(name) for name in ("scikit-learn", "dp-accounting", "matplotlib")},
        "Python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
        "seed": str(findings.seed),
    }
    chosen = {f.name: str(getattr(findings.settings, f.name)) for f in fields(findings.settings)}
    return section(
        "made",
        "How this page was made",
        paragraph(
            """By the command persample demo, on scikit-learn's digits, handwriting of 8 by 8 pixels. The
            same seed, versions and machine give the same figures, but for the times."""
        ),
        '<div class="plots">',
        table("Time of each part", ["part", "seconds"], [(n, f"{t:.1f}") for n, t in findings.seconds.items()]),
        table("Versions", ["what", "which"], list(versions.items())),
        table("Settings", ["setting", "value"], list(chosen.items())),
        "</div>",
    )
