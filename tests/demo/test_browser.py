"""The report in a real browser: nothing is fetched, nothing sticks out, everything can be seen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import browser
from .conftest import Quick

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.EXECUTABLE is None, reason="no Chromium is installed: apt-get install chromium"),
]

# Every element with text of its own: its colour against the first ground below it that is not transparent.
CONTRASTS = """
(() => {
  const rgb = c => (c.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = e => {
    for (; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  return [...document.body.querySelectorAll('*')]
    .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
    .filter(e => !['style', 'title', 'desc'].includes(e.tagName.toLowerCase()))
    .map(e => {
      const style = getComputedStyle(e);
      const [a, b] = [light(rgb(e.namespaceURI.endsWith('svg') ? style.fill : style.color)), light(ground(e))];
      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.textContent.trim().slice(0, 40)];
    });
})()
"""
HEADINGS = "[...document.querySelectorAll('h1, h2, h3')].map(h => [h.tagName, h.textContent])"
UNLOADED = "[...document.images].filter(i => !i.complete || !i.naturalWidth).length"
TEXT_SIZES = """
[...document.querySelectorAll('svg text, svg tspan')].map(t => {
  const {a, b} = t.getScreenCTM();
  return parseFloat(getComputedStyle(t).fontSize) * Math.hypot(a, b);
})
"""
DUPLICATES = """
(ids => ids.filter((id, i) => ids.indexOf(id) !== i))([...document.querySelectorAll('[id]')].map(e => e.id))
"""


@pytest.fixture(scope="module")
def page(quick: Quick) -> Iterator[browser.Page]:
    with browser.page() as tab:
        tab.resize(1200)
        tab.media()
        tab.open(quick.path)
        yield tab


def test_nothing_is_fetched(page: browser.Page, quick: Quick) -> None:
    outside = [url for url in page.requests if not url.startswith("data:")]
    assert outside == [quick.path.resolve().as_uri()]


def test_images_are_there(page: browser.Page) -> None:
    assert page.ask("document.images.length") > 20
    assert page.ask(UNLOADED) == 0
    assert page.ask("[...document.images].every(i => i.alt)")
    assert page.ask("[...document.querySelectorAll('svg')].every(s => s.getAttribute('aria-label'))")


def test_headings(page: browser.Page) -> None:
    headings = page.ask(HEADINGS)
    assert [level for level, _ in headings].count("H1") == 1
    assert headings[0][0] == "H1"
    titles = [text for level, text in headings if level == "H2"]
    assert titles[:3] == ["Why did the model say that?", "Finding wrong labels", "Training privately"]
    assert page.ask("[...document.querySelectorAll('nav a')].every(a => document.querySelector(a.hash))")


def test_ids_are_unique(page: browser.Page) -> None:
    assert page.ask(DUPLICATES) == []


@pytest.mark.parametrize("width", [320, 360, 768, 1200])
def test_nothing_sticks_out(page: browser.Page, width: int) -> None:
    page.resize(width)
    assert page.ask("window.innerWidth") == width
    assert page.ask("document.documentElement.scrollWidth") <= width


def test_tables_fit_on_paper(page: browser.Page) -> None:
    """On A4 with the page's margins; there is no scrolling there."""
    page.resize(680)
    page.media(kind="print")
    assert page.ask("[...document.querySelectorAll('.scroll')].every(e => e.scrollWidth <= e.clientWidth)")
    page.media()


def test_plots_are_readable_on_a_narrow_screen(page: browser.Page) -> None:
    page.resize(360)
    assert min(page.ask(TEXT_SIZES)) >= 9


@pytest.mark.parametrize("kind", ["screen", "print"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(page: browser.Page, scheme: str, kind: str) -> None:
    page.resize(1200)
    page.media(scheme, kind)
    found = page.ask(CONTRASTS)
    assert len(found) > 100
    assert [item for item in found if item[0] < 4.5] == []


def test_dark_is_dark_and_paper_is_white(page: browser.Page) -> None:
    grounds = {}
    for scheme, kind in (("light", "screen"), ("dark", "screen"), ("dark", "print")):
        page.media(scheme, kind)
        grounds[scheme, kind] = page.ask("getComputedStyle(document.body).backgroundColor")
    assert grounds["light", "screen"] == grounds["dark", "print"] == "rgb(255, 255, 255)"
    assert grounds["dark", "screen"] == "rgb(20, 23, 26)"
