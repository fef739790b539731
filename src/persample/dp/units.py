"""What a plan protects: items of a dataset, or users, who have given any number of them."""

from __future__ import annotations

from typing import Any, Protocol


class Counted(Protocol):
    """The part of a plan that this is about."""

    @property
    def examples(self) -> int: ...
    @property
    def users(self) -> int | None: ...
    @property
    def items_per_user(self) -> int | None: ...


def units(plan: Counted) -> int:
    """How many there are to be sampled, one as likely as another."""
    if plan.users is None:
        if plan.items_per_user is not None:
            raise ValueError(f"items_per_user={plan.items_per_user!r} is for a plan that protects users: give users=")
        if plan.examples == 0:
            raise ValueError("examples must be a positive integer, not 0: how many there are, or users= that are")
        return plan.examples
    for name in ("users", "items_per_user"):
        value = getattr(plan, name)
        if value is not None and not (_is_whole(value) and value >= 1):
            raise ValueError(f"{name} must be a positive integer, not {value!r}")
    if plan.examples not in (0, plan.users):
        raise ValueError(
            f"examples={plan.examples!r} and users={plan.users}: where users are protected, they are what is counted, "
            f"and the number of their items is nobody's business. Leave examples out"
        )
    return plan.users


def name_of_one(plan: Counted) -> str:
    """What is protected, in a word."""
    return "example" if plan.users is None else "user"


def items_in_words(plan: Counted) -> str:
    """How many items of a user a step takes, if that is bounded."""
    return "" if plan.items_per_user is None else f" with {plan.items_per_user} items each at most"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
