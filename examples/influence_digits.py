"""Which training images made a classifier wrong: an index of gradients, asked, and tried by training again.

An MLP is trained on scikit-learn's digits, 5% of them with wrong labels. For every test image that it reads wrong, the
index names the training images that harmed this answer most. Prints how many of these have a wrong label, and what
training without them does to the answers, beside training without as many images at random. (That helps, too: the
answers were picked for being wrong in one run.) Exits with status 1 if it does not help much more.
"""

import sys
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from persample import influence as pi

TEST, FLIPPED, EPOCHS, HARMFUL = 360, 0.05, 30, 10


def load() -> tuple[Tensor, Tensor, Tensor]:
    """Images, labels of which some of the training part are wrong, and which; the last TEST are for tests."""
    digits = load_digits()
    rng = torch.Generator().manual_seed(0)
    order = torch.randperm(len(digits.target), generator=rng)
    x, true = torch.tensor(digits.data, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]
    wrong = torch.rand(len(x), generator=rng) < FLIPPED
    wrong[-TEST:] = False
    return x, torch.where(wrong, (true + torch.randint(1, 10, true.shape, generator=rng)) % 10, true), wrong


def losses_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def train(x: Tensor, y: Tensor) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    for _ in range(EPOCHS):
        for ids in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            losses_fn(model, (x[ids], y[ids])).mean().backward()
            optimizer.step()
    return model


@torch.no_grad()
def answers(model: nn.Module, queries: tuple[Tensor, Tensor]) -> str:
    x, y = queries
    right = int((model(x).argmax(1) == y).sum())
    return f"mean loss {losses_fn(model, queries).mean():.2f}, {right} of {len(y)} right"


def main() -> int:
    x, y, wrong = load()
    train_x, train_y, test_x, test_y = x[:-TEST], y[:-TEST], x[-TEST:], y[-TEST:]
    model = train(train_x, train_y)
    missed = model(test_x).argmax(1) != test_y
    queries = test_x[missed], test_y[missed]

    data = [(train_x[ids], train_y[ids]) for ids in torch.arange(len(train_x)).split(128)]
    with tempfile.TemporaryDirectory() as folder:
        index = pi.Index(f"{folder}/index", model, losses_fn, sketch=pi.Blocks(32, 32, seed=0))
        index.build(data).fit(pi.Shampoo())
        harmful = index.query(queries, k=HARMFUL, order="harmful").ids
    chosen = harmful.unique()
    share = wrong[:-TEST][harmful].float().mean()
    print(f"{len(queries[0])} of {TEST} test images are read wrong; {HARMFUL} harmful training images of each:")
    print(f"{share:.0%} of them have a wrong label, and {wrong[:-TEST].float().mean():.0%} of all\n")

    some = torch.randperm(len(train_x), generator=torch.Generator().manual_seed(1))[: len(chosen)]
    retrained = {}
    for title, left_out in {
        "everything": chosen[:0],
        f"without {len(chosen)} harmful": chosen,
        "at random": some,
    }.items():
        kept = torch.ones(len(train_x), dtype=torch.bool)
        kept[left_out] = False
        retrained[title] = train(train_x[kept], train_y[kept])
        print(f"{title:>20}: the answers that were wrong: {answers(retrained[title], queries)}")
        print(f"{'':>20}  all test images: {answers(retrained[title], (test_x, test_y))}")
    losses = [float(losses_fn(each, queries).mean().detach()) for each in retrained.values()]
    return 0 if losses[1] < 0.7 * min(losses[0], losses[2]) else 1


if __name__ == "__main__":
    sys.exit(main())
