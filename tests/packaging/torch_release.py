"""`make test-torch TORCH=2.15.0`: runs the tests with a release of torch, and says what it ran and how that went.

The release goes into an environment of its own, `.venv-torch-2.15.0`, with the other packages as in constraints.txt,
but for those that torch itself decides on. A CPU build is taken where there is one; otherwise, on Linux, torch brings
gigabytes of CUDA with it, which need no GPU. `TORCH=newest`, the default, asks the package index; if that is the pinned
release, `make test` has tested it, and nothing is installed. `TESTS="tests/graph -k names"` runs a part.

The exit status is 0 only if the release was tested, here or by `make test`, and nothing failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
NEWEST = "newest"
# What a release of torch has requirements of its own for.
TORCHS_OWN = {"torch", "filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy", "triton", "typing_extensions"}


def pinned() -> str:
    """The torch of constraints.txt."""
    found = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None
    return public(found[1])


def public(version: str) -> str:
    """2.13.0+cpu is 2.13.0."""
    return version.partition("+")[0]


def constraints() -> str:
    """constraints.txt without torch and what depends on its release."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return "\n".join(line for line in lines if line.partition("==")[0].lower().replace("-", "_") not in TORCHS_OWN)


def available(*options: str, alone: bool = False) -> list[str]:
    """The releases of torch that pip finds, the newest first, with its settings or with these options ``alone``."""
    env = {name: value for name, value in os.environ.items() if not (alone and name.startswith("PIP_"))}
    if alone:
        env["PIP_CONFIG_FILE"] = os.devnull
    command = [sys.executable, "-m", "pip", "index", "versions", "torch", "--retries", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    found = re.search(r"^Available versions: (.+)$", done.stdout, re.MULTILINE)
    return found[1].split(", ") if found else []


class Decision(NamedTuple):
    """Which torch to install, if any; why; and whether it is all right if none is."""

    install: str | None
    said: str
    fine: bool = False


def decide(wanted: str, pin: str, on_index: Sequence[str], cpu: Sequence[str]) -> Decision:
    """From what is asked for and pinned, what pip finds, and the CPU builds."""
    found = [*on_index, *cpu]
    if wanted == NEWEST:
        if not found:
            return Decision(None, "No package index could be asked for torch: nothing was tested.")
        wanted = public(on_index[0] if on_index else cpu[0])
        if wanted == pin:
            said = f"The newest torch is {wanted}, the pinned one: `make test` tests it, no more was run."
            return Decision(None, said, True)
    build = next((one for one in cpu if public(one) == public(wanted)), None)
    if build is not None:
        return Decision(build, f"Testing {build}, a CPU build; pinned is {pin}.")
    if public(wanted) in map(public, found) or not found:  # without an answer, pip may still know where to look
        return Decision(wanted, f"Testing torch {wanted}, of which no CPU build was found; pinned is {pin}.")
    return Decision(None, f"There is no torch {wanted} among {', '.join(on_index[:8])}, ...: nothing was tested.")


def prepared(folder: Path, torch: str) -> Path:
    """The Python of an environment with this torch, made unless it is there."""
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    stamp, needs = folder / ".installed", [ROOT / "pyproject.toml", ROOT / "constraints.txt"]
    if stamp.exists() and stamp.stat().st_mtime > max(path.stat().st_mtime for path in needs):
        return python
    venv.create(folder, with_pip=True)
    (folder / "constraints.txt").write_text(constraints())
    index = ["--extra-index-url", CPU_BUILDS] if "+cpu" in torch else []
    what = ["-c", folder / "constraints.txt", f"torch=={torch}", "-e", f"{ROOT}[test]"]
    subprocess.run([python, "-m", "pip", "install", "-q", *index, *what], check=True)
    stamp.touch()
    return python


def command(python: Path, report: Path, some: str) -> list[str | Path]:
    """The command of `make test`, which also writes a report."""
    every = ["-n", "auto", "--maxprocesses", "8", "--dist", "worksteal", "-m", "not slow"]
    return [python, "-m", "pytest", *every, f"--junitxml={report}", *shlex.split(some)]


def counted(report: Path) -> str:
    """What a report says, in words."""
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    sums = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        for name in sums:
            sums[name] += int(suite.get(name, 0))
    failed = sums["failures"] + sums["errors"]
    return f"{sums['tests'] - failed - sums['skipped']:,} passed, {failed:,} failed, {sums['skipped']:,} skipped"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default=NEWEST)
    parser.add_argument("--tests", default="", help="arguments for pytest; all tests if there are none")
    args = parser.parse_args(argv)
    pin, cpu = pinned(), available("--index-url", CPU_BUILDS, alone=True)
    choice = decide(args.torch, pin, available(), cpu)
    print(choice.said, flush=True)
    if choice.install is None:
        return 0 if choice.fine else 1
    python = prepared(ROOT / f".venv-torch-{public(choice.install)}", choice.install)
    code = "import platform, torch; print(f'torch {torch.__version__} on Python {platform.python_version()}')"
    used = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    report = ROOT / "build" / f"test-torch-{public(choice.install)}.xml"
    report.unlink(missing_ok=True)
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # per worker, as in `make test`
    failed = subprocess.run(command(python, report, args.tests), cwd=ROOT, env=one_thread).returncode
    said = counted(report) if report.exists() else "no test was run"
    print(f"{used}: {said}{f' (of {args.tests})' if args.tests else ''}; pinned is {pin}.")
    return failed


if __name__ == "__main__":
    sys.exit(main())
