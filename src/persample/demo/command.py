"""The command: its options, and what it needs to be installed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

NEEDS = {
    "sklearn": "scikit-learn",
    "matplotlib": "matplotlib",
    "rich": "rich",
    "dp_accounting": "dp-accounting",
}  # by module


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and write its report; returns 0, 1 if a result differs from the definition, 2 if it cannot run.

    >>> from persample import demo
    >>> demo.main(["--out", "."])  # a directory: said on stderr
    2
    """
    options = _parser().parse_args(argv)
    problem = _missing() or _unwritable("--out", options.out)
    if options.picture is not None:
        problem = problem or _unwritable("--picture", options.picture)
    if problem:
        print(f"persample demo: {problem}", file=sys.stderr)
        return 2
    from .run import run  # not before it is known that what it imports is there
    from .settings import FULL, QUICK

    return run(QUICK if options.quick else FULL, options.seed, options.out, options.picture)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="persample demo",
        description="Finds the training images that caused wrong answers, finds wrong labels, trains privately and "
        "measures gradient noise on scikit-learn's digits, checks itself, and writes a report: one HTML file. Needs "
        "nothing but this machine, and about two minutes.",
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds: too short for good results")
    parser.add_argument("--out", type=Path, default=Path("persample-demo.html"), metavar="FILE", help="%(default)s")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.svg", help="some answers and their causes, as one drawing"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of everything random; %(default)s")
    return parser


def _missing() -> str:
    absent = [package for module, package in NEEDS.items() if find_spec(module) is None]
    if not absent:
        return ""
    return f"the demo needs {', '.join(absent)}, not installed here: pip install 'persample[demo]'"


def _unwritable(option: str, path: Path) -> str:
    """Found out before the work, not after it."""
    if path.is_dir():
        return f"{option} {path} is a directory: name a file in it, for instance {path / 'demo.html'}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{option} {path} cannot be written ({error.strerror}: {error.filename}): choose another file"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"{option} {path} cannot be written (no permission): choose another file"
    return ""
