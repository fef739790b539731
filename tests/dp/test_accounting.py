"""The accountants, against a closed form, published values and Opacus' accountants."""

from __future__ import annotations

import json
import logging
import math
import sys
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq
from scipy.stats import norm

from persample.dp.accounting import epsilon, epsilon_of_all

OPACUS = json.loads((Path(__file__).parent / "accountants.json").read_text())


def of_gaussians(times: int, noise: float, delta: float) -> float:
    """The exact epsilon of composed Gaussian mechanisms (Balle and Wang, 2018)."""
    mu = math.sqrt(times) / noise

    def gap(eps: float) -> float:
        return float(norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu)) - delta

    return float(brentq(gap, 0, 100))


@pytest.mark.parametrize(("times", "noise"), [(1, 1.0), (10, 4.0), (100, 30.0)])
def test_without_sampling_there_is_a_closed_form(times: int, noise: float) -> None:
    exact = of_gaussians(times, noise, 1e-5)
    assert exact <= epsilon(times, 1.0, noise, 1e-5, "pld") + 1e-9 <= exact * 1.001 + 1e-9
    assert exact <= epsilon(times, 1.0, noise, 1e-5, "rdp") <= exact * 1.15


@pytest.mark.parametrize(("rate", "noise", "steps"), [(0.1, 1.5, 80), (0.5, 5.0, 100), (0.01, 0.4, 50)])
def test_coarse_losses_cost_next_to_nothing(rate: float, noise: float, steps: int) -> None:
    """Against the library's own discretisation, on the safe side."""
    ledger = PLDAccountant()
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    ledger.compose(dp_accounting.SelfComposedDpEvent(event, steps))
    fine = ledger.get_epsilon(1e-5)
    assert fine * (1 - 1e-9) <= epsilon(steps, rate, noise, 1e-5, "pld") <= fine * (1 + 1e-4)


@pytest.mark.parametrize("row", OPACUS["rows"], ids=lambda r: f"{r['rate']}-{r['noise']}-{r['steps']}")
def test_opacus_agrees(row: dict[str, float]) -> None:
    """PRV adds an error bound of 0.01; RDP differs where an order does not converge, upward here."""
    settings = int(row["steps"]), row["rate"], row["noise"], OPACUS["delta"]
    assert -1e-3 < row["prv"] - epsilon(*settings, "pld") < 0.0125
    assert row["rdp"] * (1 - 1e-9) <= epsilon(*settings, "rdp") <= row["rdp"] * 1.08


@pytest.mark.parametrize(("noise", "epochs", "published"), [(1.12, 60, 2.92), (0.6, 30, 9.74), (1.2, 10, 1.20)])
def test_published_values(noise: float, epochs: int, published: float) -> None:
    """TensorFlow Privacy's MNIST tutorial, whose conversion from RDP is looser than today's."""
    steps, rate = epochs * 60000 // 256, 256 / 60000
    ledger = RdpAccountant(orders=[1 + x / 10 for x in range(1, 100)] + list(range(12, 64)))
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    ledger.compose(dp_accounting.SelfComposedDpEvent(event, steps))
    then = min(r - math.log(1e-5) / (order - 1) for order, r in zip(ledger.orders, ledger.rdp, strict=True))
    assert then == pytest.approx(published, abs=0.025)
    assert epsilon(steps, rate, noise, 1e-5, "pld") < epsilon(steps, rate, noise, 1e-5, "rdp") < published


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_nothing_and_everything(accountant: str) -> None:
    assert epsilon(0, 0.1, 1.0, 1e-5, accountant) == 0  # type: ignore[arg-type]
    assert epsilon(1, 0.1, 0.0, 1e-5, accountant) == math.inf  # type: ignore[arg-type]


def test_the_librarys_warnings_stay_with_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        epsilon_of_all.cache_clear()
        epsilon(100, 128 / 1500, 0.5, 1e-5, "rdp")
        assert not caplog.records
        logging.getLogger("absl").warning("somebody else's")
        assert len(caplog.records) == 1


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    epsilon_of_all.cache_clear()
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ImportError, match=r"dp-accounting.*pip install 'persample\[dp\]'"):
        epsilon(1, 0.1, 1.0, 1e-5, "rdp")
