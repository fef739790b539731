"""Certificates: what a traced computation takes for true, said by the graph beside its results.

While a call is traced into a graph there are no numbers to look at, and the graph that comes out of it serves other
numbers. Where a shorter way is right only for ordinary numbers, the graph says for which samples it was: whoever runs
the graph answers again, in the long way, where it was not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Certificate", "certify", "choosing_for", "is_traced", "traced", "usual_samples", "usual_size"]


@dataclass(frozen=True, slots=True)
class Certificate:
    """Bools of any shape, all of which must be true, and what to say if one is not."""

    holds: Tensor
    doubt: str


_certificates: ContextVar[list[Certificate] | None] = ContextVar("certificates", default=None)


@contextmanager
def traced() -> Iterator[list[Certificate]]:
    """Inside, in this thread, a call is traced into a graph; all that it takes for true is in the list."""
    certificates: list[Certificate] = []
    token = _certificates.set(certificates)
    try:
        yield certificates
    finally:
        _certificates.reset(token)


def is_traced() -> bool:
    """Is the call under way traced into a graph, which can certify?"""
    return _certificates.get() is not None


def certify(holds: Tensor, doubt: str) -> None:
    """What is computed from here on is right where this holds; without a graph that could say so, nothing happens."""
    certificates = _certificates.get()
    if certificates is not None:
        certificates.append(Certificate(holds, doubt))


_usual: ContextVar[int | None] = ContextVar("usual number of samples", default=None)


@contextmanager
def choosing_for(samples: int) -> Iterator[None]:
    """Inside, what goes by the number of samples goes by this one: a graph is to be the same for all batch sizes."""
    token = _usual.set(samples)
    try:
        yield
    finally:
        _usual.reset(token)


def usual_samples(batch: int) -> int:
    """The number of samples that choices go by, in a call of ``batch`` samples."""
    usual = _usual.get()
    return batch if usual is None else usual


def usual_size(size: int, batch: int) -> int:
    """How large something that grows with the samples usually is, if it has this size for ``batch`` of them."""
    return size * usual_samples(batch) // max(batch, 1)
