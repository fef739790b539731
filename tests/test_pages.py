"""The pages of the docs: all code in them is run, they read the same everywhere, and they build into a site."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = ROOT / "docs" / "coming-from.md"  # where the code of other libraries is shown
OTHERS_OF_INFLUENCE = ROOT / "docs" / "coming-from-influence.md"
PEERS = ROOT / ".venv-peers" / "bin" / "python"
PEERS_OF_INFLUENCE = ROOT / ".venv-influence" / "bin" / "python"
BLOCK = re.compile(r"^```(\w*)(?: title=\"([^\"]*)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = {"py", "python", "python3", "pycon"}


def blocks(path: Path) -> Iterator[tuple[str, str, str]]:
    """Language, title and text of a page's blocks."""
    for found in BLOCK.finditer(path.read_text()):
        yield found[1], found[2] or "", found[3]


def named(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_every_example_is_a_doctest(path: Path) -> None:
    """Pytest runs them (``--doctest-glob``). Code of other libraries has the language `py` and a page of its own.

    So does code of this one, whose title is the file that it stands in.
    """
    for language, title, text in blocks(path):
        assert "```" not in text, f"a block of {path.name} has no end: {text[:80]}"
        if language == "python":
            assert text.startswith(">>> "), f"not run: {text[:80]}"
            assert text.endswith("\n\n"), f"without an empty line, the fence is taken for output: {text[-80:]}"
            assert doctest.DocTestParser().get_examples(text)
        else:
            assert ">>> " not in text, f"a doctest that is not marked as python: {text[:80]}"
            shown = title.startswith("src/") and text in (ROOT / title).read_text()
            assert language not in PROGRAMS or path in (OTHERS, OTHERS_OF_INFLUENCE) or shown, f"not run: {text[:80]}"


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_lists_begin_after_an_empty_line(path: Path) -> None:
    """Or they are none: GitHub sees lists without, the site does not."""
    lines = BLOCK.sub("", path.read_text()).splitlines()
    for before, line in pairwise(lines):
        begins = re.match(r"([-*]|\d+\.) ", line) and before and not re.match(r"([-*]|\d+\.) |  |#|<!--", before)
        assert not begins, line


def versions() -> dict[str, str]:
    """What is pinned, for the tests and for the benchmarks against others."""
    pinned = (ROOT / "constraints.txt").read_text() + (ROOT / "benchmarks" / "peers.txt").read_text()
    return dict(re.findall(r"^([\w-]+)==(\S+)$", pinned.lower(), re.MULTILINE))


def shown(path: Path = OTHERS) -> list[tuple[str, str]]:
    """The code of other libraries, by title."""
    return [(title, text) for language, title, text in blocks(path) if language == "py"]


def shared_code(path: Path) -> str:
    """What all blocks of a page begin with."""
    first = next(text for language, _, text in blocks(path) if language == "python")
    return "".join(example.source for example in doctest.DocTestParser().get_examples(first))


def test_code_of_others_is_for_the_versions_that_are_pinned() -> None:
    assert {title.split()[0] for title, _ in shown()} == {"Opacus", "backpack-for-pytorch", "torch"}
    for title, _ in shown():
        name, version = title.lower().split()
        assert versions()[name] == version


@pytest.mark.slow
@pytest.mark.skipif(not PEERS.exists(), reason="the other libraries are installed by make bench-peers")
@pytest.mark.parametrize("index", range(len(shown())))
def test_code_of_others_runs_and_gives_the_same(index: int) -> None:
    compare = """
want = ps.grad(F.cross_entropy(original(data.tensors[0]), data.tensors[1], reduction="none"), original)
flat = torch.cat([w.flatten(1) for w in want.values()], 1)
found = globals()
if "rows" in found:
    torch.testing.assert_close(rows["0.weight"] if isinstance(rows, dict) else rows, want["0.weight"])
if "norms" in found:
    torch.testing.assert_close(norms, flat.norm(dim=1))
if "kernel" in found:
    torch.testing.assert_close(kernel, flat @ flat.t())
print("compared", *found.keys() & {"rows", "norms", "kernel", "engine"})
"""
    code = f"{shared_code(OTHERS)}\nimport copy\noriginal = copy.deepcopy(model)\n{shown()[index][1]}\n{compare}"
    done = subprocess.run([PEERS, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert re.search(r"compared \w", done.stdout)


def test_code_of_others_for_influence_has_its_version() -> None:
    titles = [title for title, _ in shown(OTHERS_OF_INFLUENCE)]
    assert titles == ["traker 0.3.2", "kronfluence 1.0.1", "dattri 0.3.0"]


@pytest.mark.slow
@pytest.mark.skipif(not PEERS_OF_INFLUENCE.exists(), reason="the other libraries are not installed in .venv-influence")
@pytest.mark.parametrize("index", range(len(shown(OTHERS_OF_INFLUENCE))))
def test_code_of_others_for_influence_runs_and_says_much_the_same(index: int) -> None:
    """Scores of the same shape and sign as those of `pi.exact`."""
    compare = """
original = pi.exact(copied, losses_fn, loader, next(iter(asked)), product=pi.Hessian(), damping=0.01)
both = torch.stack([original.flatten(), scores.detach().float().flatten()])
assert scores.shape == (5, 64)
print("correlation", float(both.corrcoef()[0, 1]))
"""
    code = f"{shared_code(OTHERS_OF_INFLUENCE)}\nimport copy\ncopied = copy.deepcopy(model)\n"
    code += f"{shown(OTHERS_OF_INFLUENCE)[index][1]}\n{compare}"
    done = subprocess.run([PEERS_OF_INFLUENCE, "-c", code], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = re.search(r"correlation (\S+)", done.stdout)
    assert found
    assert float(found[1]) > 0.3


@pytest.mark.slow
def test_the_site_builds_and_asks_nobody_else(tmp_path: Path) -> None:
    """Strictly: no page left out, no broken link or anchor, every name of the reference found."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(PAGES) - 1
    for page in pages:
        text = page.read_text()
        assert not re.findall(r"<(?:script|img|iframe)[^>]+src=\"?https?:", text)
        assert not re.findall(r"<link[^>]+rel=\"?(?:stylesheet|preconnect|preload)[^>]+https?:", text)
        assert "<blockquote>" not in text, f"{page}: an example without a fence"
