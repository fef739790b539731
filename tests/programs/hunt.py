"""Programs one after the other; what is found is shrunk, told apart from what was found before, and printed."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from time import monotonic

from .generate import generate
from .script import Finding, Invalid, Script, evaluate
from .shrink import PLAIN, calls, shrink, signature

Signature = tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """Something wrong, as small as it could be made."""

    seed: int
    finding: Finding
    script: Script
    signature: Signature


@dataclass
class Hunt:
    """What was run and what came of it. Programs that call all that a known finding calls are taken for it."""

    known: set[Signature] = field(default_factory=set)
    also: tuple[str, ...] = ()  # checks beside those that a program has of its own
    write: Callable[[int], Script | None] = generate
    say: Callable[[str], None] = print
    seconds_to_shrink: float = 30.0
    counts: Counter[str] = field(default_factory=Counter)
    found: list[Found] = field(default_factory=list)

    def run(self, seeds: Iterable[int], seconds: float = float("inf"), every: float = 30.0) -> None:
        """Try programs until there are no more seeds or the time is over."""
        began = told = monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for seed in seeds:
                self.one(seed)
                now = monotonic()
                if now - told > every:
                    told = now
                    self.say(self.summary(now - began))
                if now - began > seconds:
                    break
        self.say(self.summary(monotonic() - began))

    def one(self, seed: int) -> None:
        """One program."""
        script = self.write(seed)
        self.counts["programs"] += 1
        if script is None:
            self.counts["empty"] += 1
            return
        script = replace(script, checks=(*script.checks, *self.also))
        try:
            self.counts.update(evaluate(script))
        except Invalid:
            self.counts["invalid"] += 1
        except Finding as finding:
            self.counts["failing"] += 1
            self._look_into(seed, script, finding)

    def _look_into(self, seed: int, script: Script, finding: Finding) -> None:
        if self._like_known(script, finding):
            self.counts["like known"] += 1
            return
        small = shrink(script, finding, self.seconds_to_shrink)
        sign = signature(small, finding)
        if sign in self.known or self._like_known(small, finding):
            self.counts["like known"] += 1
            return
        self.known.add(sign)
        self.found.append(Found(seed, _finding(small) or finding, small, sign))
        self.say(report(self.found[-1]))

    def _like_known(self, script: Script, finding: Finding) -> bool:
        called = calls(script) - PLAIN
        about = [
            set(ops)
            for check, kind, *ops in self.known
            if check in (finding.check, "*")
            and (kind == finding.kind or (kind.endswith("*") and finding.kind.startswith(kind[:-1])))
        ]
        return any(ops and ops <= called for ops in about)

    def summary(self, seconds: float) -> str:
        """One line."""
        shown = ", ".join(f"{n} {what}" for what, n in self.counts.items() if what != "programs")
        programs = self.counts["programs"]
        return (
            f"{programs} programs, {programs / max(seconds, 1e-9):.0f} per second; {shown}; {len(self.found)} findings"
        )


def _finding(script: Script) -> Finding | None:
    """What is wrong with a program that was made smaller."""
    try:
        evaluate(script)
    except Finding as finding:
        return finding
    except Invalid:
        return None
    return None


def report(found: Found) -> str:
    """A finding with a script that can be pasted."""
    line = "=" * 100
    told = found.finding.detail if len(found.finding.detail) < 1500 else found.finding.detail[:1500] + " …"
    return (
        f"{line}\nFINDING (seed {found.seed}): {found.finding.check}, {found.finding.kind}\n"
        f"{told}\nsignature: {' '.join(found.signature[2:])}\n\n{found.script.program}\n"
        f"# ---- to paste ----\n{found.script.text}# ---- end ----\n{line}"
    )
