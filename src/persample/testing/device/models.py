"""The models that are tried on a device: small ones of each kind, and larger ones to be counted and timed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MODELS", "SIZES", "Problem", "Size", "build"]


@dataclass(frozen=True)
class Size:
    """How large a model and its batch are."""

    batch: int
    width: int  # of layers, or channels
    length: int  # of sequences, or the sides of images


SMALL = Size(batch=6, width=16, length=12)
SIZES = {  # of what is timed; each keeps a GPU busy for some milliseconds at most
    "mlp": Size(256, 1024, 8),
    "cnn": Size(128, 32, 32),
    "resnet block": Size(64, 64, 32),
    "gpt block": Size(16, 256, 128),
    "lstm": Size(64, 128, 32),
}


@dataclass(frozen=True)
class Problem:
    """A model on a device with a batch: ``losses()`` is one forward pass, of shape (B,)."""

    model: nn.Module
    x: Tensor
    y: Tensor
    autocast: torch.dtype | None = None

    def losses(self) -> Tensor:
        """The mean cross entropy over all that a sample predicts."""
        on = nullcontext() if self.autocast is None else torch.autocast(self.x.device.type, self.autocast)
        with on:
            logits = self.model(self.x)
            return F.cross_entropy(logits.movedim(-1, 1), self.y, reduction="none").flatten(1).mean(1)

    def of(self, x: Tensor) -> Problem:
        """The same with other inputs, as many or fewer."""
        return replace(self, x=x, y=self.y[: len(x)])

    @property
    def precision(self) -> torch.dtype:
        """The coarsest dtype that is computed in."""
        return self.autocast or next(self.model.parameters()).dtype


class Residual(nn.Module):
    """Two convolutions with GroupNorm, added to what they were given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(4, width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(4, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class GPT(nn.Module):
    """One block of a decoder; the head is the embedding. Its attention is PyTorch's, in one call."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(50, width), nn.Embedding(length, width)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        q, k, v = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm1(h)).chunk(3, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(mixed.transpose(1, 2).flatten(2))
        return F.linear(self.norm3(h + self.mlp(self.norm2(h))), self.token.weight)


class Recurrent(nn.Module):
    """Embedding, an LSTM or a GRU (cuDNN's on CUDA), and a linear layer on its last output."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU], width: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, width), nn.Linear(width, 10)
        self.rnn = kind(width, width, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(self.embedding(ids))[0][:, -1:])
        return out


Made = tuple[nn.Module, Tensor, Tensor]  # a model, inputs, and classes of shape (B, 1) or (B, T)


def _labels(size: Size) -> Tensor:
    return torch.randint(10, (size.batch, 1))


def _vectors(size: Size, *layers: nn.Module) -> Made:
    x = torch.randn(size.batch, size.width)
    return nn.Sequential(*layers, nn.Linear(size.width, 10), nn.Unflatten(1, (1, 10))), x, _labels(size)


def _images(size: Size, *layers: nn.Module) -> Made:
    """Layers between an image of three channels and ten classes."""
    first = nn.Conv2d(3, size.width, 3, stride=2, padding=1)
    last = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * size.width, 10), nn.Unflatten(1, (1, 10))]
    x = torch.randn(size.batch, 3, size.length, size.length)
    return nn.Sequential(first, nn.ReLU(), *layers, *last), x, _labels(size)


def _words(size: Size, model: nn.Module) -> Made:
    return model, torch.randint(50, (size.batch, size.length)), _labels(size)


def _mlp(size: Size) -> Made:
    return _vectors(size, nn.Linear(size.width, size.width), nn.ReLU(), nn.Linear(size.width, size.width), nn.ReLU())


def _cnn(size: Size) -> Made:
    return _images(
        size, nn.Conv2d(size.width, 2 * size.width, 3, stride=2), nn.ReLU(), nn.Conv2d(2 * size.width, size.width, 1)
    )


def _depthwise(size: Size) -> Made:
    w = size.width
    return _images(size, nn.Conv2d(w, w, 3, padding=1, groups=w, bias=False), nn.ReLU(), nn.Conv2d(w, w, 1))


def _resnet(size: Size) -> Made:
    return _images(size, Residual(size.width))


def _batchnorm(size: Size) -> Made:
    norm = nn.BatchNorm2d(size.width)
    nn.init.uniform_(norm.running_mean)  # type: ignore[arg-type]
    nn.init.uniform_(norm.running_var, 0.5, 2.0)  # type: ignore[arg-type]
    return _images(size, norm.eval())


def _gpt(size: Size) -> Made:
    ids = torch.randint(50, (size.batch, size.length + 1))
    return GPT(size.width, size.length), ids[:, :-1], ids[:, 1:]


def _bag(size: Size) -> Made:
    bag = nn.EmbeddingBag(50, size.width, mode="mean")
    return _words(size, nn.Sequential(bag, nn.Linear(size.width, 10), nn.Unflatten(1, (1, 10))))


MODELS: dict[str, Callable[[Size], Made]] = {
    "mlp": _mlp,
    "cnn": _cnn,
    "depthwise cnn": _depthwise,
    "resnet block": _resnet,
    "gpt block": _gpt,
    "lstm": lambda size: _words(size, Recurrent(nn.LSTM, size.width)),
    "gru": lambda size: _words(size, Recurrent(nn.GRU, size.width)),
    "embedding bag": _bag,
    "batchnorm eval": _batchnorm,
}


def build(
    name: str,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    size: Size = SMALL,
    batch: int | None = None,
    autocast: torch.dtype | None = None,
) -> Problem:
    """A model of the table, with the same weights and data on every device."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model, x, y = MODELS[name](size if batch is None else replace(size, batch=batch))
    x = x.to(dtype) if x.is_floating_point() else x
    return Problem(model.to(device, dtype), x.to(device), y.to(device), autocast)
