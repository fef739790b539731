"""Batches of users: all items of a user that take part in a step are in one part of its batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .plan import Plan
from .sources import Source
from .team import SHOWN, Team

_KINDS = "iuUS"  # of NumPy's dtypes: integers and strings


class UserPart(NamedTuple):
    """Items to be loaded at a time, user by user, and how many each has; the last so many users do not count."""

    items: list[int]
    sizes: tuple[int, ...]
    padding: int = 0


@dataclass(frozen=True)
class Users:
    """The items of every user."""

    items: npt.NDArray[np.int64]  # those of the first user, then those of the second, …
    ends: npt.NDArray[np.int64]  # where the first user's begin, and each user's end
    at_most: int | None  # of a user in a step

    @classmethod
    def of(cls, users: Any, items: int, plan: Plan) -> Users:
        """From the user of every item: refuses what are not as many users as the plan says, of so many items."""
        names = _as_array(users)
        if len(names) != items:
            raise ValueError(
                f"users must say whose each of the {items} items of the dataset is, one after another, but has "
                f"{len(names)} entries"
            )
        known, whose, counts = np.unique(names, return_inverse=True, return_counts=True)
        if len(known) != plan.users:
            raise ValueError(
                f"the plan is for {plan.users} users, but {len(known)} have items in this dataset: plan for those that "
                f"have some, whose number is public then"
            )
        return cls(np.argsort(whose, kind="stable"), np.concatenate([[0], np.cumsum(counts)]), plan.items_per_user)

    def most_items(self) -> int:
        """How many items of one user a step may have."""
        most = int(np.diff(self.ends).max())
        return most if self.at_most is None else min(most, self.at_most)

    def chosen(self, users: Sequence[int], source: Source, step: int) -> list[list[int]]:
        """Which items of these users take part in a step: all, or as many as may be, drawn anew in every step."""
        found = [self.items[self.ends[user] : self.ends[user + 1]] for user in users]
        if self.at_most is not None:
            many = [place for place, items in enumerate(found) if len(items) > self.at_most]
            sizes = [len(found[place]) for place in many]
            for place, drawn in zip(many, self._uniforms(source, step, sizes), strict=True):
                found[place] = found[place][np.sort(np.argsort(drawn)[: self.at_most])]
        return [items.tolist() for items in found]

    def _uniforms(self, source: Source, step: int, sizes: list[int]) -> list[npt.NDArray[np.float64]]:
        """So many uniform numbers each, after those that have chosen the users of the step."""
        if not sizes:
            return []
        users = len(self.ends) - 1
        return np.split(source.uniforms(step, users + sum(sizes))[users:], np.cumsum(sizes)[:-1])


def _as_array(users: Any) -> npt.NDArray[Any]:
    """The user of every item, if users are integers or strings."""
    try:
        names = users.detach().cpu().numpy() if isinstance(users, Tensor) else np.asarray(users)
    except ValueError as error:  # lists of several lengths
        raise TypeError(f"users must be integers or strings, one for each item: {error}") from error
    if names.ndim != 1 or (names.dtype.kind not in _KINDS and names.size):
        raise TypeError(
            f"users must be integers or strings, one for each item, but this is a {type(users).__name__} of "
            f"{names.ndim} dims with entries of {names.dtype}"
        )
    return names


def user_parts(chosen: list[list[int]], team: Team, physical: int | None) -> list[UserPart]:
    """The users that this process takes, in parts of at most so many items; as many parts in every process.

    A user that is alone in a part gets company that does not count, as the gradient of a single one is computed in
    another way.
    """
    shares = [_packed(chosen[share :: team.shares], physical) for share in range(team.shares)]
    turns = max(1, *map(len, shares))
    own = [_part(users) for users in shares[team.share]]
    return own + [UserPart([SHOWN], (1,), 1)] * (turns - len(own))


def _packed(users: list[list[int]], physical: int | None) -> list[list[list[int]]]:
    """One user after another, in parts of at most so many items."""
    parts: list[list[list[int]]] = []
    room = 0
    for items in users:
        if not parts or (physical is not None and len(items) > room):
            parts.append([])
            room = physical or 0
        parts[-1].append(items)
        room -= len(items)
    return parts


def _part(users: list[list[int]]) -> UserPart:
    padding = int(len(users) == 1)
    users = [*users, users[0][:1]] if padding else users
    return UserPart([item for items in users for item in items], tuple(map(len, users)), padding)


def summed(losses: Tensor, sizes: Sequence[int]) -> Tensor:
    """The losses of users, who have so many of these each."""
    whose = torch.repeat_interleave(torch.tensor(sizes, device="cpu")).to(losses.device)
    return losses.new_zeros(len(sizes)).index_add(0, whose, losses)
