"""The table of rules in docs/two-ways-in.md: `python -m tests.expanded.table` prints it."""

from __future__ import annotations

from persample.expanded import HANDLED_FUNCTIONS
from persample.expanded.functions import Known


def render() -> str:
    """One row per kind of rule, in the order of registration."""
    rows: dict[str, dict[str, None]] = {}
    for function, rule in HANDLED_FUNCTIONS.items():
        if isinstance(rule, Known):
            where = "followed" if rule.alone is None else "dim 0 or 1" if rule.dim is None else f"dim {rule.dim}"
            rows.setdefault(where, {})[f"`{function.__name__}`"] = None
    lines = ["| functions with a rule | batch |", "|---|---|"]
    return "\n".join(lines + [f"| {', '.join(names)} | {where} |" for where, names in rows.items()])


if __name__ == "__main__":
    print(render())
