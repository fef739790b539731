"""Train a small CNN on scikit-learn's digits, some of them mislabelled, and watch its per-sample gradients.

Prints how many of the images that stood out were mislabelled. `--plot docs/images/monitor.svg` draws what was logged,
and `--logdir runs` writes it to TensorBoard.
"""

import argparse
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps

EPOCHS, BATCH, EVERY, FLIPPED = 10, 64, 3, 20
Log = list[dict[str, float]]


def load() -> tuple[Tensor, Tensor, set[int]]:
    """Images as (N, 1, 8, 8) in [0, 1], labels, and which of these are wrong."""
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    wrong = torch.randperm(len(y))[:FLIPPED]
    y[wrong] = (y[wrong] + torch.randint(1, 10, (FLIPPED,))) % 10
    return x, y, set(wrong.tolist())


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 10),
    )


def train(model: nn.Module, monitor: ps.Monitor, x: Tensor, y: Tensor) -> list[int]:
    """The images that had the largest gradient of their batch, once the model knew something."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    seen = []
    for epoch in range(EPOCHS):
        for batch in torch.randperm(len(x)).split(BATCH):
            losses = F.cross_entropy(model(x[batch]), y[batch], reduction="none")
            record = monitor.backward(losses, ids=batch)
            optimizer.step()
            optimizer.zero_grad()
            if record is not None and epoch >= EPOCHS // 2:
                seen.append(record.unusual[0][0])
    return seen


def plot(log: Log, path: Path) -> None:
    """Quantiles of the norms, the noise scale, and signal to noise by layer."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    style = {"svg.hashsalt": "persample", "svg.fonttype": "none", "figure.facecolor": "white", "font.size": 9}
    names = {"snr/0": "first convolution", "snr/3": "second convolution", "snr/7": "linear"}
    steps = [values["step"] for values in log]

    def series(name: str) -> list[float]:
        return [values.get(f"persample/{name}", float("nan")) for values in log]

    with mpl.rc_context({**style, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (norms, noise, layers) = plt.subplots(1, 3, figsize=(9.6, 3), layout="constrained")
        for low, high, label in [("0", "1", "all"), ("0.25", "0.75", "half of them")]:
            norms.fill_between(steps, series(f"norms/q{low}"), series(f"norms/q{high}"), alpha=0.25, color="#0072B2")
            norms.plot([], [], color="#0072B2", alpha=0.3 if low == "0" else 0.6, linewidth=6, label=label)
        norms.plot(steps, series("norms/q0.5"), color="#0072B2", label="median")
        norms.set(title="norms of the gradients", yscale="log")
        noise.plot(steps, series("noise_scale"), color="#D55E00")
        noise.axhline(BATCH, color="#888888", linewidth=0.8, linestyle="--", label="batch size")
        noise.set(title="gradient noise scale, samples", yscale="log")
        for (name, title), colour in zip(names.items(), ("#009E73", "#E69F00", "#CC79A7"), strict=True):
            layers.plot(steps, series(name), color=colour, label=title)
        layers.set(title="signal to noise of one sample", yscale="log")
        for axes in (norms, noise, layers):
            axes.set_xlabel("step")
            axes.legend(frameon=False, fontsize=8)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    parser.add_argument("--logdir", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    torch.manual_seed(0)
    x, y, wrong = load()
    model, log = build(), Log()
    monitor = ps.Monitor(model, log=args.logdir or log.append, every=EVERY)
    seen = train(model, monitor, x, y)
    monitor.close()
    share = sum(sample in wrong for sample in seen) / len(seen)
    print(
        f"of {len(seen)} images that stood out, {share:.0%} were mislabelled; of all images, {FLIPPED / len(y):.1%} are"
    )
    if args.plot is not None and args.logdir is None:
        plot(log, args.plot)
    return 0 if share > 10 * FLIPPED / len(y) else 1


if __name__ == "__main__":
    sys.exit(main())
