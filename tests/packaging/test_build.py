"""What `python -m build` makes, installed where nothing of the repository is to be seen."""

from __future__ import annotations

import doctest
import importlib.util
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import persample
from persample._releases import OLDEST

ROOT = Path(__file__).parents[2]
VERSION = persample.__version__
pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path) -> str:
    """Its output; its errors, if it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=cwd, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist, and the wheel that was made from it."""
    pytest.importorskip("build")
    out = tmp_path_factory.mktemp("dist")
    here = ["--no-isolation"] if importlib.util.find_spec("hatchling") else []  # else pip fetches it for the build
    run(sys.executable, "-m", "build", *here, "--outdir", out, ROOT, cwd=out)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the wheel and this environment's other packages, but not its editable persample."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", folder, cwd=folder)
    bin_ = folder / ("Scripts" if sys.platform == "win32" else "bin")
    run(bin_ / "python", "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (site,) = (p.parent for p in folder.rglob("site-packages/persample"))
    # Paths from a .pth file do not have their own .pth files read, which is how an editable install is found.
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return bin_ / "python"


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    source = {
        p.relative_to(ROOT / "src").as_posix()
        for p in (ROOT / "src" / "persample").rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    inside = {name for name in names if name.startswith("persample/")}
    assert inside == source
    assert "persample/py.typed" in inside
    info = f"persample-{VERSION}.dist-info"
    assert {name.split("/")[0] for name in names} == {"persample", info}
    assert f"{info}/licenses/LICENSE" in names


def test_the_metadata(wheel: Path) -> None:
    text = zipfile.ZipFile(wheel).read(f"persample-{VERSION}.dist-info/METADATA").decode()
    head = text.split("\n\n")[0].splitlines()
    assert f"Version: {VERSION}" in head
    assert "License-Expression: MIT" in head
    needs = [line.split(": ")[1] for line in head if line.startswith("Requires-Dist")]
    assert [need for need in needs if "extra ==" not in need] == ["torch>={}.{}".format(*OLDEST)]
    extras = {line.split(": ")[1] for line in head if line.startswith("Provides-Extra")}
    assert extras >= {"dp", "cli", "bench", "docs", "test"}
    assert "# persample" in text


def test_the_sdist_can_be_tested(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "Makefile", "pyproject.toml", "constraints.txt", "tests/reference.py"} <= names
    assert not [name for name in names if name.startswith((".venv", "build/", "dist/")) or "__pycache__" in name]


def test_the_first_example_of_the_readme(python: Path, tmp_path: Path) -> None:
    examples = doctest.DocTestParser().get_examples((ROOT / "README.md").read_text().split("```")[1])
    assert len(examples) > 3
    seen = [
        "import persample",
        "print(persample.__file__, persample.__version__)",
        *("".join(e.source) for e in examples),
        "print(type(g['0.weight']).__name__)",
    ]
    script = tmp_path / "example.py"
    script.write_text("\n".join(seen))
    lines = run(python, "-I", "-W", "error", script, cwd=tmp_path).splitlines()
    file, version = lines[0].split()
    assert Path(file).is_relative_to(python.parents[1])
    assert version == VERSION
    wanted = [line for e in examples for line in e.want.splitlines()]
    assert lines[1:-1] == wanted
    assert lines[-1] == "Tensor"


def test_the_core_needs_torch_alone(python: Path, tmp_path: Path) -> None:
    """What a bare import loads besides torch's own dependencies and the standard library."""
    optional = "typer rich matplotlib sklearn dp_accounting safetensors tensorboard mkdocs".split()
    code = f"import sys, persample; print([m for m in {optional} if m in sys.modules])"
    assert run(python, "-I", "-c", code, cwd=tmp_path) == "[]\n"


def test_the_command(python: Path, tmp_path: Path) -> None:
    said = run(python.parent / "persample", "version", cwd=tmp_path)
    assert VERSION in said
    assert said == run(python, "-I", "-m", "persample", "version", cwd=tmp_path)
