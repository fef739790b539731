"""Distil scikit-learn's digits into one image per class, whose gradients point where those of the class do.

Ten images are moved until the gradient of each has the direction of the mean gradient of all images of its class, for
networks at many random weights. That is a derivative of per-sample gradients with respect to the images:
`ps.grad(..., create_graph=True)`. Prints how well a network does that has seen nothing but ten images: the distilled
ones, or ten real ones.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps

CLASSES, WIDTH, TRAINING = 10, 64, 1400


def load() -> tuple[Tensor, Tensor]:
    """Images as (N, 64) in [0, 1], and labels, in random order."""
    digits = load_digits()
    order = torch.randperm(len(digits.target))
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    return x[order], y[order]


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def directions(stacks: dict[str, Tensor]) -> Tensor:
    """(B, n): every gradient as one vector of length one."""
    return F.normalize(torch.cat([rows.flatten(1) for rows in stacks.values()], 1), dim=1)


def distil(x: Tensor, y: Tensor, steps: int) -> Tensor:
    """One image per class."""
    images = x.new_full((CLASSES, 64), 0.3).add_(0.1 * torch.randn(CLASSES, 64)).requires_grad_()
    optimizer = torch.optim.Adam([images], lr=0.02)
    labels, weights = torch.arange(CLASSES), F.one_hot(y, CLASSES).T.float()
    weights /= weights.sum(1, keepdim=True)
    for _ in range(steps):
        model = build()
        real = F.cross_entropy(model(x), y, reduction="none")
        of_classes = ps.grad(weights @ real, model)  # ten losses, each the mean of a class
        losses = F.cross_entropy(model(images), labels, reduction="none")
        of_images = ps.grad(losses, model, create_graph=True)
        distance = CLASSES - (directions(of_images) * directions(of_classes)).sum()
        optimizer.zero_grad()
        distance.backward(inputs=[images])
        optimizer.step()
    return images.detach()


def accuracy(x: Tensor, y: Tensor, test: tuple[Tensor, Tensor]) -> float:
    """Of networks that are trained on x and y alone."""
    found = []
    for _ in range(5):
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(200):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        found.append((model(test[0]).argmax(1) == test[1]).float().mean().item())
    return sum(found) / len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.manual_seed(0)
    x, y = load()
    test, labels = (x[TRAINING:], y[TRAINING:]), torch.arange(CLASSES)
    x, y = x[:TRAINING], y[:TRAINING]
    real = torch.stack([x[y == label][0] for label in labels])
    images = distil(x, y, options.steps)
    print(f"one real image per class: {accuracy(real, labels, test):.0%} of the test images are recognised")
    print(f"one distilled image per class: {accuracy(images, labels, test):.0%}")


if __name__ == "__main__":
    main()
