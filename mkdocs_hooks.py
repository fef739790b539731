"""What `mkdocs build` cannot know: examples are doctests, in pages and docstrings, and some functions are written once
for 1, 2 and 3 dims."""

from __future__ import annotations

import re
from typing import Any

import griffe

SESSION = re.compile(r"^```python(.*)\n(?=>>> )", re.MULTILINE)
FOR_EACH_DIM = "_for_each_dim"  # the decorator of functions that are written once


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Blocks that begin with a prompt are sessions, not programs: output is not to be coloured as code.

    Columns side by side need the room of the table of contents.
    """
    if '<div class="grid"' in markdown:
        page.meta["hide"] = ["toc"]
    return SESSION.sub(r"```pycon\1\n", markdown)


def fenced(text: str) -> str:
    """A docstring with fences around its examples, which Markdown would take for quotations."""
    return "\n\n".join(f"```pycon\n{part}\n```" if part.startswith(">>> ") else part for part in text.split("\n\n"))


class Docstrings(griffe.Extension):
    """Makes docstrings ready for Markdown."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """``_convNd_input(caller, ...)`` is shown as what users call, with N for the number."""
        if any(decorator.value and str(decorator.value) == FOR_EACH_DIM for decorator in func.decorators):
            func.name = func.name.removeprefix("_")
            del func.parameters["caller"]
