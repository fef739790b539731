"""What is measured: a table of workloads, each a model, its inputs and its losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import models


@dataclass(frozen=True)
class Task:
    """A workload, built: ``losses()`` is one forward pass, of shape (B,)."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    losses_fn: Callable[..., Tensor]

    def losses(self) -> Tensor:
        return self.losses_fn(self.model, *self.inputs)

    def params(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())


Inputs = Callable[[int], tuple[Tensor, ...]]  # from B to what the losses are computed from


@dataclass(frozen=True)
class Workload:
    """A row of the table: how to build a task for any number of samples."""

    name: str
    title: str
    batch: int
    model: Callable[[], nn.Module]
    inputs: Inputs
    losses_fn: Callable[..., Tensor]
    group: str = "main"
    value: int = 0  # the size that a curve varies

    def build(self, batch: int | None = None) -> Task:
        """The same weights and data every time."""
        torch.manual_seed(0)
        return Task(self.model(), self.inputs(self.batch if batch is None else batch), self.losses_fn)


def classification(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One cross entropy per sample."""
    return F.cross_entropy(model(x), y, reduction="none")


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    """The mean cross entropy over a sample's positions; ids is (B, T + 1)."""
    logits = model(ids[:, :-1].contiguous())  # Opacus views them
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def _images(shape: tuple[int, ...], batch: int) -> tuple[Tensor, ...]:
    return torch.randn(batch, *shape), torch.randint(10, (batch,))


def _text(vocabulary: int, length: int, batch: int) -> tuple[Tensor, ...]:
    return (torch.randint(vocabulary, (batch, length + 1)),)


def _labelled_text(vocabulary: int, length: int, batch: int) -> tuple[Tensor, ...]:
    return torch.randint(vocabulary, (batch, length)), torch.randint(10, (batch,))


def _images_row(
    name: str,
    title: str,
    batch: int,
    shape: tuple[int, ...],
    model: Callable[[], nn.Module],
    group: str = "main",
) -> Workload:
    return Workload(name, title, batch, model, partial(_images, shape), classification, group)


def _wide(width: int, depth: int) -> Callable[[], nn.Module]:
    return partial(models.mlp, [width] * (depth + 1) + [10])


def _gpt_row(
    name: str,
    batch: int,
    width: int,
    layers: int,
    heads: int,
    vocabulary: int,
    length: int,
    group: str = "main",
    value: int = 0,
) -> Workload:
    title = f"GPT, width {width}, {layers} layers, vocabulary {vocabulary}, T={length}"
    model = partial(models.GPT, width, layers, heads, vocabulary, length)
    return Workload(name, title, batch, model, partial(_text, vocabulary, length), next_token, group, value)


CURVES = {
    "batch": [1, 2, 8, 32, 128, 512],
    "length": [16, 64, 256, 512, 1024, 2048],
    "width": [32, 64, 128, 256, 512],
    "layers": [1, 2, 4, 8, 16, 32],
}
SMALL_GPT = {"batch": 4, "width": 64, "layers": 2, "heads": 4, "vocabulary": 256, "length": 64}


def _curve(size: str) -> list[Workload]:
    """A small GPT with one of its sizes varied."""
    return [_gpt_row(f"{size}-{n}", **{**SMALL_GPT, size: n}, group=size, value=n) for n in CURVES[size]]


# main: what the project is judged by; overhead: many small ops, so that the engine's own time shows; private: so many
# parameters that their noise shows; tiny: for the tests of this package; batch, length, width, layers: how cost grows.
TABLE = [
    _images_row("mlp", "MLP 784-1024-1024-10", 256, (784,), partial(models.mlp, [784, 1024, 1024, 10])),
    _images_row("cnn", "MNIST-style CNN", 256, (1, 28, 28), models.mnist_cnn),
    _images_row(
        "resnet",
        "ResNet-18 plan with GroupNorm, widths 32-256, 32x32",
        32,
        (3, 32, 32),
        partial(models.resnet, [32, 64, 128, 256]),
    ),
    _images_row(
        "depthwise",
        "depthwise-separable CNN, 64 channels, 4 blocks at 16x16",
        64,
        (3, 32, 32),
        partial(models.depthwise_cnn, 64, 4),
    ),
    _gpt_row("gpt", batch=8, width=256, layers=4, heads=4, vocabulary=5000, length=128),
    Workload(
        "lstm",
        "LSTM, one layer, embedding and hidden 128, vocabulary 1000, T=64",
        64,
        partial(models.LSTMClassifier, 1000, 128, 10),
        partial(_labelled_text, 1000, 64),
        classification,
    ),
    _gpt_row("gpt-thin", batch=4, width=64, layers=12, heads=4, vocabulary=1000, length=64, group="overhead"),
    _images_row("mlp-deep", "MLP, 50 layers of width 32", 32, (32,), partial(models.mlp, [32] * 50 + [10]), "overhead"),
    *[
        _images_row(name, f"MLP, {depth} layers of width {width}", 64, (width,), _wide(width, depth), "private")
        for name, width, depth in (("mlp-1m", 512, 4), ("mlp-10m", 1024, 10), ("mlp-100m", 4096, 6))
    ],
    _images_row("tiny-cnn", "the same CNN", 4, (1, 28, 28), models.mnist_cnn, "tiny"),
    _gpt_row("tiny-gpt", batch=3, width=16, layers=2, heads=2, vocabulary=20, length=5, group="tiny"),
    Workload(
        "tiny-lstm",
        "the same LSTM, narrow",
        3,
        partial(models.LSTMClassifier, 10, 4, 10),
        partial(_labelled_text, 10, 5),
        classification,
        "tiny",
    ),
    *[workload for size in CURVES for workload in _curve(size)],
]

WORKLOADS = {w.name: w for w in TABLE}
DEFAULT = [w.name for w in TABLE if w.group in ("main", "overhead")]
MAIN = [w.name for w in TABLE if w.group == "main"]
