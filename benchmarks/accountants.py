"""Epsilon by Opacus' accountants for a table of settings, to compare ours with.

Run once, where Opacus is installed; tests/dp/accountants.json keeps what it printed:

    python -m benchmarks.accountants > tests/dp/accountants.json
"""

from __future__ import annotations

import json
import warnings
from importlib.metadata import version
from itertools import product

SETTINGS = [  # (sampling rate, noise multiplier, steps)
    *product((0.004, 0.05), (0.7, 1.1, 2.0), (100, 3000)),
    (0.001, 0.6, 20000),
    (0.1, 5.0, 1000),
    (0.02, 20.0, 10000),
    (1.0, 4.0, 10),
]
DELTA = 1e-5


def epsilon(accountant: str, rate: float, noise: float, steps: int) -> float:
    from opacus.accountants import create_accountant

    ledger = create_accountant(accountant)
    ledger.history = [(noise, rate, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on orders, as for ours
        return float(ledger.get_epsilon(DELTA))


def main() -> None:
    rows = [
        {"rate": q, "noise": s, "steps": n, "rdp": epsilon("rdp", q, s, n), "prv": epsilon("prv", q, s, n)}
        for q, s, n in SETTINGS
    ]
    print(json.dumps({"opacus": version("opacus"), "delta": DELTA, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
