"""The report: one page that needs nothing but itself."""

from __future__ import annotations

from importlib.resources import files
from string import Template

from .answers import wrong_answers
from .chapters import checked, made, noise, private, summary, wrong_labels
from .findings import Findings


def render(findings: Findings) -> str:
    """The page as text."""
    here = files(__package__)
    parts = (wrong_answers, wrong_labels, private, noise, checked, made)
    return Template((here / "page.html").read_text(encoding="utf-8")).substitute(
        style=(here / "page.css").read_text(encoding="utf-8"),
        summary=summary(findings),
        body="\n\n".join(part(findings) for part in parts),
    )
