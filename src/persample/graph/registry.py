"""Tables of rules, filled by decorators."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

F = TypeVar("F")
P = ParamSpec("P")
R = TypeVar("R")


class Undecided(Exception):
    """A rule was asked about cotangents that it is not written for."""


def or_else(answer: R, function: Callable[P, R]) -> Callable[P, R]:
    """The same function, which gives this answer where it cannot decide."""

    @wraps(function)
    def decided(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Undecided:
            return answer

    return decided


def registrar(table: dict[str, F], what: str) -> Callable[[str], Callable[[F], F]]:
    """A decorator factory: ``@register("Mm Addmm")`` enters a function for these node types, once each."""

    def register(names: str) -> Callable[[F], F]:
        def enter(function: F) -> F:
            for name in names.split():
                if name in table:
                    raise ValueError(f"{name} already has a {what}")
                table[name] = function
            return function

        return enter

    return register
