"""`make test-torch-latest`: run the tests with the newest torch, and say in words what was run, or why nothing was.

Asks the package index which torch is the newest, and which is the newest with a CPU build. If that is the pinned one,
`make test` has tested it, and nothing is installed. Otherwise it goes into an environment of its own, without
constraints on other packages. On Linux, a torch without a CPU build is gigabytes of CUDA: `--cuda` allows them. The
exit status is 0 only if the newest torch, or the newest CPU build of it, was tested here or by `make test`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"


def pinned() -> str:
    """The torch of constraints.txt."""
    found = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None
    return public(found[1])


def public(version: str) -> str:
    """2.13.0+cpu is 2.13.0."""
    return version.partition("+")[0]


def newest(*options: str, alone: bool = False) -> str | None:
    """The newest torch that pip finds, with its settings or with these options ``alone``; None if it finds none."""
    env = {name: value for name, value in os.environ.items() if not (alone and name.startswith("PIP_"))}
    if alone:
        env["PIP_CONFIG_FILE"] = os.devnull
    command = [sys.executable, "-m", "pip", "index", "versions", "torch", "--retries", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    found = re.search(r"^torch \((\S+)\)", done.stdout, re.MULTILINE)
    return found and found[1]


class Decision(NamedTuple):
    """Which torch to install, if any; why; and whether it is all right if none is."""

    install: str | None
    said: str
    fine: bool = False


def decide(pin: str, on_index: str | None, cpu: str | None, cuda: bool) -> Decision:
    """From what is pinned, what pip finds, and the newest CPU build."""
    best = on_index or cpu
    if best is None:
        return Decision(None, "No package index could be asked for torch: nothing was tested.")
    if public(best) == pin:
        return Decision(
            None, f"The newest torch is {best}, the pinned one: `make test` tests it, no more was run.", True
        )
    if cpu is not None and public(cpu) == public(best):
        return Decision(cpu, f"The newest torch is {best}, and {cpu} a CPU build of it; pinned is {pin}.")
    if cuda or sys.platform != "linux":
        return Decision(best, f"The newest torch is {best}; pinned is {pin}.")
    if cpu is not None and public(cpu) != pin:
        return Decision(cpu, f"The newest torch is {best}; {cpu} is the newest CPU build, pinned is {pin}.")
    return Decision(
        None,
        f"The newest torch is {best}, and pinned is {pin}. No newer CPU build was found ({CPU_BUILDS}), and torch from "
        f"PyPI brings gigabytes of CUDA with it: nothing was tested. CUDA=1 make test-torch-latest installs them.",
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--cuda", action="store_true")
    args = parser.parse_args(argv)
    pin = pinned()
    cpu = newest("--index-url", CPU_BUILDS, alone=True)
    choice = decide(pin, newest(), cpu, args.cuda)
    print(choice.said, flush=True)
    if choice.install is None:
        return 0 if choice.fine else 1
    venv.create(args.venv, with_pip=True)
    python = args.venv / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    index = [] if args.cuda else ["--extra-index-url", CPU_BUILDS]
    subprocess.run(
        [python, "-m", "pip", "install", "-q", *index, f"torch=={choice.install}", "-e", f"{ROOT}[test]"], check=True
    )
    code = "import torch; print(torch.__version__)"
    used = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    tests = [python, "-m", "pytest", "-n", "auto", "--maxprocesses", "8", "-m", "not slow"]
    failed = subprocess.run(tests, cwd=ROOT).returncode
    print(f"Tests with torch {used} (pinned: {pin}): {'FAILED' if failed else 'passed'}.")
    return failed


if __name__ == "__main__":
    sys.exit(main())
