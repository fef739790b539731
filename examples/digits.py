"""Train a small CNN on scikit-learn's digits, then show which samples pull at it most and least.

Run by `make demo`. Exits with status 1 when the per-sample gradients differ from the definition.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps
from persample.testing import check

EPOCHS, BATCH, SHOWN, CHECKED = 5, 64, 5, 32


def load() -> tuple[Tensor, Tensor]:
    """The images as (N, 1, 8, 8) in [0, 1], and their labels."""
    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 10),
    )


def train(model: nn.Module, x: Tensor, y: Tensor) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(1, EPOCHS + 1):
        total, right = 0.0, 0
        for batch in torch.randperm(len(x)).split(BATCH):
            logits = model(x[batch])
            loss = F.cross_entropy(logits, y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
            right += int((logits.argmax(1) == y[batch]).sum())
        print(f"epoch {epoch}/{EPOCHS}  loss {total / len(x):.4f}  accuracy {right / len(x):.1%}", flush=True)


def gradient_norms(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The norm over all parameters of each sample's own gradient, (N,)."""
    norms = []
    for inputs, labels in zip(x.split(256), y.split(256), strict=True):
        losses = F.cross_entropy(model(inputs), labels, reduction="none")
        grads = ps.grad(losses, model)
        norms.append(torch.linalg.vector_norm(torch.cat([g.flatten(1) for g in grads.values()], 1), dim=1))
    return torch.cat(norms)


@torch.no_grad()
def show(title: str, indices: Tensor, norms: Tensor, model: nn.Module, x: Tensor, y: Tensor) -> None:
    print(f"\n{title}\n   index  label  predicted  gradient norm")
    for i, predicted in zip(indices.tolist(), model(x[indices]).argmax(1).tolist(), strict=True):
        print(f"  {i:6d}  {int(y[i]):5d}  {predicted:9d}  {norms[i].item():13.3e}")


def main() -> int:
    torch.manual_seed(0)
    x, y = load()
    model = build()
    train(model, x, y)

    norms = gradient_norms(model, x, y)
    order = norms.argsort(descending=True)
    show("largest per-sample gradients", order[:SHOWN], norms, model, x, y)
    show("smallest per-sample gradients", order[-SHOWN:].flip(0), norms, model, x, y)

    # The hardest samples: their gradients are large enough for an error to show.
    hard = order[:CHECKED]
    report = check(lambda: F.cross_entropy(model(x[hard]), y[hard], reduction="none"), model)
    print(f"\nagainst one backward per sample, on {CHECKED} samples:\n{report}")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
