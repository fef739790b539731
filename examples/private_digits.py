"""Train a small model on scikit-learn's digits with differential privacy: epsilon 3 at delta 1e-5.

Prints test accuracy and what was spent. Exits with status 1 below 90% accuracy.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import persample as ps
from persample import dp

TEST, EPOCHS, EPSILON, DELTA, GOAL = 360, 20, 3.0, 1e-5, 0.9


def load() -> tuple[TensorDataset, Tensor, Tensor]:
    """Training data, and images and labels to test with; pixels in [-1, 1]."""
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 8 - 1
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST], order[TEST:]
    return TensorDataset(x[train], y[train]), x[test], y[test]


def main() -> int:
    torch.manual_seed(0)
    data, test_x, test_y = load()
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
    plan = dp.Plan(examples=len(data), batch_size=256, epochs=EPOCHS, epsilon=EPSILON, delta=DELTA)
    print(plan, "\n")
    # The seed is for the test of this script: leave it out in earnest.
    private = dp.Private(model, optimizer, plan, clip=ps.ClippedSum(1.0), seed=0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, plan.length)
    for x, y in private.batches(data):
        step = private.step(F.cross_entropy(model(x), y, reduction="none"))
        scheduler.step()
        if step.number % 20 == 0:
            print(private.spent(), flush=True)  # not the loss on the training data: it has no noise

    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    print(f"\ntest accuracy {accuracy:.1%}\n{private.spent()}")
    return 0 if accuracy >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
