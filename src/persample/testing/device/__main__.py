"""The command ``python -m persample.testing.device``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from .run import examine, tell_on_stderr, usable

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Print a report; the exit status is 1 if anything was not ok, and 2 if nothing could be tried."""
    parser = argparse.ArgumentParser(
        prog="python -m persample.testing.device",
        description="Check persample on a device, and count and time what it asks of it.",
        epilog="Exit status: 0 if all is ok, 1 if not, 2 if nothing could be tried.",
    )
    parser.add_argument("device", help="as PyTorch names it: cuda, cuda:1, mps, xpu, cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON, too")
    parser.add_argument("--quick", action="store_true", help="small models and few rounds also where it is timed")
    args = parser.parse_args(argv)
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {args.json.absolute().parent}")
    try:
        device = usable(args.device)
    except ValueError as error:
        parser.error(str(error))
    findings = examine(device, quick=args.quick, tell=tell_on_stderr)
    print(file=sys.stderr)
    print(findings)
    if args.json is not None:
        args.json.write_text(json.dumps(findings.as_json(), indent=1) + "\n")
    return 0 if findings.ok else 1


if __name__ == "__main__":
    sys.exit(main())
