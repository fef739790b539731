"""Accounts as they are written down, and what they must look like."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

_RUN = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True)
class Accounts:
    """Which run, by which plan, and how far it has come."""

    run: str
    plan: dict[str, Any]
    steps: int
    passes: int

    @classmethod
    def from_dict(cls, accounts: Any) -> Accounts:
        """Refuses what cannot be, by a ValueError."""
        check_accounts(accounts, [f.name for f in fields(cls)])
        return cls(**accounts)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_accounts(accounts: Any, names: list[str]) -> None:
    """A mapping with these names, whose run, plan, steps and passes are possible."""
    if not isinstance(accounts, Mapping) or set(accounts) != set(names):
        raise ValueError(f"accounts should have {', '.join(names)}, and these are {str(accounts)[:80]}")
    if not isinstance(accounts["run"], str) or not _RUN.fullmatch(accounts["run"]):
        raise ValueError(
            f"accounts are damaged: a run has 16 hexadecimal digits, and not {str(accounts['run'])[:80]!r}"
        )
    if not isinstance(accounts["plan"], Mapping) or not is_count(accounts["plan"].get("steps")):
        raise ValueError(f"accounts are damaged: a plan should have steps, and this is {str(accounts['plan'])[:80]}")
    for name, most in (("steps", accounts["plan"]["steps"]), ("passes", accounts["steps"])):
        if not is_count(accounts[name]) or accounts[name] > most:
            raise ValueError(
                f"accounts are damaged: {name} should be 0 to {most}, and are {str(accounts[name])[:80]!r}"
            )


def is_positive(value: object) -> bool:
    """Whether it is a finite number above 0, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def is_bound(value: object) -> bool:
    """Whether it is a positive number, or a list of some."""
    return is_positive(value) or (isinstance(value, list) and bool(value) and all(map(is_positive, value)))


def is_count(value: object) -> bool:
    """Whether it is an integer that is not negative, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
