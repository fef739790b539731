"""Losses with reduction="none", and the ways a loss per element becomes one per sample."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import Program, case, ints, param, score

# Every loss takes (B, 4) and returns (B, ...).
VECTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "mse": lambda h: F.mse_loss(h, torch.ones_like(h), reduction="none"),
    "l1": lambda h: F.l1_loss(h, torch.ones_like(h), reduction="none"),
    "smooth-l1": lambda h: F.smooth_l1_loss(h, torch.ones_like(h), reduction="none", beta=0.5),
    "huber": lambda h: F.huber_loss(h, torch.ones_like(h), reduction="none", delta=0.7),
    "bce": lambda h: F.binary_cross_entropy(h.sigmoid(), torch.full_like(h, 0.3), reduction="none"),
    "bce-logits": lambda h: F.binary_cross_entropy_with_logits(h, torch.full_like(h, 0.3), reduction="none"),
    "bce-weighted": lambda h: F.binary_cross_entropy_with_logits(
        h, torch.full_like(h, 0.3), torch.arange(4.0), reduction="none", pos_weight=torch.arange(1.0, 5.0)
    ),
    "kl-div": lambda h: F.kl_div(h.log_softmax(1), torch.full_like(h, 0.25), reduction="none"),
    "kl-div-log": lambda h: F.kl_div(h.log_softmax(1), h.detach().log_softmax(1), reduction="none", log_target=True),
    "poisson": lambda h: F.poisson_nll_loss(h, torch.ones_like(h), reduction="none"),
    "gaussian": lambda h: F.gaussian_nll_loss(h[:, :2], torch.ones_like(h)[:, :2], h[:, 2:].exp(), reduction="none"),
    "soft-margin": lambda h: F.soft_margin_loss(h, torch.ones_like(h), reduction="none"),
    "multilabel-soft": lambda h: F.multilabel_soft_margin_loss(h, torch.ones_like(h), reduction="none"),
    "cosine": lambda h: F.cosine_embedding_loss(h, torch.ones_like(h), h.new_ones(len(h)), reduction="none"),
    "hinge-embedding": lambda h: F.hinge_embedding_loss(h, -torch.ones_like(h), reduction="none"),
    "margin-ranking": lambda h: F.margin_ranking_loss(h[:, 0], h[:, 1], h.new_ones(len(h)), 9.0, reduction="none"),
    "soft-labels": lambda h: F.cross_entropy(h, torch.full_like(h, 0.25), reduction="none"),
    "triplet": lambda h: F.triplet_margin_loss(h, h.flip(1), torch.ones_like(h), 9.0, reduction="none"),
    "weighted-mse": lambda h: F.mse_loss(h, torch.ones_like(h), reduction="none", weight=torch.rand(h.shape)),
}


@case({name: {"loss": loss} for name, loss in VECTORS.items()})
def objective(B: int, loss: Callable[[Tensor], Tensor]) -> Program:
    net, x = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)), torch.randn(B, 3)
    return net, lambda: loss(net(x)).unsqueeze(-1).flatten(1).mean(1)


@case(
    {
        "plain": {},
        "weighted": {"weight": [0.2, 1.0, 2.0, 0.5]},
        "smoothed": {"label_smoothing": 0.2},
        "ignored": {"ignore_index": 1},
    },
    batches=(4, 1, 0, 9),
)
def classification(B: int, weight: list[float] | None = None, **options: float) -> Program:
    net, x, y = nn.Linear(3, 4), torch.randn(B, 3), torch.arange(B) % 3
    weights = None if weight is None else torch.tensor(weight)
    return net, lambda: F.cross_entropy(net(x), y, weights, reduction="none", **options)


@case({"plain": {}, "ignored": {"ignore_index": 1}, "smoothed": {"label_smoothing": 0.1}})
def classification_over_time(B: int, **options: float) -> Program:
    net, x, y = nn.Linear(3, 4), torch.randn(B, 5, 3), ints(4, B, 5)
    return net, lambda: F.cross_entropy(net(x).transpose(1, 2), y, reduction="none", **options).mean(1)


@case()
def classification_of_pixels(B: int) -> Program:
    net, x, y = nn.Conv2d(3, 4, 3, padding=1), torch.randn(B, 3, 5, 5), ints(4, B, 5, 5)
    return net, lambda: F.cross_entropy(net(x), y, reduction="none").mean((1, 2))


@case()
def classification_folded(B: int) -> Program:
    net, x, y = nn.Linear(3, 4), torch.randn(B, 5, 3), ints(4, B, 5)
    return (
        net,
        lambda: F.cross_entropy(net(x).flatten(0, 1), y.flatten(), reduction="none").view(B, 5).mean(1),
    )


@case()
def classification_folded_with_padding(B: int) -> Program:
    net, x, y = nn.Linear(3, 4), torch.randn(B, 5, 3), ints(4, B, 5)
    y[:, 0], mask = 0, torch.rand(B, 5) < 0.7

    def losses() -> Tensor:
        target = y.masked_fill(~mask, -100).flatten()
        each = F.cross_entropy(net(x).flatten(0, 1), target, reduction="none").view(B, 5)
        return each.sum(1) / mask.sum(1).clamp(min=1)

    return net, losses


@case(batches=(4, 5))
def classification_time_first_as_long_as_the_batch(B: int) -> Program:
    net, x, y = nn.Linear(3, 4), torch.randn(B, B, 3), ints(4, B, B)
    return (
        net,
        lambda: F.cross_entropy(net(x).flatten(0, 1), y.flatten(), reduction="none").view(B, B).mean(0),
    )


@case()
def negative_log_likelihood(B: int) -> Program:
    net, x, y = nn.Linear(3, 4), torch.randn(B, 3), ints(4, B)
    return net, lambda: F.nll_loss(net(x).log_softmax(1), y, reduction="none", weight=torch.arange(1.0, 5.0))


@case()
def negative_log_likelihood_by_gather(B: int) -> Program:
    net, x, y = nn.Linear(3, 4), torch.randn(B, 5, 3), ints(4, B, 5)
    return net, lambda: -net(x).log_softmax(-1).gather(-1, y[..., None]).squeeze(-1).mean(1)


@case()
def negative_log_likelihood_by_index(B: int) -> Program:
    net, x, y = nn.Linear(3, 4), torch.randn(B, 3), ints(4, B)
    return net, lambda: -net(x).log_softmax(-1)[torch.arange(B), y]


@case({"margin": {"fn": F.multi_margin_loss}, "nll": {"fn": F.nll_loss}})
def classification_by_margin(B: int, fn: Callable[..., Tensor]) -> Program:
    net, x, y = nn.Linear(3, 4), torch.randn(B, 3), ints(4, B)
    return net, lambda: fn(net(x), y, reduction="none")


@case(batches=(4, 1))
def multilabel_margin(B: int) -> Program:
    net, x, y = nn.Linear(3, 4), torch.randn(B, 3), torch.tensor([2, 0, -1, -1]).repeat(B, 1)
    return net, lambda: F.multilabel_margin_loss(net(x), y, reduction="none")


@case(batches=(4, 1))
def connectionist(B: int) -> Program:
    net, x, y = nn.Linear(3, 5), torch.randn(8, B, 3), torch.randint(1, 5, (B, 3))
    long, short = torch.tensor([8, 6, 7, 8])[:B], torch.tensor([3, 2, 3, 1])[:B]
    return net, lambda: F.ctc_loss(net(x).log_softmax(-1), y, long, short, reduction="none")


@case(batches=(4, 1))
def connectionist_batch_first(B: int) -> Program:
    net, x, y = nn.GRU(3, 5, batch_first=True), torch.randn(B, 8, 3), torch.randint(1, 5, (B, 3))
    long, short = torch.full((B,), 8), torch.full((B,), 3)
    return net, lambda: F.ctc_loss(net(x)[0].log_softmax(-1).transpose(0, 1), y, long, short, reduction="none")


@case()
def weights_per_sample(B: int) -> Program:
    net, x, w = nn.Linear(3, 4), torch.randn(B, 3), torch.rand(B)
    return net, lambda: score(net(x)) * w / w.sum()


@case(batches=(4,))
def weights_of_zero(B: int) -> Program:
    net, x, w = nn.Linear(3, 4), torch.randn(B, 3), torch.tensor([1.0, 0.0, -2.0, 0.0])
    return net, lambda: score(net(x)) * w


@case()
def focal(B: int) -> Program:
    net, x, y = nn.Linear(3, 4), torch.randn(B, 3), ints(4, B)

    def losses() -> Tensor:
        each = F.cross_entropy(net(x), y, reduction="none")
        return (1 - (-each).exp()) ** 2 * each

    return net, losses


@case()
def policy_gradient(B: int) -> Program:
    net, value, x = nn.Linear(3, 4), nn.Linear(3, 1), torch.randn(B, 3)
    action, reward, old = ints(4, B), torch.randn(B), torch.rand(B) - 1.5

    def losses() -> Tensor:
        logp = net(x).log_softmax(1).gather(1, action[:, None]).squeeze(1)
        guess = value(x).squeeze(1)
        ratio, gain = (logp - old).exp(), reward - guess.detach()
        return -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain) + (guess - reward) ** 2

    return nn.ModuleList([net, value]), losses


@case(batches=(4, 1))
def direct_preference(B: int) -> Program:
    tok, head, pair = nn.Embedding(6, 4), nn.Linear(4, 6), ints(6, 2 * B, 5)

    def losses() -> Tensor:
        each = -F.cross_entropy(head(tok(pair).tanh()).mT, pair.roll(-1, 1), reduction="none").sum(1)
        chosen, rejected = each.split(B)
        return -F.logsigmoid(0.3 * (chosen - rejected))

    return nn.ModuleList([tok, head]), losses


@case()
def uncertainty_weighted_tasks(B: int) -> Program:
    net, log_var, x, y = nn.Linear(3, 2), param(2), torch.randn(B, 3), torch.randn(B, 2)
    return {"log_var": log_var, **dict(net.named_parameters())}, lambda: (
        (net(x) - y).square() * torch.exp(-log_var) + log_var
    ).sum(1)


@case()
def ensemble_of_losses(B: int) -> Program:
    net, x, y = nn.ModuleList([nn.Linear(3, 4) for _ in range(3)]), torch.randn(B, 3), ints(4, B)
    return net, lambda: torch.stack([F.cross_entropy(m(x), y, reduction="none") for m in net]).mean(0)
