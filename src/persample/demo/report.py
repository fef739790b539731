"""The report: one page that needs nothing but itself."""

from __future__ import annotations

from importlib.resources import files
from string import Template

from .chapters import checked, made, noise, private, summary, wrong_labels
from .findings import Findings


def render(found: Findings) -> str:
    """The page as text."""
    here = files(__package__)
    chapters = [wrong_labels(found), private(found), noise(found), checked(found), made(found)]
    return Template((here / "page.html").read_text(encoding="utf-8")).substitute(
        style=(here / "page.css").read_text(encoding="utf-8"),
        summary=summary(found),
        body="\n\n".join(chapters),
    )
