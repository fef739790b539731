"""How well influences predict retraining: linear datamodelling scores on digits, for every curvature.

`python -m benchmarks.influence --json out.json`: 240 retrainings on random halves of 1000 digits (60 halves, 4 seeds
each), a logistic regression and an MLP; the score of a method is the Spearman correlation between the sum of the scores
of a half's samples and the loss of a model trained on it, the mean over 100 queries. All methods see one checkpoint.
`--cost` measures what a pass of fitting costs beside a plain step instead.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps
from persample import influence as pi
from persample.influence.vectors import Fit

from .workloads import WORKLOADS

DECAY, RATE, STEPS, HALVES, SEEDS = 5e-3, 0.1, 300, 60, 4


@dataclass(frozen=True)
class Retrained:
    """Data, one model trained on all of them, and what models trained on halves of them say of the queries."""

    train: tuple[Tensor, Tensor]
    queries: tuple[Tensor, Tensor]
    model: nn.Module
    halves: Tensor  # (60, 1000) of zeros and ones
    outcomes: Tensor  # (60, 100): the queries' losses

    def lds(self, scores: Tensor) -> float:
        """The mean over queries of the rank correlation between predicted and actual losses."""
        predicted = -self.halves.double() @ scores.double().t()
        return float(spearman(predicted, self.outcomes.double()).nanmean())


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """The rank correlation of every column."""
    ranks = [t.argsort(0).argsort(0).double() for t in (a, b)]
    centred = [r - r.mean(0) for r in ranks]
    return (centred[0] * centred[1]).sum(0) / (centred[0].norm(dim=0) * centred[1].norm(dim=0))


def make(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if kind == "logistic":
        return nn.Linear(64, 10)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def train_many(kind: str, x: Tensor, y: Tensor, subsets: Tensor, seeds: list[int]) -> list[nn.Module]:
    """One model for each row of subsets (R, n), all at once."""
    models = [make(kind, seed) for seed in seeds]
    weights = [
        torch.stack([p.detach() for p in ps_]).requires_grad_() for ps_ in zip(*map(_parameters, models), strict=True)
    ]
    optimizer = torch.optim.SGD(weights, lr=RATE, momentum=0.9, weight_decay=DECAY)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    for _ in range(STEPS):
        picked = [s[torch.randint(len(s), (64,), generator=g)] for s, g in zip(subsets, generators, strict=True)]
        rows = torch.stack(picked)
        z = torch.baddbmm(weights[1].unsqueeze(1), x[rows], weights[0].mT)
        if kind != "logistic":
            z = torch.baddbmm(weights[3].unsqueeze(1), z.relu(), weights[2].mT)
        losses = F.cross_entropy(z.flatten(0, 1), y[rows].flatten(), reduction="none")
        optimizer.zero_grad()
        losses.view(len(rows), -1).mean(1).sum().backward()
        optimizer.step()
    for r, model in enumerate(models):
        for p, trained in zip(model.parameters(), weights, strict=True):
            p.data.copy_(trained[r].detach())
    return [model.eval() for model in models]


def _parameters(model: nn.Module) -> list[Tensor]:
    return list(model.parameters())


def retrain(kind: str, halves: int = HALVES, seeds: int = SEEDS, split: int = 0) -> Retrained:
    from sklearn.datasets import load_digits

    data, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(data / 16, dtype=torch.float32), torch.tensor(labels)
    x = x - x.mean(0)
    generator = torch.Generator().manual_seed(split)
    order = torch.randperm(len(x), generator=generator)
    train, test = order[:1000], order[1000:1100]
    subsets = torch.stack([torch.randperm(1000, generator=generator)[:500] for _ in range(halves)])
    masks = torch.zeros(halves, 1000).scatter_(1, subsets, 1.0)
    outcomes = torch.zeros(halves, 100)
    for s in range(seeds):
        models = train_many(kind, x[train], y[train], subsets, [1000 * (s + 1) + j for j in range(halves)])
        with torch.no_grad():
            outcomes += torch.stack([F.cross_entropy(m(x[test]), y[test], reduction="none") for m in models])
    (model,) = train_many(kind, x[train], y[train], torch.arange(1000).unsqueeze(0), [2000])
    return Retrained((x[train], y[train]), (x[test], y[test]), model, masks, outcomes / seeds)


def losses_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def logits_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(batch[0])  # type: ignore[no-any-return]


SAMPLED = pi.categorical(logits_fn)
NEWTON = pi.GaussNewton(logits_fn, lambda z, batch: F.cross_entropy(z, batch[1], reduction="none"))


def by_blocks(run: Retrained, curvature: pi.Curvature, damping: float | None) -> Tensor:
    """Scores of a curvature that is fitted to whole gradients."""
    fitted = pi.fit(curvature, run.model, losses_fn, [run.train], sample_losses_fn=SAMPLED, damping=damping)
    params = dict(run.model.named_parameters())
    gradients = ps.grad(losses_fn(run.model, run.queries), params)
    blocks = {n: g.reshape(len(g), g.shape[1], -1) for n, g in gradients.items()}
    divided = {n: b.reshape(gradients[n].shape) for n, b in fitted.apply(blocks).items()}
    return ps.dot(losses_fn(run.model, run.train), params, divided).t()


def by_products(run: Retrained, product: Any, products: int, damping: float | None = DECAY) -> Tensor:
    return pi.exact(
        run.model, losses_fn, [run.train], run.queries,
        product=product, sample_losses_fn=SAMPLED, products=products, damping=damping,
    )  # fmt: skip


def by_dual(run: Retrained, draws: int) -> Tensor:
    return pi.dual(run.model, losses_fn, [run.train], run.queries, sample_losses_fn=SAMPLED, draws=draws, damping=DECAY)


METHODS: dict[str, Callable[[Retrained], Tensor]] = {
    "none": lambda run: by_blocks(run, pi.Identity(), None),
    "K-FAC, sampled, chosen damping": lambda run: by_blocks(run, pi.KFAC(labels="sampled"), None),
    "Shampoo, given, chosen damping": lambda run: by_blocks(run, pi.Shampoo(), None),
    "Shampoo, sampled, chosen damping": lambda run: by_blocks(run, pi.Shampoo(labels="sampled"), None),
    "Shampoo, sampled, weight decay": lambda run: by_blocks(run, pi.Shampoo(labels="sampled"), DECAY),
    "covariance, sampled, weight decay": lambda run: by_blocks(
        run, pi.Covariance(labels="sampled", max_size=2048), DECAY
    ),
    "dual, 1 label": lambda run: by_dual(run, 1),
    "dual, 4 labels": lambda run: by_dual(run, 4),
    "exact, Fisher of given labels, 8 products": lambda run: by_products(run, pi.Fisher(), 8),
    "exact, Fisher of 4 labels, 8 products": lambda run: by_products(run, pi.Fisher(SAMPLED, draws=4), 8),
    "exact, Hessian, 8 products": lambda run: by_products(run, pi.Hessian(), 8),
    "exact, Gauss-Newton, 2 products": lambda run: by_products(run, NEWTON, 2),
    "exact, Gauss-Newton, 8 products": lambda run: by_products(run, NEWTON, 8),
    "exact, Gauss-Newton, 8 products, chosen damping": lambda run: by_products(run, NEWTON, 8, None),
}


def accuracies(kinds: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in kinds:
        run = retrain(kind)
        for name, method in METHODS.items():
            start = time.process_time()
            scores = method(run)
            seconds = time.process_time() - start
            found.setdefault(kind, {})[name] = {"lds": run.lds(scores), "seconds": seconds}
            print(f"{kind:9} {name:50} LDS {found[kind][name]['lds']:.3f}  {seconds:6.2f} s", flush=True)
    return found


def costs(names: list[str], repeats: int) -> dict[str, Any]:
    """CPU time of each pass of fitting whole gradients over that of a plain step, the least of several runs."""
    found: dict[str, Any] = {}
    for workload in [WORKLOADS[name] for name in names]:
        task = workload.build()
        params = task.params()

        def plain(task: Any = task, params: Any = params) -> None:
            torch.autograd.grad(task.losses().mean(), list(params.values()))

        shapes = {n: (p.shape[0], p[0].numel()) for n, p in params.items()}
        curvature = pi.Shampoo(max_side=1024)
        curvature.start(shapes)
        for number in range(curvature.passes):

            def one(task: Any = task, params: Any = params, curvature: Any = curvature) -> None:
                ps.reduce(task.losses(), params, Fit(curvature))

            ratio = min_ratio(one, plain, repeats)
            found[f"{workload.name}, pass {number + 1}"] = ratio
            print(f"{workload.name:12} pass {number + 1}: {ratio:.2f} of a plain step", flush=True)
            curvature.end_pass()
        sketched = pi.Shampoo()
        sides = {n: (torch.randn(k, min(k, 16)), torch.randn(m, min(m, 16))) for n, (k, m) in shapes.items()}
        sketched.start({n: (left.shape[1], right.shape[1]) for n, (left, right) in sides.items()})
        for number in range(sketched.passes):

            def sketch(task: Any = task, params: Any = params, curvature: Any = sketched, sides: Any = sides) -> None:
                curvature.add(ps.reduce(task.losses(), params, Sketch(sides))[0])

            ratio = min_ratio(sketch, plain, repeats)
            found[f"{workload.name}, 16 x 16, pass {number + 1}"] = ratio
            print(f"{workload.name:12} 16 x 16, pass {number + 1}: {ratio:.2f} of a plain step", flush=True)
            sketched.end_pass()
    return found


class Sketch(ps.Reduction):
    """(B, l, r) per parameter: gradients multiplied by two matrices."""

    def __init__(self, sides: dict[str, tuple[Tensor, Tensor]]) -> None:
        self.sides = sides

    def start(self, call: Any) -> None:
        self.call, self.found = call, dict[str, Tensor]()

    def add(self, name: str, factor: Any) -> None:
        self.found[name] = factor.compress(*self.sides[name], self.call.space)

    def result(self) -> dict[str, Tensor]:
        return self.found


def min_ratio(one: Callable[[], None], other: Callable[[], None], repeats: int) -> float:
    """The least time of each, in turns after a first run."""
    least = [float("inf"), float("inf")]
    for turn in range(repeats + 1):
        for k, run in enumerate((one, other)):
            start = time.process_time()
            run()
            if turn:
                least[k] = min(least[k], time.process_time() - start)
    return least[0] / least[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kinds", nargs="*", default=["logistic", "mlp"])
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--workloads", nargs="*", default=["mlp", "resnet", "gpt"])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = costs(args.workloads, args.repeats) if args.cost else accuracies(args.kinds)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"torch": torch.__version__, "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
