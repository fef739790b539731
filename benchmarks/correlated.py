"""``python -m benchmarks.correlated``: correlated noise beside independent noise (DP-SGD), at the same epsilon.

First the error that is expected of sums of gradients, for plans of several kinds: seconds, and the same on any machine.
With ``--seeds N``, also test accuracies on scikit-learn's digits: the mean of N runs for each learning rate, and the
best rate for each mechanism. Both are Markdown, as in docs/correlated-noise.md.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import persample as ps
from examples.private_digits import load
from persample import dp

DELTA = 1e-7


@dataclass(frozen=True)
class Setting:
    """A task by its numbers."""

    examples: int
    batch_size: int
    epochs: float
    epsilon: float

    def plan(self, **more: Any) -> dp.Plan:
        kinds = {"delta": DELTA, "accountant": "rdp", **more}
        return dp.Plan(
            examples=self.examples, batch_size=self.batch_size, epochs=self.epochs, epsilon=self.epsilon, **kinds
        )


SETTINGS = [Setting(60_000, 500, epochs, epsilon) for epochs in (1, 5, 20) for epsilon in (1.0, 4.0, 16.0)]
SETTINGS += [Setting(1_000_000, 4_000, 4, epsilon) for epsilon in (1.0, 4.0, 16.0)]
MECHANISMS: dict[str, dict[str, Any]] = {
    "DP-SGD, cyclic": {"sampling": "cyclic"},
    "banded": {"mechanism": "banded"},
    "banded, cyclic": {"mechanism": "banded", "sampling": "cyclic"},
    "blt, cyclic": {"mechanism": "blt", "sampling": "cyclic"},
}


def _bands(plan: dp.Plan) -> str:
    return f" ({plan.bands} band{'s' * (plan.bands != 1)})" if plan.bands else ""


def errors(setting: Setting) -> list[str]:
    """A row of the table: DP-SGD's error, and those of all others as multiples of it, the least in bold."""
    base = setting.plan().expected_error
    plans = {name: setting.plan(**kinds) for name, kinds in MECHANISMS.items()}
    ratios = {name: plan.expected_error / base for name, plan in plans.items()}
    cells = []
    for name, plan in plans.items():
        text = f"{ratios[name]:.2f}"
        text = f"**{text}**" if ratios[name] == min(*ratios.values(), 1.0) else text
        cells.append(text + _bands(plan))
    task = f"{setting.batch_size} of {setting.examples}, {setting.epochs:g} epoch{'s' * (setting.epochs != 1)}"
    return [task, f"{setting.epsilon:g}", f"{base:.3g}", *cells]


RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
TRIALS: dict[str, dict[str, Any]] = {
    "DP-SGD": {},
    "banded": {"mechanism": "banded"},
    "blt, cyclic": {"mechanism": "blt", "sampling": "cyclic"},
}


def accuracy(plan: dp.Plan, rate: float, seed: int) -> float:
    """On the test data, after training a linear model with a constant learning rate."""
    data, x, y = load()
    model = nn.Linear(64, 10)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    private = dp.Private(model, optimizer, plan, ps.ClippedSum(1.0), seed=seed)
    for images, labels in private.batches(data):
        private.step(F.cross_entropy(model(images), labels, reduction="none"))
    return float((model(x).argmax(1) == y).float().mean())


def trials(epsilon: float, seeds: int) -> list[list[str]]:
    """A row for each mechanism, at its best learning rate."""
    setting, rows = Setting(len(load()[0]), 64, 10, epsilon), []
    for name, kinds in TRIALS.items():
        plan = setting.plan(**{"delta": 1e-5, **kinds})
        found = {rate: [accuracy(plan, rate, seed) for seed in range(seeds)] for rate in RATES}
        best = max(found, key=lambda rate: mean(found[rate]))
        spread = stdev(found[best]) if seeds > 1 else 0.0
        label = name + _bands(plan)
        error = f"{plan.expected_error:.3g}"
        rows.append([f"{epsilon:g}", label, error, f"{best:g}", f"{mean(found[best]):.1%} ± {spread:.1%}"])
        print(".", end="", file=sys.stderr, flush=True)
    return rows


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=0, help="runs on digits for each learning rate")
    parser.add_argument("--epsilons", type=float, nargs="*", default=[1.0, 8.0], help="for the runs on digits")
    options = parser.parse_args(arguments)
    head = ["plan", "epsilon", "DP-SGD: error", *MECHANISMS]
    print(table(head, [errors(setting) for setting in SETTINGS]))
    if options.seeds:
        warnings.simplefilter("ignore", dp.PrivacyWarning)  # of many runs on the same data
        torch.set_num_threads(1)
        rows = [row for epsilon in options.epsilons for row in trials(epsilon, options.seeds)]
        print("\n" + table(["epsilon", "mechanism", "expected error", "learning rate", "test accuracy"], rows))


if __name__ == "__main__":
    main()
