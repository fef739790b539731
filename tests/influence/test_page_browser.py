"""The page of hits in a real browser: nothing is fetched, nothing sticks out, everything can be seen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from persample import influence as pi
from tests.demo import browser
from tests.demo.test_browser import CONTRASTS, DUPLICATES, UNLOADED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.EXECUTABLE is None, reason="no Chromium is installed: apt-get install chromium"),
]
LONG = "averyveryverylongnamewithoutanyplacetobreak" * 5


def show(i: int) -> object:
    """Something of every kind."""
    return [
        torch.rand(8, 8),
        torch.rand(3, 300, 900),
        LONG,
        "a text of many words " * 200,
        [" tokens", " of", f" {LONG}"],
        {"image": torch.rand(28, 28), "label": 3, LONG: LONG, "text": "words " * 50},
    ][i]


def hits(**more: object) -> pi.Hits:
    ids = torch.arange(6).expand(3, 6)
    return pi.Hits(ids, torch.linspace(-1500.0, 1500, 18).reshape(3, 6), **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=["sample", "parameter", "token"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shares = {f"layers.{i}.{LONG[:60]}.weight": torch.randn(3, 6) for i in range(8)}
    more = {"sample": {}, "parameter": {"by_parameter": shares}, "token": {"tokens": torch.arange(6).expand(3, 6) % 3}}
    made = hits(**more[request.param])
    place: Path = tmp_path_factory.mktemp("page") / "hits.html"
    place.write_text(pi.hits_page(made, made, show=show, show_query=show, title=LONG, about={"spec": LONG}))
    return place


@pytest.fixture(scope="module")
def page(path: Path) -> Iterator[browser.Page]:
    with browser.page() as tab:
        tab.resize(1200)
        tab.media()
        tab.open(path)
        yield tab


def test_nothing_is_fetched_and_pictures_are_there(page: browser.Page, path: Path) -> None:
    assert [url for url in page.requests if not url.startswith("data:")] == [path.resolve().as_uri()]
    assert page.ask("document.images.length") >= 20
    assert page.ask(UNLOADED) == 0
    assert page.ask("[...document.images].every(i => i.alt)")
    assert page.ask(DUPLICATES) == []
    assert page.ask("[...document.querySelectorAll('nav a')].every(a => document.querySelector(a.hash))")


@pytest.mark.parametrize("width", [320, 360, 768, 1200])
def test_nothing_sticks_out(page: browser.Page, width: int) -> None:
    page.resize(width)
    assert page.ask("window.innerWidth") == width
    assert page.ask("document.documentElement.scrollWidth") <= width
    out = "[...document.querySelectorAll('.hits li > *')].filter(e => e.scrollWidth > e.parentElement.clientWidth"
    assert page.ask(f"{out} && getComputedStyle(e).overflowX === 'visible').length") == 0


def test_everything_fits_on_paper(page: browser.Page) -> None:
    """On A4 with the page's margins; there is no scrolling there."""
    page.resize(680)
    page.media(kind="print")
    assert page.ask("document.documentElement.scrollWidth") <= 680
    assert page.ask("[...document.querySelectorAll('.text')].every(e => e.scrollHeight <= e.clientHeight + 1)")
    page.media()


def test_small_tables_fit_on_paper_of_every_size(tmp_path: Path) -> None:
    """From A5 to A4 across: cards stand beside each other, and no table is wider than its card."""
    labelled = lambda i: {"image": torch.rand(8, 8), "label": i, "predicted": i + 1}  # noqa: E731
    place = tmp_path / "hits.html"
    place.write_text(pi.hits_page(hits(), hits(), show=labelled, show_query=labelled))
    with browser.page() as tab:
        tab.media(kind="print")
        tab.open(place)
        for width in range(450, 1100, 25):
            tab.resize(width)
            assert tab.ask("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
            inside = "[...document.querySelectorAll('.hits li')].every(e => e.scrollWidth <= e.clientWidth + 1)"
            assert tab.ask(inside), width


@pytest.mark.parametrize("kind", ["screen", "print"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(page: browser.Page, scheme: str, kind: str) -> None:
    page.resize(1200)
    page.media(scheme, kind)
    found = page.ask(CONTRASTS)
    assert len(found) > 50
    assert [item for item in found if item[0] < 4.5] == []
    ground = page.ask("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(20, 23, 26)" if (scheme, kind) == ("dark", "screen") else "rgb(255, 255, 255)")
