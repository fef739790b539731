"""Docs that can fail: every public name is documented, and the README says how to begin."""

from __future__ import annotations

import doctest
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import persample
from persample import audit, dp, expanded, testing
from persample.nn import grad as nn_grad

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
API = PAGES.pop("docs/api.md")
MAKEFILE = (ROOT / "Makefile").read_text()
PUBLIC = [name for name in persample.__all__ if not name.startswith("__")]
CALLABLE = [(persample, name) for name in PUBLIC] + [(testing, name) for name in testing.__all__]
CALLABLE += [(module, name) for module in (dp, expanded, nn_grad) for name in module.__all__]
CALLABLE.remove((expanded, "HANDLED_FUNCTIONS"))  # a dict
FUNCTIONS = [getattr(module, name) for module, name in CALLABLE if inspect.isfunction(getattr(module, name))]

VERBS = [name for name in PUBLIC if inspect.isfunction(getattr(persample, name))]


def is_error(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, Exception)


def test_all_is_what_there_is() -> None:
    """Nothing public is missing from __all__, nothing in it is missing from the package, and it is sorted."""
    assert all(hasattr(persample, name) for name in persample.__all__)
    modules = {name for name, value in vars(persample).items() if isinstance(value, ModuleType)} - {
        "expanded",
        "nn",
        "testing",
    }
    public = {name for name in vars(persample) if not name.startswith("_")} - modules
    assert public == set(PUBLIC)
    assert persample.__all__ == sorted(persample.__all__)


@pytest.mark.parametrize(("module", "name"), CALLABLE, ids=lambda x: x if isinstance(x, str) else "")
def test_every_public_name_has_a_docstring(module: ModuleType, name: str) -> None:
    doc = getattr(module, name).__doc__
    assert doc
    assert doc.strip().splitlines()[0].endswith((".", ":"))
    assert not doc.startswith(f"{name}("), "a dataclass's generated signature is no docstring"


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example_or_is_part_of_one(name: str) -> None:
    """A verb has a doctest of its own; a module has one in it; what a verb returns is described by the verb."""
    thing = getattr(persample, name)
    if is_error(thing):
        return
    if inspect.isclass(thing):
        described = any(f"`{name}`" in (fn.__doc__ or "") for fn in FUNCTIONS) or ">>>" in (thing.__doc__ or "")
        own = doctest.DocTestParser().get_examples(thing.__doc__ or "")
        assert own or described or f"ps.{name}" in PAGES["docs/reductions.md"]
    elif isinstance(thing, ModuleType):
        assert any(test.examples for test in doctest.DocTestFinder().find(thing))
    else:
        assert doctest.DocTestParser().get_examples(thing.__doc__)


@pytest.mark.parametrize("fn", [getattr(persample, n) for n in VERBS] + [testing.check])
def test_every_argument_of_a_verb_is_described(fn: object) -> None:
    doc, signature = inspect.getdoc(fn) or "", inspect.signature(fn)  # type: ignore[arg-type]
    assert ("Args:" in doc) == bool(signature.parameters)
    assert ("Returns:" in doc) == (signature.return_annotation != "None")
    described = re.findall(r"^    (\w+): ", doc, re.MULTILINE)
    assert described == list(signature.parameters)


def test_the_readme_names_the_two_commands_and_they_exist() -> None:
    for command in ("make demo", "make test"):
        assert command in README
        assert re.search(rf"^{command.split()[1]}:", MAKEFILE, re.MULTILINE)


def test_the_readme_opens_with_code_that_runs() -> None:
    lines = README.splitlines()
    assert lines.index("```python") < 10
    assert len(doctest.DocTestParser().get_examples(README)) > 10


def test_the_readme_is_short_and_says_how_to_begin_on_its_first_screen() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120
    assert all(any(line.startswith(command) for line in lines[:30]) for command in ("make demo", "make test"))


@pytest.mark.parametrize("module", [persample, dp, expanded, testing], ids=lambda module: module.__name__)
def test_pages_mention_every_public_name(module: ModuleType) -> None:
    """In prose or examples, beside the reference."""
    prose = "\n".join([README, *PAGES.values()])
    names = [name for name in module.__all__ if not name.startswith("__")]
    assert not [name for name in names if not re.search(rf"\b{name}\b", prose)]


@pytest.mark.parametrize(
    "module", [persample, audit, dp, expanded, testing, nn_grad], ids=lambda module: module.__name__
)
def test_the_reference_has_every_public_name(module: ModuleType) -> None:
    """By itself (``persample.explain`` is also a file, so that its path is longer), or as part of its module."""
    listed = re.findall(r"^::: persample\.([\w.]+)$", API, re.MULTILINE)
    path = module.__name__.removeprefix("persample").lstrip(".")
    if path == "nn.grad":
        assert path in listed
        return
    names = [name for name in module.__all__ if not name.startswith("__") and not name.isupper()]
    modules = [name for name in names if isinstance(getattr(module, name), ModuleType)]
    assert not [name for name in modules if not any(entry.startswith(f"{name}.") for entry in listed)]
    wanted = [f"{path}.{name}".lstrip(".") for name in names if name not in modules]
    assert not [name for name in wanted if name not in listed and f"{name}.{name}" not in listed]


def test_links_of_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_the_version_is_told_once() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", persample.__version__)
    assert (
        f"[{persample.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
        or persample.__version__ in (ROOT / "CHANGELOG.md").read_text()
    )
