"""What is shown of examples, and the page of hits."""

from __future__ import annotations

import base64
import io
import re
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from persample import _html
from persample import influence as pi
from persample.influence.showing import is_image, pixels, to_html, to_line


def decoded(content: bytes) -> Any:
    return numpy.asarray(Image.open(io.BytesIO(content)))


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [(1, 1), (5, 3), (64, 70)])
def test_png_is_read_by_others(channels: int, size: tuple[int, int]) -> None:
    image = torch.randint(256, (*size, channels), dtype=torch.uint8)
    found = decoded(_html.png(image))
    numpy.testing.assert_array_equal(found.reshape(*size, channels), image.numpy())


IMAGES: dict[str, tuple[Any, tuple[int, int, int]]] = {
    "grey": (torch.rand(8, 8), (64, 64, 1)),
    "channels first": (torch.rand(3, 32, 48), (64, 96, 3)),
    "channels last": (torch.rand(32, 32, 3), (64, 64, 3)),
    "one channel": (torch.rand(1, 28, 28), (84, 84, 1)),
    "array": (numpy.zeros((9, 9, 4), dtype=numpy.uint8), (72, 72, 4)),
    "pil": (Image.new("RGB", (30, 20)), (60, 90, 3)),
    "large": (torch.rand(3, 600, 300), (256, 128, 3)),
    "bool": (torch.ones(64, 64, dtype=torch.bool), (64, 64, 1)),
    "half": (torch.rand(64, 64).half(), (64, 64, 1)),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images_of_every_kind(name: str) -> None:
    image, shape = IMAGES[name]
    assert is_image(image)
    assert tuple(pixels(image).shape) == shape
    assert pixels(image).dtype == torch.uint8
    (source,) = re.findall(r'src="data:image/png;base64,([^"]*)"', to_html(image, "it"))
    assert decoded(base64.b64decode(source)).shape[:2] == shape[:2]


def test_numbers_become_bytes() -> None:
    assert pixels(torch.tensor([[0.0, 0.5], [1.0, 0.25]]))[::32, ::32, 0].tolist() == [[0, 128], [255, 64]]
    assert pixels(torch.tensor([[-1.0, 0.0], [1.0, torch.nan]]))[::32, ::32, 0].tolist() == [[0, 128], [255, 128]]
    assert pixels(torch.full((64, 64), 7.0)).max() == 0
    assert pixels(torch.full((300, 300), 200, dtype=torch.uint8)).unique().tolist() == [200]


def test_what_is_no_image() -> None:
    for thing in (torch.zeros(()), torch.zeros(5), torch.zeros(0, 4), torch.zeros(9, 8, 7), "text", None):
        assert not is_image(thing)


THINGS_OF_NUMPY = {
    "text": (numpy.str_("cat"), "cat"),
    "texts": (numpy.array([["a", "b"]]), "[[&#x27;a&#x27; &#x27;b&#x27;]]"),
    "date": (numpy.datetime64("2020-01-02"), "2020-01-02"),
    "object": (numpy.array([[None, 1]], dtype=object), "[[None 1]]"),
}


@pytest.mark.parametrize("name", THINGS_OF_NUMPY)
def test_what_numpy_has_beside_numbers_is_text(name: str) -> None:
    thing, text = THINGS_OF_NUMPY[name]
    assert not is_image(thing)
    assert text in to_html(thing, "it")
    assert to_line(thing) == str(thing)
    assert text in to_html({"label": thing}, "it")


def test_colours_of_pil_are_what_they_look_like() -> None:
    """Numbers of a palette, inks and hues are none; and PIL's channels are last, however low the image is."""
    palette = Image.new("P", (70, 2))
    palette.putpalette([255, 0, 0, 0, 255, 0])
    palette.putpixel((1, 0), 1)
    assert pixels(palette)[0, :2].tolist() == [[255, 0, 0], [0, 255, 0]]
    assert pixels(Image.new("CMYK", (70, 3), (0, 255, 255, 0)))[0, 0].tolist() == [255, 0, 0]
    assert pixels(Image.new("HSV", (70, 9), (0, 255, 255)))[0, 0].tolist() == [255, 0, 0]
    assert pixels(Image.new("LA", (70, 2), (7, 8)))[0, 0].tolist() == [7, 7, 7, 8]
    assert pixels(Image.new("RGB", (70, 3), (1, 2, 3)))[0, 0].tolist() == [1, 2, 3]
    assert to_line(Image.new("RGB", (70, 3))) == "image 70×3"


def test_text_that_no_file_and_no_terminal_can_take() -> None:
    page = pi.hits_page(hits(), show=lambda i: "half \ud800 of a character", title="\udfff")
    assert "half ? of a character" in page
    page.encode("utf-8")
    assert to_line("red \x1b[31m\x9b31m \u202e\ud800é") == "red \ufffd[31m\ufffd31m \ufffd\ufffdé"


def test_text_is_escaped_wherever_it_stands() -> None:
    bad = "<script>&\"'"
    for thing in (bad, [bad, bad], {bad: bad}, {"a": {bad: [bad]}}, [{"a": bad}, 3]):
        assert "<script" not in to_html(thing, bad, {0: (1, bad)})
    assert "&quot;" in to_html(torch.rand(8, 8), bad)
    page = pi.hits_page(hits(), show=lambda i: bad, show_query=lambda i: bad, title=bad, about={bad: bad})
    assert "<script" not in page


def test_mappings_are_tables_with_images_above() -> None:
    found = to_html({"label": torch.tensor(3), "image": torch.rand(8, 8), "text": None}, "example 5")
    assert found.index("<img") < found.index("<table")
    assert 'alt="image of example 5, image"' in found
    assert '<td><span class="quiet">label</span></td><td>3</td>' in found
    assert "<table" not in to_html({"image": torch.rand(8, 8)}, "it")
    assert to_html(None, "it") == ""


def test_lines_for_a_terminal() -> None:
    assert to_line({"image": torch.rand(8, 9), "label": 3}) == "label 3"
    assert to_line({"image": torch.rand(8, 9)}) == to_line(torch.rand(8, 9)) == "image 9×8"
    assert to_line([" a", " b\nc"]) == "a b c"
    assert to_line(["a", torch.rand(4, 4)]) == "a, image 4×4"
    assert to_line("x" * 100) == "x" * 59 + "…"
    assert to_line(None) == ""


def hits(**more: Any) -> pi.Hits:
    return pi.Hits(torch.tensor([[4, 1], [0, 4]]), torch.tensor([[2.0, -0.5], [0.0, 0.0]]), **more)


def test_the_page_has_every_hit() -> None:
    page = pi.hits_page(hits(), hits(), show=lambda i: f"text {i}", show_query=lambda i: f"asked {i}")
    assert [page.count(words) for words in ("text 4", "text 1", "text 0", "asked 0", "asked 1")] == [4, 2, 2, 1, 1]
    assert page.count("Most helpful") == page.count("Most harmful") == 2
    assert "<b>+2</b>" in page
    assert 'style="width:25.0%"' in page  # a quarter of the largest
    assert "Most harmful" not in pi.hits_page(hits())
    assert not re.search(r'(?:src|href)="(?!data:image/png;base64,|#)|url\(|https?://|@import', page)


def test_shares_of_parameters() -> None:
    names = [f"layer{i}.weight" for i in range(8)]
    shares = {name: torch.full((2, 2), float(-i)) for i, name in enumerate(names)}
    page = pi.hits_page(hits(by_parameter=shares))
    assert page.count("layer7.weight") == 4
    assert "layer0.weight" not in page
    assert page.count("3 other parameters") == 4
    assert '<td class="number">-7</td>' in page


def test_tokens_are_marked_in_their_example() -> None:
    found = pi.Hits(torch.tensor([[4, 1, 4]]), torch.tensor([[2.0, 1.0, 0.5]]), torch.tensor([[0, 9, 1]]))
    page = pi.hits_page(None, found, show=lambda i: [" one", " <two>"])
    first, second = ("+2", 4, "one"), ("+0.5", 2, "&lt;two&gt;")
    marks = [f'<mark class="bad level-{level}" title="{title}">{text}</mark>' for title, level, text in (first, second)]
    assert f'<p class="text">{" ".join(marks)}</p>' in page
    assert page.count("<li>") == 2  # examples 4 and 1
    assert "tokens 0 (+2), 1 (+0.5)" in page
    assert "token 9 (+1)" in page


def test_no_queries_and_no_hits() -> None:
    empty = pi.Hits(torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3))
    assert "Query 0" not in pi.hits_page(empty)
    with pytest.raises(ValueError, match="there are no hits: pass helpful=, harmful= or both"):
        pi.hits_page(None)
    with pytest.raises(ValueError, match=r"of the same queries, not of \[0, 2\]"):
        pi.hits_page(hits(), empty)
