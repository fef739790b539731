"""Studies to try `persample index` and `persample lds` with: each is a SPEC, as persample.influence.examples:digits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .sampling import categorical


def digits(examples: int = 600, queries: int = 10) -> dict[str, Any]:
    """A small network on scikit-learn's digits; queries are the test images with the highest losses."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    train_x, train_y = images[:examples], labels[:examples]
    model, optimizer = _trained(train_x, train_y, seed=0)
    with torch.no_grad():
        rest = model(images[examples:])
        worst = F.cross_entropy(rest, labels[examples:], reduction="none").topk(queries).indices
        predicted = rest[worst].argmax(1)
    query_x, query_y = images[examples:][worst], labels[examples:][worst]

    def retrain(ids: Tensor, seed: int) -> Tensor:
        again, _ = _trained(train_x[ids], train_y[ids], seed)
        with torch.no_grad():
            return _losses(again, (query_x, query_y))

    def show_query(i: int) -> dict[str, Any]:
        return {"image": query_x[i], "label": int(query_y[i]), "predicted": int(predicted[i])}

    return {
        "model": model,
        "losses_fn": _losses,
        "loader": list(zip(train_x.split(64), train_y.split(64), strict=True)),
        "queries": (query_x, query_y),
        "sample_losses_fn": categorical(lambda model, batch: model(batch[0])),
        "optimizer": optimizer,
        "show": lambda i: {"image": train_x[i], "label": int(train_y[i])},
        "show_query": show_query,
        "retrain": retrain,
    }


def _losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def _trained(x: Tensor, y: Tensor, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(seed)
    with _same_everywhere(seed):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
        for _ in range(30):
            for some in torch.randperm(len(x), generator=generator).split(64):
                optimizer.zero_grad()
                _losses(model, (x[some], y[some])).mean().backward()
                optimizer.step()
    return model, optimizer


SENTENCES = """
the cat sleeps on the warm roof
the dog sleeps under the old table
the cat chases the small mouse
the dog chases the red ball
the mouse hides under the warm roof
the bird sings on the old roof
the bird sleeps on the green tree
the fish swims in the cold lake
the fish hides under the grey stone
the duck swims on the cold lake
the boat drifts on the calm lake
the moon shines on the calm lake
the moon shines on the old roof
the sun shines on the green tree
""".split("\n")[1:-1]
ASKED = ["the duck sleeps under the green tree", "the sun shines on the cold lake"]


class _NextWord(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.embed, self.read, self.say = (
            nn.Embedding(words, 16),
            nn.GRU(16, 32, batch_first=True),
            nn.Linear(32, words),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.say(self.read(self.embed(ids))[0])  # type: ignore[no-any-return]


def _losses_of_words(model: nn.Module, ids: Tensor) -> Tensor:
    """(B, T): of every word but the first; of padding, zero."""
    return F.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:], reduction="none", ignore_index=0)


def sentences() -> dict[str, Any]:
    """A model of next words with one loss per word, for ``--per token``."""
    words = ["", *sorted({word for line in [*SENTENCES, *ASKED] for word in line.split()})]
    number = {word: i for i, word in enumerate(words)}

    def batch(lines: list[str]) -> Tensor:
        rows = [torch.tensor([number[word] for word in line.split()]) for line in lines]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    data = batch(SENTENCES)
    with _same_everywhere(0):
        model = _NextWord(len(words))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(60):
            optimizer.zero_grad()
            _losses_of_words(model, data).sum(1).mean().backward()
            optimizer.step()
    return {
        "model": model,
        "losses_fn": _losses_of_words,
        "loader": list(data.split(4)),
        "queries": batch(ASKED),
        "optimizer": optimizer,
        "show": lambda i: [f" {word}" for word in SENTENCES[i].split()[1:]],  # one for every loss
        "show_query": lambda i: ASKED[i],
    }


@contextmanager
def _same_everywhere(seed: int) -> Iterator[None]:
    """One thread, and random numbers of a seed: whoever loads an example gets the same model, to the last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
