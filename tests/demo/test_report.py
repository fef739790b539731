"""The report: complete, self-contained, and true to what was found."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import torch

from persample.demo import pieces
from persample.demo.causes import Retrain, influence
from persample.demo.picture import picture
from persample.demo.private import train_privately
from persample.demo.report import render
from persample.demo.scores import look

from .conftest import Quick

VOID = {"meta", "img", "br", "hr", "link", "input"}


class Outline(HTMLParser):
    """Tags in balance, and all ids, links and sources."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.values: dict[str, list[str]] = {"id": [], "href": [], "src": [], "alt": []}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in self.values:
                self.values[name].append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed(quick: Quick) -> None:
    outline = Outline(quick.page)
    assert outline.open == []
    ids = outline.values["id"]
    assert len(ids) == len(set(ids))
    assert all(link.startswith("#") and link[1:] in ids for link in outline.values["href"])
    assert all(outline.values["alt"])


def test_the_page_needs_nothing_else(quick: Quick) -> None:
    outline = Outline(quick.page)
    assert all(source.startswith("data:image/png;base64,") for source in outline.values["src"])
    assert "<script" not in quick.page
    assert "@import" not in quick.page
    assert set(re.findall(r"url\(([^)]{0,5})", quick.page)) <= {"#norm", "#prec", "#priv", "#nois", "#caus"}
    assert "default-src 'none'" in quick.page


def test_the_page_has_no_path_of_this_machine(quick: Quick) -> None:
    assert not re.search(r"/(home|root|work|tmp|usr)/", quick.page)


def test_figures_are_those_that_were_found(quick: Quick) -> None:
    found, text = quick.found, re.sub(r"<[^>]+>", " ", quick.page)
    for name in found.scores:
        for value in found.precisions(name):
            assert f"{value:.0%}" in text
    for run in found.private:
        assert f"{run.accuracy:.1%}" in text
        assert run.spent <= run.epsilon
    for trial in found.causes.trials.values():
        low, high = trial.interval
        assert re.search(rf"{trial.score:.2f}\s+{low:.2f} to {high:.2f}", text)
    assert f"{found.trained.accuracy:.1%}" in text
    assert f"({found.chance:.1%})" in text
    for part, seconds in found.seconds.items():
        assert part in text
        assert f"{seconds:.1f}" in text


def test_the_code_is_the_code_that_was_run(quick: Quick) -> None:
    shown = re.findall(r"<pre .*?</pre>", quick.page, flags=re.DOTALL)
    assert escape(inspect.getsource(influence).strip()) in shown[0]
    assert escape(inspect.getsource(Retrain).strip()) in shown[0]
    assert escape(inspect.getsource(look).strip()) in shown[1]
    assert escape(inspect.getsource(train_privately).strip()) in shown[2]


def test_colours_are_the_page_s(quick: Quick) -> None:
    drawings = re.findall(r"<svg .*?</svg>", quick.page, flags=re.DOTALL)
    assert len(drawings) == 5
    for svg in drawings:
        assert "var(--series-1)" in svg
        assert not re.findall(r"(?:fill|stroke): #\w+", svg)
        assert "<metadata" not in svg


def test_every_answer_has_its_causes(quick: Quick) -> None:
    """Harmful images first; of a known one, label, truth and prediction are those that were found."""
    causes, digits = quick.found.causes, quick.found.digits
    cases = re.findall(r'<div class="case">.*?</div></div>', quick.page, flags=re.DOTALL)
    assert len(cases) == len(causes.asked) == 3
    for q, case in enumerate(cases):
        harmful, helpful = case.split("<p>helpful</p>")
        worst, best = int(causes.scores[q].argmin()), int(causes.scores[q].argmax())
        assert f"says {causes.said[q]}" in harmful
        for k, part in ((worst, harmful), (best, helpful)):
            assert f"A handwritten {digits.true[k]}, labelled {digits.y[k]}" in part
            assert f"{causes.scores[q, k]:+.2f}".replace("-", "−") in part
        assert case.count("<img") == 1 + 2 * quick.found.settings.causes


def test_a_model_without_wrong_answers_is_said_to_be_right(quick: Quick) -> None:
    page = render(replace(quick.found, causes=replace(quick.found.causes, wrong=0)))
    assert "It reads all 360 test digits right; here are the 3 that it is least sure of." in page


def test_a_report_without_false_alarms_or_misses_says_so(quick: Quick) -> None:
    perfect = replace(quick.found.scores["influence"], values=quick.found.digits.flipped.float())
    page = render(replace(quick.found, scores={**quick.found.scores, "influence": perfect}))
    assert page.count("<li>none</li>") == 2


def test_an_unknown_noise_scale_is_said_to_be_unknown(quick: Quick) -> None:
    trained = replace(quick.found.trained, estimated=[float("nan"), *quick.found.trained.estimated[1:]])
    page = render(replace(quick.found, trained=trained))
    assert "In 1 of 3 epochs the batches&#x27; estimate of |G|² was not positive" in page
    assert "<td>unknown</td>" in page


def test_the_picture_has_answers_and_causes(quick: Quick, tmp_path: Path) -> None:
    picture(quick.found, tmp_path / "why.svg")
    drawn = (tmp_path / "why.svg").read_text(encoding="utf-8")
    assert drawn.count("<image ") == 3 * (1 + 2 * 4)
    assert f"says {quick.found.causes.said[0]}" in drawn
    assert f"LDS {quick.found.causes.score.score:.2f}" in drawn


def test_text_is_escaped() -> None:
    assert pieces.paragraph("a < b & c") == "<p>a &lt; b &amp; c</p>"
    assert "&lt;i&gt;" in pieces.table("<i>", ["<i>"], [["<i>", "<i>"]])
    assert "<i>" not in pieces.thumbnail(torch.zeros(8, 8), '"<i>', ["<i>"])
