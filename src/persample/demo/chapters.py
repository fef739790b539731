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


def summary(found: Findings) -> str:
    """The figures to remember."""
    at = _at_flips(found, "influence")
    epsilon, (private, _, _) = list(found.private_accuracy.items())[-1]
    return cards(
        [
            (f"{at:.0%}", f"of the {found.flips} most suspicious labels are wrong; by chance {found.chance:.0%}"),
            (f"{private:.1%}", f"test accuracy with privacy, epsilon {epsilon:g}"),
            (f"{found.trained.accuracy:.1%}", "test accuracy without"),
            ("exact" if found.verdict.ok else "WRONG", f"largest error {found.verdict.gradients.max_error:.0e}"),
        ]
    )


def wrong_labels(found: Findings) -> str:
    """Part (a): ranking examples by their gradients."""
    return section(
        "labels",
        "Finding wrong labels",
        paragraph(
            f"""{found.flips} of {len(found.digits.x)} training labels ({found.chance:.1%}) were replaced
            by wrong ones, and a small CNN was trained on all of them. It was not told which. After each of
            {len(found.trained.history)} epochs, the gradient g of every single example was looked at, and examples were
            ranked by what it says, the most suspicious first:"""
        ),
        listing((score.title, score.what) for score in found.scores.values()),
        _precisions(found),
        paragraph(
            f"""Precision at k is the share of flipped labels among the first k. The last score is for comparison:
            the mean loss needs no single gradients, and finds {_at_flips(found, "loss"):.1%} at k = {found.flips} where
            self-influence finds {_at_flips(found, "influence"):.1%}."""
        ),
        '<div class="plots">',
        figure(
            plots.precision_curves(found),
            f"Precision at k for every score, up to k = {3 * found.flips}; the values are in the table above.",
            f"Share of flipped labels among the k most suspicious examples. There are only {found.flips} to be found.",
        ),
        figure(
            plots.norms_over_training(found),
            "Median gradient norm after every epoch: " + _first_and_last(found),
            "Norms of single gradients over training: median, and the middle half as a band.",
        ),
        "</div>",
        *_galleries(found),
        "<h3>The code</h3>",
        code(look, mean_cosine, scores),
    )


def _at_flips(found: Findings, name: str) -> float:
    return precision(found.scores[name].order, found.digits.flipped, found.flips)


def _precisions(found: Findings) -> str:
    rows = [(score.title, *(f"{p:.0%}" for p in found.precisions(name))) for name, score in found.scores.items()]
    chance = ("chance", *(f"{found.chance:.0%}" for _ in found.depths))
    return table("Precision at k", ["score", *(f"k = {k}" for k in found.depths)], [*rows, chance])


def _first_and_last(found: Findings) -> str:
    flipped, history = found.digits.flipped, found.trained.history
    first, last = (
        f"{e.norms[flipped].median():.2g} for flipped labels and {e.norms[~flipped].median():.2g} for all others"
        for e in (history[0], history[-1])
    )
    return f"{first} after the first epoch, {last} after the last."


def _galleries(found: Findings) -> list[str]:
    """The most suspicious by each score, and where the ranking goes wrong."""
    shown, flipped = found.settings.shown, found.digits.flipped
    by_gradients = {name: score for name, score in found.scores.items() if score.gradients}
    tops = [
        gallery(f"Most suspicious by {score.title}", [_thumbnail(found, i) for i in score.order[:shown].tolist()])
        for score in by_gradients.values()
    ]
    order = found.scores["influence"].order
    alarms = order[: found.flips][~flipped[order[: found.flips]]][:shown].tolist()
    missed = order[found.flips :][flipped[order[found.flips :]]][:shown].tolist()
    return [
        *tops,
        gallery(f"False alarms: among the first {found.flips} by self-influence, and not flipped", _all(found, alarms)),
        gallery(f"Missed: flipped, and not among the first {found.flips} by self-influence", _all(found, missed)),
    ]


def _all(found: Findings, examples: list[int]) -> list[str]:
    return [_thumbnail(found, i) for i in examples] or ["<li>none</li>"]


def _thumbnail(found: Findings, i: int) -> str:
    given, true, guess = (int(t[i]) for t in (found.digits.y, found.digits.true, found.trained.predicted))
    lines = [f"given {given}", f"true {true}", f"model {guess}"]
    alt = f"A handwritten {true}, labelled {given}"
    return thumbnail(found.digits.x[i, 0], alt, lines, "flipped" if given != true else "")


def private(found: Findings) -> str:
    """Part (b): accuracy against epsilon."""
    s = found.settings
    rows = [_private_row(found, epsilon) for epsilon in s.epsilons]
    rows.append(("∞", f"{found.trained.accuracy:.1%}", "", "0", "0%", "∞"))
    return section(
        "private",
        "Training privately",
        paragraph(
            f"""The same model on the same labels (the flipped ones included), with differential privacy: every sample's
            gradient is clipped to norm {s.max_norm:g}, and the sum gets noise. Each epsilon has {s.repeats} runs of its
            own, with other weights, batches and noise, planned for {s.private_epochs} epochs of Poisson batches of
            {s.private_batch} on average at delta {s.delta:g} ({s.accountant.upper()} accountant). Accuracy is that on
            {len(found.digits.test_y)} test images: the mean of the runs, the lowest and the highest. Learning rate and
            bound were chosen by hand on this dataset, which a real accounting would have to include. In the table,
            noise is the noise multiplier, clipped the mean share of samples that were, and the last row the ordinary
            training. {len(found.digits.x)} examples are few for privacy: noise that hides each of them hides much."""
        ),
        '<div class="plots">',
        figure(
            plots.accuracy_against_epsilon(found),
            "Test accuracy of the private runs against epsilon; the values are in the table.",
            "Test accuracy against epsilon.",
        ),
        table("Private runs", ["epsilon", "mean", "range", "noise", "clipped", "spent"], rows),
        "</div>",
        "<h3>The code</h3>",
        code(train_privately),
    )


def _private_row(found: Findings, epsilon: float) -> tuple[str, ...]:
    runs = [run for run in found.private if run.epsilon == epsilon]
    mean, low, high = found.private_accuracy[epsilon]
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


def noise(found: Findings) -> str:
    """Part (c): gradient noise scale."""
    t, s = found.trained, found.settings
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
            plots.noise_over_training(found),
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


def checked(found: Findings) -> str:
    """Part (d): against the definition."""
    report, wrong = found.verdict.gradients, not found.verdict.ok
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
            [(n, f"{e:.1e}") for n, e in found.verdict.reductions.items()],
        ),
        "</div>",
        "<h3>The code</h3>",
        code(verify),
    )


def made(found: Findings) -> str:
    """Versions, seed, settings and times."""
    versions = {
        "persample": persample.__version__,
        "torch": torch.__version__,
        **{name: version(name) for name in ("scikit-learn", "dp-accounting", "matplotlib")},
        "Python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
        "seed": str(found.seed),
    }
    chosen = {f.name: str(getattr(found.settings, f.name)) for f in fields(found.settings)}
    return section(
        "made",
        "How this page was made",
        paragraph(
            """By the command persample demo, on scikit-learn's digits, handwriting of 8 by 8 pixels. The
            same seed, versions and machine give the same figures, but for the times."""
        ),
        '<div class="plots">',
        table("Time of each part", ["part", "seconds"], [(n, f"{t:.1f}") for n, t in found.seconds.items()]),
        table("Versions", ["what", "which"], list(versions.items())),
        table("Settings", ["setting", "value"], list(chosen.items())),
        "</div>",
    )
