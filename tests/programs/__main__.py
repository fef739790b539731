"""`python -m tests.programs --minutes 10`: random programs against the definition, until the time is over."""

from __future__ import annotations

import argparse
import json
import sys
from itertools import count, islice
from pathlib import Path
from time import time

import torch

from .hunt import Hunt


def main() -> int:
    """Exit code 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to go on")
    parser.add_argument("--seed", type=int, default=None, help="the first program's; the next ones follow it")
    parser.add_argument("--programs", type=int, default=None, help="at most so many")
    parser.add_argument(
        "--known", type=Path, help="a file of signatures, one JSON list per line, that are not findings"
    )
    parser.add_argument("--alarms", action="store_true", help="also find samples that are said to interact, and do not")
    options = parser.parse_args()
    seed = int(time()) % 1_000_000 * 1_000 if options.seed is None else options.seed
    known = {tuple(json.loads(line)) for line in options.known.read_text().splitlines()} if options.known else set()
    torch.set_num_threads(1)  # the tensors are tiny
    print(f"seed {seed}", flush=True)
    hunt = Hunt(known, ("alarm",) if options.alarms else (), say=lambda text: print(text, flush=True))
    hunt.run(islice(count(seed), options.programs), options.minutes * 60)
    for found in hunt.found:
        print(f"seed {found.seed}: {json.dumps(found.signature)}")
    return 1 if hunt.found else 0


if __name__ == "__main__":
    sys.exit(main())
