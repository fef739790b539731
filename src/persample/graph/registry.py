"""Tables of rules, filled by decorators."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F")


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
