"""The networks that are measured, written as their users would write them."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mlp(widths: list[int]) -> nn.Module:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for d, p in pairwise(widths):
        layers += [nn.Linear(d, p), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def mnist_cnn() -> nn.Module:
    """The small CNN of the private-learning tutorials: two convolutions, two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with GroupNorm, and a 1x1 shortcut where the shape changes."""

    def __init__(self, d: int, p: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(d, p, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(8, p)
        self.conv2 = nn.Conv2d(p, p, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(8, p)
        self.shortcut: nn.Module = nn.Identity()
        if d != p or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(d, p, 1, stride, bias=False), nn.GroupNorm(8, p))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        h = self.norm2(self.conv2(h))
        return F.relu(h + self.shortcut(x))


def resnet(widths: list[int], depth: int = 2) -> nn.Module:
    """ResNet-18's plan for 32x32 images: a stage per width, ``depth`` blocks each."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, widths[0], 3, padding=1, bias=False),
        nn.GroupNorm(8, widths[0]),
        nn.ReLU(),
    ]
    d = widths[0]
    for stage, p in enumerate(widths):
        for block in range(depth):
            layers.append(ResidualBlock(d, p, stride=2 if stage and not block else 1))
            d = p
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(d, 10))


def depthwise_cnn(width: int, depth: int) -> nn.Module:
    """Depthwise 3x3 and pointwise convolutions with GroupNorm, as in MobileNet."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, stride=2, padding=1), nn.ReLU()]
    for _ in range(depth):
        layers += [
            nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False),
            nn.GroupNorm(8, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 1, bias=False),
            nn.GroupNorm(8, width),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class GPTBlock(nn.Module):
    """Causal self-attention and an MLP, each after a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        B, T, d = x.shape
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(d, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(B, T, d))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A decoder with learned positions and a head of its own."""

    def __init__(self, width: int, layers: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[GPTBlock(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.shared_positions = True  # peers that look at modules need them once per sample

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.token(ids) + self.position(places if self.shared_positions else places.repeat(len(ids), 1))
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


class LSTMClassifier(nn.Module):
    """Embedding, one LSTM layer, and a linear layer on its last output."""

    def __init__(self, vocabulary: int, width: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(ids))[0][:, -1])  # type: ignore[no-any-return]


class UnrolledLSTM(nn.LSTM):
    """One layer, step by step in ordinary ops, for those who cannot look into the fused one."""

    weight_ih_l0: Tensor
    weight_hh_l0: Tensor
    bias_ih_l0: Tensor
    bias_hh_l0: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Of (B, T, d) the outputs (B, T, p)."""
        h = c = x.new_zeros(len(x), self.hidden_size)
        inputs, outputs = F.linear(x, self.weight_ih_l0, self.bias_ih_l0 + self.bias_hh_l0), []
        for gates in inputs.unbind(1):
            i, f, g, o = (gates + F.linear(h, self.weight_hh_l0)).chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return torch.stack(outputs, dim=1), None
