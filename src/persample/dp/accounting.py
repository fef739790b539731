"""What a number of steps costs: the one module that knows the accounting library."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal, get_args

Accountant = Literal["pld", "rdp"]
ACCOUNTANTS: tuple[str, ...] = get_args(Accountant)

_FINEST = 1e-4  # the accounting library's own discretisation of privacy losses


def epsilon(times: int, rate: float, noise_multiplier: float, delta: float, accountant: Accountant) -> float:
    """The epsilon at ``delta`` of ``times`` Gaussian mechanisms, each on a Poisson sample of ``rate`` of the examples.

    ``rate`` 1 means no sampling. ``noise_multiplier`` is the noise's standard deviation over the sensitivity.
    """
    return epsilon_of_all(((times, noise_multiplier),), rate, delta, accountant)


@lru_cache(maxsize=4096)
def epsilon_of_all(
    mechanisms: tuple[tuple[int, float], ...], rate: float, delta: float, accountant: Accountant
) -> float:
    """`epsilon` of Gaussian mechanisms one after another: how often, and with which noise multiplier each.

    Infinite where there is so little noise that the library's numbers overflow.
    """
    mechanisms = tuple((times, noise) for times, noise in mechanisms if times)
    if not mechanisms:
        return 0.0
    if not all(noise for _, noise in mechanisms):
        return math.inf
    with _quiet():
        try:
            return _composed(mechanisms, rate, delta, accountant)
        except (OverflowError, ZeroDivisionError):
            return math.inf


def _composed(mechanisms: tuple[tuple[int, float], ...], rate: float, delta: float, accountant: Accountant) -> float:
    library = _library()
    ledger = _accountant(accountant, rate, [noise for _, noise in mechanisms])
    for times, noise in mechanisms:
        event = library.GaussianDpEvent(noise)
        if rate < 1:
            event = library.PoissonSampledDpEvent(rate, event)
        ledger.compose(library.SelfComposedDpEvent(event, times))
    return float(ledger.get_epsilon(delta))


def _accountant(name: Accountant, rate: float, noises: Sequence[float]) -> Any:
    if name == "rdp":
        return import_module("dp_accounting.rdp").RdpAccountant()
    # Coarser where losses are large: ten times as fast, and within 1e-5 of the finest. Losses are rounded upward, so
    # that what is lost is lost on the safe side.
    interval = min(max(_FINEST, _FINEST / noise**2, 0.01 * rate / noise) for noise in noises)
    return import_module("dp_accounting.pld").PLDAccountant(value_discretization_interval=interval)


def _library() -> Any:
    try:
        return import_module("dp_accounting")
    except ImportError as error:
        raise ImportError(
            "private training needs the package dp-accounting, which is not installed: pip install 'persample[dp]'"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence messages about orders that do not converge: the accountant leaves them out, which is sound."""
    logger = logging.getLogger("absl")
    logger.addFilter(_drop)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # overflows on the way to an epsilon of infinity
            yield
    finally:
        logger.removeFilter(_drop)


def _drop(record: logging.LogRecord) -> bool:
    return False
