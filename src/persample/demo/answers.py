"""The report's first chapter: wrong answers, the training images that caused them, and training without those."""

from __future__ import annotations

from persample import influence as pi

from . import plots
from .causes import Retrain, at_the_end, influence, likeness
from .findings import Findings
from .pieces import code, figure, heading, paragraph, section, strip, table, thumbnail
from .training import train, train_on


def wrong_answers(findings: Findings) -> str:
    """Why did the model say that?"""
    s, causes = findings.settings, findings.causes
    return section(
        "answers",
        "Why did the model say that?",
        paragraph(
            f"""A small CNN was trained on {len(findings.digits.x)} digits, {findings.chance:.1%} of them with a wrong
            label. {_which(findings)} For each of them the run was gone through once more, backwards, which gives
            the derivative of its loss by the weight of every single training image. Harmful images raised the loss,
            helpful ones lowered it; the number is the change that is predicted without the image. Wrong labels are
            marked: {_share(findings)} P is the probability of the right label, and what it became when the model was
            trained again without the {s.removed} most harmful images."""
        ),
        *(_case(findings, q) for q in range(len(causes.asked))),
        heading("Is it true?"),
        paragraph(
            f"""The model was trained again, {s.subsets + len(causes.asked) + 1} times: {s.subsets} times without a
            random {s.dropped:.0%} of the images, for each answer without its {s.removed} most harmful images, and once
            on everything. All runs have the same weights at the start and the same batches, in which what is left out
            does not count, so that nothing else differs. The linear datamodelling score (LDS) is the rank
            correlation of predicted and actual losses over the random subsets, the mean over answers: 1 is perfect, 0
            is chance. Here it is {_with_interval(causes.score)}, with an interval of 95% confidence from drawing the
            {s.subsets} subsets again. {_without(findings)}"""
        ),
        '<div class="plots">',
        figure(
            plots.predicted_and_actual(findings),
            f"Predicted against actual changes of losses, for {s.subsets} random subsets and for the most harmful "
            f"images; LDS {_with_interval(causes.score)}.",
            "Changes of these losses: predicted by gradients, and found by training again. On the line they are the "
            "same. A loss cannot fall below 0, which a sum of derivatives does not know.",
        ),
        table(
            "The same subsets, other ways to predict",
            ["scores", "LDS", "95%"],
            [(title, f"{each.score:.2f}", _interval(each)) for title, each in causes.trials.items()],
        ),
        "</div>",
        paragraph(
            """One checkpoint needs the trained model alone, and takes it to be at a minimum, which a run of a few
            epochs does not reach. Likeness compares what the last layer sees of two images, with a sign by their
            labels: no gradients, and no way to tell by how much a loss will change."""
        ),
        heading("The code"),
        code(train, influence, at_the_end, likeness, train_on, Retrain),
    )


def _which(findings: Findings) -> str:
    causes, tests = findings.causes, len(findings.digits.test_y)
    count = len(causes.asked)
    if not causes.wrong:
        return f"It reads all {tests} test digits right; here are the {count} that it is least sure of."
    some = "Here they are." if count == causes.wrong else f"Here are the {count} worst."
    return f"It reads {causes.wrong} of {tests} test digits wrong. {some}"


def _share(findings: Findings) -> str:
    count = findings.settings.causes
    worst = findings.causes.scores.argsort(dim=1)[:, :count]
    flipped = int(findings.digits.flipped[worst].sum())
    return f"{flipped} of the {worst.numel()} harmful images that are shown have one."


def _without(findings: Findings) -> str:
    causes, s = findings.causes, findings.settings
    return (
        f"Without its {s.removed} most harmful images, the loss of {int((causes.without.actual < 0).sum())} of "
        f"{len(causes.asked)} answers falls, by {-causes.without.actual.mean():.2f} on average where "
        f"{-causes.without.predicted.mean():.2f} was predicted; {causes.corrected} of them then "
        f"{'has' if causes.corrected == 1 else 'have'} more than half of the probability on the right label."
    )


def _with_interval(score: pi.DataModelScore) -> str:
    return f"{score.score:.2f} ({_interval(score)})"


def _interval(score: pi.DataModelScore) -> str:
    low, high = score.interval
    return f"{low:.2f} to {high:.2f}"


def _case(findings: Findings, q: int) -> str:
    """One answer: the image, what harmed it, what helped."""
    causes, digits, count = findings.causes, findings.digits, findings.settings.causes
    i, said = int(causes.asked[q]), int(causes.said[q])
    true = int(digits.test_y[i])
    order = causes.scores[q].argsort()
    lines = [f"says {said}", f"is {true}", f"P({true}) = {causes.before[q]:.0%},", f"then {causes.after[q]:.0%}"]
    asked = thumbnail(digits.test_x[i, 0], f"A handwritten {true}, read as {said}", lines)
    strips = [
        strip(title, [_cause(findings, q, int(k)) for k in some])
        for title, some in (("harmful", order[:count]), ("helpful", order.flip(0)[:count]))
    ]
    return f'<div class="case">\n<ul class="gallery asked">{asked}</ul>\n{"".join(strips)}</div>'


def _cause(findings: Findings, q: int, k: int) -> str:
    digits = findings.digits
    given, true = int(digits.y[k]), int(digits.true[k])
    change = float(findings.causes.scores[q, k])
    lines = [f"given {given}", f"true {true}" if given != true else "", f"{change:+.2f}".replace("-", "−")]
    return thumbnail(
        digits.x[k, 0], f"A handwritten {true}, labelled {given}", lines, "flipped" if given != true else ""
    )
