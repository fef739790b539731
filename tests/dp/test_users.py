"""Users: whoever is more or less, with any number of items, moves a step by one bound."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import persample as ps
from persample import dp
from persample.dp.sampling import poisson
from persample.dp.sources import Secure, Seeded, Source
from persample.dp.team import Team
from persample.dp.users import Users, summed, user_parts
from persample.reductions.exact import ExactClippedSum
from tests.dp.helpers import CLASSES, WIDTH, flat, losses_of, network, private

COUNTS = [1, 5, 2, 9, 1, 3, 4, 1, 7, 2, 6, 1]  # items of each user
USERS = len(COUNTS)
WHOSE = torch.arange(USERS).repeat_interleave(torch.tensor(COUNTS))[
    torch.randperm(sum(COUNTS), generator=torch.Generator().manual_seed(0))
]


def data(dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(len(WHOSE), WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(x, torch.randint(CLASSES, (len(WHOSE),), generator=generator))


def plan(**more: Any) -> dp.Plan:
    base: dict[str, Any] = {
        "users": USERS,
        "batch_size": 4,
        "steps": 6,
        "noise_multiplier": 1.0,
        "delta": 1e-5,
        "accountant": "rdp",
    }
    return dp.Plan(**{**base, **more})


def train(trained: dp.Private, users: Any = WHOSE, **options: Any) -> list[dp.Step]:
    return [trained.step(losses_of(trained._model, batch)) for batch in trained.batches(data(), users=users, **options)]


def test_one_step_is_the_clipped_sum_of_users_gradients() -> None:
    """Against autograd, user by user, in float64; all users are in the batch."""
    model = network().double()
    run = private(model, plan(batch_size=USERS, steps=1, noise_multiplier=0.0), clip=ps.ClippedSum(2.0))
    for batch in run.batches(data(torch.float64), users=WHOSE):
        assert len(batch[0]) == len(WHOSE)
        record = run.backward(losses_of(model, batch))
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    losses, total, below = losses_of(model, data(torch.float64).tensors), torch.zeros_like(found), 0
    for user in range(USERS):
        rows = torch.autograd.grad(losses[user == WHOSE].sum(), list(model.parameters()), retain_graph=True)
        row = torch.cat([t.flatten() for t in rows])
        below += int(row.norm() > 2)
        total += row * min(1.0, 2 / float(row.norm()))
    assert 0 < below < USERS
    assert (record.size, record.clipped) == (USERS, below / USERS)
    torch.testing.assert_close(found * USERS, total, rtol=1e-3, atol=0)


@pytest.mark.parametrize("physical", [10, 13, 1000])
@pytest.mark.parametrize("workers", [0, 2])
def test_parts_change_nothing_but_rounding_and_split_no_user(physical: int, workers: int) -> None:
    whole, parts = network(), network()
    train(private(whole, plan()))
    trained = private(parts, plan())
    for x, y in trained.batches(data(), users=WHOSE, physical_batch_size=physical, num_workers=workers):
        assert len(x) <= physical
        trained.step(losses_of(parts, (x, y)))
    assert trained.steps == 6
    torch.testing.assert_close(flat(parts), flat(whole), atol=1e-5, rtol=0)


def items_of(counts: list[int], at_most: int | None = None) -> Users:
    whose = np.repeat(np.arange(len(counts)), counts)
    return Users.of(whose, len(whose), plan(users=len(counts), batch_size=1, items_per_user=at_most, delta=1e-9))


class Member(Team):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = self.share, self.shares = rank, size


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("physical", [None, 10, 12])
@pytest.mark.parametrize("drawn", [[], [3], [4], [0, 4], list(range(USERS)), [3, 8, 1]])
def test_every_user_is_in_one_part_of_one_process(drawn: list[int], physical: int | None, size: int) -> None:
    users = items_of(COUNTS)
    chosen = users.chosen(drawn, Seeded(0), 0)
    every = [user_parts(chosen, Member(rank, size), physical) for rank in range(size)]
    assert len({len(parts) for parts in every}) == 1  # all loops make the same turns
    seen = []
    for part in (part for parts in every for part in parts):
        assert len(part.sizes) > 1 or part.padding == 1
        assert sum(part.sizes) == len(part.items)
        assert physical is None or len(part.items) <= physical
        ends = np.cumsum((0, *part.sizes)).tolist()
        pieces = [part.items[a:b] for a, b in pairwise(ends)]
        seen += pieces[: len(pieces) - part.padding]
    assert sorted(seen) == sorted(chosen)
    assert [len(c) for c in chosen] == [COUNTS[user] for user in drawn]


@pytest.mark.parametrize("source", [Seeded(0), Secure()], ids=lambda s: type(s).__name__)
def test_which_items_of_a_user_is_drawn_anew_and_all_are_as_likely(source: Source) -> None:
    """3000 steps, of 3 of 9 items: frequencies and pairs within 7 standard deviations."""
    users = items_of([2, 9, 4, 9], at_most=3)
    taken = torch.zeros(3000, 24, dtype=torch.float64)
    for step in range(3000):
        chosen = users.chosen([0, 1, 3], source, step)
        assert [len(items) for items in chosen] == [2, 3, 3]
        assert chosen == [sorted(items) for items in chosen] == users.chosen([0, 1, 3], source, step)
        taken[step, [item for items in chosen for item in items]] = 1
    assert taken[:, :2].all()
    assert not taken[:, 11:15].any()
    z = (taken[:, [*range(2, 11), *range(15, 24)]] - 1 / 3) / math.sqrt(2 / 9)
    assert float(z.mean(0).abs().max()) < 7 / math.sqrt(3000)
    assert float((z[:, :9].t() @ z[:, 9:] / 3000).abs().max()) < 7 / math.sqrt(3000)  # users know nothing of each other
    assert float((z[:-1] * z[1:]).mean(0).abs().max()) < 7 / math.sqrt(3000)  # nor do steps
    drawn = source.uniforms(5, 4)
    assert np.array_equal(drawn, source.uniforms(5, 4 + 18)[:4])  # who takes part does not depend on the items


def test_at_most_so_many_items_of_a_user() -> None:
    model = network()
    trained = private(model, plan(items_per_user=2, batch_size=USERS, steps=3))
    for x, y in trained.batches(data(), users=WHOSE):
        assert len(x) == sum(min(2, count) for count in COUNTS)
        trained.step(losses_of(model, (x, y)))
    assert trained.steps == 3


@pytest.mark.parametrize("sampling", ["poisson", "shuffled", "cyclic"])
def test_users_are_sampled_as_examples_would_be(sampling: str) -> None:
    """The same users as examples of a plan without; and every epoch, but for Poisson's, shows each of them once."""
    trained = private(plan_=plan(sampling=sampling, steps=3))
    rows = {tuple(x.tolist()): int(user) for x, user in zip(data().tensors[0], WHOSE, strict=True)}
    seen = []
    for x, y in trained.batches(data(), users=WHOSE):
        found = [rows[tuple(row.tolist())] for row in x]
        seen.append(sorted(set(found)))
        assert len(found) == sum(COUNTS[user] for user in seen[-1]) + (len(seen[-1]) == 1)
        trained.step(losses_of(trained._model, (x, y)))
    if sampling == "poisson":
        assert seen == [poisson(trained.plan, trained._source, step) for step in range(3)]
    else:
        assert sorted(user for users in seen for user in users) == list(range(USERS))


def test_accounts_are_those_of_users() -> None:
    found = dp.Plan(users=1000, items_per_user=5, batch_size=50, steps=200, noise_multiplier=1.1, delta=1e-5)
    ledger = PLDAccountant()
    event = dp_accounting.PoissonSampledDpEvent(50 / 1000, dp_accounting.GaussianDpEvent(1.1))
    ledger.compose(dp_accounting.SelfComposedDpEvent(event, 200))
    assert found.epsilon == pytest.approx(ledger.get_epsilon(1e-5), rel=1e-4)
    lines = str(found).splitlines()
    assert (
        lines[0] == "200 steps (10 epochs) of 50 of 1000 users on average with 5 items each at most, Poisson sampling"
    )
    assert lines[2].endswith("neighbours: one user more or less)")


def sums_of(model: nn.Module, xs: list[Tensor], cotangents: list[Tensor]) -> Tensor:
    """The exact clipped sum over users with these inputs, as a run adds it up."""
    y = model(torch.cat(xs))
    losses = summed(((y[0] if isinstance(y, tuple) else y) * torch.cat(cotangents)).flatten(1).sum(1), [*map(len, xs)])
    params = dict(model.named_parameters())
    found = ps.reduce(losses, params, ExactClippedSum(ps.ClippedSum(1.0), 2**12), independent=True)[0]
    sums = [(found.take(name), found.units[name].size) for name in params]
    return torch.cat([numbers.double().flatten() * unit for numbers, unit in sums if numbers is not None])


class TimeFirst(nn.Module):
    """A module whose samples are in dim 1."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x.transpose(0, 1).contiguous())
        return (y[0] if isinstance(y, tuple) else y).transpose(0, 1)


class Tbc(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.conv_tbc(x, self.weight, torch.zeros(4), 1)


class Twice(nn.Module):
    """Of two inputs that are halves of one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(3, 2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[:, :3], x[:, 3:])


class Heads(nn.Module):
    """A matrix for each of three heads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), self.weight).transpose(0, 1)


IDS = "ids of 20 rows"
MODELS: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], str | None]] = {
    "linear": (lambda: nn.Linear(5, 4), (5,), (4,), None),
    "positions": (lambda: nn.Linear(5, 4, bias=False), (7, 5), (7, 4), None),
    "convolution": (lambda: nn.Conv2d(2, 3, 3), (2, 6, 6), (3, 4, 4), None),
    "groups": (lambda: nn.Conv1d(4, 6, 3, groups=2), (4, 8), (6, 6), None),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2), (2, 3, 3), (3, 7, 7), None),
    "tbc": (lambda: TimeFirst(Tbc()), (6, 5), (6, 4), None),
    "embedding": (lambda: nn.Embedding(20, 4), (6,), (6, 4), IDS),
    "bags": (lambda: nn.EmbeddingBag(20, 4, mode="mean"), (6,), (4,), IDS),
    "largest of bags": (lambda: nn.EmbeddingBag(20, 4, mode="max"), (6,), (4,), IDS),
    "lstm": (lambda: nn.LSTM(5, 3, batch_first=True), (6, 5), (6, 3), None),
    "gru": (lambda: nn.GRU(5, 3, batch_first=True), (6, 5), (6, 3), None),
    "norm": (lambda: nn.LayerNorm(5), (7, 5), (7, 5), None),
    "bilinear": (Twice, (5,), (4,), None),
    "heads": (Heads, (3, 5), (3, 4), None),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("new", [1, 2, 60])
def test_a_user_more_moves_the_sum_by_one_bound_and_nobody_else(kind: str, new: int) -> None:
    """Items of a user that cancel leave the rounding of large numbers; a newcomer of any size changes none of it."""
    make, inputs, outputs, ids = MODELS[kind]

    def drawn(n: int) -> Tensor:
        return torch.randint(20, (n, *inputs)) if ids else torch.randn(n, *inputs)

    for seed in range(3):
        torch.manual_seed(seed)
        model = make()
        counts = torch.randint(1, 9, (12,)).tolist()
        xs = [drawn(n) for n in counts]
        cs = [torch.randn(n, *outputs) * 1e9 for n in counts]
        for x, c in zip(xs[::2], cs[::2], strict=True):
            x[-1], c[-1] = x[0] * (1 if ids else 1 + 1e-6), -c[0]
        without = sums_of(model, xs, cs)
        x = drawn(new)
        for scale in (1e-30, 1.0, 1e30):
            moved = sums_of(model, [*xs, x], [*cs, torch.randn(new, *outputs) * scale]) - without
            assert float(moved.norm()) <= 1
        quiet = [torch.zeros(new, *outputs)]
        for users, cotangents in (([*xs, x], [*cs, *quiet]), ([x, *xs], [*quiet, *cs])):
            others = sums_of(model, users, cotangents) - without
            assert float(others.norm()) <= ROUNDING.get(kind, 0)


ROUNDING = {"lstm": 1e-4, "gru": 1e-4, "norm": 1e-7}  # of PyTorch's kernels, in batches of other sizes


def test_a_run_moves_by_one_bound_with_a_user_of_many_items() -> None:
    """By whole runs without noise: with one user, who has every other item and huge gradients, and without."""
    model = nn.Linear(WIDTH, CLASSES)
    x, y = data().tensors

    def released(rows: Tensor, users: int) -> Tensor:
        every = plan(users=users, batch_size=users, steps=1, noise_multiplier=0.0)
        run = dp.Private(model, torch.optim.SGD(model.parameters(), lr=0.0), every, ps.ClippedSum(0.3))
        for batch in run.batches(TensorDataset(x[rows], y[rows]), users=WHOSE[rows]):
            run.backward(losses_of(model, batch) * 1e3)
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double() * users

    everybody = torch.arange(len(WHOSE))
    moved = released(everybody, USERS) - released(everybody[WHOSE != 3], USERS - 1)
    assert 0.29 < float(moved.norm()) <= 0.3 * (1 + 1e-6)


class Seeing(nn.Module):
    """Items are centred by the mean of a user, or of everybody, detached or not."""

    def __init__(self, *, users: bool, detached: bool) -> None:
        super().__init__()
        self.linear, self.users, self.detached = nn.Linear(WIDTH, CLASSES), users, detached

    def forward(self, x: Tensor, user: Tensor) -> Tensor:
        h = self.linear(x)
        same = (user[:, None] == user).to(h) if self.users else h.new_ones(len(h), len(h))
        mean = same / same.sum(1, keepdim=True) @ h
        return h - (mean.detach() if self.detached else mean)


@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("users", [True, False])
def test_users_must_not_see_each_other_and_their_own_items_may(users: bool, detached: bool) -> None:
    model = Seeing(users=users, detached=detached)
    before = flat(model)
    trained = private(model, plan(batch_size=8), check_every=1)
    x, y = data().tensors

    def run() -> None:
        for inputs, labels, user in trained.batches(TensorDataset(x, y, WHOSE), users=WHOSE):
            trained.step(nn.functional.cross_entropy(model(inputs, user), labels, reduction="none"))

    if users:
        run()
        assert trained.steps == 6
        return
    with pytest.raises(ps.InteractionError):
        run()
    assert torch.equal(before, flat(model))
    assert trained.steps == 0


def test_empty_batches_show_an_item_that_does_not_count() -> None:
    model = network()
    trained = private(model, plan(batch_size=1, steps=40, noise_multiplier=0.0))
    empty = 0
    for batch in trained.batches(data(), users=WHOSE):
        before = flat(model)
        record = trained.step(losses_of(model, batch))
        assert torch.equal(before, flat(model)) == (record.size == 0)
        assert record.size or len(batch[0]) == 1
        empty += record.size == 0
    assert 5 < empty < 30


def test_company_of_a_lone_user_adds_nothing() -> None:
    """A user alone in a batch: the gradient of all of its items, once."""
    x, y = data().tensors
    alone = TensorDataset(x[WHOSE == 3], y[WHOSE == 3])
    model = network()
    run = private(model, plan(users=1, batch_size=1, steps=1, noise_multiplier=0.0), clip=ps.ClippedSum(100.0))
    for batch in run.batches(alone, users=["somebody"] * 9):
        assert len(batch[0]) == 10
        assert run.backward(losses_of(model, batch)).size == 1
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    rows = torch.autograd.grad(losses_of(model, alone.tensors).sum(), list(model.parameters()))
    torch.testing.assert_close(found, torch.cat([t.flatten() for t in rows]), rtol=1e-3, atol=1e-5)


def test_users_may_have_names() -> None:
    ends = []
    for users in (WHOSE, WHOSE.numpy(), WHOSE.tolist(), [f"user {user:02}" for user in WHOSE.tolist()]):
        model = network()
        train(private(model, plan()), users=users)
        ends.append(flat(model))
    assert all(torch.equal(end, ends[0]) for end in ends)


def test_bounds_follow_the_norms_of_users() -> None:
    """Without noise: the share of users below the bound, of whom each has all of its items."""
    model = network()
    clip = dp.AdaptiveClip(initial=1.5, quantile=0.5, rate=1.0)
    trained = private(model, plan(batch_size=USERS, steps=1, noise_multiplier=0.0), clip=clip)
    losses = summed(losses_of(model, data().tensors)[WHOSE.argsort(stable=True)], COUNTS)
    share = float((ps.norms(losses, model) <= 1.5).double().mean())
    assert 0 < share < 1
    train(trained)
    assert trained.bound == pytest.approx(1.5 * math.exp(0.5 - share))


def test_a_run_goes_on_in_the_middle(tmp_path: Path) -> None:
    trained = private(plan_=plan(items_per_user=2))
    train(trained, steps=2)
    trained.save(tmp_path / "run")
    train(trained, steps=1)
    header = json.loads((tmp_path / "run.journal").read_text().splitlines()[0])
    assert (header["plan"]["users"], header["plan"]["items_per_user"]) == (USERS, 2)
    resumed = private(plan_=plan(items_per_user=2))
    resumed.resume(tmp_path / "run")
    assert resumed.steps == 3
    assert len(train(resumed)) == 3
    for other in (plan(), plan(items_per_user=3), dp.Plan(**{**plan_of_examples(), "steps": 6})):
        with pytest.raises(dp.PrivacyError, match=r"another run.*(users|items_per_user)="):
            private(plan_=other).resume(tmp_path / "run")


def plan_of_examples() -> dict[str, Any]:
    return {"examples": USERS, "batch_size": 4, "noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp"}


REFUSED_PLANS: list[tuple[dict[str, Any], str]] = [
    ({"users": 0}, "users must be a positive integer, not 0"),
    ({"users": 2.5}, "users must be a positive integer, not 2.5"),
    ({"users": True}, "users must be a positive integer, not True"),
    ({"items_per_user": 0}, "items_per_user must be a positive integer, not 0"),
    ({"examples": 99}, "examples=99 and users=12: where users are protected, they are what is counted"),
    ({"users": None, "examples": 60, "items_per_user": 2}, "items_per_user=2 is for a plan that protects users"),
    ({"users": None}, "examples must be a positive integer, not 0: how many there are, or users="),
    ({"batch_size": 13}, "batch_size 13 is larger than the dataset of 12 users"),
]


@pytest.mark.parametrize(("more", "message"), REFUSED_PLANS, ids=[m[:30] for _, m in REFUSED_PLANS])
def test_impossible_plans_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**more)


def test_a_large_delta_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"delta 0.1 is not below 1 / users = 0.0833.*: publishing one user in full"):
        plan(delta=0.1)


REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (None, {}, ValueError, r"the plan protects 12 users: say whose each item .* users="),
    (WHOSE[1:], {}, ValueError, "users must say whose each of the 42 items .*, but has 41 entries"),
    (WHOSE.clamp(max=10), {}, ValueError, "the plan is for 12 users, but 11 have items in this dataset"),
    (torch.arange(42), {}, ValueError, "the plan is for 12 users, but 42 have items"),
    (WHOSE.double(), {}, TypeError, "users must be integers or strings.*a Tensor of 1 dims with entries of float64"),
    (WHOSE[:, None], {}, TypeError, "users must be integers or strings.*of 2 dims"),
    ([None] * 42, {}, TypeError, "users must be integers or strings.*entries of object"),
    ([[1], [1, 2]], {}, TypeError, "users must be integers or strings"),
    (WHOSE, {"physical_batch_size": 9}, ValueError, "a user may have 9 items in a step.*physical_batch_size above"),
]


@pytest.mark.parametrize(("users", "options", "error", "message"), REFUSED, ids=[r[3][:35] for r in REFUSED])
def test_users_that_do_not_match_are_refused(
    users: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        private(plan_=plan()).batches(data(), users=users, **options)


def test_users_of_a_plan_for_examples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the plan protects single examples: for users, plan by dp.Plan\(users="):
        private(plan_=dp.Plan(**plan_of_examples(), steps=1)).batches(data(), users=WHOSE)


def test_losses_of_users_in_place_of_items_are_refused() -> None:
    trained = private(plan_=plan(batch_size=USERS))
    for batch in trained.batches(data(), users=WHOSE):
        losses = losses_of(trained._model, batch)
        with pytest.raises(dp.PrivacyError, match="there are 12 losses, but the batch has 42 samples"):
            trained.step(losses[:USERS])
        break


def test_compiled_steps_are_for_examples() -> None:
    model = network()
    with pytest.raises(ValueError, match=r"compile= is for plans that protect examples"):
        private(model, plan(), compile=lambda x, y: losses_of(model, (x, y)))
