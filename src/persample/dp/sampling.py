"""Which examples are in a batch, and how they are loaded."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from .errors import PrivacyError
from .plan import Plan
from .sources import Source
from .team import Team
from .users import Users, summed, user_parts

_OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "in_order")


@dataclass(frozen=True)
class BatchPart:
    """What is loaded at a time: a logical batch, or a part of it."""

    step: int
    size: int
    last: bool
    opens_pass: bool = False
    padding: int = 0  # samples at its end that do not count
    sizes: tuple[int, ...] | None = None  # where a sample is a user: how many items each has

    @property
    def items(self) -> int:
        """How many losses its step takes."""
        return self.size if self.sizes is None else sum(self.sizes)

    def per_sample(self, losses: Tensor) -> Tensor:
        """One loss for every sample that is clipped on its own."""
        return losses if self.sizes is None else summed(losses, self.sizes)


def check_stepped(part: BatchPart | None) -> None:
    """Refuse to go on while a batch waits for its step."""
    if part is not None:
        raise PrivacyError(
            f"the last batch of {part.size} samples was not stepped: call private.step(losses) for every batch, "
            f"because a step that is left out is not what the plan accounts for"
        )


def poisson(plan: Plan, source: Source, step: int) -> list[int]:
    """Every example with the plan's probability, on its own; with bands, of the part whose turn it is."""
    parts = plan.bands or 1
    part = step % parts
    chosen = (source.uniforms(step, plan.examples)[part::parts] < plan.rate).nonzero()[0]
    found: list[int] = (chosen * parts + part).tolist()
    return found


def cyclic(plan: Plan, step: int) -> list[int]:
    """The batch of a step: the same examples in every epoch, and each of them in one batch."""
    batches = int(plan.steps_per_epoch)
    return list(range(step % batches, plan.examples, batches))


def shuffled(plan: Plan, source: Source, step: int) -> Iterator[list[int]]:
    """The batches of one pass, which begins at a step."""
    order = np.argsort(source.uniforms(step, plan.examples)).tolist()
    for start in range(0, plan.examples, plan.batch_size):
        yield order[start : start + plan.batch_size]


def most_samples(plan: Plan) -> int:
    """How many samples a batch may have: with Poisson sampling, 20 standard deviations more than are expected."""
    return plan.batch_size + (math.ceil(20 * math.sqrt(plan.batch_size)) + 20 if plan.sampling == "poisson" else 0)


class Sampler:
    """Indices of what to load next, for a DataLoader; `parts` tells what they are, in the same order.

    A DataLoader with workers asks ahead of time: nothing is accounted here.
    """

    def __init__(
        self,
        plan: Plan,
        source: Source,
        team: Team,
        first: int,
        steps: int,
        physical: int | None,
        users: Users | None = None,
    ) -> None:
        self._plan, self._source, self._team, self._users = plan, source, team, users
        self._first, self._steps, self._physical = first, steps, physical
        self.parts: deque[BatchPart] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        for step, samples, opens_pass in self._batches():
            if len(samples) > most_samples(self._plan):
                raise PrivacyError(
                    f"a batch of {len(samples)} samples was drawn where {self._plan.batch_size} are expected: that "
                    f"does not happen by chance, so something is wrong with the random numbers"
                )
            parts = self._parts(step, samples)
            for place, (some, padding, sizes) in enumerate(parts):
                size = len(some if sizes is None else sizes)
                self.parts.append(BatchPart(step, size, place + 1 == len(parts), opens_pass, padding, sizes))
                yield some

    def _parts(self, step: int, samples: list[int]) -> list[tuple[list[int], int, tuple[int, ...] | None]]:
        """Items to be loaded at a time, how many samples at their end do not count, and users' sizes."""
        if self._users is None:
            return [(some, padding, None) for some, padding in self._team.parts(samples, self._physical)]
        chosen = self._users.chosen(samples, self._source, step)
        return [(part.items, part.padding, part.sizes) for part in user_parts(chosen, self._team, self._physical)]

    def _batches(self) -> Iterator[tuple[int, list[int], bool]]:
        end = self._first + self._steps
        if self._plan.sampling == "poisson":
            for step in range(self._first, end):
                yield step, poisson(self._plan, self._source, step), False
            return
        if self._plan.sampling == "cyclic":
            for step in range(self._first, end):
                yield step, cyclic(self._plan, step), False
            return
        step = self._first
        while step < end:
            for place, samples in enumerate(shuffled(self._plan, self._source, step)):
                if step < end:
                    yield step, samples, place == 0
                step += 1


def loader(data: Any, sampler: Sampler, options: dict[str, Any]) -> DataLoader[Any]:
    """A DataLoader over a map-style dataset."""
    for name in _OURS:
        if name in options:
            raise ValueError(f"{name} cannot be chosen: batches are drawn as the plan's accounting assumes")
    return DataLoader(data, batch_sampler=sampler, **options)


def check_counts(**counts: Any) -> None:
    """Refuse, by name, what is given and no positive integer."""
    for name, value in counts.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a positive integer, not {value!r}")


def check_data(data: Any, plan: Plan, users: Any = None, physical: int | None = None) -> Users | None:
    """Refuse what cannot be sampled as the plan says; the users, if the plan is for users."""
    if isinstance(data, IterableDataset) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise TypeError(
            f"batches needs a map-style dataset, with a length and items by index, to sample every example with the "
            f"same probability; a {type(data).__name__} has not both"
        )
    if plan.users is not None:
        return _check_users(users, len(data), plan, physical)
    if users is not None:
        raise ValueError("the plan protects single examples: for users, plan by dp.Plan(users=...)")
    if len(data) != plan.examples:
        raise ValueError(f"the plan is for {plan.examples} examples, but the dataset has {len(data)}")
    return None


def _check_users(users: Any, items: int, plan: Plan, physical: int | None) -> Users:
    if users is None:
        raise ValueError(
            f"the plan protects {plan.users} users: say whose each item of the dataset is, private.batches(data, "
            f"users=...)"
        )
    found = Users.of(users, items, plan)
    if physical is not None and found.most_items() >= physical:
        raise ValueError(
            f"a user may have {found.most_items()} items in a step, which have to be in one part of its batch, with "
            f"one more beside them: use a physical_batch_size above that, or dp.Plan(items_per_user=...) for fewer"
        )
    return found
