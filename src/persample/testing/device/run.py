"""Running all checks on a device, and the report of it."""

from __future__ import annotations

import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch

from ..._errors import PerformanceWarning
from ..._version import __version__
from ...kernels.devices import has_fast_float64, has_float64
from .answers import Check, Wrong, answers
from .hard import hard_numbers
from .work import full_float32, work

__all__ = ["Findings", "Line", "examine", "usable"]


@dataclass(frozen=True, slots=True)
class Line:
    """What became of one check: "ok", "WRONG", or "failed" with an error."""

    section: str
    name: str
    status: str
    remark: str


@dataclass(frozen=True)
class Findings:
    """All lines, and where they are of; prints as a report."""

    environment: dict[str, str]
    lines: tuple[Line, ...]

    @property
    def ok(self) -> bool:
        """Was everything right?"""
        return all(line.status == "ok" for line in self.lines)

    def as_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {"ok": self.ok, "environment": self.environment, "lines": [asdict(line) for line in self.lines]}

    def __str__(self) -> str:
        return "\n".join(self._text())

    def _text(self) -> Iterator[str]:
        yield from (f"{name}: {value}" for name, value in self.environment.items())
        width = max((len(line.name) for line in self.lines), default=0)
        for section, lines in groupby(self.lines, key=lambda line: line.section):
            yield f"\n{section}"
            yield from (f"  {line.status:<6}  {line.name:<{width}}  {line.remark}".rstrip() for line in lines)
        bad = [line for line in self.lines if line.status != "ok"]
        yield f"\n{len(self.lines)} checks: " + (f"{len(bad)} NOT ok" if bad else "all ok")
        yield from (f"  {line.status}  {line.section}; {line.name}: {line.remark}" for line in bad)
        device = self.environment["device"]
        yield "From a checkout, every case of the tests runs on this device, too:"
        yield f"  PERSAMPLE_DEVICE={device} python -m pytest tests/device -q"


def usable(name: str) -> torch.device:
    """The device of this name; ValueError if PyTorch knows none, or cannot compute on it here."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{name!r} is no device of PyTorch: {_first_line(error)}") from error
    if device.type == "meta":
        raise ValueError("tensors on meta have no numbers: there is nothing to check")
    try:
        return (torch.zeros(2, device=device) + 1).sum().device
    except Exception as error:
        found = torch.accelerator.current_accelerator(check_available=True)
        there = "cpu" if found is None else f"cpu, {found.type}"
        raise ValueError(f"no work can be done on {name!r} ({_first_line(error)}); there is: {there}") from error


def examine(device: torch.device, *, quick: bool = False, tell: Callable[[str], object] | None = None) -> Findings:
    """Run every check, whatever becomes of the others; ``tell`` hears of each as it begins.

    >>> from persample.testing.device import examine
    >>> findings = examine(torch.device("cpu"), quick=True)  # doctest: +SKIP
    >>> findings.ok  # doctest: +SKIP
    True
    """
    checks, lines = [*answers(device), *hard_numbers(device), *work(device, quick)], list[Line]()
    with full_float32(device):
        for done, check in enumerate(checks):
            if tell is not None:
                tell(f"[{done + 1}/{len(checks)}] {check.section}; {check.name}")
            lines.append(_run(check))
    return Findings(environment(device), tuple(lines))


def _run(check: Check) -> Line:
    """One line; a slow path is remarked on, other warnings are for other tests."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            status, remark = "ok", check.run()
        except Wrong as wrong:
            status, remark = "WRONG", str(wrong)
        except Exception as error:
            status, remark = "failed", f"{type(error).__name__}: {_first_line(error)}"
    slow = sorted({_first_line(w.message) for w in caught if issubclass(w.category, PerformanceWarning)})
    return Line(check.section, check.name, status, "; ".join([remark, *(f"slow: {text}" for text in slow)]))


def _first_line(error: object) -> str:
    line = (str(error).strip().splitlines() or ["no message"])[0]
    return line if len(line) <= 200 else f"{line[:200]}…"


def environment(device: torch.device) -> dict[str, str]:
    """What a reader of the report needs to know of the machine."""
    speed = ("fast" if has_fast_float64(device) else "slow") if has_float64(device) else "none"
    found = {
        "persample": __version__,
        "torch": torch.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "device": str(device),
        "float64": speed,
    }
    return found | (_of_cuda(device) if device.type == "cuda" else {})


def _of_cuda(device: torch.device) -> dict[str, str]:
    """Name and versions, as far as this build of PyTorch tells."""
    facts = torch.cuda.get_device_properties(device)
    return {
        "name": facts.name,
        "capability": f"{facts.major}.{facts.minor}",
        "memory": f"{facts.total_memory / 2**30:.1f} GB, {facts.multi_processor_count} multiprocessors",
        "cuda": str(torch.version.cuda or f"hip {torch.version.hip}"),
        "driver": _driver(),
        "cudnn": str(torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else "none"),
    }


def _driver() -> str:
    """By the command that comes with it."""
    import subprocess

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return said[0] if said else "unknown"


def tell_on_stderr(text: str) -> None:
    """One line that is written over where somebody is watching, a line each in a log."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:100]}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)
