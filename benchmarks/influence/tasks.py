"""What is retrained: four small models on scikit-learn's digits, many of each at once, on subsets of the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..models import GPT

EXAMPLES = 1000
Batch = tuple[Tensor, Tensor]  # inputs and labels: of a class, or of every position
Params = dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """A model, how it is trained, and the data; the loss of a sample is the mean cross entropy of its labels."""

    name: str
    title: str
    make: Callable[[], nn.Module]
    data: Callable[[], Batch]
    rate: float = 0.1
    decay: float = 5e-3
    steps: int = 300
    batch: int = 64
    queries: int = 100
    forward: Callable[[Params, Tensor], Tensor] | None = None  # the same function, where vmap has a shorter way

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self.make()


def logits_fn(model: nn.Module, batch: Batch) -> Tensor:
    """(B, C), or (B, T, C)."""
    return model(batch[0])  # type: ignore[no-any-return]


def output_losses_fn(logits: Tensor, batch: Batch) -> Tensor:
    """(B,)."""
    losses = F.cross_entropy(logits.flatten(0, -2), batch[1].flatten(), reduction="none")
    return losses.view(len(logits), -1).mean(1)


def losses_fn(model: nn.Module, batch: Batch) -> Tensor:
    """(B,)."""
    return output_losses_fn(logits_fn(model, batch), batch)


def train_many(task: Task, train: Batch, subsets: Tensor, seeds: Sequence[int]) -> list[nn.Module]:
    """One model for every row of ``subsets`` (R, n), all at once."""
    models = [task.model(seed) for seed in seeds]
    params, _ = stack_module_state(models)
    optimizer = torch.optim.SGD(params.values(), lr=task.rate, momentum=0.9, weight_decay=task.decay)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    forward = task.forward or (lambda p, x: functional_call(models[0], p, (x,)))
    loss_of_each = vmap(lambda p, x, y: output_losses_fn(forward(p, x), (x, y)).mean())
    with sdpa_kernel(SDPBackend.MATH):  # vmap knows no other
        for _ in range(task.steps):
            picked = [
                s[torch.randint(len(s), (task.batch,), generator=g)] for s, g in zip(subsets, generators, strict=True)
            ]
            rows = torch.stack(picked)
            optimizer.zero_grad()
            loss_of_each(params, train[0][rows], train[1][rows]).sum().backward()
            optimizer.step()
    for r, model in enumerate(models):
        for name, p in model.named_parameters():
            p.data.copy_(params[name][r].detach())
    return [model.eval() for model in models]


def digits() -> Batch:
    """(1797, 64) centred pixels, and classes."""
    from sklearn.datasets import load_digits

    data, labels = load_digits(return_X_y=True)
    x = torch.tensor(data / 16, dtype=torch.float32)
    return x - x.mean(0), torch.tensor(labels)


def images() -> Batch:
    x, y = digits()
    return x.view(-1, 1, 8, 8), y


def pixel_texts() -> Batch:
    """Digits as texts of 17 tokens: the class, then 16 shades of grey, each to be predicted from those before it."""
    from sklearn.datasets import load_digits

    data, labels = load_digits(return_X_y=True)
    small = F.avg_pool2d(torch.tensor(data).view(-1, 1, 8, 8), 2).flatten(1)  # 0 to 16
    ids = torch.cat([torch.tensor(labels).unsqueeze(1) + SHADES, (small / 2).round().long()], 1)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


SHADES = 9


def logistic() -> nn.Module:
    """In a container, as some libraries look for layers inside of the model alone."""
    return nn.Sequential(nn.Linear(64, 10))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def cnn() -> nn.Module:
    first, second = nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.Conv2d(8, 16, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))


def gpt() -> nn.Module:
    return GPT(width=16, layers=2, heads=2, vocabulary=SHADES + 10, length=16)


def cnn_by_patches(p: Params, x: Tensor) -> Tensor:
    """The CNN by products of matrices, which vmap does faster than convolutions of many weights."""
    for name, stride in (("0", 2), ("2", 1)):
        weight, bias = p[f"{name}.weight"], p[f"{name}.bias"]
        patches = F.unfold(x, 3, padding=1, stride=stride)
        x = (weight.flatten(1) @ patches + bias.unsqueeze(1)).relu().unflatten(2, (4, 4))
    return x.flatten(1) @ p["5.weight"].t() + p["5.bias"]


TASKS = {
    task.name: task
    for task in [
        Task("logistic", "logistic regression", logistic, digits),
        Task("mlp", "MLP 64-32-10", mlp, digits),
        Task("cnn", "CNN, two convolutions", cnn, images, forward=cnn_by_patches),
        Task("gpt", "GPT, two blocks of width 16", gpt, pixel_texts, decay=1e-3, batch=32, queries=50),
    ]
}
